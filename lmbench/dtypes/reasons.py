"""Why a tensor has its dtype, in words: autocast's lists, the precision, or the code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmbench.dtypes.notes import NotedOperator
from lmbench.precision import find_precision

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
UNSEEN = "TorchScript: no hook sees its calls"
TAKES = "takes what it gets"


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
    reason = f"takes a mixture, gives {output}" if len(floating) > 1 else TAKES
    if under_autocast and floating - {"float32"} and any((device, name) in LISTS for device in ("cuda", "cpu")):
        here, other = ("the CPU's", "CUDA's") if device_type == "cpu" else ("CUDA's", "the CPU's")
        reason += f" ({other} autocast has it in a list, {here} has not)"
    return reason


def module_reason(operators: Sequence[NotedOperator], was_called: bool, has_gradients: bool, has_children: bool) -> str:
    """Why a module returns what it returns: what decides it in the operators that it called itself."""
    if not was_called:
        return "not called, but its parameters have gradients: another module uses them" if has_gradients else NEVER_RAN
    if not operators:
        return "what its modules return" if has_children else "calls no operator"
    names: dict[str, list[str]] = {}
    for operator in operators:
        alike = names.setdefault(operator.reason, [])
        if operator.name not in alike:
            alike.append(operator.name)
    if len(names) > 1:
        # What takes what it gets decides nothing.
        names.pop(TAKES, None)
    return "; ".join(f"{_first(alike)}: {reason}" for reason, alike in names.items())


def _first(names: Sequence[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")


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
    meaning = find_precision(precision)
    parameters = dtypes["parameters"]
    # Lightning's plugin casts modules and batches themselves.
    casts = meaning is not None and not meaning.is_mixed and meaning.weights != "float32"
    reasons = {
        "parameters": "as the module made them",
        "buffers": f"precision {precision} casts floating ones" if casts else "as the module made them",
        "batch": f"precision {precision} casts what is floating in it" if casts else "as the data gives it",
        "gradients": "as autograd left them",
        "optimizer_state": "made like the parameters",
    }
    if meaning is not None:
        if meaning.is_mixed:
            reasons["parameters"] = (
                f"precision {precision} leaves weights as they are made; autocast casts copies of them"
            )
        elif casts:
            reasons["parameters"] = f"precision {precision} makes floating weights {meaning.weights}"
        else:
            reasons["parameters"] = "precision 32-true leaves weights as they are made"
        if foreign := [dtype for dtype in parameters if dtype != meaning.weights]:
            reasons["parameters"] += f"; {', '.join(foreign)}: the module's own doing"
    if not any(map(is_floating, dtypes["batch"])):
        reasons["batch"] = "no floating tensor in it" if dtypes["batch"] else "no tensor in it"
    if set(dtypes["gradients"]) <= set(parameters):
        reasons["gradients"] = "a gradient has its parameter's dtype"
    if loss_scale is not None:
        reasons["gradients"] += f"; multiplied by the loss scale {loss_scale:g} until the optimizer's step"
    if foreign := [dtype for dtype in dtypes["optimizer_state"] if dtype not in parameters]:
        reasons["optimizer_state"] += f"; {', '.join(foreign)}: the optimizer's own choice"
    missing = {
        "parameters": "the module has none",
        "gradients": f"mode {mode} computes none" if mode in ("inference", "forward") else "there are none",
        "optimizer_state": "no optimizer's step" if mode != "train_step" else "the optimizer holds none",
    }
    return {kind: reason if dtypes[kind] else missing.get(kind, reason) for kind, reason in reasons.items()}
