"""Results as one answer: a section for each group of runs, by the view of its study; a row for each cell as data."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import Any

from msgspec.structs import asdict, replace

from lmbench.errors import UsageError
from lmbench.masking import masked_message
from lmbench.records.environment import Revision
from lmbench.records.load import Run
from lmbench.records.passes import PASSES, pass_of
from lmbench.records.vocabulary import OUTCOMES
from lmbench.report import answer
from lmbench.report.answer import Answer, Cell, Chart, Line, Table
from lmbench.report.catalogue import Catalogue
from lmbench.report.charts import build_charts
from lmbench.report.columns import HOST_BOUND
from lmbench.report.facts import FACT, fact_of
from lmbench.report.frame import Frame, Group, make_frame, outcome_label, outcome_word, parse_baseline, read_groups
from lmbench.report.headline import sentences
from lmbench.report.tables import failed_guards, published, spread_text, view_tables
from lmbench.report.units import gib
from lmbench.report.view import GENERIC, View

#: Longest message of a failed run in a report; run.json has all of it.
_MESSAGE_WIDTH = 160
#: Cells or runs named of those that met the same end.
_MOST_NAMED = 6
#: The study whose view shows profiled runs that belong to no sweep.
_PROFILED_STUDY = "kernels"


@dataclass(frozen=True)
class Options:
    """What was asked for: a view and a baseline instead of a group's own, published figures beside the cells."""

    view: str | None = None
    baseline: str | None = None
    has_reference: bool = False


def report_on(paths: Iterable[str | Path], catalogue: Catalogue, options: Options | None = None) -> Answer:
    """Everything at or below the paths as an answer.

    Raises:
        UsageError: no result, an unknown view, or a baseline that no group has.
    """
    options = options or Options()
    groups, unread = read_groups(paths)
    wanted = catalogue.view(options.view) if options.view is not None else None
    frames = list[Frame]()
    sections, parts, refused = [], list[Callable[[], list[dict[str, Any]]]](), list[UsageError]()
    for group in groups:
        frame, notes = make_frame(group), list[str]()
        view = wanted or _own_view(group, frame, catalogue, notes)
        if view.name == GENERIC.name and group.sweep.axes:
            axes = tuple(map(fact_of, group.sweep.axes))
            view = replace(view, tables=tuple(replace(table, rows=axes) for table in view.tables))
        baseline = view.baseline
        if options.baseline is not None:
            try:
                baseline = parse_baseline(options.baseline, frame)
            except UsageError as error:
                refused.append(error)
                notes.append(str(error))
        # A fact that a view sorts by comes before those that it does not name.
        frame = frame.against(baseline)
        frame = frame.select(frame.ordered([*view.tables[0].rows, *frame.varying()]))
        shown = frame.shows(view.is_profiled)
        frames.append(frame)
        sections.append(_section(group, view, frame, shown, catalogue, options, notes))
        # Worked out for CSV and JSON alone: of 1,000 cells it takes a second.
        parts.append(partial(_data_rows, group, view, shown, catalogue, options.has_reference))
    if len(refused) == len(groups):
        raise refused[0]

    def data() -> Table:
        return _data([row for part in parts for row in part()])

    sections.append(Answer(title="How to repeat", tables=[_runs_table(frames)], first=[]))
    return Answer(sections=sections, notes=[Line("not read", line) for line in unread], data=data)


def _runs_table(frames: Iterable[Frame]) -> Table:
    """Every run with the command that repeats it."""
    rows = [
        (row.run.run_id, row.outcome, masked_message(row.run.record.replay_command or ""))
        for frame in frames
        for row in frame.runs.itertuples()
    ]
    columns = [answer.Column("run", name="run_id"), answer.Column("outcome"), answer.Column("command")]
    return Table("runs", "Runs", columns, rows)


def _own_view(group: Group, frame: Frame, catalogue: Catalogue, notes: list[str]) -> View:
    """The view of a group that nobody asked for another one of, and what must be said of it."""
    given, runs = group.sweep.view, frame.runs
    if given is None:
        # There is no timing run whose figures another view could show.
        is_profiled = runs.is_profiled.any() and (runs.is_profiled | ~runs.is_shown).all()
        return catalogue.view(_PROFILED_STUDY) if is_profiled else GENERIC
    try:
        view = catalogue.view(given, tuple(group.sweep.axes or ()))
    except UsageError as error:
        problem = f"view {given!r} is unknown here" if isinstance(given, str) else str(error)
        notes.append(f"the sweep's {problem}; shown as any sweep")
        return GENERIC
    return view if view.name else replace(view, name=group.name)


