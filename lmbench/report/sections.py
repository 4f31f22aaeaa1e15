"""The report before it has a format: a section for each group of runs, with its tables and what must be said of it."""

from __future__ import annotations

import dataclasses
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from textwrap import shorten

from msgspec.structs import asdict, replace

from lmbench.errors import UsageError
from lmbench.records.environment import Revision
from lmbench.records.passes import PASSES, pass_of
from lmbench.records.vocabulary import OUTCOMES
from lmbench.report.cells import (
    Cell,
    Pairing,
    differing,
    in_order,
    make_cells,
    of_profiled,
    outcome_label,
    outcome_word,
    parse_baseline,
    told,
    varying,
)
from lmbench.report.columns import host_bound, phase_time
from lmbench.report.facts import fact_of
from lmbench.report.feature import Catalogue
from lmbench.report.gather import Gathered, Group, Sample
from lmbench.report.references import References
from lmbench.report.table import Table
from lmbench.report.tabulate import Setting, build_comparison, build_table
from lmbench.report.units import gib
from lmbench.report.view import GENERIC, View

#: Longest message of a failed run in a report; run.json has all of it.
_MESSAGE_WIDTH = 160
#: A row whose host-bound share is above this tells of the host.
_MOSTLY = 0.5
#: The study whose view shows profiled runs that belong to no sweep.
_PROFILED_STUDY = "kernels"


@dataclass(frozen=True)
class Options:
    """What was asked for: a view and a baseline instead of a group's own, published figures beside them."""

    view: str | None = None
    baseline: str | None = None
    has_reference: bool = False


#: Cells or runs that met the same end.
_MOST_NAMED = 6


@dataclass(frozen=True)
class Failure:
    """Runs that ended alike and not well: of which cells, how, why, and where they lie."""

    cell: str
    outcome: str
    reason: str
    run_ids: tuple[str, ...]

    @property
    def text(self) -> str:
        subject = f"{self.cell}: " if self.cell else ""
        reason = f": {self.reason}" if self.reason else ""
        runs = "run" if len(self.run_ids) == 1 else "runs"
        return f"{subject}{self.outcome}{reason} ({runs} {first_of(self.run_ids, ', ')})"


@dataclass
class Section:
    """One group of runs, ready for any format. `cells` are in the order of the view's first table."""

    name: str
    view: View
    catalogue: Catalogue
    cells: list[Cell]
    pairing: Pairing
    references: References | None
    tally: str
    environment: list[str]
    tables: list[Table]
    failures: list[Failure]
    answers: list[str] = field(default_factory=list)
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


def build_report(gathered: Gathered, catalogue: Catalogue, options: Options | None = None) -> Report:
    """Sections of everything that was gathered.

    Raises:
        UsageError: an unknown view, or a baseline that no group has.
    """
    options = options or Options()
    wanted = catalogue.view(options.view) if options.view is not None else None
    groups = [(group, make_cells(group)) for group in gathered.groups]
    refused: list[UsageError] = []
    sections = []
    for group, cells in groups:
        view, notes = (wanted, []) if wanted is not None else _own_view(group, cells, catalogue)
        if view.name == GENERIC.name and group.axes:
            rows = tuple(fact_of(axis) for axis in group.axes)
            view = replace(view, tables=tuple(replace(table, rows=rows) for table in view.tables))
        sections.append(_section(group, cells, view, catalogue, options, refused, notes))
    if len(refused) == len(groups):
        raise refused[0]
    return Report(sections, gathered.unread)


def _own_view(group: Group, cells: Sequence[Cell], catalogue: Catalogue) -> tuple[View, list[str]]:
    """The view of a group that nobody asked for another one of, and what must be said of it."""
    if group.view is None:
        return (catalogue.view(_PROFILED_STUDY) if _is_profiled(cells) else GENERIC), []
    try:
        view = catalogue.view(group.view, group.axes)
    except UsageError as error:
        what = f"view {group.view!r} is unknown here" if isinstance(group.view, str) else str(error)
        return GENERIC, [f"the sweep's {what}; shown as any sweep"]
    return (view if view.name else replace(view, name=group.name)), []


