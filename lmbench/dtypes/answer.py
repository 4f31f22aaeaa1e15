"""Recorded dtypes as an answer: of one run its tensors, modules and operators, of several runs what differs."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from lmbench.dtypes.notes import TAKES, DtypeNotes, NotedCall, NotedModule, in_words, read_notes, tally
from lmbench.errors import UsageError
from lmbench.records.instruments import DtypeRecord
from lmbench.records.load import is_run_folder, load_run
from lmbench.records.run import RunRecord
from lmbench.reference.published import load_dtypes
from lmbench.report.answer import Answer, Column, Line, Table, Value
from lmbench.report.units import COUNT

#: The published model, and whose output a published tensor is.
_PUBLISHED_MODEL = "lmbench.model.toy.Toy"
_PUBLISHED_OUTPUTS = {"fc1_output": "fc1", "relu_output": "relu", "layernorm_output": "ln", "fc2_output": "fc2"}
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")
_DEVICES = {"cuda": "CUDA", "cpu": "a CPU"}


@dataclass(frozen=True)
class DtypeRun:
    """One run's dtypes; `path` is its folder, `published` the dtype that was published of each tensor of the same model
    under the same autocast."""

    path: Path
    run: RunRecord
    record: DtypeRecord
    notes: DtypeNotes
    published: dict[str, str]

    @property
    def title(self) -> str:
        """Precision and device."""
        return f"{self.run.precision} on {_DEVICES.get(self.notes.device_type, self.notes.device_type)}"

    def tensor_rows(self) -> list[tuple[str, str, str, str]]:
        """Kind of tensor, dtypes, published dtype, reason; of the published model its modules' outputs too."""
        rows = [(each.name, tally(each.dtypes), each.reason) for each in self.record.tensors]
        modules = {module.path: module for module in self.notes.modules if self.published}
        rows += [
            (name, returned(modules[path]), modules[path].reason)
            for name, path in _PUBLISHED_OUTPUTS.items()
            if path in modules
        ]
        return [(name.replace("_", " "), dtypes, self.published.get(name, ""), why) for name, dtypes, why in rows]

    def module_rows(self) -> list[tuple[str, int, NotedModule]]:
        """Modules in the order of the model, those that differ in a number in their path alone in one row
        (`blocks.*.norm`), with how many they are."""
        groups: dict[bytes, list[NotedModule]] = defaultdict(list)
        for module in self.notes.modules:
            groups[msgspec.json.encode(replace(module, path=_INDEX.sub("*", module.path)))].append(module)
        return [
            (_INDEX.sub("*", first.path) if more else first.path, 1 + len(more), first)
            for first, *more in groups.values()
        ]


def returned(module: NotedModule) -> str:
    """What the calls of a module returned."""
    return " | ".join(in_words(call.outputs) for call in module.calls)


def examine(source: str) -> DtypeRun:
    """Read the dtypes recorded in a result folder.

    Raises:
        UsageError: it is no result, has no dtypes, or they cannot be read.
    """
    path = Path(source)
    if not is_run_folder(path):
        raise UsageError(f"{source!r} is no result; give the folder of a run recorded with --dtypes.record true")
    run = load_run(path, with_steps=False).record
    record = run.dtypes
    if record is None or record.notes_file is None:
        reason = (record and record.reason) or "record them with `lmbench fit ... --dtypes.record true`"
        raise UsageError(f"{source} has no dtypes: {reason}")
    rows = load_dtypes() if run.model.name == _PUBLISHED_MODEL else ()
    published = {row.tensor: row.dtype for row in rows if row.autocast_dtype == record.autocast_dtype}
    return DtypeRun(path, run, record, read_notes(path), published)


