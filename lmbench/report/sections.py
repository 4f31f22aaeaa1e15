"""The report before it has a format: a section for each group of runs, with its tables and what must be said of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from textwrap import shorten

from lmbench.errors import UsageError
from lmbench.records.vocabulary import OUTCOMES
from lmbench.report.cells import Cell, in_order, make_cells, of_profiled, outcome_label, outcome_word, varying
from lmbench.report.facts import fact_of, in_words, is_consequence
from lmbench.report.gather import Gathered, Group
from lmbench.report.references import References
from lmbench.report.relative import Pairing, parse_baseline
from lmbench.report.remarks import cost_lines, environment_lines, host_bound_lines, pass_lines, warning_lines
from lmbench.report.sample import Sample
from lmbench.report.table import Table
from lmbench.report.tabulate import Setting, build_comparison, build_table
from lmbench.report.units import gib
from lmbench.report.views import GENERIC, KERNELS, VIEWS, find_view
from lmbench.report.views.view import View

#: Longest message of a failed run in a report; run.json has all of it.
_MESSAGE_WIDTH = 160


@dataclass(frozen=True)
class Options:
    """What was asked for: a view and a baseline instead of a group's own, published figures (`plausible` or `all`)."""

    view: str | None = None
    baseline: str | None = None
    reference: str | None = None


@dataclass(frozen=True)
class Failure:
    """Runs of a cell that ended alike and not well: which cell, how, why, and where they lie."""

    cell: str
    outcome: str
    reason: str
    run_ids: tuple[str, ...]


@dataclass
class Section:
    """One group of runs, ready for any format. `cells` are in the order of the view's first table."""

    name: str
    view: View
    cells: list[Cell]
    pairing: Pairing
    references: References | None
    tally: str
    environment: list[str]
    tables: list[Table]
    failures: list[Failure]
    notes: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        if not self.name:
            return self.view.title
        return self.view.title if self.name == self.view.name else self.name


@dataclass
class Report:
    """All sections, and a line for each result that could not be read."""

    sections: list[Section]
    unread: list[str]


def build_report(gathered: Gathered, options: Options | None = None) -> Report:
    """Sections of everything that was gathered.

    Raises:
        UsageError: an unknown view, or a baseline that no group has.
    """
    options = options or Options()
    if options.view is not None:
        find_view(options.view)
    groups = [(group, make_cells(group)) for group in gathered.groups]
    refused: list[UsageError] = []
    sections = [_section(group, cells, options, refused) for group, cells in groups]
    if len(refused) == len(groups):
        raise refused[0]
    return Report(sections, gathered.unread)


def _section(group: Group, cells: list[Cell], options: Options, refused: list[UsageError]) -> Section:
    view, notes = _view_of(group, cells, options)
    if view is GENERIC and group.axes:
        rows = tuple(fact_of(axis) for axis in group.axes)
        view = replace(GENERIC, tables=tuple(replace(table, rows=rows) for table in GENERIC.tables))
    baseline = view.baseline
    if options.baseline is not None:
        try:
            baseline = parse_baseline(options.baseline, cells)
        except UsageError as error:
            refused.append(error)
            notes.append(str(error))
    pairing = Pairing(baseline, cells)
    references = References(options.reference == "all") if options.reference else None
    # A fact that a view sorts by comes before those that it does not name.
    order = [*view.tables[0].rows, *varying(cells)]
    cells = in_order(cells, order)
    by_purpose = cells
    if view.is_profiled:
        cells = [of_profiled(cell) for cell in cells]
    timed = [cell for cell in cells if cell.samples]
    if baseline is not None and timed and not any(baseline.is_met_by(cell) for cell in timed):
        notes.append(f"no run is the baseline {baseline.name}; what compares with it is left out")
    notes += [
        *pass_lines(by_purpose, has_kernels=view.is_profiled),
        *_missing_lines(group),
        *host_bound_lines(timed),
        *warning_lines(cells),
        *cost_lines(cells),
    ]
    return Section(
        name=group.name,
        view=view,
        cells=cells,
        pairing=pairing,
        references=references,
        tally=_tally(cells),
        environment=environment_lines(cells),
        tables=_tables(view, timed, pairing, references),
        failures=_failures(cells),
        notes=notes,
    )


def _view_of(group: Group, cells: Sequence[Cell], options: Options) -> tuple[View, list[str]]:
    if options.view is not None:
        return find_view(options.view), []
    if group.view is None:
        return (KERNELS if _is_profiled(cells) else GENERIC), []
    if group.view not in VIEWS:
        return GENERIC, [f"the sweep's view {group.view!r} is unknown here; shown as any sweep"]
    return VIEWS[group.view], []


def _is_profiled(cells: Sequence[Cell]) -> bool:
    """Whether there are profiled runs, and no timing run whose figures another view could show."""
    runs = [sample for cell in cells for sample in (*cell.samples, *cell.passes)]
    return any(run.is_profiled for run in runs) and all(run.is_profiled or not run.is_timing for run in runs)


def _tables(view: View, cells: Sequence[Cell], pairing: Pairing, references: References | None) -> list[Table]:
    by_device = sorted(cells, key=lambda cell: cell.gpu)
    differing = varying(cells)
    found: list[Table | None] = []
    for _, same in groupby(by_device, key=lambda cell: cell.gpu):
        setting = Setting(list(same), differing, pairing, references)
        for spec in view.tables:
            found += [build_table(spec, setting), build_comparison(spec, setting)]
    return [table for table in found if table is not None]


def _tally(cells: Sequence[Cell]) -> str:
    samples = [sample for cell in cells for sample in (*cell.samples, *cell.passes)]
    outcomes = Counter(sample.outcome for sample in samples)
    known = [outcome for outcome in (*OUTCOMES, *sorted(set(outcomes) - set(OUTCOMES))) if outcomes[outcome]]
    counts = ", ".join(f"{outcomes[outcome]} {outcome_word(outcome)}" for outcome in known)
    return f"{_count(len(cells), 'cell')}, {_count(len(samples), 'run')} ({counts})"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def _failures(cells: Sequence[Cell]) -> list[Failure]:
    names = [name for name in varying(cells) if not is_consequence(name)]
    found: dict[tuple[int, str, str], list[str]] = {}
    for index, cell in enumerate(cells):
        for sample in (*cell.samples, *cell.passes):
            if sample.outcome != "ok":
                reason = shorten(_reason(sample), _MESSAGE_WIDTH, placeholder=" ...")
                found.setdefault((index, outcome_label(sample), reason), []).append(sample.run_id)
    labels = [", ".join(in_words(n, cell.facts[n]) for n in names if cell.facts.get(n) is not None) for cell in cells]
    return [Failure(labels[index], outcome, reason, tuple(ids)) for (index, outcome, reason), ids in found.items()]


def _reason(sample: Sample) -> str:
    asked, taken = sample.number("error.requested_bytes"), sample.number("memory.run_peak_allocated_bytes")
    total = sample.number("memory.device_total_bytes")
    if sample.outcome == "oom" and asked and taken and total:
        return f"{gib(asked)} more asked for; at most {gib(taken)} had been allocated of {gib(total)}"
    return sample.damage or str((sample.record.get("error") or {}).get("message") or "")


def _missing_lines(group: Group) -> list[str]:
    if not group.missing_cells:
        return []
    return [f"{len(group.missing_cells)} of {_count(group.planned_cells, 'cell')} have no run yet"]
