"""Loss and perplexity of a run, by torchmetrics, from losses that were read after their steps."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torchmetrics.aggregation import MeanMetric

from lmbench.records.measured import Loss
from lmbench.records.step import StepRecord


def loss_facts(steps: Sequence[StepRecord]) -> Loss:
    """The `loss` part of a run's record: first of the run, last and mean of the window, perplexity exp(mean).

    A nan or an infinity stays one: torchmetrics' own check for nan is off, since it would hide a diverged run.
    """
    every = [step.loss for step in steps if step.loss is not None]
    window = [step.loss for step in steps if step.loss is not None and step.stage == "window"]
    metric = MeanMetric(nan_strategy="disable").set_dtype(torch.float64)
    mean = None
    if window:
        metric.update(torch.tensor(window, dtype=torch.float64))
        mean = float(metric.compute())
    return Loss(
        first=every[0] if every else None,
        last=window[-1] if window else None,
        mean=mean,
        # Over 709 the perplexity is no float any more; the loss itself says enough.
        perplexity=math.exp(mean) if mean is not None and not mean > 700 else None,
    )
