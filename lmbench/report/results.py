"""Results as one answer: a section for each group of runs, shown by its study's view. CSV has a row for each cell."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain, groupby
from operator import attrgetter
from pathlib import Path
from shlex import quote
from textwrap import shorten
from typing import Any, NamedTuple

from msgspec import structs

from lmbench.errors import UsageError, suggest
from lmbench.masking import masked_message
from lmbench.records.load import guards_by_name
from lmbench.records.named import repeat_command, shown_path
from lmbench.records.passes import PASS, pass_of
from lmbench.records.schema import recorded
from lmbench.records.vocabulary import INCORRECT
from lmbench.report.answer import Answer, Column, Line, Table, labelled, listed
from lmbench.report.banner import environment_text
from lmbench.report.charts import build_charts
from lmbench.report.columns import OPEN, Quantity
from lmbench.report.facts import Facts
from lmbench.report.frame import Frame, MeasuredCell, in_order, make_frame, parse_baseline
from lmbench.report.groups import Group, read_groups
from lmbench.report.over import Over, frame_over, over_view
from lmbench.report.sentences import sentences
from lmbench.report.tables import view_tables
from lmbench.report.units import GIB, MS, PERCENT, WORDS, counted, tally
from lmbench.report.view import GENERIC, Catalogue, View

#: The label of the command that measures what is missing, which only helps where the folder is.
GO_ON = "go on"
#: Most cells that are named with one failure, and most environments that are listed.
_MOST_NAMED = 6
_UNIT_OF = {"s": MS, "fraction": PERCENT, "bytes": GIB}


class Section(NamedTuple):
    """A group with its view, the frame of the runs that the view shows, and a note on the choice of the view."""

    group: Group
    view: View
    frame: Frame
    catalogue: Catalogue
    note: str = ""

    @property
    def columns(self) -> list[Quantity]:
        """The columns of all tables of the view."""
        return [column for table in self.view.tables for column in self.catalogue.columns_of(table)]


def report_on(sections: Sequence[Section]) -> Answer:
    """The sections as an answer; CSV has a row for each of their cells."""
    rows = [
        (run.run_id, run.outcome, masked_message(repeat_command(run.record, run.path)))
        for section in sections
        for run in section.frame.runs
    ]
    columns = [Column("run", name="run_id"), Column("outcome"), Column("command")]
    repeat = Table("runs", "Runs, and how to repeat them", columns, rows)
    return Answer(
        sections=[*map(section_answer, sections), Answer(tables=[repeat], first=[])],
        # Computed for CSV and JSON alone, since it takes a second for 1,000 cells.
        data=lambda: cells_table(sections),
    )


def read_sections(
    paths: Iterable[str | Path],
    catalogue: Catalogue,
    view: str | None = None,
    baseline: str | None = None,
    over: Over | None = None,
) -> list[Section]:
    """All results at or below the paths.

    Args:
        view, baseline: used instead of each group's own.
        over: follow the configurations of all runs over commits or time.

    Raises:
        UsageError: there is no result, the view is unknown, a group lacks the baseline, or no configuration can be
            followed.
    """
    groups = read_groups(paths, is_by_sweep=over is None)
    shared_view = over_view(over) if over else view
    common_view = None if shared_view is None else catalogue.view(shared_view, (over,) if over else ())
    sections = []
    for group in groups:
        group_view, note = (common_view, "") if common_view else _view_of(group, catalogue)
        frame = frame_over(group, over) if over else make_frame(group, group_view.is_profiled)
        frame = frame.against(parse_baseline(baseline, frame) if baseline else group_view.baseline)
        # Sort by the facts that the view names, then by the others.
        frame = frame.select(frame.ordered([*group_view.tables[0].rows, *frame.varying()]))
        sections.append(Section(group, group_view, frame, catalogue, note))
    # Sweeps of one name, such as those of two machines, go by their folders.
    for _, same in groupby(sorted(groups, key=attrgetter("name")), attrgetter("name")):
        homes = {group.home: group for group in same if group.home}
        if len(homes) > 1:
            shared = os.path.commonpath(homes)
            for home, group in homes.items():
                group.sweep.name = str(home.relative_to(shared))
    return sections


def _view_of(group: Group, catalogue: Catalogue) -> tuple[View, str]:
    """A group's own view, and a note if that cannot be used and the generic view stands in."""
    if group.sweep.view is None:
        return GENERIC, ""
    try:
        view = catalogue.view(group.sweep.view, group.sweep.axes)
    except UsageError as error:
        return GENERIC, f"the sweep's own view is not used: {error}; shown as any sweep"
    return view if view.name else structs.replace(view, name=group.name), ""


