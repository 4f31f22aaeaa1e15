"""What a view is: which tables and charts show a study, in which rows and columns, against which baseline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lmbench.report.relative import Baseline


@dataclass(frozen=True)
class TableSpec:
    """A table with a row for each cell; `rows` are facts, in the order of sorting.

    Facts that differ between cells and are not named become rows too, and those that all cells share go to the
    caption. With `only_filled`, cells that have none of the columns are left out. With `across`, one column for each
    value of that fact, and the only one of `columns` in each.
    """

    title: str
    rows: tuple[str, ...]
    columns: tuple[str, ...]
    across: str | None = None
    only_filled: bool = False


@dataclass(frozen=True)
class ChartSpec:
    """A chart for each combination of the facts that it does not name.

    `bars`: `y` by the values of `x`, side by side for each of `series`; `rows`: the same lying, a bar for each cell,
    labelled with what differs; `lines`: `y` over the number `x`, a line for each of `series`; `phases`: the step's
    phases on top of each other by `x`; `steps`: time of each of the first steps, a line for each of `series`;
    `parts`, `kinds`, `attention`: kernel time of the phase `y` by part of the model, by kind of kernel and by part of
    attention, on top of each other.
    """

    title: str
    kind: Literal["bars", "rows", "lines", "phases", "steps", "parts", "kinds", "attention"]
    y: str = "step_s"
    x: str = "size"
    series: tuple[str, ...] = ()
    is_log: bool = False


@dataclass(frozen=True)
class View:
    """A study's view. `question` is what it answers, in a sentence; `is_profiled` says that it shows profiled runs."""

    name: str
    title: str
    question: str
    tables: tuple[TableSpec, ...]
    charts: tuple[ChartSpec, ...] = ()
    baseline: Baseline | None = None
    is_profiled: bool = False
