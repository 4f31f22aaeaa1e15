"""A user's own attention: what is let through to be measured, and what is told of the rest."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lmbench.errors import UsageError
from lmbench.fit.run import run
from lmbench.model import attention_check
from lmbench.model.attention import NaiveCore, Size, attention_kind, causal_mask
from lmbench.model.attention_check import TOLERANCES, Use, check_attention, formula
from lmbench.records.load import Run, load_run
from lmbench.records.measured import RunError
from lmbench.records.run import SCHEMA_VERSION, AttentionCheck, RunRecord
from lmbench.report.frame import outcome_label

CPU = torch.device("cpu")


# functions, named as a user names them: test_attention_check:naive


def naive(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return NaiveCore(q.shape[-1], is_causal)(q, k, v, causal_mask(q.shape[-2]) if is_causal else None)


def fused(q: Any, k: Any, v: Any, attn_mask: Any = None, dropout_p: Any = 0.0, is_causal: Any = False) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def scaled(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=1.05 * q.shape[-1] ** -0.5)


def never_causal(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return scaled_dot_product_attention(q, k, v)


def forgets_the_last_block(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """As a kernel does that has no mask for a length that its block does not divide."""
    whole = max(1, q.shape[-2] // 16 * 16)
    seen = torch.ones(q.shape[-2], q.shape[-2], dtype=torch.bool)
    seen = seen.tril() if is_causal else seen
    seen[:, whole:] &= torch.eye(q.shape[-2], dtype=torch.bool)[:, whole:]
    return scaled_dot_product_attention(q, k, v, attn_mask=seen)


def breaks_the_graph(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    torch._dynamo.graph_break()
    return fused(q, k, v, is_causal=is_causal)


def takes_v_for_contiguous(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    flat = torch.as_strided(v, v.shape, q.contiguous().stride(), v.storage_offset())
    return scaled_dot_product_attention(q, k, flat, is_causal=is_causal)


def wrong_between_the_ends(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    """As a kernel is that takes a step between heads for one between batches."""
    factor = torch.ones(q.shape[1], 1, 1, dtype=q.dtype)
    factor[1:-1] = 0.9
    return fused(q, k, v, is_causal=is_causal) * factor


def writes_to_q(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    q.data.mul_(2)
    return fused(q, k, v, is_causal=is_causal)


def writes_to_k_afterwards(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    output = fused(q, k, v, is_causal=is_causal)
    k.data.zero_()
    return output


CALLS: list[int] = []


def right_at_first(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    CALLS.append(q.shape[-2])
    return fused(q, k, v, is_causal=is_causal) * (1.0 if len(CALLS) <= 16 else 0.9)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:  # type: ignore[override]
        if ctx.factor == 0:
            raise RuntimeError("no backward yet")
        return grad * ctx.factor, None


def wrong_gradient(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return scaled_dot_product_attention(q, Doubled.apply(k, 1.1), v, is_causal=is_causal)


def fails_in_backward(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return scaled_dot_product_attention(q, k, Doubled.apply(v, 0), is_causal=is_causal)


def only_tens(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    if q.shape[-2] % 10:
        raise ValueError("the length must be a multiple of 10")
    return fused(q, k, v, is_causal=is_causal)


def nan(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return fused(q, k, v, is_causal=is_causal) * float("nan")


def two_arguments(q: Tensor, k: Tensor) -> Tensor:
    return q


def one_head(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return fused(q, k, v)[:, :1]


def detached(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return fused(q, k, v, is_causal=is_causal).detach()


def no_gradient_of_k(q: Tensor, k: Tensor, v: Tensor, is_causal: bool = False) -> Tensor:
    return fused(q, k.detach(), v, is_causal=is_causal)


@torch.library.custom_op("lmbench_tests::attention", mutates_args=())
def operator(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    return fused(q, k, v, is_causal=is_causal).contiguous()


@operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _keep(ctx: Any, inputs: Any, output: Tensor) -> None:
    *tensors, ctx.is_causal = inputs
    ctx.save_for_backward(*tensors)


@torch.library.custom_op("lmbench_tests::attention_backward", mutates_args=())
def operator_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    # Below autograd, as a kernel's own.
    scale = q.shape[-1] ** -0.5
    scores = (q @ k.transpose(-2, -1)) * scale
    if is_causal:
        scores = scores.masked_fill(causal_mask(q.shape[-2]), float("-inf"))
    weights = scores.softmax(-1)
    of_weights = grad @ v.transpose(-2, -1)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdim=True)) * scale
    return of_scores @ k, of_scores.transpose(-2, -1) @ q, weights.transpose(-2, -1) @ grad


@operator_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(q), torch.empty_like(q), torch.empty_like(q)


def _backward(ctx: Any, grad: Tensor) -> Any:
    return *operator_backward(grad, *ctx.saved_tensors, ctx.is_causal), None


operator.register_autograd(_backward, setup_context=_keep)


# the formula


@pytest.mark.parametrize("causal", [False, True])
def test_the_formula_and_its_gradients_are_those_of_naive_attention_in_blocks_too(causal, monkeypatch):
    monkeypatch.setattr(attention_check, "_BLOCK_ELEMENTS", 200)
    q, k, v, gradient = (torch.randn(2, 2, 23, 8, dtype=torch.float64) for _ in range(4))
    found = formula(q, k, v, gradient, causal)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    output = naive(*leaves, is_causal=causal)
    for rows, wanted in zip(found, (output, *torch.autograd.grad(output, leaves, gradient)), strict=True):
        torch.testing.assert_close(rows.values, wanted)
        # Rows of independent products have the size that they are measured by, give or take chance.
        ratio = torch.linalg.vector_norm(wanted[..., 3:-3, :], dim=-1, keepdim=True) / rows.sizes[..., 3:-3, :]
        assert 0.3 < ratio.mean().item() < 1.7


# what is let through


def checked(function: str, dtype: torch.dtype = torch.float32, **changes: Any) -> AttentionCheck:
    use = Use(**{"size": Size(2, 2, 40, 16), "is_causal": True, "dtype": dtype, "device": CPU, **changes})
    found = check_attention(attention_kind(f"test_attention_check:{function}"), use)
    assert found is not None
    return found


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("function", ["naive", "fused", "operator"])
def test_right_functions_are_within_the_tolerance_with_room(function, dtype):
    found = checked(function, dtype, is_strided=True)
    assert found.tolerance_fraction == TOLERANCES[dtype]
    assert found.deviation_fraction is not None
    assert 0 < found.deviation_fraction < TOLERANCES[dtype] / 2
    assert (found.cases, found.refused) == (13, [])


def test_a_right_function_is_right_in_each_row_of_many_heads():
    """Where the gradient of a score is by chance the small difference of large numbers, too."""
    size = Size(2, 8, 100, 128)
    found = checked("fused", size=size)
    assert found.deviation_fraction is not None
    assert found.deviation_fraction < TOLERANCES[torch.float32] / 4


def test_shapes_that_a_function_refuses_are_noted_unless_they_are_the_runs_own():
    found = checked("only_tens")
    assert found.cases == 3
    assert len(found.refused) == 10
    assert "batch 2, heads 3, seq 1, head_dim 16, causal" in found.refused
    with pytest.raises(
        UsageError, match=r"raised in its forward at test_attention_check.py:\d+ in only_tens, for batch 1"
    ):
        checked("only_tens", size=Size(1, 1, 41, 16))


def test_the_check_leaves_the_runs_random_numbers_alone():
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    checked("fused")
    assert torch.equal(torch.rand(3), expected)


# what is not


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("function", "where"),
    [
        ("scaled", "in the (output|gradient of [qkv]) at batch"),
        ("never_causal", "at .*, causal"),
        ("forgets_the_last_block", "at .*seq (100|129|77|193|40)"),
        ("wrong_gradient", "in the gradient of k at"),
        ("nan", "is off by nan or infinity in the"),
        ("wrong_between_the_ends", "heads 3"),
    ],
)
def test_a_wrong_function_is_incorrect_with_the_largest_deviation_and_where(function, where, dtype):
    with pytest.raises(UsageError, match=where) as caught:
        checked(function, dtype)
    told = str(caught.value)
    assert told.startswith(f"incorrect: test_attention_check:{function} is off by ")
    assert f"allowed in {str(dtype)[6:]} is " in told
    assert "\n" not in told


def test_a_function_that_takes_a_models_v_for_contiguous_is_wrong_in_the_model_alone():
    checked("takes_v_for_contiguous")
    with pytest.raises(UsageError, match="incorrect: "):
        checked("takes_v_for_contiguous", is_strided=True)


@pytest.mark.parametrize(("function", "letter"), [("writes_to_q", "q"), ("writes_to_k_afterwards", "k")])
@pytest.mark.parametrize("has_backward", [True, False])
def test_a_function_that_writes_to_what_it_is_given_is_incorrect(function, letter, has_backward):
    with pytest.raises(UsageError, match=f"^incorrect: test_attention_check:{function} changes its {letter}, "):
        checked(function, has_backward=has_backward)


@pytest.mark.parametrize(
    ("function", "line"),
    [
        ("two_arguments", r"takes \(q.*\) .* and is called with \(query, key, value, is_causal=...\)"),
        ("one_head", r"returned a tensor of shape \(2, 1, 40, 16\), where q has \(2, 2, 40, 16\)"),
        ("detached", "returned a tensor without a gradient; it must be differentiable"),
        ("no_gradient_of_k", "gives k no gradient; q was batch 2, heads 2, seq 40, head_dim 16, causal"),
        (
            "fails_in_backward",
            r"raised in its backward at test_attention_check.py:\d+ in backward, .*: no back",
        ),
        ("CPU", "is of type device; name a function"),
        ("Doubled", "is a class; name a function, or an instance that can be called"),
        ("fusd", "module test_attention_check has no fusd; did you mean test_attention_check:fused?"),
        ("", "name a function with its module"),
    ],
)
def test_what_cannot_be_attention_is_told_in_one_line(function, line):
    with pytest.raises(UsageError, match=line) as caught:
        checked(function)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", ["mine.py:fused", "./folder/mine.py:fused"])
def test_a_file_instead_of_a_module_is_told_in_one_line(path):
    with pytest.raises(UsageError, match=r"name the module as in an import, mine:fused, from its folder$"):
        attention_kind(path)


# from the command line

SHORT = [
    "--trainer.accelerator", "cpu", "--measure.min_window_s", "0", "--measure.steps", "3", "--measure.warmup_steps",
    "1", "--measure.probe_steps", "1", "--wandb.mode", "disabled", "--data.context_length", "24",
    "--data.batch_size", "2",
]  # fmt: skip
LAYER = ["--model", "lmbench.AttentionLayer", "--model.head_dim", "8"]
MODEL = ["--model.size", "tiny", "--model.vocab_size", "50"]


def measured(folder: Path, *words: str) -> RunRecord:
    assert run(["fit", *words, *SHORT, "--measure.results_dir", str(folder)]) == 0
    return load_run(next(folder.iterdir())).record


@pytest.mark.parametrize(
    ("subject", "compiled"),
    [(LAYER, []), (LAYER, ["--trainer.compile.backend", "aot_eager"]), (MODEL, [])],
    ids=["layer", "compiled layer", "model"],
)
def test_a_librarys_operator_is_checked_and_measured(subject, compiled, tmp_path, capsys):
    name = "test_attention_check:operator"
    found = measured(tmp_path, *subject, "--model.attention", name, *compiled)
    assert found.model.attention == name
    assert found.model.attention_check is not None
    assert found.model.attention_check.cases == 13
    assert found.flops.per_token_flops
    assert "against the formula at 13 shapes: off by " in capsys.readouterr().out
    if subject is LAYER:
        assert found.memory.saved_bytes == 0  # q, k and v alone
        assert found.memory.expected_saved_bytes is None


#: As Inductor fails of a Triton kernel: none of the frames is the user's, and the last line but one says why.
REFUSES = """
def refuses(graph, inputs):
    raise RuntimeError("An exception occurred in a subprocess:\\nTraceback (most recent call last):\\n  File ...\\n"
        "AssertionError: largest is fp32 and then fp64\\n\\nSet TORCHDYNAMO_VERBOSE=1 for the internal stack trace")
