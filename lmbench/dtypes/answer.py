"""Recorded dtypes: the file `dtypes.json` of a result, the reasons for dtypes, and the answer of `lmbench dtypes`.

`dtypes.json` has every module with its calls and operators. A reason is one of autocast's lists, the precision, or the
code. The answer has tables of tensors, modules and operators.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct, field
from msgspec.structs import replace

from lmbench.errors import UsageError
from lmbench.precision import PRECISIONS, find_precision
from lmbench.records.codec import DamagedRecord, read_packed
from lmbench.records.examined import DtypeRecord
from lmbench.records.load import load_run
from lmbench.records.vocabulary import collapsed
from lmbench.report.answer import Answer, Column, Line, Table, Value
from lmbench.report.units import COUNT

DTYPES_FILE = "dtypes.json"
#: Functions and methods that cast.
CASTS = frozenset(["to", "type", "type_as", "float", "double", "half", "bfloat16"])
#: Largest number of operators that a module's reason names.
_MAX_OPERATORS = 3
NEVER_RAN = "never ran"
FOLLOWS = "follows its inputs"


class NotedOperator(Struct):
    """Equal calls of an operator: the dtypes of its inputs as the code passed them, of its result, and the reason."""

    name: str
    count: int
    inputs: list[str]
    output: str
    reason: str


class NotedCall(Struct):
    """Equal calls of a module: the dtypes of the tensors that it got and of those that it returned."""

    inputs: list[str]
    outputs: list[str]


class NotedModule(Struct):
    """A module with its parameters, its calls, and the operators that its own code called.

    `path` is empty for the code of the step itself, outside of all modules. `parameters` counts them by dtype.
    """

    path: str
    class_name: str
    reason: str
    parameters: dict[str, int] = field(default_factory=dict)
    calls: list[NotedCall] = field(default_factory=list)
    operators: list[NotedOperator] = field(default_factory=list)


class DtypeNotes(Struct):
    """The content of dtypes.json."""

    schema_version: Literal[2] = 2
    torch: str = ""
    device_type: str = ""
    modules: list[NotedModule] = field(default_factory=list)


def read_notes(folder: Path) -> DtypeNotes:
    """Read the `dtypes.json` of a result folder.

    Raises:
        UsageError: the file is missing or damaged.
    """
    try:
        return read_packed(folder / DTYPES_FILE, DtypeNotes)
    except DamagedRecord as error:
        raise UsageError(
            f"{folder / DTYPES_FILE} is damaged: {error}; record it again with --dtypes.record true"
        ) from None


def sequence_text(dtypes: Iterable[str]) -> str:
    """Dtypes in order, with equal neighbours counted: `float32 x 3, int64`."""
    runs = [(dtype, len(list(neighbours))) for dtype, neighbours in groupby(dtypes)]
    return ", ".join(dtype if count == 1 else f"{dtype} x {count}" for dtype, count in runs)


def counts_text(dtypes: dict[str, int]) -> str:
    """Dtypes with their numbers of tensors: `float32 (3), int64 (1)`; a single dtype without its number."""
    if len(dtypes) == 1:
        return next(iter(dtypes))
    return ", ".join(f"{dtype} ({count})" for dtype, count in dtypes.items()) or "none"


def is_floating(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex"))


def operator_reason(name: str, inputs: Sequence[str], output: str, listed: str | None, under_autocast: bool) -> str:
    """The reason why an operator returned its dtype.

    Args:
        name: name of the operator, such as `linear`.
        inputs: dtypes of the tensors that the code passed to it.
        output: dtype that it returned.
        listed: autocast's list of the operator; None where it has none, or autocast was never on in the step.
        under_autocast: whether autocast was on for this call.
    """
    if name in CASTS:
        return f"the code casts to {output}"
    if all(dtype.startswith("float8") for dtype in inputs):
        return f"multiplies in fp8, gives {output}"
    if listed is not None:
        return listed if under_autocast else "autocast was off for it: follows its inputs"
    return f"takes mixed inputs, gives {output}" if len(set(filter(is_floating, inputs))) > 1 else FOLLOWS


def module_reason(operators: Sequence[NotedOperator], was_called: bool, has_gradients: bool, has_children: bool) -> str:
    """The reason for the dtypes that a module returns, from the operators that its own code called."""
    if not was_called:
        return "not called, but its parameters have gradients: another module uses them" if has_gradients else NEVER_RAN
    if not operators:
        return "as its modules return it" if has_children else "calls no operator"
    names: dict[str, dict[str, None]] = defaultdict(dict)
    # An operator that only takes the dtype of its inputs decides nothing.
    for operator in [operator for operator in operators if operator.reason != FOLLOWS] or operators:
        names[operator.reason][operator.name] = None
    return "; ".join(f"{', '.join(list(group)[:_MAX_OPERATORS])}: {reason}" for reason, group in names.items())


def tensor_reasons(
    precision: str, mode: str, loss_scale: float | None, dtypes: Mapping[str, Mapping[str, int]]
) -> dict[str, str]:
    """The reasons for the dtypes of parameters, buffers, batch, gradients and optimizer state.

    Args:
        precision: Lightning's name, such as bf16-mixed.
        mode: mode of the run.
        loss_scale: factor by which the loss was multiplied; None without a scaler.
        dtypes: numbers of tensors by kind of tensor and by dtype.
    """
    # An unknown precision, defined by a plugin, is treated as one that casts nothing.
    meaning, parameters = find_precision(precision) or PRECISIONS["32-true"], dtypes["parameters"]
    reasons = {
        "parameters": f"precision {precision} leaves weights as they were made",
        "buffers": "as the module made them",
        "batch": "as the data gives it",
        "gradients": "a gradient has its parameter's dtype",
        "optimizer_state": "made with the dtypes of the parameters",
    }
    if meaning.is_mixed:
        reasons["parameters"] += "; autocast casts copies of them"
        if meaning.peak == "fp8":
            reasons["parameters"] += ", and torchao casts those of its layers to fp8"
    elif meaning.weights != "float32":
        # Lightning's plugin casts modules and batches themselves.
        reasons |= dict.fromkeys(("parameters", "buffers", "batch"), f"precision {precision} casts floating tensors")
    if loss_scale is not None:
        reasons["gradients"] += f"; multiplied by the loss scale {loss_scale:g} until the optimizer's step"
    expected = dict.fromkeys(("gradients", "optimizer_state"), parameters)
    for kind, explained in {"parameters": [meaning.weights], **expected}.items():
        if others := ", ".join(dtype for dtype in dtypes[kind] if dtype not in explained):
            reasons[kind] += f"; {others}: the code's own choice"
    return {kind: reason if dtypes[kind] else f"there are none in mode {mode}" for kind, reason in reasons.items()}


#: Largest number of modules that a line names.
_MAX_MODULES = 5


def dtypes_answer(source: str) -> Answer:
    """The dtypes recorded in a result folder: tables of tensors, modules and operators.

    Raises:
        UsageError: the folder is not a result, has no dtypes, or they cannot be read.
    """
    path = Path(source)
    run = load_run(path, with_steps=False).record
    record = run.dtypes or DtypeRecord(reason="record them with `lmbench fit ... --dtypes.record true`")
    if record.notes_file is None:
        raise UsageError(f"{source} has no dtypes: {record.reason}")
    notes = read_notes(path)
    autocast = f"autocast to {record.autocast_dtype}" if record.autocast_dtype else "no autocast"
    headline = [
        Line("model", str(run.model.name)),
        Line("precision", f"{run.precision} on {notes.device_type}, {autocast}, torch {notes.torch}"),
    ]
    if record.was_compiled:
        text = "noted in a step without compiled code; values inside a fused kernel may have wider dtypes"
        headline.append(Line("compiled", text))
    lines = [Line("notes", str(path / record.notes_file), is_whole=True)]
    if unused := [module.path for module in notes.modules if module.reason == NEVER_RAN]:
        lines.insert(0, Line("never ran", f"{len(unused)} modules: {', '.join(unused[:_MAX_MODULES])}"))
    tensors = [(kind.name.replace("_", " "), counts_text(kind.dtypes), kind.reason) for kind in record.tensors]
    tables = [
        _table("tensors", "tensors dtype why", tensors, "by dtype, with how many have it"),
        *_module_tables(notes.modules),
    ]
    figures = {"path": source, "device_type": notes.device_type, **msgspec.to_builtins(record)}
    return Answer(headline, [table for table in tables if table.rows], lines, figures={"runs": [figures]})


def _table(name: str, titles: str, rows: Iterable[Sequence[Value]], caption: str) -> Table:
    """A table with a column for each word of `titles`; all are text but the number `n`."""
    special = {"n": Column("n", COUNT, "count"), "class": Column("class", is_shortened=True)}
    columns = [special.get(title, Column(title)) for title in titles.split()]
    return Table(name, name.capitalize(), columns, list(rows), caption)


def _module_tables(modules: Sequence[NotedModule]) -> list[Table]:
    """The tables of modules and of operators.

    Modules are in the order of the model. Modules that differ only in a number of their path share a row
    (`blocks.*.norm`), which has their count.
    """
    calls = Counter[tuple[str, str, str, str]]()
    groups: dict[bytes, list[NotedModule]] = defaultdict(list)
    for module in modules:
        groups[msgspec.json.encode(replace(module, path=collapsed(module.path)))].append(module)
        for operator in module.operators:
            calls[operator.name, sequence_text(operator.inputs), operator.output, operator.reason] += operator.count
    rows = []
    for first, *others in groups.values():
        path = (collapsed(first.path) if others else first.path) or "(the step)"
        weights = counts_text(first.parameters) if first.parameters else ""
        for call in first.calls or [NotedCall([], [])]:
            dtypes = sequence_text(call.inputs), sequence_text(call.outputs)
            rows.append((path, 1 + len(others), first.class_name, weights, *dtypes, first.reason))
    # First the operators that autocast decides, then those that the code decides, last those that follow their inputs.
    ordered = sorted(calls, key=lambda call: (call[3].startswith(FOLLOWS), not call[3].startswith("autocast")))
    operators = [(call[0], calls[call], *call[1:]) for call in ordered]
    caption = "n modules are alike; each call with dtypes of its own has a row"
    return [
        _table("modules", "module n class weights gets returns why", rows, caption),
        _table("operators", "operator n given gives why", operators, "calls in the forward pass, without views"),
    ]