def _section(
    group: Group,
    cells: list[Cell],
    view: View,
    catalogue: Catalogue,
    options: Options,
    refused: list[UsageError],
    notes: list[str],
) -> Section:
    baseline = view.baseline
    if options.baseline is not None:
        try:
            baseline = parse_baseline(options.baseline, cells)
        except UsageError as error:
            refused.append(error)
            notes.append(str(error))
    pairing = Pairing(baseline, cells)
    references = References() if options.has_reference else None
    # A fact that a view sorts by comes before those that it does not name.
    cells = in_order(cells, [*view.tables[0].rows, *varying(cells)])
    by_purpose = cells
    if view.is_profiled:
        cells = [of_profiled(cell) for cell in cells]
    timed = [cell for cell in cells if cell.samples]
    if baseline is not None and timed and not any(baseline.is_met_by(cell.facts) for cell in timed):
        notes.append(f"no run is the baseline {baseline.name}; what compares with it is left out")
    notes += [
        *_pass_lines(by_purpose, has_kernels=view.is_profiled),
        *_lines_of_runs(group),
        *_host_bound_lines(timed),
        *_warning_lines(cells),
        *_cost_lines(cells),
    ]
    return Section(
        name=group.name,
        view=view,
        catalogue=catalogue,
        cells=cells,
        pairing=pairing,
        references=references,
        tally=_tally(cells),
        environment=_environment_lines(cells),
        tables=_tables(view, Setting(timed, varying(timed), pairing, catalogue, references)),
        failures=_failures(cells),
        answers=_answers(view, timed, pairing, catalogue),
        notes=notes,
    )


def _is_profiled(cells: Sequence[Cell]) -> bool:
    """Whether there are profiled runs, and no timing run whose figures another view could show."""
    runs = [sample for cell in cells for sample in (*cell.samples, *cell.passes)]
    return any(run.is_profiled for run in runs) and all(run.is_profiled or not run.is_timing for run in runs)


def _tables(view: View, setting: Setting) -> list[Table]:
    """Every table of the view for each device."""
    found: list[Table | None] = []
    for _, same in groupby(sorted(setting.cells, key=lambda cell: cell.gpu), key=lambda cell: cell.gpu):
        of_device = dataclasses.replace(setting, cells=list(same))
        for spec in view.tables:
            found += [build_table(spec, of_device), build_comparison(spec, of_device)]
    return [table for table in found if table is not None]


def _answers(view: View, cells: Sequence[Cell], pairing: Pairing, catalogue: Catalogue) -> list[str]:
    """What answers the view's question, device by device."""
    by_device = [list(same) for _, same in groupby(sorted(cells, key=lambda cell: cell.gpu), key=lambda cell: cell.gpu)]
    found = [(same[0].gpu, text) for same in by_device for text in catalogue.answers(view, same, pairing)]
    return [f"{gpu}: {text}" if len(by_device) > 1 else text for gpu, text in found]


def _tally(cells: Sequence[Cell]) -> str:
    samples = [sample for cell in cells for sample in (*cell.samples, *cell.passes)]
    outcomes = Counter(sample.outcome for sample in samples)
    known = [outcome for outcome in (*OUTCOMES, *sorted(set(outcomes) - set(OUTCOMES))) if outcomes[outcome]]
    counts = ", ".join(f"{outcomes[outcome]} {outcome_word(outcome)}" for outcome in known)
    return f"{_count(len(cells), 'cell')}, {_count(len(samples), 'run')} ({counts}){_dates(samples)}"


def _dates(samples: Iterable[Sample]) -> str:
    """When the runs began: the day, or the first and the last."""
    days = sorted({started[:10] for sample in samples if (started := sample.record.started_at)})
    return f", measured on {' to '.join(dict.fromkeys((days[0], days[-1])))}" if days else ""


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def _failures(cells: Sequence[Cell]) -> list[Failure]:
    """What did not end well, each reason once with the cells that it was met in."""
    names = differing(cells)
    found: dict[tuple[str, str], dict[int, list[str]]] = {}
    for index, cell in enumerate(cells):
        for sample in (*cell.samples, *cell.passes):
            if sample.outcome != "ok":
                reason = shorten(_reason(sample), _MESSAGE_WIDTH, placeholder=" ...")
                same = found.setdefault((outcome_label(sample), reason), {})
                same.setdefault(index, []).append(sample.run_id)
    return [
        Failure(
            first_of([text for index in same if (text := told(cells[index], names))], "; "),
            outcome,
            reason,
            tuple(run_id for ids in same.values() for run_id in ids),
        )
        for (outcome, reason), same in found.items()
    ]


def first_of(names: Sequence[str], separator: str) -> str:
    """All of a few names, of many the first ones and how many more there are."""
    if len(names) <= _MOST_NAMED:
        return separator.join(names)
    return f"{separator.join(names[: _MOST_NAMED - 1])} and {len(names) - _MOST_NAMED + 1} more"


def _reason(sample: Sample) -> str:
    error, memory = sample.record.error, sample.record.memory
    asked, taken, total = error and error.requested_bytes, memory.run_peak_allocated_bytes, memory.device_total_bytes
    if sample.outcome == "oom" and asked and taken and total:
        return f"{gib(asked)} more asked for; at most {gib(taken)} had been allocated of {gib(total)}"
    return sample.damage or (error and error.message) or ""


