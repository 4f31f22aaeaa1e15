"""`lmbench list`: the results so far, with a line for each run or sweep."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from lmbench.errors import UsageError
from lmbench.masking import leaves
from lmbench.records.load import load_known
from lmbench.records.named import Result, find_result, given_names, results_in, shown_path, sweep_of
from lmbench.records.passes import pass_of
from lmbench.records.schema import recorded
from lmbench.records.store import RESULTS, is_made_up
from lmbench.report.answer import Answer, Cell, Column, Line, Table, Value, labelled, listed
from lmbench.report.columns import KNOWN_BY, MEASURED
from lmbench.report.facts import FACT, Facts, describe, is_notable, plain, read_facts
from lmbench.report.frame import Frame, frame_of
from lmbench.report.groups import read_sweep_summary
from lmbench.report.units import tally

#: The facts that describe a run. The first two are in every line, the others only if they differ between lines.
_FACTS = ("size", "precision", *(name for name in FACT if name not in ("size", "precision", "warmup", "zero_grad")))
#: So many values of a name are listed where `--where` matches none.
_MOST_CHOICES = 10
_FIGURES = [column for column in MEASURED if column.name in KNOWN_BY]
_COLUMNS = (
    Column("name"),
    Column("when (UTC)", name="started_at"),
    Column("what"),
    *(Column(column.title.removesuffix(" memory"), column.unit, column.name) for column in _FIGURES),
    Column("outcome"),
    Column("result", name="path", is_extra=True),
)


class _Entry(NamedTuple):
    """A result that is listed: the frame of its runs that match `--where`, and the facts that all its cells share.

    `shown` is the name that a person reads: a folder's name that the user chose tells more than `last~3`.
    """

    name: str
    shown: str
    result: Result
    frame: Frame
    facts: Facts


def listing(folders: Sequence[str], where: str | None = None, limit: int = 20) -> Answer:
    """The results at or below the folders as a table, the newest first.

    Raises:
        UsageError: there is no result, or none that matches `where`.
    """
    newest, given_by_path = results_in(folders), {path: name for name, path in given_names().items()}
    home = "" if Path(folders[0]) == RESULTS else f"{folders[0].rstrip('/')}/"
    conditions = dict(part.partition("=")[::2] for part in where.split(",")) if where else {}
    entries, known = list[_Entry](), defaultdict[str, set[str]](set)
    for age, result in enumerate(newest):
        runs = []
        for run in map(load_known, result.runs):
            options, facts = dict(leaves(run.record.config or {})), read_facts(run.record)
            # `--model zoo.Tied --model.width 64` is `model.class_path` and `model.init_args.width` here.
            given = {name.removesuffix(".class_path").replace(".init_args.", "."): options[name] for name in options}
            values = {**recorded(run.record), **given, **options, **facts, "outcome": run.outcome}
            for name in conditions:
                if values.get(name) is not None:
                    known[name].add(str(plain(values[name])))
            # `highest` matches `highest (fp32)`.
            if all(f"{plain(values.get(name))} ".startswith(f"{value} ") for name, value in conditions.items()):
                runs.append(run)
        if runs:
            last = f"{home}last~{age}".removesuffix("~0") if len(folders) == 1 else shown_path(result.path)
            frame, path = frame_of(runs, sweep_of(runs[0].path)), shown_path(result.path)
            shown = name = given_by_path.get(result.path, last)
            own = f"{home}{result.path.name}"
            if name == last and not is_made_up(own) and result.path.parent == Path(folders[0]).resolve():
                shown = own if find_result(own) == path else path
            entries.append(_Entry(name, shown, result, frame, frame.shared()))
        if len(entries) == limit:
            break
    if not entries:
        if missing := [name for name in conditions if name not in known]:
            advice = f"give NAME=VALUE of a fact ({', '.join(FACT)}), an option or a field"
            raise UsageError(f"--where {where}: no run has {missing[0]!r}; {advice}")
        choices = (f"{name}={'|'.join(sorted(values)[:_MOST_CHOICES])}" for name, values in known.items())
        raise UsageError(f"--where {where}: no run is so; there are {', '.join(choices)}")
    # Runs whose model was never built record few facts; a missing one is no difference.
    built = [entry.facts for entry in entries if any("precision" in run.facts for run in entry.frame.runs)]
    # Axes of sweeps may set what is no fact, such as an argument of one's own module.
    axes = [axis for entry in entries for run in entry.frame.runs for axis in run.record.axes]
    names = [*dict.fromkeys([*_FACTS, *axes])]
    common = [name for name in names[2:] if len({facts.get(name) for facts in built}) == 1]
    words = built and describe(built[0], [name for name in common if is_notable(name, built[0].get(name))])
    caption = f"all {words}" if words else ""
    rows = [_row(entry, [name for name in names if name not in common]) for entry in entries]
    table = Table("results", "Results, the newest first", _COLUMNS, rows, caption).without_empty_columns()
    older = len(newest) - age - 1
    more = labelled("more", older and f"{older} older; --limit {limit + older} looks at them too")
    return Answer(tables=[table], notes=[*more, Line("see one", f"lmbench show {entries[0].name}", is_whole=True)])


def _row(entry: _Entry, names: Sequence[str]) -> Sequence[Value | Cell]:
    """A result's row, described by the facts `names`; the figures are means over the runs of its only cell."""
    cells, runs = entry.frame.cells, entry.frame.runs
    described = describe(
        entry.facts, [name for name in names if name not in FACT or is_notable(name, entry.facts.get(name))]
    )
    count = label = ""
    if len(runs) == 1:
        run_pass, outcomes = pass_of(runs[0].record), runs[0].outcome
        if not run_pass.has_timing:
            label = run_pass.label
    else:
        count = f"{len(cells)} cells, " if len(cells) > 1 else f"{len(runs)} runs, "
        outcomes = tally(run.outcome for run in runs if run.outcome != "ok") or "ok"
    if failed := sum(guard.status == "fail" for run in runs for guard in run.record.guards):
        outcomes += f", guards failed: {failed}"
    if missing := read_sweep_summary(entry.result.path).missing(len(entry.result.runs)):
        outcomes += f", {missing}"
    words = count + listed(described or runs[0].damage, label)
    # A mean over different cells would say nothing.
    figures = [column.of(entry.frame).get(cells[0]) if len(cells) == 1 else None for column in _FIGURES]
    values = [figure and figure.value for figure in figures]
    began = entry.result.began[0]
    when = Cell(began, text=began[5:16].replace("T", " "))
    return [Cell(entry.name, text=entry.shown), when, words, *values, outcomes, shown_path(entry.result.path)]
