"""Joins published figures to cells: the same size, mode, context, precision and compilation as they really were."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from lmbench.precision import FP32_MATMUL, matmul_label
from lmbench.reference.published import Figure, StepTime, load_figures, load_step_times
from lmbench.report import units
from lmbench.report.cells import Cell
from lmbench.report.columns import Column, Measure
from lmbench.report.facts import EAGER

#: Attention by itself was published of one head.
_ONE_HEAD = 1


@dataclass(frozen=True)
class Published:
    """A published figure beside a cell: its value in SI (None of a run that ran out of memory), its text in the unit
    of its heading, and what must be known of it."""

    value: float | None
    text: str
    caveats: tuple[str, ...]


class References:
    """Published step times, shares of kernel time, peaks of memory, and times of attention by itself, without those
    that cannot be right."""

    def __init__(self) -> None:
        self._figures = load_figures()
        self._times = [time for time in load_step_times() if not time.is_implausible]

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

    def beside(self, columns: Iterable[Column], cells: Sequence[Cell]) -> dict[str, dict[int, Published]]:
        """Published figures beside a table's columns: for each heading the figures by the cell's place."""
        found: dict[str, dict[int, Published]] = {}
        for column in columns:
            if column.name == "step_s":
                found |= {f"{source} (ms)": figures for source, figures in self.match(cells).items()}
            published = [figure for figure in self._figures if figure.column == column.name]
            for figure in sorted(published, key=lambda figure: (figure.label, figure.context is not None)):
                for index, cell in enumerate(cells):
                    is_placed = figure.size is not None or figure.head_dim is not None or len(cells) == 1
                    if is_placed and _fits_figure(figure, cell.facts):
                        figures = found.setdefault(f"{figure.label}: {column.heading}", {})
                        figures[index] = _published_figure(figure, column, figures.get(index))
        return found


def _fits(time: StepTime, facts: Mapping[str, object]) -> bool:
    return (
        facts.get("size") == (time.shape or time.size)
        and facts.get("checkpoint", "none") == "none"
        and facts.get("mode") == time.mode
        and facts.get("precision") == time.precision
        and (time.matmul is None or facts.get("matmul") == matmul_label(time.matmul))
        and (facts.get("compile", EAGER) != EAGER) == time.is_compiled
        and time.context in (None, facts.get("context"))
        and time.batch in (None, facts.get("batch"))
        and time.warmup in (None, facts.get("warmup"))
    )


def _fits_figure(figure: Figure, facts: Mapping[str, object]) -> bool:
    return (
        facts.get("precision") == figure.precision
        and (figure.precision != "32-true" or facts.get("matmul") == FP32_MATMUL)
        and (facts.get("compile", EAGER) != EAGER) == figure.is_compiled
        and facts.get("attention", "naive") == "naive"
        and facts.get("checkpoint", "none") == "none"
        and facts.get("head_dim") == figure.head_dim
        and facts.get("heads") in (None, _ONE_HEAD)
        and figure.size in (None, facts.get("size"))
        and figure.context in (None, facts.get("context"))
        and figure.batch in (None, facts.get("batch"))
        and figure.mode in (None, facts.get("mode"))
    )


def _published_figure(figure: Figure, column: Column, other: Published | None) -> Published:
    """The figure, after another one of the same source if it states both ends of a range."""
    text = column.show(Measure(figure.value))
    caveats = (f"{figure.label}: {'; '.join(figure.caveats)}",) if figure.caveats else ()
    if other is None or other.value is None:
        return Published(figure.value, text, caveats)
    return Published((other.value + figure.value) / 2, f"{other.text} to {text}", (*other.caveats, *caveats))


def _stated_count(time: StepTime) -> int:
    return sum(value is not None for value in (time.context, time.batch, time.warmup)) + time.is_precision_stated


def _published(time: StepTime) -> Published:
    text = "OOM" if time.is_oom else units.mean_and_std(time.mean_s, time.std_s)
    caveats = "; ".join(time.caveats)
    return Published(time.mean_s, text, (f"{time.label}: {caveats}",) if caveats else ())
