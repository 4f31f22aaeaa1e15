"""`lmbench list`: what has been measured, a line for each run or sweep, and names for results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import NamedTuple

from jsonargparse.typing import PositiveInt

from lmbench.configs import shipped_configs, shipped_studies
from lmbench.errors import UsageError, suggest
from lmbench.records.load import Run, find_runs, load_known
from lmbench.records.named import RESULTS, Result, given_names, name_result, results_in, shown_path
from lmbench.records.passes import pass_of
from lmbench.records.schema import leaves, recorded, value_at
from lmbench.records.statistics import sample_std
from lmbench.report.answer import Answer, Cell, Column, Line, Table
from lmbench.report.facts import FACT, Value, in_words, plain, read_facts
from lmbench.report.units import COUNT, GIB, MS, milliseconds

#: Facts that tell what a run was, those first that should be read where the screen is narrow.
_WORDS = ("size", "precision", "matmul", "compile", "batch", "context", "mode", "attention", "optimizer")
#: Those of them that every line tells; of the others only those that are not the same in all lines.
_ALWAYS = ("size", "precision")
_FIGURES = (
    (Column("step", MS, "step_s"), "phases.step.mean_s"),
    (Column("tokens/s", COUNT, "tokens_per_s"), "throughput.tokens_per_s"),
    (Column("peak", GIB, "run_peak_allocated_bytes"), "memory.run_peak_allocated_bytes"),
)
_COLUMNS = (
    Column("name"),
    Column("when (UTC)", name="started_at"),
    Column("what", narrowing="shorten"),
    *(column for column, _ in _FIGURES),
    Column("outcome"),
    Column("commit", is_extra=True),
    Column("result", name="path", is_extra=True),
)


class _Entry(NamedTuple):
    """A result on its way to a line: the runs that are listed of it, and the facts that all of them share."""

    name: str
    result: Result
    runs: Sequence[Run]
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
    if name in {**shipped_configs(), **shipped_studies()}:
        raise UsageError(f"--name {name!r} is the name of a shipped configuration or study; give another one")
    path = Path(results[0])
    find_runs([path])
    name_result(name, path)
    return Answer([Line(name, shown_path(path.resolve()), is_whole=True)])


def listing(folders: Sequence[str], where: str | None = None, limit: int = 20) -> Answer:
    """The results at or below the folders as a table, the newest first.

    Raises:
        UsageError: there is none, or a condition names what no run has.
    """
    newest = results_in(folders)
    names = {(RESULTS / target).resolve(): name for name, target in given_names().items()}
    home = "" if Path(folders[0]) == RESULTS else f"{folders[0].rstrip('/')}/"
    conditions = [[part.strip() for part in text.partition("=")[::2]] for text in where.split(",")] if where else []
    values: dict[str, set[str]] = {name: set() for name, _ in conditions}
    entries: Sequence[_Entry] = ()
    for back, result in enumerate(newest):
        if len(entries) == limit and not conditions:
            break
        runs = [load_known(folder) for folder in result.runs]
        for name, wanted in conditions:
            told = [(run, _told(run).get(name)) for run in runs]
            values[name] |= {value for _, value in told if value is not None}
            # `highest` is that of `highest (fp32)`.
            runs = [run for run, value in told if value is not None and f"{value} ".startswith(f"{wanted} ")]
        if runs:
            last = f"{home}last~{back}".removesuffix("~0") if len(folders) == 1 else shown_path(result.path)
            facts = [_facts(run).items() for run in runs]
            shared = {name: value for name, value in facts[0] if all((name, value) in other for other in facts)}
            entries = [*entries, _Entry(names.get(result.path, last), result, runs, shared)]
    for name, known in values.items() if not entries else ():
        hint = suggest(name, FACT) or f"; facts are {', '.join(FACT)}"
        known_values = f"{name} is one of {', '.join(sorted(known))}" if known else f"no run has a {name!r}{hint}"
        raise UsageError(f"--where {where}: no run is so (NAME=VALUE); {known_values}")
    return _listing(entries[:limit], (len(entries) if conditions else len(newest)) - len(entries[:limit]))


def _listing(entries: Sequence[_Entry], older: int) -> Answer:
    common = [name for name in _WORDS if len({entry.facts.get(name) for entry in entries}) == 1]
    words = [name for name in _WORDS if name in _ALWAYS or name not in common]
    rows = [_row(entry, words) for entry in entries]
    more = [Line("more", f"{older} older; --limit {older + len(rows)} shows them")] if older else []
    caption = in_words(entries[0].facts, [name for name in common if name not in _ALWAYS])
    return Answer(
        tables=[Table("results", "Results, the newest first", _COLUMNS, rows, caption=caption and f"all {caption}")],
        notes=[*more, Line("see one", f"lmbench show {entries[0].name}", is_whole=True)],
    )


def _told(run: Run) -> dict[str, str]:
    """Everything that a run says of itself: its record, its options and its facts, as they are shown."""
    record = run.record
    options = dict(leaves(record.config or {}))
    values = {**recorded(record), **options, **_facts(run), "outcome": run.outcome}
    return {name: str(plain(value)) for name, value in values.items() if value is not None}


def _facts(run: Run) -> dict[str, Value]:
    axes = (run.record.sweep.axes if run.record.sweep else None) or {}
    return read_facts(run.record, (axes, {}, run.record.config))


def _row(entry: _Entry, names: Sequence[str]) -> Sequence[Value | Cell]:
    result, runs = entry.result, entry.runs
    cells = {run.record.sweep.cell if run.record.sweep else None for run in runs}
    words = in_words(entry.facts, names) or runs[0].damage or ""
    if len(cells) > 1:
        words = ", ".join(filter(None, [f"{len(cells)} cells", words]))
    elif runs[1:]:
        words = f"{words} x {len(runs)}"
    elif not (look := pass_of(runs[0].record)).has_timing:
        words = f"{words}, {look.label}"
    counted = [run.record for run in runs if run.outcome == "ok" and pass_of(run.record).has_timing]
    figures = []
    for column, field in _FIGURES:
        values = [value for record in counted if (value := value_at(record, field)) is not None]
        figures.append(_figure(column, values, is_one_cell=len(cells) == 1))
    failed = Counter(run.outcome for run in runs if run.outcome != "ok")
    ended = ", ".join(f"{count} {outcome}" for outcome, count in failed.most_common()) if runs[1:] else runs[0].outcome
    began = result.began[0]
    # Of another year the date; UTC, as in the record.
    when = began[5:16].replace("T", " ") if began[:4] == str(datetime.now(UTC).year) else began[:10]
    return [entry.name, Cell(began, text=when), words, *figures, ended or "ok", entry.facts.get("commit"),
            shown_path(result.path)]  # fmt: skip


def _figure(column: Column, values: Sequence[float], is_one_cell: bool) -> Cell:
    """The mean of repeats, with the spread of a time; of several cells the range."""
    if not values:
        return Cell(None)
    mean = fmean(values)
    if is_one_cell or min(values) == max(values):
        return Cell(mean, std=sample_std(values, mean) if column.unit is MS else None)
    low, high = min(values), max(values)
    ends = [milliseconds(end, high - low) if column.unit is MS else column.unit.text(end) for end in (low, high)]
    return Cell(None, low=low, high=high, text=" .. ".join(ends))
