"""Recorded dtypes as an answer: of one run its tensors, modules and operators, of several runs what differs."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec.structs import replace

from lmbench.dtypes.notes import DtypeNotes, NotedCall, NotedModule, in_words, read_notes, tally
from lmbench.dtypes.reasons import TAKES
from lmbench.errors import UsageError
from lmbench.records.instruments import DtypeRecord
from lmbench.records.load import is_run_folder, load_run
from lmbench.records.run import RunRecord
from lmbench.reference.published import load_dtypes
from lmbench.report.answer import Answer, Column, Line, Table
from lmbench.report.units import COUNT

#: The published model, and whose output a published tensor is.
_PUBLISHED_MODEL = "lmbench.model.toy.Toy"
_PUBLISHED_OUTPUTS = {"fc1_output": "fc1", "relu_output": "relu", "layernorm_output": "ln", "fc2_output": "fc2"}
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class DtypeRun:
    """One run's dtypes; `path` is its folder, `published` what was published of the same model's tensors."""

    path: Path
    run: RunRecord
    record: DtypeRecord
    notes: DtypeNotes
    published: dict[str, str]

    @property
    def title(self) -> str:
        """Precision and device."""
        device = self.notes.device_type
        return f"{self.run.precision} on {({'cuda': 'CUDA', 'cpu': 'a CPU'}).get(device, device)}"

    def tensor_rows(self) -> list[tuple[str, str, str, str]]:
        """Kind of tensor, dtypes, published dtypes, reason; of the published model its modules' outputs before its
        logits."""
        rows = [
            (each.name.replace("_", " "), tally(each.dtypes), self.published.get(each.name, ""), each.reason)
            for each in self.record.tensors
        ]
        modules = {module.path: module for module in self.notes.modules}
        outputs = [
            (name.replace("_", " "), returned(modules[path]), self.published.get(name, ""), modules[path].reason)
            for name, path in _PUBLISHED_OUTPUTS.items()
            if self.published and path in modules
        ]
        place = next((index for index, row in enumerate(rows) if row[0] == "logits"), len(rows))
        return rows[:place] + outputs + rows[place:]

    def module_rows(self) -> list[tuple[str, int, NotedModule]]:
        """Modules in the order of the model, those that differ in a number in their path alone in one row
        (`blocks.*.norm`), with how many they are."""
        groups: dict[bytes, list[NotedModule]] = {}
        for module in self.notes.modules:
            key = msgspec.json.encode(replace(module, path=_INDEX.sub("*", module.path)))
            groups.setdefault(key, []).append(module)
        return [
            (_INDEX.sub("*", alike[0].path) if len(alike) > 1 else alike[0].path, len(alike), alike[0])
            for alike in groups.values()
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
    if record is None:
        raise UsageError(f"{source} has no dtypes; record them with `lmbench fit ... --dtypes.record true`")
    if record.notes_file is None:
        raise UsageError(f"{source} has no dtypes: {record.reason or 'they were not written'}")
    return DtypeRun(path, run, record, read_notes(path), _published(run, record))


def _published(run: RunRecord, record: DtypeRecord) -> dict[str, str]:
    """Of the published model, the dtypes that were published of it under the same autocast, by tensor; where sources
    differ, each dtype has its sources."""
    sources: dict[str, dict[str, list[str]]] = {}
    for row in load_dtypes() if run.model.name == _PUBLISHED_MODEL else ():
        if row.autocast_dtype == record.autocast_dtype:
            sources.setdefault(row.tensor, {}).setdefault(row.dtype, []).append(row.source)
    return {
        tensor: ", ".join(f"{dtype} ({', '.join(by[dtype])})" if len(by) > 1 else dtype for dtype in by)
        for tensor, by in sources.items()
    }


def dtypes_answer(runs: Sequence[DtypeRun]) -> Answer:
    """The tables of one run, or several runs side by side."""
    first = runs[0]
    headline = [Line("model", ", ".join(dict.fromkeys(str(each.run.model.name) for each in runs)))]
    notes = [line for each in runs for line in _published_lines(each)]
    if len(runs) > 1:
        tables = [_side_by_side(runs)]
        notes += [Line("reasons", f"lmbench dtypes {each.path}", is_whole=True) for each in runs]
    else:
        lower = first.record.autocast_dtype
        autocast = f"autocast to {lower}" if lower else "no autocast"
        headline.append(Line("precision", f"{first.title}, {autocast}, torch {first.notes.torch}"))
        if first.record.was_compiled:
            text = (
                "noted in a step without compiled code; its casts are in the graph too, but what a fused kernel keeps "
                "to itself may be wider"
            )
            headline.append(Line("compiled", text))
        tables = [table for table in (_tensors(first), _modules(first), _operators(first)) if table.rows]
        if unused := first.record.unused_modules:
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


def _published_lines(run: DtypeRun) -> list[Line]:
    """Where a run of the published model is not as published."""
    rows = [(name, dtypes == published) for name, dtypes, published, _ in run.tensor_rows() if published]
    differing = [name for name, is_same in rows if not is_same]
    where = "" if run.notes.device_type == "cuda" else "; the published runs had CUDA's autocast lists"
    text = f"differs in {', '.join(differing)}{where}" if differing else f"agrees in all {len(rows)}"
    return [Line("published", text)] if rows else []


def _tensors(run: DtypeRun) -> Table:
    has_published = bool(run.published)
    columns = [
        Column("tensors"),
        Column("dtype"),
        *([Column("published")] if has_published else []),
        Column("why", narrowing="fold"),
    ]
    rows = [(name, dtypes, *([known] if has_published else []), why) for name, dtypes, known, why in run.tensor_rows()]
    return Table("tensors", "Tensors", columns, rows, "by dtype, with how many have it")


def _modules(run: DtypeRun) -> Table:
    columns = [
        Column("module", narrowing="fold"),
        Column("n", COUNT, "count"),
        Column("class", narrowing="shorten"),
        Column("weights"),
        Column("gets", narrowing="fold"),
        Column("returns", narrowing="fold"),
        Column("gradients", narrowing="fold", is_extra=True),
        Column("why", narrowing="fold"),
    ]
    rows = [
        (
            path or "(the step)", count, module.class_name, tally(module.parameters) if module.parameters else "",
            in_words(call.inputs), in_words(call.outputs), in_words(call.gradients), module.reason,
        )
        for path, count, module in run.module_rows()
        for call in module.calls or [NotedCall(0, [], [])]
    ]  # fmt: skip
    caption = "n modules are alike; each call with dtypes of its own has a row"
    return Table("modules", "Modules", columns, rows, caption)


def _operators(run: DtypeRun) -> Table:
    columns = [
        Column("operator", narrowing="fold"),
        Column("n", COUNT, "count"),
        Column("given", narrowing="fold"),
        Column("gives"),
        Column("why", narrowing="fold"),
    ]
    calls: Counter[tuple[str, str, str, str]] = Counter()
    for module in run.notes.modules:
        for each in module.operators:
            calls[each.name, in_words(each.inputs), each.output, each.reason] += each.count
    # What autocast decides comes first, then what the code does, then what takes what it gets.
    ordered = sorted(
        calls.items(), key=lambda call: (call[0][3].startswith(TAKES), not call[0][3].startswith("autocast"))
    )
    rows = [(name, count, inputs, output, reason) for (name, inputs, output, reason), count in ordered]
    return Table("operators", "Operators", columns, rows, "calls in the forward pass, without views")


def _side_by_side(runs: Sequence[DtypeRun]) -> Table:
    """Tensors, and what modules return, in several runs."""
    cells: list[dict[str, str]] = []
    for run in runs:
        of_run = {
            name: f"{dtypes} (published: {known})" if known not in ("", dtypes) else dtypes
            for name, dtypes, known, _ in run.tensor_rows()
        }
        if not run.published:
            # Of the published model they are among the tensors.
            of_run |= {f"{path} returns": returned(module) for path, _, module in run.module_rows() if module.calls}
        cells.append(of_run)
    titles = [run.title for run in runs]
    if len(set(titles)) < len(titles):
        titles = [f"{run.run.run_id}: {run.title}" for run in runs]
    names = dict.fromkeys(name for of_run in cells for name in of_run)
    columns = [Column("of", narrowing="fold"), *map(Column, titles)]
    rows = [(name, *(of_run.get(name, "") for of_run in cells)) for name in names]
    return Table("dtypes", "Dtypes side by side", columns, rows, "tensors, and what modules return")