def dtypes_answer(runs: Sequence[DtypeRun]) -> Answer:
    """The tables of one run, or several runs side by side."""
    first, notes = runs[0], list[Line]()
    headline = [Line("model", ", ".join(dict.fromkeys(str(each.run.model.name) for each in runs)))]
    for run in runs:
        rows = [row for row in run.tensor_rows() if row[2]]
        differing = [name for name, dtypes, published, _ in rows if dtypes != published]
        where = "" if run.notes.device_type == "cuda" else "; the published runs had CUDA's autocast lists"
        text = f"differs in {', '.join(differing)}{where}" if differing else f"agrees in all {len(rows)}"
        notes += [Line("published", text)] if rows else []
    if len(runs) > 1:
        tables = [_side_by_side(runs)]
        notes += [Line("reasons", f"lmbench dtypes {each.path}", is_whole=True) for each in runs]
    else:
        lower, unused = first.record.autocast_dtype, first.record.unused_modules
        autocast = f"autocast to {lower}" if lower else "no autocast"
        headline.append(Line("precision", f"{first.title}, {autocast}, torch {first.notes.torch}"))
        if first.record.was_compiled:
            text = "noted in a step without compiled code; what a fused kernel keeps to itself may be wider"
            headline.append(Line("compiled", text))
        tables = [table for table in _tables(first) if table.rows]
        if unused:
            more = f" and {len(unused) - 5} more" if len(unused) > 5 else ""
            notes.insert(0, Line("never ran", f"{', '.join(unused[:5])}{more}"))
        notes.append(Line("notes", str(first.path / str(first.record.notes_file)), is_whole=True))
    figures = [
        {
            "run_id": each.run.run_id, "path": str(each.path), "model": each.run.model.name,
            "precision": each.run.precision, "device_type": each.notes.device_type, "torch": each.notes.torch,
            **msgspec.to_builtins(each.record), "published": each.published,
        }
        for each in runs
    ]  # fmt: skip
    return Answer(headline, tables, list(dict.fromkeys(notes)), figures={"runs": figures})


def _table(name: str, titles: Sequence[str], rows: Iterable[Sequence[Value]], caption: str) -> Table:
    """A table of words, all of which may fold, and of the number `n`."""
    looks: dict[str, dict[str, Any]] = {
        "n": {"unit": COUNT, "name": "count"}, "class": {"narrowing": "shorten"},
        "gradients": {"narrowing": "fold", "is_extra": True},
    }  # fmt: skip
    columns = [Column(title, **looks.get(title, {"narrowing": "fold"})) for title in titles]
    return Table(name, name.capitalize(), columns, list(rows), caption)


def _tables(run: DtypeRun) -> list[Table]:
    """Tensors, modules and operators of a run."""
    calls: Counter[tuple[str, str, str, str]] = Counter()
    for module in run.notes.modules:
        for each in module.operators:
            calls[each.name, in_words(each.inputs), each.output, each.reason] += each.count
    # What autocast decides comes first, then what the code does, then what takes what it gets.
    ordered = sorted(calls, key=lambda call: (call[3].startswith(TAKES), not call[3].startswith("autocast")))
    modules = [
        (
            path or "(the step)", count, module.class_name, tally(module.parameters) if module.parameters else "",
            in_words(call.inputs), in_words(call.outputs), in_words(call.gradients), module.reason,
        )
        for path, count, module in run.module_rows()
        for call in module.calls or [NotedCall(0, [], [])]
    ]  # fmt: skip
    return [
        _table(
            "tensors", ("tensors", "dtype", *(["published"] if run.published else []), "why"),
            [row if run.published else (*row[:2], row[3]) for row in run.tensor_rows()],
            "by dtype, with how many have it",
        ),
        _table(
            "modules", ("module", "n", "class", "weights", "gets", "returns", "gradients", "why"), modules,
            "n modules are alike; each call with dtypes of its own has a row",
        ),
        _table(
            "operators", ("operator", "n", "given", "gives", "why"),
            [(call[0], calls[call], *call[1:]) for call in ordered], "calls in the forward pass, without views",
        ),
    ]  # fmt: skip


def _side_by_side(runs: Sequence[DtypeRun]) -> Table:
    """Tensors, and what modules return, in several runs."""
    cells: list[dict[str, str]] = []
    for run in runs:
        cells.append({
            name: f"{dtypes} (published: {known})" if known not in ("", dtypes) else dtypes
            for name, dtypes, known, _ in run.tensor_rows()
        })  # fmt: skip
        if not run.published:
            # Of the published model they are among the tensors.
            cells[-1] |= {f"{path} returns": returned(module) for path, _, module in run.module_rows() if module.calls}
    titles = [run.title for run in runs]
    if len(set(titles)) < len(titles):
        titles = [f"{run.run.run_id}: {run.title}" for run in runs]
    names = dict.fromkeys(name for of_run in cells for name in of_run)
    rows = [(name, *(of_run.get(name, "") for of_run in cells)) for name in names]
    columns = [Column("of", narrowing="fold"), *map(Column, titles)]
    return Table("dtypes", "Dtypes side by side", columns, rows, "tensors, and what modules return")