def _section(
    group: Group, view: View, frame: Frame, shown: Frame, catalogue: Catalogue, options: Options, notes: list[str]
) -> Answer:
    """A group's section.

    Args:
        frame: with the timing runs shown.
        shown: with the runs shown that the view is about.
    """
    timed = shown.timed()
    baseline = frame.baseline
    if baseline is not None and len(timed.facts) and not any(map(baseline.is_met_by, timed.known.values())):
        notes.append(f"no run is the baseline {baseline.name}; what compares with it is left out")
    charts, left_out = _charts(view, timed, catalogue)
    notes += [*_pass_lines(frame, view.is_profiled), *_lines_of_runs(group), *_host_bound_lines(timed)]
    notes += [*_warning_lines(shown), *_cost_lines(shown)]
    notes += [f"{_count(left_out, 'more chart')} left out; the tables have all figures"] * bool(left_out)
    environment = sorted({line for run in frame.runs.itertuples() if (line := _environment(run.run, run.gpu))})
    return Answer(
        title=view.title if group.name in ("", view.name) else group.name,
        headline=[
            *([Line("question", view.question)] if view.question else []),
            *(Line("answer", text) for text in _answers(view, timed, catalogue)),
            Line("cells", _tally(shown)),
            *(Line("measured", line) for line in environment),
        ],
        tables=view_tables(view, timed, catalogue, options.has_reference),
        charts=_Charts(charts, frame, catalogue),
        notes=[*(Line("not ok", text) for text in _failures(shown)), *(Line("note", note) for note in notes)],
    )


def _charts(view: View, frame: Frame, catalogue: Catalogue) -> tuple[list[Chart], int]:
    """The charts, device by device, and how many were left out for there being too many."""
    charts, left_out = list[Chart](), 0
    for part in frame.by_device():
        for spec in view.charts:
            some, more = build_charts(spec, catalogue.chart_kinds[spec.kind], part, catalogue.column)
            charts, left_out = [*charts, *some], left_out + more
    return charts, left_out


class _Charts(Sequence[Chart]):
    """A section's charts: those of its view, then pictures of runs, whose files are read only for a page."""

    def __init__(self, charts: Sequence[Chart], frame: Frame, catalogue: Catalogue) -> None:
        self._charts, self._frame, self._features = charts, frame, catalogue.features

    @cached_property
    def _all(self) -> list[Chart]:
        pictures = (feature.charts(self._frame) for feature in self._features if feature.charts is not None)
        return [*self._charts, *chain.from_iterable(pictures)]

    def __len__(self) -> int:
        return len(self._all)

    def __getitem__(self, place: Any) -> Any:
        return self._all[place]


def _answers(view: View, frame: Frame, catalogue: Catalogue) -> list[str]:
    """What answers the view's question, device by device: the view's own sentences, then those of features."""
    names, devices, told = {name for table in view.tables for name in table.columns}, frame.by_device(), list[str]()
    for part in devices:
        texts = sentences(view.answers, part, catalogue.column)
        for feature in catalogue.features:
            if feature.headline is not None and any(column.name in names for column in feature.columns):
                texts += feature.headline(part)
        told += [f"{part.facts.gpu.iloc[0]}: {text}" if len(devices) > 1 else text for text in texts]
    return told


def _tally(frame: Frame) -> str:
    """How many cells and runs there are, how they ended, and when they were measured."""
    outcomes = Counter(frame.runs.outcome)
    known = dict.fromkeys([*OUTCOMES, *sorted(outcomes)])
    counts = ", ".join(f"{outcomes[each]} {outcome_word(each)}" for each in known if outcomes[each])
    days = sorted({started[:10] for run in frame.runs.run if (started := run.record.started_at)})
    dates = f", measured on {' to '.join(dict.fromkeys((days[0], days[-1])))}" if days else ""
    return f"{_count(len(frame.facts), 'cell')}, {_count(len(frame.runs), 'run')} ({counts}){dates}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def _failures(frame: Frame) -> list[str]:
    """What did not end well, each reason once with the cells that it was met in, and where the runs lie."""
    names, found = frame.differing(), dict[tuple[str, str], tuple[dict[str, None], list[str]]]()
    for cell in frame.facts.index:
        for run in sorted(frame.runs_of(cell, is_shown=None), key=lambda run: run.outcome == "ok"):
            if run.outcome != "ok":
                reason = shorten(_reason(run), _MESSAGE_WIDTH, placeholder=" ...")
                cells, run_ids = found.setdefault((outcome_label(run), reason), ({}, []))
                cells |= dict.fromkeys(filter(None, [frame.told(cell, names)]))
                run_ids.append(run.run_id)
    lines = []
    for (outcome, reason), (cells, run_ids) in found.items():
        ending = ": ".join(filter(None, [_first_of(list(cells), "; "), outcome, reason]))
        lines.append(f"{ending} ({'run' if len(run_ids) == 1 else 'runs'} {_first_of(run_ids, ', ')})")
    return lines


