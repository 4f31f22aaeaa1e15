"""Recorded dtypes: what a recording leaves beside run.json, why a tensor has its dtype, and both as an answer.

`dtypes.json` has every module, its calls and its operators. The reasons are autocast's lists, the precision, or the
code. The answer has tensors, modules and operators.
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
from lmbench.records.load import load_run
from lmbench.records.measured import DtypeRecord
from lmbench.records.vocabulary import collapsed
from lmbench.report.answer import Answer, Column, Line, Table, Value
from lmbench.report.units import COUNT

DTYPES_FILE = "dtypes.json"
_LOWER, _FLOAT32, _WIDEST = (
    f"autocast's {name}" for name in ("lower-precision list", "float32 list", "list for the widest dtype of several")
)
_NAMES = {
    ("cuda", _LOWER): """conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution
        prelu addmm addmv addr matmul einsum mm mv linalg_vecdot linear addbmm baddbmm bmm chain_matmul multi_dot lstm
        gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell scaled_dot_product_attention
        multi_head_attention_forward""",
    ("cuda", _FLOAT32): """acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow rpow
        softplus layer_norm rms_norm group_norm norm cosine_similarity poisson_nll_loss cosine_embedding_loss nll_loss
        cross_entropy hinge_embedding_loss kl_div l1_loss smooth_l1_loss huber_loss mse_loss margin_ranking_loss
        multilabel_margin_loss soft_margin_loss triplet_margin_loss multi_margin_loss binary_cross_entropy_with_logits
        dist pdist cdist renorm logsumexp interpolate upsample prod softmax log_softmax cumprod cumsum vector_norm
        matrix_norm sum""",
    ("cuda", _WIDEST): "addcdiv addcmul atan2 bilinear cross dot vdot grid_sample index_put tensordot scatter_add",
    ("cpu", _LOWER): """conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d prelu addmm
        matmul einsum mm linalg_vecdot linear addbmm baddbmm bmm lstm gru scaled_dot_product_attention
        multi_head_attention_forward""",
    ("cpu", _FLOAT32): """avg_pool3d binary_cross_entropy binary_cross_entropy_with_logits cdist cholesky
        cosine_embedding_loss cross_entropy ctc_loss grid_sample hinge_embedding_loss huber_loss inverse kl_div l1_loss
        margin_ranking_loss max_pool3d mse_loss multi_margin_loss multilabel_margin_loss nanquantile nll_loss pinverse
        poisson_nll_loss polar prod quantile smooth_l1_loss soft_margin_loss stft trace triplet_margin_loss
        view_as_complex""",
    ("cpu", _WIDEST): "cat index_copy stack",
}
#: Autocast's lists by device and operator, of PyTorch 2.11: ATen/autocast_mode.h for CUDA, autocast_mode.cpp for a CPU.
#: Functions that Python sees in one piece and that consist of listed operators (`cross_entropy`, `lstm`) are in them.
LISTS = {(device, name): words for (device, words), names in _NAMES.items() for name in names.split()}
#: What code casts with.
CASTS = frozenset(["to", "type", "type_as", "float", "double", "half", "bfloat16"])
#: How many operators a module's reason names.
_NAMED = 3
NEVER_RAN = "never ran"
TAKES = "takes what it gets"


class NotedOperator(Struct):
    """Calls of an operator that are alike: dtypes of the tensors that the code gave it, of its result, and why."""

    name: str
    count: int
    inputs: list[str]
    output: str
    reason: str


class NotedCall(Struct):
    """Calls of a module that are alike: dtypes of the tensors that it got and returned."""

    inputs: list[str]
    outputs: list[str]


class NotedModule(Struct):
    """A module by its path: its parameters, how it was called, and the operators that its own code called.

    The path of the step's own code, which runs in no module, is empty.
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
    """Read the notes of a result folder.

    Raises:
        UsageError: there are none, or they cannot be read.
    """
    try:
        return read_packed(folder / DTYPES_FILE, DtypeNotes)
    except DamagedRecord as error:
        raise UsageError(
            f"{folder / DTYPES_FILE} is damaged: {error}; record it again with --dtypes.record true"
        ) from None


def in_words(dtypes: Iterable[str]) -> str:
    """Dtypes in their order, neighbours that are alike together: `float32 x 3, int64`."""
    runs = [(dtype, len(list(same))) for dtype, same in groupby(dtypes)]
    return ", ".join(dtype if count == 1 else f"{dtype} x {count}" for dtype, count in runs)


def tally(dtypes: dict[str, int]) -> str:
    """Dtypes with how many tensors have each; one dtype alone needs no number."""
    if len(dtypes) == 1:
        return next(iter(dtypes))
    return ", ".join(f"{dtype} ({count})" for dtype, count in dtypes.items()) or "none"


def is_floating(dtype: str) -> bool:
    return dtype.startswith(("float", "bfloat", "complex"))


def operator_reason(
    name: str, inputs: Sequence[str], output: str, device_type: str, under_autocast: bool, uses_autocast: bool
) -> str:
    """Why an operator returned `output`.

    Args:
        name: the operator's, `linear`.
        inputs: dtypes of the tensors that the code gave it.
        output: the dtype that it returned.
        device_type: whose lists autocast used.
        under_autocast: whether autocast was on for this call.
        uses_autocast: whether it was on for any call of the step.
    """
    if name in CASTS:
        return f"the code casts to {output}"
    if all(dtype.startswith("float8") for dtype in inputs):
        return f"multiplies in fp8, gives {output}"
    listed = LISTS.get((device_type, name))
    if listed is not None and uses_autocast:
        return listed if under_autocast else "autocast was off for it: takes what it gets"
    return f"takes a mixture, gives {output}" if len(set(filter(is_floating, inputs))) > 1 else TAKES