def section_answer(section: Section) -> Answer:
    group, view, frame, catalogue, note = section
    timed = frame.select(cell for cell in frame.cells if cell.shown)
    # If rows name their commits, the line of an environment leaves the code out, so that each is listed once.
    names_commits = "commit" in frame.varying()
    environments = {
        environment_text(run.record.environment, run.facts.get("gpu"), with_code=not names_commits)
        for run in frame.runs
        if run.record.is_set_up
    }
    # The view's question is answered by the view's own sentences, then by those of features.
    features = catalogue.features_of(section.columns)
    answers = [sentences(view.answers, timed, catalogue.column), *(feature.headline(timed) for feature in features)]
    warnings = []
    for guards in guards_by_name(frame.samples, "warn").values():
        worst = max(guards, key=lambda guard: abs(guard.value or 0.0))
        at_worst = ", at worst" if len(guards) > 1 else ""
        warnings.append(
            Line("WARN", f"{len(guards)} of {counted(len(frame.samples), 'run')}{at_worst}: {worst.message}")
        )
    unfinished = []
    if group.home is not None and (missing := group.sweep.missing(len(group.runs))):
        again = Line(GO_ON, f"lmbench sweep {quote(shown_path(group.home))}", is_whole=True)
        unfinished = [Line("unfinished", missing), again]
    tables = view_tables(view, timed, catalogue)
    # A study for GPUs has no figures in some of its tables on a CPU.
    titles = {table.title for table in tables}
    absent = [spec.title for spec in view.tables if spec.title not in titles]
    empty = f"no run has figures of {'; '.join(absent)}" if absent and frame.samples else ""
    beside = [column for table in view.tables for column in catalogue.columns_of(table)[len(table.columns) :]]
    is_apart = beside and not any(column.of(timed) for column in beside)
    copies = f"copies of runs, not counted: {', '.join(_first(group.copies))}" if group.copies else ""
    counts = tally(run.outcome_word for run in frame.runs)
    days = sorted(run.record.started_at[:10] for run in frame.runs if run.record.started_at)
    dates = f", measured on {' to '.join(dict.fromkeys((days[0], days[-1])))}" if days else ""
    return Answer(
        title=view.title if group.name in ("", view.name) else group.name,
        headline=[
            *labelled("question", view.question),
            *(Line("answer", text) for text in chain.from_iterable(answers)),
            *warnings,
            Line("cells", f"{counted(len(frame.cells), 'cell')}, {counted(len(frame.runs), 'run')} ({counts}){dates}"),
            *unfinished,
            *(Line("measured", line) for line in _first(sorted(filter(None, environments)))),
            *labelled("reference", is_apart and "it has no figure of these configurations"),
        ],
        tables=tables,
        charts=lambda: [chart for spec in view.charts for chart in build_charts(spec, timed, catalogue)],
        notes=[
            *(Line("not ok", text) for text in _failures(frame)),
            *(Line("note", note) for note in (note, empty, copies, *_notes(frame, view)) if note),
        ],
    )