def _lines_of_runs(group: Group) -> list[str]:
    trials = [f"{_count(group.trials, 'more run')} tried what fits, and more than that"] if group.trials else []
    if not group.missing_cells:
        return trials
    return [*trials, f"{len(group.missing_cells)} of {_count(group.planned_cells, 'cell')} have no run yet"]


def _environment_lines(cells: Iterable[Cell]) -> list[str]:
    """Device, power limit and versions, a line for each combination that occurs."""
    samples = [sample for cell in cells for sample in (*cell.samples, *cell.passes)]
    return sorted({line for sample in samples if (line := _environment(sample))})


def _environment(sample: Sample) -> str:
    found = sample.record.environment
    if found is None or not sample.gpu:
        return ""
    limit, versions = found.gpu.power_limit_w, found.versions
    named = {
        "torch": versions.torch, "cuda": versions.cuda, "driver": versions.driver, "lightning": versions.lightning,
        "lmbench": versions.lmbench,
    }  # fmt: skip
    parts = [sample.gpu, f"power limit {limit:.0f} W" if limit else ""]
    parts += [f"{name} {version}" for name, version in named.items() if version]
    parts += [_code(found.code.lmbench, "lmbench commit"), _code(found.code.project, "code at")]
    return ", ".join(part for part in parts if part)


def _code(code: Revision, words: str) -> str:
    return f"{words} {code.commit[:9]}{' with changes' if code.is_dirty else ''}" if code.commit else ""


def _cost_lines(cells: Iterable[Cell]) -> list[str]:
    """Where the time of a sweep's run went, from its process's start to its end: the median over ok runs by part."""
    costs: dict[str, list[float]] = {}
    for cell in cells:
        for sample in cell.ok:
            cost = sample.record.sweep.cost if sample.record.sweep else None
            for name, value in asdict(cost).items() if cost else ():
                if value is not None:
                    costs.setdefault(name.removesuffix("_s"), []).append(value)
    if not costs:
        return []
    medians = ", ".join(f"{name} {statistics.median(values):.2f} s" for name, values in costs.items())
    return [f"where the time of a run went (median): {medians}"]


def _pass_lines(cells: Sequence[Cell], has_kernels: bool) -> list[str]:
    """A line for the runs that are in no timing table, and how much slower than the timing run the profiled were.

    Args:
        has_kernels: whether the view shows the profiled runs' kernels; else the line says which one does.
    """
    profiled = [s for cell in cells for s in cell.passes if s.record.is_profiled]
    counts = Counter(pass_of(sample.record).name for cell in cells for sample in cell.passes)
    lines = [
        f"{_count(counts[look.name], 'run')} {look.label}: in no timing table"
        for look in PASSES
        if counts[look.name] and not look.has_timing
    ]
    if profiled:
        where = "" if has_kernels else f"; `--view {_PROFILED_STUDY}` shows their kernels"
        lines[-1] += _slower(cells) + where
        unread = [s for s in profiled if s.outcome == "ok" and s.record.kernels is None]
        if has_kernels and unread:
            what = "without kernel figures in run.json: `lmbench kernels RUN` reads the trace"
            lines.append(f"{_count(len(unread), 'run')} {what}")
    return lines


def _slower(cells: Iterable[Cell]) -> str:
    ratios = []
    for cell in cells:
        timed = phase_time(cell)
        steps = [sample.record.phases.step for sample in cell.passes if sample.record.is_profiled]
        ratios += [step.mean_s / timed.value for step in steps if timed and step and step.mean_s]
    if not ratios:
        return ""
    low, high = min(ratios), max(ratios)
    figure = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
    return f"; their steps took {figure} times as long"


def _host_bound_lines(cells: Sequence[Cell]) -> list[str]:
    """A line where the host, not the device, set the times of rows: what changes the device's work changes little."""
    shares = [measure.value for cell in cells if (measure := host_bound(cell)) is not None]
    bound = sum(share > _MOSTLY for share in shares)
    if not bound:
        return []
    return [
        f"host-bound over 50 % in {_count(bound, 'row')}: the device waited for the host there, and precision, "
        "compilation or a bigger batch show what they do to the host"
    ]


def _warning_lines(cells: Iterable[Cell]) -> list[str]:
    """Guards that warned, by name, with how many runs they are about and what the worst of them says."""
    samples = [sample for cell in cells for sample in cell.ok]
    found: dict[str, list[tuple[float, str]]] = {}
    for sample in samples:
        for guard in sample.guards("warn"):
            found.setdefault(guard.name, []).append((abs(guard.value or 0.0), guard.message))
    return [
        f"guard {name} warns in {len(seen)} of {_count(len(samples), 'run')}; the worst: {max(seen)[1]}"
        for name, seen in sorted(found.items())
    ]