def module_reason(operators: Sequence[NotedOperator], was_called: bool, has_gradients: bool, has_children: bool) -> str:
    """Why a module returns what it returns: what decides it in the operators that it called itself."""
    if not was_called:
        return "not called, but its parameters have gradients: another module uses them" if has_gradients else NEVER_RAN
    if not operators:
        return "what its modules return" if has_children else "calls no operator"
    names: dict[str, dict[str, None]] = defaultdict(dict)
    # What takes what it gets decides nothing.
    for operator in [each for each in operators if each.reason != TAKES] or operators:
        names[operator.reason][operator.name] = None
    return "; ".join(f"{', '.join(list(alike)[:_NAMED])}: {reason}" for reason, alike in names.items())


def tensor_reasons(
    precision: str, mode: str, loss_scale: float | None, dtypes: Mapping[str, Mapping[str, int]]
) -> dict[str, str]:
    """Why parameters, buffers, batch, gradients and optimizer state have their dtypes.

    Args:
        precision: Lightning's name, such as bf16-mixed.
        mode: of the run.
        loss_scale: what the loss was multiplied by, None without a scaler.
        dtypes: by kind of tensor.
    """
    # A precision that a plugin made up is not known to cast.
    meaning, parameters = find_precision(precision) or PRECISIONS["32-true"], dtypes["parameters"]
    reasons = {
        "parameters": f"precision {precision} leaves weights as they are made",
        "buffers": "as the module made them",
        "batch": "as the data gives it",
        "gradients": "a gradient has its parameter's dtype",
        "optimizer_state": "made like the parameters",
    }
    if meaning.is_mixed:
        reasons["parameters"] += "; autocast casts copies of them"
        if meaning.peak == "fp8":
            reasons["parameters"] += ", torchao those of its layers to fp8"
    elif meaning.weights != "float32":
        # Lightning's plugin casts modules and batches themselves.
        reasons |= dict.fromkeys(("parameters", "buffers", "batch"), f"precision {precision} casts what is floating")
    if loss_scale is not None:
        reasons["gradients"] += f"; multiplied by the loss scale {loss_scale:g} until the optimizer's step"
    usual: dict[str, Iterable[str]] = dict.fromkeys(("gradients", "optimizer_state"), parameters)
    for kind, known in {"parameters": [meaning.weights], **usual}.items():
        if others := ", ".join(dtype for dtype in dtypes[kind] if dtype not in known):
            reasons[kind] += f"; {others}: the code's own choice"
    return {kind: reason if dtypes[kind] else f"there are none in mode {mode}" for kind, reason in reasons.items()}


#: How many modules a line names.
_MOST_NAMED = 5


def dtypes_answer(source: str) -> Answer:
    """The dtypes recorded in a result folder: tensors, modules and operators.

    Raises:
        UsageError: it is no result, has no dtypes, or they cannot be read.
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
        text = "noted in a step without compiled code; what a fused kernel keeps to itself may be wider"
        headline.append(Line("compiled", text))
    lines = [Line("notes", str(path / record.notes_file), is_whole=True)]
    if unused := record.unused_modules:
        lines.insert(0, Line("never ran", f"{len(unused)} modules: {', '.join(unused[:_MOST_NAMED])}"))
    tensors = [(each.name.replace("_", " "), tally(each.dtypes), each.reason) for each in record.tensors]
    tables = [
        _table("tensors", "tensors dtype why", tensors, "by dtype, with how many have it"),
        *_module_tables(notes.modules),
    ]
    figures = {"path": source, "device_type": notes.device_type, **msgspec.to_builtins(record)}
    return Answer(headline, [table for table in tables if table.rows], lines, figures={"runs": [figures]})


def _table(name: str, titles: str, rows: Iterable[Sequence[Value]], caption: str) -> Table:
    """A table of words, and of the number `n`."""
    looks = {"n": Column("n", COUNT, "count"), "class": Column("class", is_shortened=True)}
    columns = [looks.get(title, Column(title)) for title in titles.split()]
    return Table(name, name.capitalize(), columns, list(rows), caption)


def _module_tables(modules: Sequence[NotedModule]) -> list[Table]:
    """Modules in the order of the model, those that differ in a number in their path alone in one row
    (`blocks.*.norm`), with how many they are; and their operators."""
    calls: Counter[tuple[str, str, str, str]] = Counter()
    groups: dict[bytes, list[NotedModule]] = defaultdict(list)
    for module in modules:
        groups[msgspec.json.encode(replace(module, path=collapsed(module.path)))].append(module)
        for each in module.operators:
            calls[each.name, in_words(each.inputs), each.output, each.reason] += each.count
    # What autocast decides comes first, then what the code does, then what takes what it gets.
    ordered = sorted(calls, key=lambda call: (call[3].startswith(TAKES), not call[3].startswith("autocast")))
    rows = [
        (
            (collapsed(first.path) if more else first.path) or "(the step)", 1 + len(more), first.class_name,
            tally(first.parameters) if first.parameters else "", in_words(call.inputs), in_words(call.outputs),
            first.reason,
        )
        for first, *more in groups.values()
        for call in first.calls or [NotedCall([], [])]
    ]  # fmt: skip
    operators = [(name, calls[name, given, gives, why], given, gives, why) for name, given, gives, why in ordered]
    alike = "n modules are alike; each call with dtypes of its own has a row"
    return [
        _table("modules", "module n class weights gets returns why", rows, alike),
        _table("operators", "operator n given gives why", operators, "calls in the forward pass, without views"),
    ]