def _failures(frame: Frame) -> Iterator[str]:
    """Each reason why runs did not end well, with the cells of these runs."""
    names, cells_of = frame.differing(), defaultdict[str, list[str]](list)
    for cell in frame.cells:
        for run in cell.runs:
            if run.outcome != "ok":
                message = run.damage or run.record.failure.message or ""
                # The label has this word, too.
                shortened = shorten(message.removeprefix(f"{INCORRECT}: "), 160, placeholder=" ...")
                reason = listed(run.outcome_label, shortened, separator=": ")
                cells_of[reason].append(cell.describe(names))
    for reason, cells in cells_of.items():
        yield listed("; ".join(_first(list(dict.fromkeys(cells)))), reason, separator=": ")


def _first(names: Sequence[str]) -> list[str]:
    """The names if they are few, else the first ones and how many more there are."""
    if len(names) <= _MOST_NAMED:
        return list(names)
    return [*names[:_MOST_NAMED], f"and {len(names) - _MOST_NAMED} more"]


def _notes(frame: Frame, view: View) -> Iterator[str]:
    """Notes on a baseline and on columns that no run has, and on runs that no timing table shows."""
    baseline = frame.baseline
    if frame.cells and not any(baseline.items() <= cell.facts.items() for cell in frame.cells):
        yield f"no run is the baseline {frame.base_name}; what compares with it is left out"
    records = [run.record for run in frame.runs]
    known = {name for run in records for part in ("scalars", "rooms") for name in recorded(getattr(run, part), part)}
    for name in dict.fromkeys(name for table in view.tables for name in table.columns):
        if name.startswith(OPEN) and name not in known:
            yield f"no run has {name}{suggest(name, known)}"
    passes = Counter(pass_of(record).name for record in records)
    for run_pass in PASS.values():
        if passes[run_pass.name] and not run_pass.has_timing:
            hint = f"; `lmbench {run_pass.command} RUN` shows it" if run_pass.command else ""
            yield f"{counted(passes[run_pass.name], 'run')} {run_pass.label}: in no timing table{hint}"


def cells_table(
    sections: Sequence[Section],
    facts_of: Callable[[MeasuredCell], Facts] = lambda cell: cell.facts,
) -> Table:
    """The cells of all sections as one table: sweep, facts, outcome, and the columns of the view and of references."""
    facts = {cell: facts_of(cell) for section in sections for cell in section.frame.cells}
    names = in_order({name for of_cell in facts.values() for name in of_cell})
    rows = []
    for section in sections:
        frame = section.frame
        figures = {column.name: column.of(frame) for column in section.columns}
        for cell in frame.cells:
            first = next(iter(cell.ok or cell.shown), None)
            rows.append({
                "sweep": section.group.name,
                **{name: facts[cell].get(name) for name in names},
                "outcome": first.outcome if first else "ok",
                "reason": first.damage or first.record.failure.message if first else None,
                "runs": len(cell.shown),
                "ok_runs": len(cell.ok),
                "failed_guards": "; ".join(guards_by_name(cell.ok, "fail")) or None,
                "warnings": "; ".join(sorted(guards_by_name(cell.ok, "warn"))) or None,
                "run_ids": " ".join(run.run_id for run in cell.shown),
                **{name: cells.get(cell) for name, cells in figures.items() if cells},
                "baseline": frame.base_name or None,
            })  # fmt: skip
    return rows_table("cells", rows)


def rows_table(name: str, rows: Sequence[Mapping[str, Any]]) -> Table:
    """A table of mappings from names in SI units, such as `step_s`, to values."""
    columns = []
    for key in dict.fromkeys(key for row in rows for key in row):
        title, _, ending = key.rpartition("_")
        # A rate such as `flops_per_s` is no time.
        unit = WORDS if title.endswith("_per") else _UNIT_OF.get(ending, WORDS)
        columns.append(Column(key if unit is WORDS else title.replace("_", " "), unit, key))
    return Table(name, name, columns, [[row.get(column.name) for column in columns] for row in rows])
