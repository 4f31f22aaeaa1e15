"""Noise floors on the screen: one table, and why some configurations have none."""

from __future__ import annotations

from rich.console import Console

from lmbench.compare.metrics import STEP
from lmbench.compare.noise_survey import NoiseCell, Survey
from lmbench.records.welch import detectable_fraction
from lmbench.report.screen import print_table
from lmbench.report.table import Entry, Heading, Table

_REPEATS = (3, 5, 8)
_MEANINGS = (
    "spread: standard deviation between processes; drift: later half of the repeats against the earlier one",
    "floor: what 95 % of random splits into halves stay under, or the drift if that is more; compare calls "
    "nothing below it faster or slower",
    "alarms: splits whose 95 % interval excluded no change (5 expected); in a row: the same for three repeats "
    "against the next three",
    f"detects: the change told from none in 95 % of cases with {' / '.join(map(str, _REPEATS))} repeats a side",
)


def print_noise(found: Survey, console: Console) -> None:
    measured = [cell for cell in found.cells if cell.entry is not None]
    if measured:
        print_table(_table(measured), console)
        for line in _MEANINGS:
            console.print(line, markup=False)
    for cell in found.cells:
        if cell.problem is not None:
            console.print(f"no floor  {cell.name or 'the configuration'}: {cell.problem}", markup=False)
    for run in found.left_out:
        console.print(f"left out  {run.path}: {run.reason}", markup=False, soft_wrap=True)


def _table(cells: list[NoiseCell]) -> Table:
    names = ("repeats", "spread", "drift", "floor", "alarms", "in a row", "detects")
    rows = [[Entry(cell.name or "(one)", "fact"), *map(Entry, _figures(cell))] for cell in cells]
    headings = [Heading("cell", False), *map(Heading, names)]
    return Table("Step time against itself", "in percent of the step", headings, rows)


def _figures(cell: NoiseCell) -> list[str]:
    noise = cell.noises[STEP.name]
    return [
        str(cell.run_count),
        _percent(noise.std_fraction),
        f"{noise.drift_fraction * 100:+.2f}",
        _percent(noise.floor_fraction),
        f"{noise.false_alarm_fraction * 100:.1f}",
        f"{noise.consecutive_alarm_count} of {noise.consecutive_count}",
        " / ".join(_percent(detectable_fraction(noise.std_fraction, n)) for n in _REPEATS),
    ]


def _percent(fraction: float) -> str:
    return f"{fraction * 100:.2f}"
