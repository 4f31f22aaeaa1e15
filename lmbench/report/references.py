"""Joins published step times to cells: the same size, mode, context, precision and compilation as they really were."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lmbench.reference.step_times import StepTime, load_step_times
from lmbench.report import units
from lmbench.report.cells import Cell
from lmbench.report.facts import EAGER, matmul_label


@dataclass(frozen=True)
class Published:
    """A published figure beside a cell: its text in ms, and what must be known of it."""

    time: StepTime
    text: str
    caveats: tuple[str, ...]


class References:
    """Published step times.

    Args:
        with_implausible: also those that cannot be right, each with the reason.
    """

    def __init__(self, with_implausible: bool = False) -> None:
        self._times = [time for time in load_step_times() if with_implausible or not time.implausible]

    def match(self, cells: Sequence[Cell]) -> dict[str, dict[int, Published]]:
        """For each source that has a figure for one of the cells: its figures by the cell's place in the sequence.

        What a write-up states must be equal. What it does not is a caveat; but a figure of unknown context is shown
        only where all cells have one context, as it cannot belong to several.
        """
        contexts = {cell.facts.get("context") for cell in cells}
        found: dict[str, dict[int, Published]] = {}
        for index, cell in enumerate(cells):
            for time in sorted(self._times, key=_stated_count):
                if _fits(time, cell.facts) and (time.context is not None or len(contexts) == 1):
                    # The figure that states most comes last and stays.
                    found.setdefault(time.label, {})[index] = _published(time)
        return dict(sorted(found.items()))


def _fits(time: StepTime, facts: Mapping[str, object]) -> bool:
    return (
        facts.get("size") == (time.shape or time.size)
        and facts.get("mode") == time.mode
        and facts.get("precision") == time.precision
        and (time.matmul is None or facts.get("matmul") == matmul_label(time.matmul))
        and (facts.get("compile", EAGER) != EAGER) == time.is_compiled
        and time.context in (None, facts.get("context"))
        and time.batch in (None, facts.get("batch"))
        and time.warmup in (None, facts.get("warmup"))
    )


def _stated_count(time: StepTime) -> int:
    return sum(value is not None for value in (time.context, time.batch, time.warmup)) + time.is_precision_stated


def _published(time: StepTime) -> Published:
    text = "OOM" if time.is_oom else units.mean_and_std(time.mean_s, time.std_s)
    wrong = (f"implausible: {time.implausible}",) if time.implausible else ()
    caveats = "; ".join((*wrong, *time.caveats))
    return Published(time, text, (f"{time.label}: {caveats}",) if caveats else ())
