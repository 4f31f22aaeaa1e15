"""Where the memory goes: the contents of a peak, predicted before a run or read from its recorded history."""

from dataclasses import dataclass


@dataclass
class MemorySettings:
    """What to record of the device's memory, for `lmbench memory`.

    Args:
        predict: after the run, predict its memory in a process of its own, and record the prediction beside the
            measured peak.
        history: record the allocator's history over a few steps after the warm-up; the run's step times then do not
            count as timings.
        steps: steps to record. They are the run's window; measure.steps and measure.min_window_s have no effect.
        max_entries: entries that the history can hold. Older entries are lost, which the record says.
    """

    predict: bool = False
    history: bool = False
    steps: int = 3
    max_entries: int = 1_000_000
