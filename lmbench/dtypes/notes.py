"""What a recording of dtypes leaves beside run.json as dtypes.json: every module, its calls and its operators; and why
a tensor has its dtype, in words: autocast's lists, the precision, or the code."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct, field

from lmbench.errors import UsageError
from lmbench.precision import find_precision
from lmbench.records.codec import indented_json

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
    """Calls of a module that are alike: dtypes of the tensors it got, returned, and whose gradients came back."""

    count: int
    inputs: list[str]
    outputs: list[str]
    gradients: list[str] = field(default_factory=list)


class NotedModule(Struct):
    """A module by its path: its parameters and buffers, how it was called, and the operators that its own code called.

    The path of the step's own code, which runs in no module, is empty.
    """

    path: str
    class_name: str
    reason: str
    parameters: dict[str, int] = field(default_factory=dict)
    buffers: dict[str, int] = field(default_factory=dict)
    calls: list[NotedCall] = field(default_factory=list)
    operators: list[NotedOperator] = field(default_factory=list)


class DtypeNotes(Struct):
    """The content of dtypes.json."""

    schema_version: Literal[2] = 2
    torch: str = ""
    device_type: str = ""
    modules: list[NotedModule] = field(default_factory=list)


def write_notes(notes: DtypeNotes, folder: Path) -> None:
    """Write the notes into a result folder. Raises OSError."""
    (folder / DTYPES_FILE).write_bytes(indented_json(notes).encode())


def read_notes(folder: Path) -> DtypeNotes:
    """Read the notes of a result folder.

    Raises:
        UsageError: there are none, or they cannot be read.
    """
    path = folder / DTYPES_FILE
    again = "record it again with --dtypes.record true"
    try:
        return msgspec.json.decode(path.read_bytes(), type=DtypeNotes)
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror}; {again}") from None
    except msgspec.DecodeError as error:
        raise UsageError(f"{path} is damaged: {error}; {again}") from None


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
    listed = LISTS.get((device_type, name)) if uses_autocast else None
    if listed is not None:
        return listed if under_autocast else "autocast was off for it: takes what it gets"
    floating = {dtype for dtype in inputs if is_floating(dtype)}
    return f"takes a mixture, gives {output}" if len(floating) > 1 else TAKES


def module_reason(operators: Sequence[NotedOperator], was_called: bool, has_gradients: bool, has_children: bool) -> str:
    """Why a module returns what it returns: what decides it in the operators that it called itself."""
    if not was_called:
        return "not called, but its parameters have gradients: another module uses them" if has_gradients else NEVER_RAN
    if not operators:
        return "what its modules return" if has_children else "calls no operator"
    names: dict[str, dict[str, None]] = defaultdict(dict)
    for operator in operators:
        names[operator.reason][operator.name] = None
    if len(names) > 1:
        # What takes what it gets decides nothing.
        names.pop(TAKES, None)
    return "; ".join(
        f"{', '.join(list(alike)[:_NAMED])}{' and others' if len(alike) > _NAMED else ''}: {reason}"
        for reason, alike in names.items()
    )


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
    meaning, parameters = find_precision(precision), dtypes["parameters"]
    weights, is_mixed = (meaning.weights, meaning.is_mixed) if meaning is not None else (None, False)
    # Lightning's plugin casts modules and batches themselves.
    casts = weights not in (None, "float32") and not is_mixed
    copies = "; autocast casts copies of them" if is_mixed else ""
    is_alike = set(dtypes["gradients"]) <= set(parameters)
    scaled = "" if loss_scale is None else f"; multiplied by the loss scale {loss_scale:g} until the optimizer's step"
    has_floating = any(map(is_floating, dtypes["batch"]))
    given = f"precision {precision} casts what is floating in it" if casts else "as the data gives it"
    reasons = {
        "parameters": f"precision {precision} makes floating weights {weights}"
        if casts
        else f"precision {precision} leaves weights as they are made{copies}",
        "buffers": f"precision {precision} casts floating ones" if casts else "as the module made them",
        "batch": given if has_floating else "no floating tensor in it",
        "gradients": ("a gradient has its parameter's dtype" if is_alike else "as autograd left them") + scaled,
        "optimizer_state": "made like the parameters",
    }
    if foreign := [dtype for dtype in parameters if weights and dtype != weights]:
        reasons["parameters"] += f"; {', '.join(foreign)}: the module's own doing"
    if foreign := [dtype for dtype in dtypes["optimizer_state"] if dtype not in parameters]:
        reasons["optimizer_state"] += f"; {', '.join(foreign)}: the optimizer's own choice"
    missing = {
        "parameters": "the module has none",
        "gradients": f"mode {mode} computes none" if mode in ("inference", "forward") else "there are none",
        "optimizer_state": "no optimizer's step" if mode != "train_step" else "the optimizer holds none",
    }
    return {kind: reason if dtypes[kind] else missing.get(kind, reason) for kind, reason in reasons.items()}