def _first_of(names: Sequence[str], separator: str) -> str:
    """All of a few names, of many the first ones and how many more there are."""
    if len(names) <= _MOST_NAMED:
        return separator.join(names)
    return f"{separator.join(names[: _MOST_NAMED - 1])} and {len(names) - _MOST_NAMED + 1} more"


def _reason(run: Run) -> str:
    error, memory = run.record.error, run.record.memory
    asked, taken, total = error and error.requested_bytes, memory.run_peak_allocated_bytes, memory.device_total_bytes
    if run.outcome == "oom" and asked and taken and total:
        return f"{gib(asked)} more asked for; at most {gib(taken)} had been allocated of {gib(total)}"
    return run.damage or (error and error.message) or ""


def _environment(run: Run, gpu: str) -> str:
    """Device, power limit and versions in a line."""
    environment = run.record.environment
    if environment is None:
        return ""
    limit, versions = environment.gpu.power_limit_w, environment.versions
    parts = [gpu, f"power limit {limit:.0f} W" if limit else ""]
    for name in ("torch", "cuda", "driver", "lightning", "lmbench"):
        parts.append(f"{name} {version}" if (version := getattr(versions, name)) else "")
    parts += [_code(environment.code.lmbench, "lmbench commit"), _code(environment.code.project, "code at")]
    return ", ".join(filter(None, parts))


def _code(code: Revision, words: str) -> str:
    return f"{words} {code.commit[:9]}{' with changes' if code.is_dirty else ''}" if code.commit else ""


# notes


def _lines_of_runs(group: Group) -> list[str]:
    lines = [f"{_count(group.trials, 'more run')} tried what fits, and more than that"] if group.trials else []
    cells = _count(len(group.sweep.cells), "cell")
    return [*lines, *([f"{group.missing_count} of {cells} have no run yet"] if group.missing_count else [])]


def _cost_lines(frame: Frame) -> list[str]:
    """Where the time of a sweep's run went, from its process's start to its end: the median over ok runs by part."""
    costs: dict[str, list[float]] = {}
    for run in frame.ok.run:
        cost = run.record.sweep.cost if run.record.sweep else None
        for name, value in asdict(cost).items() if cost else ():
            if value is not None:
                costs.setdefault(name.removesuffix("_s"), []).append(value)
    medians = ", ".join(f"{name} {statistics.median(values):.2f} s" for name, values in costs.items())
    return [f"where the time of a run went (median): {medians}"] if costs else []


def _pass_lines(frame: Frame, has_kernels: bool) -> list[str]:
    """A line for the runs that are in no timing table, and how much slower than the timing run the profiled were.

    Args:
        has_kernels: whether the view shows the profiled runs' kernels; else the line says which one does.
    """
    passes = list(frame.runs.run[~frame.runs.is_shown])
    profiled = [run for run in passes if run.record.is_profiled]
    counts = Counter(pass_of(run.record).name for run in passes)
    lines = [
        f"{_count(counts[look.name], 'run')} {look.label}: in no timing table"
        for look in PASSES
        if counts[look.name] and not look.has_timing
    ]
    if profiled:
        where = "" if has_kernels else f"; `--view {_PROFILED_STUDY}` shows their kernels"
        lines[-1] += _slower(frame) + where
        unread = [run for run in profiled if run.outcome == "ok" and run.record.kernels is None]
        if has_kernels and unread:
            problem = "without kernel figures in run.json: `lmbench kernels RUN` reads the trace"
            lines.append(f"{_count(len(unread), 'run')} {problem}")
    return lines


