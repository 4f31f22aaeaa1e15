"""What fits on each of several GPUs, from one prediction and few fake steps more."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from msgspec.structs import replace

from lmbench.memory.forecast import FitOnGpu, TargetGpu
from lmbench.memory.predictor import Predictor, largest_that_fits


def fits_on(predictor: Predictor, gpus: Sequence[TargetGpu], has_context: bool) -> list[FitOnGpu]:
    """Whether a configuration fits on each GPU, and the largest batch and context that do.

    Args:
        predictor: predicts for the first GPU, whose workspace of cuBLAS is in its peaks.
        gpus: the GPUs.
        has_context: whether the context length can be varied.
    """
    workspace_bytes = gpus[0].workspace_bytes
    workspace_count = max(peak.peak["workspaces"] for peak in predictor.phases) / workspace_bytes
    # A GPU with another workspace is as one with the first one's, and so much more or less memory.
    alike = [
        replace(gpu, total_bytes=gpu.total_bytes - round(workspace_count * (gpu.workspace_bytes - workspace_bytes)))
        for gpu in gpus
    ]
    largest = []
    for is_context in (False, True)[: 1 + has_context]:
        reserve = _reserve(predictor, max(alike, key=lambda gpu: gpu.total_bytes), is_context)
        start, unit, limit = predictor.span(is_context)
        largest.append([largest_that_fits(reserve, gpu, start, unit, limit).value for gpu in alike])
    contexts = largest[1] if has_context else [None] * len(gpus)
    fits = [gpu.fits(predictor.reserved_bytes) for gpu in alike]
    return [FitOnGpu(*row) for row in zip(gpus, fits, largest[0], contexts, strict=True)]


def _reserve(predictor: Predictor, gpu: TargetGpu, is_context: bool) -> Callable[[int], int]:
    """The reserved bytes as a function of the batch size or the context length, up to what fits on a GPU.

    The peak of each part of a step is a polynomial: of the first degree in the batch size, of the second in the context
    length, for attention that is not fused. The ratio of reserved to allocated bytes is the larger one of those of the
    configuration and of the largest that fits.
    """
    start, unit, limit = predictor.span(is_context)

    def through(values: list[int]) -> Callable[[int], float]:
        peaks = [predictor.peaks(*predictor.shape(value, is_context)) for value in values]
        sizes = [[peak.total_bytes for peak in parts] for parts in peaks]
        polynomials = np.polyfit(values, sizes, len(values) - 1)
        return lambda value: float(np.polyval(polynomials, value).max())

    line = through([start, 4 * start])
    far = largest_that_fits(lambda value: round(line(value)), gpu, start, unit, limit).value or start
    far = max(far, 4 * start)
    peak = through([start, far // unit // 2 * unit, far])
    ratios = [predictor.reserved_ratio(*predictor.shape(value, is_context)) for value in (start, far)]
    return lambda value: round(peak(value) * max(ratios))
