"""The part of a run's record that compares the loader alone, the model alone, and both with other settings."""

from __future__ import annotations

from lmbench.records.field import Fraction, Seconds, Text, about, lower, record
from lmbench.records.vocabulary import Values


@record
class InputPipeline:
    """Input pipeline: the loader and the model, alone and together, after the window."""

    reason: Text = about("Why the loader was not measured; null where it was.")
    waited_s: Seconds = lower("Mean time in which a step of the window waited for its batch: `data_s` + `transfer_s`.")
    resident_step_s: Seconds = lower("Mean step on one batch that is already on the device.", "model alone")
    loader_step_s: Seconds = lower("Time in which the loader alone makes the batches of a step.", "loader alone")
    first_batch_s: Seconds = lower("Time from the loader's start to its first batch.", "first batch")
    turn_s: Seconds = lower("Time from a new epoch's start to its first batch.", "turn of an epoch")
    reader: Text = about("Method of the dataset that reads samples, with file and line.")
    reader_s: Seconds = lower("Time of the dataset for a batch, in one worker.", "reader")
    collate_s: Seconds = lower("Time of `collate_fn`, which joins samples to a batch, in one worker.", "collate")
    idle_fraction: Fraction = about(
        "Share of the time for a batch in which the worker does not compute: it reads. Waits for a core do not count.",
        "reads",
    )
    slowest_lines: Values = about(
        "The worker's lines that take most of a batch, by looks at its stack, each with its seconds in a batch.",
        factory=dict,
    )
    fix: Values = about(
        "Smallest settings of the DataLoader with which the step waits least; empty where the loader has them.",
        factory=dict,
    )
    predicted_step_s: Seconds = lower(
        "Predicted mean step with `fix`: mean of the predictions by the model alone before and after, with the copy of "
        "a batch to the device.",
        "predicted with the fix",
    )
    predicted_interval: list[float] | None = about(
        "Lowest and highest prediction in s, by the model alone before and after the steps with `fix`, and 5 % more."
    )
    fixed_step_s: Seconds = lower("Measured mean step with `fix`.", "measured with the fix")
