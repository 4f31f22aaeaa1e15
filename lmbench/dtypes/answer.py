"""Recorded dtypes as an answer: of one run its tensors, modules and operators, of several runs what differs."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from lmbench.dtypes.notes import TAKES, DtypeNotes, NotedCall, NotedModule, in_words, read_notes, tally
from lmbench.errors import UsageError
from lmbench.records.load import is_run_folder, load_run
from lmbench.records.measured import DtypeRecord
from lmbench.records.run import RunRecord
from lmbench.reference import PublishedDtype, load_rows
from lmbench.report.answer import Answer, Column, Line, Table, Value
from lmbench.report.units import COUNT

#: The published model, and whose output a published tensor is.
_PUBLISHED_MODEL = "lmbench.model.toy.Toy"
_PUBLISHED_OUTPUTS = {"fc1_output": "fc1", "relu_output": "relu", "layernorm_output": "ln", "fc2_output": "fc2"}
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")
#: How many modules a line names.
_MOST_NAMED = 5
_DEVICES = {"cuda": "CUDA", "cpu": "a CPU"}


class DtypeRun(NamedTuple):
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
        names = {path: name for name, path in _PUBLISHED_OUTPUTS.items() if self.published}
        modules = [module for module in self.notes.modules if module.path in names]
        rows += [(names[module.path], returned(module), module.reason) for module in modules]
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
    record = run.dtypes or DtypeRecord(reason="record them with `lmbench fit ... --dtypes.record true`")
    if record.notes_file is None:
        raise UsageError(f"{source} has no dtypes: {record.reason}")
    rows = load_rows("precision_dtypes.csv", PublishedDtype) if run.model.name == _PUBLISHED_MODEL else ()
    published = {row.tensor: row.dtype for row in rows if row.autocast_dtype == record.autocast_dtype}
    return DtypeRun(path, run, record, read_notes(path), published)


def dtypes_answer(runs: Sequence[DtypeRun]) -> Answer:
    """The tables of one run, or several runs side by side."""
    first, notes = runs[0], list[Line]()
    record, tables = first.record, [_side_by_side(runs)]
    headline = [Line("model", ", ".join(dict.fromkeys(str(each.run.model.name) for each in runs)))]
    for run in runs:
        rows = [row for row in run.tensor_rows() if row[2]]
        differing = ", ".join(name for name, dtypes, published, _ in rows if dtypes != published)
        text = f"differs in {differing}" if differing else f"agrees in all {len(rows)}"
        if differing and run.notes.device_type != "cuda":
            text += "; the published runs had CUDA's autocast lists"
        notes += [Line("published", text)] if rows else []
        if len(runs) > 1:
            notes.append(Line("reasons", f"lmbench dtypes {run.path}", is_whole=True))
    if len(runs) == 1:
        autocast = f"autocast to {record.autocast_dtype}" if record.autocast_dtype else "no autocast"
        headline.append(Line("precision", f"{first.title}, {autocast}, torch {first.notes.torch}"))
        if record.was_compiled:
            text = "noted in a step without compiled code; what a fused kernel keeps to itself may be wider"
            headline.append(Line("compiled", text))
        if unused := record.unused_modules:
            notes.append(Line("never ran", f"{len(unused)} modules: {', '.join(unused[:_MOST_NAMED])}"))
        notes.append(Line("notes", str(first.path / str(record.notes_file)), is_whole=True))
        tables = [table for table in _tables(first) if table.rows]
    figures = [
        {
            "path": str(run.path), "device_type": run.notes.device_type, **msgspec.to_builtins(run.record),
            "published": run.published,
        }
        for run in runs
    ]  # fmt: skip
    return Answer(headline, tables, list(dict.fromkeys(notes)), figures={"runs": figures})


def _table(name: str, titles: str, rows: Iterable[Sequence[Value]], caption: str) -> Table:
    """A table of words, all of which may fold, and of the number `n`."""
    looks = {
        "n": Column("n", COUNT, "count"), "class": Column("class", narrowing="shorten"),
        "gradients": Column("gradients", narrowing="fold", is_extra=True),
    }  # fmt: skip
    columns = [looks.get(title, Column(title, narrowing="fold")) for title in titles.split()]
    return Table(name, name.capitalize(), columns, list(rows), caption)


def _tables(run: DtypeRun) -> list[Table]:
    """Tensors, modules and operators of a run."""
    calls: Counter[tuple[str, str, str, str]] = Counter()
    for module in run.notes.modules:
        for each in module.operators:
            calls[each.name, in_words(each.inputs), each.output, each.reason] += each.count
    # What autocast decides comes first, then what the code does, then what takes what it gets.
    ordered = sorted(calls, key=lambda call: (call[3].startswith(TAKES), not call[3].startswith("autocast")))
    tensors = [row if run.published else (*row[:2], row[3]) for row in run.tensor_rows()]
    modules = [
        (
            path or "(the step)", count, module.class_name, tally(module.parameters) if module.parameters else "",
            in_words(call.inputs), in_words(call.outputs), in_words(call.gradients), module.reason,
        )
        for path, count, module in run.module_rows()
        for call in module.calls or [NotedCall(0, [], [])]
    ]  # fmt: skip
    operators = [(name, calls[name, given, gives, why], given, gives, why) for name, given, gives, why in ordered]
    titles = "tensors dtype published why" if run.published else "tensors dtype why"
    alike = "n modules are alike; each call with dtypes of its own has a row"
    return [
        _table("tensors", titles, tensors, "by dtype, with how many have it"),
        _table("modules", "module n class weights gets returns gradients why", modules, alike),
        _table("operators", "operator n given gives why", operators, "calls in the forward pass, without views"),
    ]


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
