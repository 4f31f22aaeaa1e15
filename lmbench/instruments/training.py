"""Did it train? Which parameters got gradients and which moved, and the losses of a run."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch.distributed.tensor import DTensor

from lmbench.records.measured import Loss, TrainingFacts
from lmbench.records.step import StepRecord


def loss_scaler(trainer: Trainer) -> torch.amp.GradScaler | None:
    """What scales the trainer's loss, None in a precision without a loss scale."""
    plugin = trainer.precision_plugin
    return plugin.scaler if isinstance(plugin, MixedPrecision) else None


def norms(tensors: Mapping[str, torch.Tensor | None], dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """The 2-norm of each tensor, such as a parameter's gradient, by name, where there is one. Synchronizes.

    In `dtype` at least: half precision would overflow, and float64 shows the smallest step of a single weight.
    """
    return {
        name: float(_whole(torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, dtype))))
        for name, tensor in tensors.items()
        if tensor is not None
    }


def total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients together, a float32 scalar on their device; waits for nothing."""
    dense = [grad.coalesce().values() if grad.is_sparse else grad for grad in gradients]
    # As `torch.nn.utils.get_total_norm`, which would round each norm to the gradients' own dtype: bf16 has 8 bits.
    # Float64 is not narrowed, which would be refused.
    dtype = None if any(grad.dtype is torch.float64 for grad in dense) else torch.float32
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(dense, 2, dtype=dtype)))
    return _whole(norm)


def _whole(norm: torch.Tensor) -> torch.Tensor:
    """The norm over all ranks, where each of them has that of its part of a sharded tensor."""
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def unscales_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer takes the fp16 loss scale out inside its step (a fused one), so that gradients have it
    until then."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def gradient_facts(trainable: Collection[str], norms: Mapping[str, float], scale: float = 1.0) -> TrainingFacts:
    """What the gradients of the `trainable` parameters are like, from their norms.

    Names of parameters without a gradient (`missing_gradients`), with one that is zero everywhere (`zero_gradients`)
    or not finite (`nonfinite_gradients`), their number, and the 2-norm of all gradients together, divided by `scale`.
    """
    return TrainingFacts(
        parameters=len(trainable),
        missing_gradients=[name for name in trainable if name not in norms],
        zero_gradients=[name for name, norm in norms.items() if norm == 0.0],
        nonfinite_gradients=[name for name, norm in norms.items() if not math.isfinite(norm)],
        gradient_norm=math.hypot(*norms.values()) / scale if norms else None,
    )


def loss_facts(steps: Sequence[StepRecord]) -> Loss:
    """The `loss` part of a run's record: first of the run, last and mean of the window, perplexity exp(mean).

    A nan or an infinity stays one, so that a diverged run is seen.
    """
    losses = [step.loss for step in steps if step.loss is not None]
    window = [step.loss for step in steps if step.loss is not None and step.stage == "window"]
    mean = float(torch.tensor(window, dtype=torch.float64).mean()) if window else None
    return Loss(
        first=losses[0] if losses else None,
        last=window[-1] if window else None,
        mean=mean,
        # Over 709 the perplexity is no float any more; the loss itself says enough.
        perplexity=math.exp(mean) if mean is not None and not mean > 700 else None,
    )