"""


def test_a_function_that_cannot_be_compiled_is_the_users_code_and_the_compilers_reason_is_told(tmp_path, capsys):
    found: dict[str, Any] = {}
    exec(compile(REFUSES, torch.__file__, "exec"), found)
    torch._dynamo.register_backend(found["refuses"], name="refuses")
    words = [*LAYER, "--model.attention", "test_attention_check:operator", "--trainer.compile.backend", "refuses"]
    assert run(["fit", *words, *SHORT, "--measure.results_dir", str(tmp_path)]) == 5
    told = capsys.readouterr().err
    assert told.startswith("lmbench: error in your code, in forward, at no line of yours: ")
    assert "raised: AssertionError: largest is fp32 and then fp64 (all frames: " in told
    assert told.count("\n") == 1


def test_a_function_that_is_not_compiled_as_a_whole_is_told(tmp_path, capsys):
    torch._dynamo.reset()
    words = ["--model.attention", "test_attention_check:breaks_the_graph", "--trainer.compile.backend", "aot_eager"]
    breaks = measured(tmp_path, *LAYER, *words).compile.graph_break_count
    assert breaks
    told = " ".join(capsys.readouterr().out.split())
    assert f"compiled with {breaks} graph break" in told
    assert "--trainer.compile.fullgraph true" in told


def test_a_wrong_function_has_an_exit_code_and_one_line_and_no_speed(tmp_path, capsys):
    words = [*MODEL, "--model.attention", "test_attention_check:scaled", *SHORT]
    assert run(["fit", *words, "--measure.results_dir", str(tmp_path)]) == 2
    told = capsys.readouterr()
    assert told.err.startswith("lmbench: incorrect: test_attention_check:scaled is off by ")
    assert told.err.count("\n") == 1
    assert "ms" not in told.out
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("subject", [LAYER, MODEL], ids=["layer", "model"])
def test_a_function_that_was_right_only_before_the_run_has_no_speed(subject, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["test_attention_check"], "CALLS", [])
    words = [*subject, "--model.attention", "test_attention_check:right_at_first", *SHORT]
    assert run(["fit", *words, "--measure.results_dir", str(tmp_path)]) == 2
    told = capsys.readouterr().out
    assert "outcome " in told
    assert not [label for label in ("mean step", "throughput", "MFU", "forward ") if f"\n{label}" in told]
    record = load_run(next(tmp_path.iterdir())).record
    assert record.outcome == "error"
    assert record.error is not None
    assert (record.error.message or "").startswith("incorrect: after the run, though it was right before: ")


def test_a_table_says_incorrect_instead_of_the_phase():
    error = RunError("UsageError", "incorrect: my_module:mine is off by 0.2 in the output at ...", "setup")
    record = RunRecord(SCHEMA_VERSION, "error", error=error)
    assert outcome_label(Run(Path("run"), record, [], "error")) == "error: incorrect"
