"""`lmbench list`: what has been measured, a line for each run or sweep, and names for results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from lmbench.commands.parser import PositiveInt
from lmbench.errors import UsageError
from lmbench.records.load import find_runs, load_known
from lmbench.records.named import (
    Result,
    find_result,
    given_names,
    name_result,
    results_in,
    shown_path,
    sweep_of,
)
from lmbench.records.passes import pass_of
from lmbench.records.schema import leaves, recorded
from lmbench.records.store import RESULTS
from lmbench.report.answer import Answer, Cell, Column, Line, Table
from lmbench.report.facts import FACT, Value, in_words, is_said, plain, read_facts
from lmbench.report.frame import Frame, frame_of
from lmbench.report.units import COUNT, GIB, MS
from lmbench.runs import read_run

#: Facts that tell what a run was. The first two stand in every line, the others where they differ between lines.
_WORDS = ("size", "precision", *(name for name in FACT if name not in ("size", "precision", "warmup", "zero_grad")))
_FIGURES = (
    (Column("step", MS, "step_s"), "phases.step.mean_s"),
    (Column("tokens/s", COUNT, "tokens_per_s"), "throughput.tokens_per_s"),
    (Column("peak", GIB, "run_peak_allocated_bytes"), "memory.run_peak_allocated_bytes"),
)
_COLUMNS = (
    Column("name"),
    Column("when (UTC)", name="started_at"),
    Column("what"),
    *(column for column, _ in _FIGURES),
    Column("outcome"),
    Column("result", name="path", is_extra=True),
)


class _Entry(NamedTuple):
    """A result on its way to a line: the cells of the runs that are listed of it, and the facts that all share."""

    name: str
    result: Result
    frame: Frame
    facts: Mapping[str, Value]


def list(*results: str, where: str | None = None, limit: PositiveInt = 20, name: str | None = None) -> Answer:
    """Lists results, the newest first: when, what, ms a step, tokens/s, peak memory and how each ended.

    A result's name is understood wherever a command takes a result: `last`, `last~1` (the one before), FOLDER/last, or
    a name that was given with `lmbench list --name baseline RUN`.

    Args:
        results: folders of results (results); of a sweep's folder its runs
        where: only runs with NAME=VALUE,...: a fact (precision=bf16-mixed), an option or a field of the record
        limit: results listed
        name: give one result this name
    """
    if name is None:
        return listing(results or [str(RESULTS)], where, limit)
    if len(results) != 1:
        raise UsageError(f"--name names one result, such as `lmbench list --name {name} last`; {len(results)} given")
    path = Path(results[0])
    find_runs([path])
    name_result(name, path)
    return Answer([Line(name, shown_path(path.resolve()), is_whole=True)])


def listing(folders: Sequence[str], where: str | None = None, limit: int = 20) -> Answer:
    """The results at or below the folders as a table, the newest first.

    Raises:
        UsageError: there is none, or none that the conditions pick.
    """
    newest, names = results_in(folders), {(RESULTS / target).resolve(): name for name, target in given_names().items()}
    home = "" if Path(folders[0]) == RESULTS else f"{folders[0].rstrip('/')}/"
    wanted = dict(part.partition("=")[::2] for part in where.split(",")) if where else {}
    entries: Sequence[_Entry] = ()
    for back, result in enumerate(newest):
        runs = []
        for run in map(load_known, result.runs):
            options, facts = leaves(run.record.config or {}), read_facts(run.record)
            told = {**recorded(run.record), **dict(options), **facts, "outcome": run.outcome}
            # `highest` is that of `highest (fp32)`.
            if all(f"{plain(told.get(fact))} ".startswith(f"{value} ") for fact, value in wanted.items()):
                runs.append(run)
        if runs:
            last = f"{home}last~{back}".removesuffix("~0") if len(folders) == 1 else shown_path(result.path)
            frame = frame_of(runs, sweep_of(runs[0].path))
            entries = [*entries, _Entry(names.get(result.path, last), result, frame, frame.shared())]
        if len(entries) == limit:
            break
    if not entries:
        known = ", ".join(FACT)
        raise UsageError(f"--where {where}: no run is so; give NAME=VALUE of a fact ({known}), an option or a field")
    # A run that was never built knows little: what it lacks is no difference.
    built = [entry.facts for entry in entries if "precision" in entry.facts]
    common = [name for name in _WORDS[2:] if len({facts.get(name) for facts in built}) == 1]
    words = built and in_words(built[0], [name for name in common if is_said(name, built[0].get(name))])
    caption = f"all {words}" if words else ""
    rows = [_row(entry, [name for name in _WORDS if name not in common]) for entry in entries]
    table = Table("results", "Results, the newest first", _COLUMNS, rows, caption).without_empty_columns()
    older = len(newest) - back - 1
    more = [Line("more", f"{older} older; --limit {limit + older} looks at them too")] if older else []
    return Answer(tables=[table], notes=[*more, Line("see one", f"lmbench show {entries[0].name}", is_whole=True)])


def _row(entry: _Entry, names: Sequence[str]) -> Sequence[Value | Cell]:
    frame, runs = entry.frame, [row.run for row in entry.frame.runs]
    look = pass_of(runs[0].record)
    count = f"{len(frame.rows)} cells, " if len(frame.rows) > 1 else f"{len(runs)} x " if runs[1:] else ""
    label = "" if look.has_timing or runs[1:] else look.label
    told = [name for name in names if is_said(name, entry.facts.get(name))]
    words = count + ", ".join(filter(None, [in_words(entry.facts, told) or runs[0].damage, label]))
    # Of several cells a mean tells nothing.
    numbers = [frame.numbers(0, field) if len(frame.rows) == 1 else [] for _, field in _FIGURES]
    figures = [fmean(values) if values else None for values in numbers]
    outcomes = Counter(run.outcome for run in runs if run.outcome != "ok" or not runs[1:])
    ended = ", ".join(f"{number} {outcome}" if runs[1:] else outcome for outcome, number in outcomes.most_common())
    began, place = entry.result.began[0], shown_path(entry.result.path)
    when = Cell(began, text=began[5:16].replace("T", " "))
    return [entry.name, when, words, *figures, ended or "ok", place]


def show(*results: str) -> Answer:
    """Prints results again as `lmbench fit` did; without any, the newest.

    Of a folder of many runs it lists them, as `lmbench list` does.

    Args:
        results: result folders, names such as `last`, or a folder of results
    """
    results = results or (find_result("last"),)
    folders = find_runs(results)
    if len(folders) > len(results):
        return listing(results)
    answers = [read_run(folder).answer() for folder in folders]
    return answers[0] if len(answers) == 1 else Answer(sections=answers)
