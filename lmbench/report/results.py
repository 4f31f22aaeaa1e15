"""Results as one answer: a section for each group of runs, by the view of its study; a row for each cell as data."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from textwrap import shorten
from typing import NamedTuple

from msgspec.structs import replace

from lmbench.errors import UsageError
from lmbench.masking import masked_message
from lmbench.records.load import Run
from lmbench.records.measured import Guard
from lmbench.records.passes import PASSES, pass_of
from lmbench.records.run import Code, SweepPlace
from lmbench.records.schema import value_at
from lmbench.report import answer
from lmbench.report.answer import Answer, Line, Table
from lmbench.report.charts import build_charts
from lmbench.report.frame import (
    Frame,
    Group,
    in_order,
    make_frame,
    outcome_label,
    outcome_word,
    parse_baseline,
    read_groups,
)
from lmbench.report.over import Over, frame_over, over_view
from lmbench.report.run import lines
from lmbench.report.tables import failed_guards, sentences, view_tables
from lmbench.report.view import GENERIC, Catalogue, View

#: Cells or runs named of those that met the same end, and environments.
_MOST_NAMED = 6


class _Section(NamedTuple):
    """A group with the view that shows it: `frame` shows the runs that the view is about, `note` is said of it."""

    group: Group
    view: View
    frame: Frame
    note: str


def report_on(
    paths: Iterable[str | Path],
    catalogue: Catalogue,
    view: str | None = None,
    baseline: str | None = None,
    over: Over | None = None,
) -> Answer:
    """Everything at or below the paths as an answer.

    Args:
        view, baseline: asked for instead of a group's own.
        over: show all runs as configurations that are followed over commits or time.

    Raises:
        UsageError: no result, an unknown view, a baseline that a group lacks, or nothing that can be followed.
    """
    groups = read_groups(paths, is_by_sweep=over is None)
    asked = over_view(over) if over else view
    wanted = catalogue.view(asked, (over,) if over else ()) if asked is not None else None
    sections = list[_Section]()
    for group in groups:
        shown_by, note = (wanted, "") if wanted else _own_view(group, catalogue)
        frame = frame_over(group, over) if over else make_frame(group, shown_by.is_profiled)
        frame = frame.against(parse_baseline(baseline, frame) if baseline else shown_by.baseline)
        # A fact that a view sorts by comes before those that it does not name.
        frame = frame.select(frame.ordered([*shown_by.tables[0].rows, *frame.varying()]))
        sections.append(_Section(group, shown_by, frame, note))
    rows = [
        (run.run_id, run.outcome, masked_message(run.record.replay_command or ""))
        for section in sections
        for run, *_ in section.frame.runs
    ]
    columns = [answer.Column("run", name="run_id"), answer.Column("outcome"), answer.Column("command")]
    repeat = Table("runs", "Runs, and how to repeat them", columns, rows)
    return Answer(
        sections=[*(_answer(section, catalogue) for section in sections), Answer(tables=[repeat], first=[])],
        # Worked out for CSV and JSON alone: of 1,000 cells it takes a second.
        data=lambda: _data(sections, catalogue),
    )


def _own_view(group: Group, catalogue: Catalogue) -> tuple[View, str]:
    """The view of a group that nobody asked for another one of, and what must be said of it."""
    if group.sweep.view is None:
        return GENERIC, ""
    try:
        view = catalogue.view(group.sweep.view, tuple(group.sweep.axes or ()))
    except UsageError as error:
        return GENERIC, f"the sweep's own view is not used: {error}; shown as any sweep"
    return view if view.name else replace(view, name=group.name), ""


def _answer(section: _Section, catalogue: Catalogue) -> Answer:
    group, view, frame, note = section
    timed = frame.select(cell for cell in frame.rows if frame.runs_of(cell))
    # Where rows tell the commits, they differ in nothing else.
    changes = {"code": Code()} if "commit" in frame.varying() else {}
    measured = {
        line.text
        for row in frame.runs
        if (environment := row.run.record.environment) is not None
        for line in lines("environment", replace(environment, **changes), device=row.facts.get("gpu"))
    }
    # What answers the view's question: the view's own sentences, then those of features.
    features = catalogue.features_of(column for table in view.tables for column in catalogue.columns_of(table))
    texts = [sentences(view.answers, timed, catalogue.column), *(feature.headline(timed) for feature in features)]
    runs = [run for runs in frame.ok.values() for run in runs]
    warnings = defaultdict[bool, list[str]](list)
    for guards in _warned(runs).values():
        text = f"{len(guards)} of {_count(len(runs), 'run')}, the first: {guards[0].message}"
        warnings[len(guards) == len(runs)].append(text)
    outcomes = Counter(outcome_word(row.run.outcome) for row in frame.runs)
    counts = ", ".join(f"{count} {outcome}" for outcome, count in outcomes.most_common())
    days = sorted(row.run.record.started_at[:10] for row in frame.runs if row.run.record.started_at)
    dates = f", measured on {' to '.join(dict.fromkeys((days[0], days[-1])))}" if days else ""
    return Answer(
        title=view.title if group.name in ("", view.name) else group.name,
        headline=[
            *([Line("question", view.question)] if view.question else []),
            *(Line("answer", text) for text in chain.from_iterable(texts)),
            *(Line("WARN", text) for text in warnings[True]),
            Line("cells", f"{_count(len(frame.known), 'cell')}, {_count(len(frame.runs), 'run')} ({counts}){dates}"),
            *(Line("measured", line) for line in _first(sorted(measured))),
        ],
        tables=view_tables(view, timed, catalogue),
        charts=lambda: [
            chart
            for spec in view.charts
            for chart in build_charts(spec, catalogue.chart_kinds[spec.kind], timed, catalogue.column)
        ],
        notes=[
            *(Line("not ok", text) for text in _failures(frame)),
            *(Line("note", note) for note in filter(None, (note, *_notes(group, frame), *warnings[False]))),
        ],
    )


def _count(number: int, word: str) -> str:
    return f"{number} {word}" + ("" if number == 1 else "s")


def _failures(frame: Frame) -> Iterator[str]:
    """What did not end well, each reason once with the cells that it was met in."""
    names, met = frame.differing(), defaultdict[str, list[str]](list)
    for cell in frame.known:
        for run in frame.runs_of(cell, is_shown=None):
            if run.outcome != "ok":
                error = run.record.error
                message = shorten(run.damage or (error and error.message) or "", 160, placeholder=" ...")
                met[": ".join(filter(None, [outcome_label(run), message]))].append(frame.in_words(cell, names))
    for reason, cells in met.items():
        yield ": ".join(filter(None, ["; ".join(_first(list(dict.fromkeys(cells)))), reason]))


def _first(names: Sequence[str]) -> list[str]:
    """All of a few names, of many the first ones and how many more there are."""
    more = len(names) - _MOST_NAMED
    return [*names[:_MOST_NAMED], *([f"and {more} more"] if more > 0 else [])]


def _notes(group: Group, frame: Frame) -> Iterator[str]:
    """The baseline that no run is, runs in no timing table, and cells without a run."""
    baseline, cells = frame.baseline, group.sweep.cells
    if frame.known and not any(baseline.items() <= known.items() for known in frame.known.values()):
        yield f"no run is the baseline {frame.base_name}; what compares with it is left out"
    passes = Counter(pass_of(row.run.record).name for row in frame.runs)
    for look in PASSES:
        if passes[look.name] and not look.has_timing:
            hint = f"; `lmbench {look.command} RUN` shows it" if look.command else ""
            yield f"{_count(passes[look.name], 'run')} {look.label}: in no timing table{hint}"
    places = [row.run.record.sweep or SweepPlace() for row in group.rows]
    if missing := {cell.id for cell in cells}.difference(*((place.cell, place.searched_cell) for place in places)):
        yield f"{len(missing)} of {_count(len(cells), 'cell')} have no run yet"


def _warned(runs: Iterable[Run]) -> dict[str, list[Guard]]:
    """The guards that warn, by their names."""
    guards = defaultdict[str, list[Guard]](list)
    for run in runs:
        for guard in run.record.guards:
            if guard.status == "warn":
                guards[guard.name].append(guard)
    return guards


def _data(sections: Sequence[_Section], catalogue: Catalogue) -> Table:
    """The cells of all sections as one table: where each belongs, its facts, how it ended, and the columns of its view,
    published ones among them."""
    facts = in_order({name for section in sections for known in section.frame.known.values() for name in known})
    rows = []
    for group, view, frame, _ in sections:
        columns = [column for table in view.tables for column in catalogue.columns_of(table)]
        figures = {column.name: column.of(frame) for column in columns}
        for cell in frame.known:
            runs, ok = frame.runs_of(cell), frame.runs_of(cell, "ok")
            first = next(iter(ok or runs), None)
            rows.append({
                "sweep": group.name,
                **{name: frame.known[cell].get(name) for name in facts},
                "outcome": first.outcome if first else "ok",
                "reason": first.damage or value_at(first.record, "error.message") if first else None,
                "runs": len(runs),
                "ok_runs": len(ok),
                "failed_guards": "; ".join(failed_guards(frame, cell)) or None,
                "warnings": "; ".join(sorted(_warned(ok))) or None,
                "run_ids": " ".join(run.run_id for run in runs),
                **{name: cells.get(cell) for name, cells in figures.items() if cells},
                "baseline": frame.base_name or None,
            })  # fmt: skip
    names = list(dict.fromkeys(name for row in rows for name in row))
    keys = [answer.Column(name, name=name) for name in names]
    return Table("cells", "Cells", keys, [[row.get(name) for name in names] for row in rows])
