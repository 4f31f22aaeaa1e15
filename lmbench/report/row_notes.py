"""What a reader must know of a row beside its figures, and of the spread behind them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from lmbench.kernels.shown.columns import KERNEL_COLUMN, no_kernels
from lmbench.report.cells import Cell, mixed_outcomes, partly_known
from lmbench.report.columns import Column, Measure
from lmbench.report.facts import FACT, Value, is_consequence
from lmbench.report.relative import Pairing

_UNDECIDED = "the difference to the baseline is not told from none: its 95 % interval between processes includes 1"


def usual_consequences(cells: Iterable[Cell]) -> dict[str, Value]:
    """Of each fact that follows from others (the optimizer's variant), the value that most cells have; none of a fact
    that some cells do not have."""
    cells = list(cells)
    found: dict[str, Value] = {}
    missing = partly_known(cells)
    for name in (name for name in FACT if is_consequence(name) and name not in missing):
        counts = Counter(str(cell.facts[name]) for cell in cells if cell.facts.get(name) is not None)
        if counts:
            found[name] = min(counts, key=lambda value: (-counts[value], value))
    return found


def row_notes(cell: Cell, columns: Sequence[Column], pairing: Pairing, usual: Mapping[str, Value]) -> list[str]:
    """Failed guards, runs left out, several hosts, a baseline without figures, what follows from the row's facts."""
    found = [f"{name} failed: {message}" for name, message in failed_guards(cell)]
    if (text := mixed_outcomes(cell)) is not None:
        found.append(text)
    hosts = {host for sample in cell.ok if (host := sample.record["environment"]["host"]["hostname"])}
    if len(hosts) > 1:
        found.append(f"runs on {len(hosts)} hosts; the spread has their difference in it")
    skipped = sum(int(sample.number("window.skipped_count") or 0) for sample in cell.ok)
    if skipped and not any(column.name == "skipped_count" for column in columns):
        found.append(f"the fp16 scaler skipped {skipped} steps, which are in no statistic")
    if cell.ok and any(column.is_relative for column in columns):
        baseline = pairing.of(cell)
        if baseline is not None and not baseline.ok:
            found.append(f"its baseline has no figure: {baseline.label}")
        if baseline is not cell and any(_includes_one(column.read(cell, baseline)) for column in columns):
            found.append(_UNDECIDED)
    if any(column.name in KERNEL_COLUMN for column in columns):
        found += no_kernels(cell)
    own = {name: cell.facts.get(name) for name in usual}
    return found + [f"{own[name]} instead of {usual[name]}" for name in usual if own[name] not in (None, usual[name])]


def _includes_one(ratio: Measure | None) -> bool:
    return ratio is not None and ratio.low is not None and ratio.high is not None and ratio.low <= 1 <= ratio.high


def failed_guards(cell: Cell) -> list[tuple[str, str]]:
    """Guards that failed in one of the ok runs, each once, with the first message."""
    failed: dict[str, str] = {}
    for sample in cell.ok:
        for guard in sample.guards:
            if guard.get("status") == "fail":
                failed.setdefault(f"guard {guard.get('name')}", str(guard.get("message")))
    return list(failed.items())


def spread_text(cells: Iterable[Cell]) -> str:
    """Which spread stands behind `±`."""
    counts = {len(cell.ok) for cell in cells if cell.ok}
    if not counts:
        return ""
    if counts == {1}:
        return "mean ± std of the steps within one run"
    if len(counts) == 1:
        return f"mean ± std between {counts.pop()} processes"
    if 1 in counts:
        return "mean ± std between processes, within the run where there is one"
    return "mean ± std between processes"