def _slower(frame: Frame) -> str:
    timed = frame.numbers("phases.step.mean_s").groupby(level=0).mean()
    rows = frame.runs[frame.runs.is_profiled & ~frame.runs.is_shown & frame.runs.cell.isin(timed.index)]
    steps = [(timed[cell], run.record.phases.step) for cell, run in zip(rows.cell, rows.run, strict=True)]
    ratios = [step.mean_s / time for time, step in steps if step and step.mean_s]
    if not ratios:
        return ""
    ends = dict.fromkeys(f"{ratio:.2f}" for ratio in (min(ratios), max(ratios)))
    return f"; their steps took {' to '.join(ends)} times as long"


def _host_bound_lines(frame: Frame) -> list[str]:
    """A line where the host, not the device, set the times of rows: what changes the device's work changes little."""
    bound = sum(float(str(share.value)) > 0.5 for share in HOST_BOUND.of(frame).values())
    if not bound:
        return []
    return [
        f"host-bound over 50 % in {_count(bound, 'row')}: the device waited for the host there, and precision, "
        "compilation or a bigger batch show what they do to the host"
    ]


def _warning_lines(frame: Frame) -> list[str]:
    """Guards that warned, by name, with how many runs they are about and what the worst of them says."""
    runs, found = list(frame.ok.run), dict[str, list[tuple[float, str]]]()
    for guard in (guard for run in runs for guard in run.record.guards if guard.status == "warn"):
        found.setdefault(guard.name, []).append((abs(guard.value or 0.0), guard.message))
    return [
        f"guard {name} warns in {len(seen)} of {_count(len(runs), 'run')}; the worst: {max(seen)[1]}"
        for name, seen in sorted(found.items())
    ]


# a row for each cell


def _data_rows(
    group: Group, view: View, frame: Frame, catalogue: Catalogue, has_reference: bool
) -> list[dict[str, Any]]:
    """Each cell as a flat row: where it belongs, its facts, how it ended, its figures, and published ones."""
    shown = {name: catalogue.column(name) for table in view.tables for name in table.columns}
    columns = [
        column
        for name, column in ({**catalogue.columns, **shown}).items()
        if name in shown or not (column.reads_steps or (column.is_profiled and not view.is_profiled))
    ]
    values = [(column.name, column.of(frame)) for column in columns]
    if has_reference:
        for heading, cells in published(frame, list(shown.values())):
            caveats = {cell: Cell("; ".join(entry.notes)) for cell, entry in cells.items()}
            values += [(heading.name, cells), (f"{heading.name}: caveat", caveats)]
    rows = []
    for cell in frame.facts.index:
        runs, ok = frame.runs_of(cell), frame.runs_of(cell, "ok")
        bad = [run for run in runs if run.outcome != "ok" and not ok]
        error = bad[0].record.error if bad else None
        warnings = {guard.name for run in ok for guard in run.record.guards if guard.status == "warn"}
        rows.append(
            {"sweep": group.name, "view": view.name, "gpu": frame.facts.gpu[cell]}
            | {f"fact {name}": value for name, value in frame.known[cell].items()}
            | {
                "outcome": bad[0].outcome if bad else "ok",
                "phase": error and error.phase,
                "reason": bad[0].damage or (error and error.message) if bad else None,
                "runs": len(runs),
                "ok_runs": len(ok),
                "passes": len(frame.runs_of(cell, is_shown=False)),
                "window_steps": sum(run.record.window.steps or 0 for run in ok),
                "spread": spread_text([len(ok)]) or None,
                "failed_guards": "; ".join(failed_guards(frame, cell)) or None,
                "warnings": "; ".join(sorted(warnings)) or None,
                "run_ids": " ".join(run.run_id for run in runs),
            }
            | {name: cells.get(cell) for name, cells in values}
            | {"baseline": frame.base_name or None}
        )
    return rows


def _data(rows: Sequence[dict[str, Any]]) -> Table:
    """The rows of all sections as one table: place, facts in their order, then the rest as the rows have them."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    order = {f"fact {name}": place for place, name in enumerate(FACT)}
    facts = sorted((n for n in names if n.startswith("fact ")), key=lambda name: (order.get(name, len(order)), name))
    names = [*names[:3], *facts, *(name for name in names[3:] if name not in facts)]
    columns = [answer.Column(name, name=name.removeprefix("fact ")) for name in names]
    return Table("cells", "Cells", columns, [[row.get(name) for name in names] for row in rows])
