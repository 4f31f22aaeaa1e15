# ruff: noqa: E501 (tables, one row a line)
"""Every field of a step record (one line of steps.jsonl)."""

from __future__ import annotations

from lmbench.records.old_field import group

_IDENTITY = group(
    "Step records: which step",
    "step",
    (
        ("step", "index", "step", "Index of the optimizer step, from 0, warm-up included."),
        ("stage", "text", "stage", "`warmup` or `window`."),
        ("is_warmup", "flag", "warm-up", "The step came before the window and is in no statistic."),
        ("micro_batches", "count", "micro-batches", "Micro-batches of this step; the last group of an epoch can be short."),
        ("tokens", "count", "tokens", "Tokens of all micro-batches of this rank."),
        ("loss", "nat", "loss", "Mean loss over the micro-batches, as `training_step` returned it.", "down"),
        ("is_skipped", "flag", "skipped", "The fp16 scaler skipped the update; the step is in no statistic."),
        (
            "excluded_s", "s", "excluded",
            "Validation, checkpoints and record writing between this step and the one before; already subtracted.",
        ),
    ),
)  # fmt: skip

_SHARED = group(
    "Step records: which step",
    "both",
    (
        ("rank", "index", "rank", "Rank of the process that measured."),
        ("nonfinite", "tree", "non-finite", "Names and values (`nan`, `inf`, `-inf`) of fields stored as null for that reason."),
    ),
)  # fmt: skip

_DEVICE = group(
    "Step records: device spans",
    "step",
    (
        ("step_s", "s", "step", "From the end of the last step's last batch to the end of this one's, exclusions subtracted.", "down"),
        ("data_s", "s", "data", "Waiting for the loader.", "down"),
        ("transfer_s", "s", "transfer", "Copying the batch from host to device.", "down"),
        ("forward_s", "s", "forward", "`training_step`, the loss included.", "down"),
        ("backward_s", "s", "backward", "The backward pass.", "down"),
        ("clip_s", "s", "clip", "Gradient clipping.", "down"),
        ("optimizer_s", "s", "optimizer", "The parameter update.", "down"),
        ("zero_grad_s", "s", "zero_grad", "Zeroing the gradients.", "down"),
        ("other_s", "s", "other", "The remainder of `step_s`: the framework between the phases.", "down"),
    ),
)  # fmt: skip

_HOST = group(
    "Step records: host spans and lags",
    "step",
    (
        ("<phase>_host_s", "s", "<phase> (host)", "Wall time the host needed to issue <phase>.", "down"),
        (
            "lag_<border>_s", "s", "lag at <border>'s end",
            "How far the device is behind the host at the end of <border>: near zero the device waits for the host. "
            "Null on a CPU.",
        ),
    ),
)  # fmt: skip

STEP_FIELDS = (*_IDENTITY, *_SHARED, *_DEVICE, *_HOST)
