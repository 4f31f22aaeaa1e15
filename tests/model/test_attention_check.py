"""A user's attention function: right ones are measured, wrong ones are refused with a reason."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import torch
from fit_process import bench
from refusals import usage_error
from tables import cases, flat
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lmbench.fit.run import run
from lmbench.model import attention_check
from lmbench.model.attention import NaiveCore, Size, attention_kind, causal_mask
from lmbench.model.attention_check import TOLERANCES, Use, check_attention, formula


def naive(q, k, v, is_causal=False):
    return NaiveCore(q.shape[-1])(q, k, v, causal_mask(q.shape[-2]) if is_causal else None)


def fused(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False):
    return scaled_dot_product_attention(q, k, v, is_causal=is_causal)


def forgets_the_last_block(q, k, v, is_causal=False):
    """Like a kernel without a mask for lengths that its block size does not divide."""
    seq = q.shape[-2]
    full, seen = max(1, seq // 16 * 16), torch.ones(seq, seq, dtype=torch.bool)
    seen = seen.tril() if is_causal else seen
    seen[:, full:] &= torch.eye(seq, dtype=torch.bool)[:, full:]
    return scaled_dot_product_attention(q, k, v, attn_mask=seen)


def takes_v_for_contiguous(q, k, v, is_causal=False):
    flat = torch.as_strided(v, v.shape, q.contiguous().stride(), v.storage_offset())
    return fused(q, k, flat, is_causal=is_causal)


def writes_to_k_afterwards(q, k, v, is_causal=False):
    output = fused(q, k, v, is_causal=is_causal)
    k.data.zero_()
    return output


def only_tens(q, k, v, is_causal=False):
    if q.shape[-2] % 10:
        raise ValueError("the length must be a multiple of 10")
    return fused(q, k, v, is_causal=is_causal)


CALLS = []


def right_at_first(q, k, v, is_causal=False):
    CALLS.append(q.shape[-2])
    return fused(q, k, v, is_causal=is_causal) * (1.0 if len(CALLS) <= 16 else 0.9)


def hooked(x, hook):
    """A copy of x whose gradient goes through a hook."""
    copy = x.clone()
    if copy.requires_grad:
        copy.register_hook(hook)
    return copy


def backward(grad):
    raise RuntimeError("no backward yet")


OF = SimpleNamespace(
    scaled=lambda q, k, v, is_causal: fused(1.05 * q, k, v, is_causal=is_causal),
    never_causal=lambda q, k, v, is_causal: fused(q, k, v),
    wrong_gradient=lambda q, k, v, is_causal: fused(q, hooked(k, lambda grad: 1.1 * grad), v, is_causal=is_causal),
    nan=lambda q, k, v, is_causal: fused(q, k, v) * float("nan"),
    two_arguments=lambda q, k: q,
    one_head=lambda q, k, v, is_causal: fused(q, k, v)[:, :1],
    detached=lambda q, k, v, is_causal: fused(q, k, v).detach(),
    no_gradient_of_k=lambda q, k, v, is_causal: fused(q, k.detach(), v),
    fails_in_backward=lambda q, k, v, is_causal: fused(q, k, hooked(v, backward)),
    number=1,
)


@torch.library.custom_op("lmbench_tests::attention", mutates_args=())
def operator(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
    return fused(q, k, v, is_causal=is_causal).contiguous()


@operator.register_fake
def _(q, k, v, is_causal):
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _keep(ctx, inputs, output):
    *tensors, ctx.is_causal = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    _, gradients = torch.func.vjp(partial(fused, is_causal=ctx.is_causal), *ctx.saved_tensors)
    return *gradients(grad), None


operator.register_autograd(_backward, setup_context=_keep)


@cases("causal", False, True)
def test_the_formula_and_its_gradients_are_those_of_naive_attention_in_blocks_too(causal, monkeypatch):
    monkeypatch.setattr(attention_check, "_BLOCK_ELEMENTS", 200)
    q, k, v, gradient = (torch.randn(2, 2, 23, 8, dtype=torch.float64) for _ in range(4))
    results = formula([q, k, v, gradient], causal)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    output = naive(*leaves, is_causal=causal)
    expected = (output, *torch.autograd.grad(output, leaves, gradient))
    for (values, sizes), tensor in zip(results, expected, strict=True):
        torch.testing.assert_close(values, tensor)
        # Random inputs make independent products, so rows have about their expected size.
        ratio = torch.linalg.vector_norm(tensor[..., 3:-3, :], dim=-1, keepdim=True) / sizes[..., 3:-3, :]
        assert 0.3 < ratio.mean().item() < 1.7


def checked(function, dtype=torch.float32, **changes):
    use = Use(Size(2, 2, 40, 16), True, dtype, torch.device("cpu"))
    name = f"OF.{function}" if hasattr(OF, function) else function
    return check_attention(attention_kind(f"test_attention_check:{name}"), replace(use, **changes))


@cases("dtype", *TOLERANCES)
@cases("function", "naive", "operator")
def test_right_functions_are_within_the_tolerance_with_room(function, dtype):
    torch.manual_seed(4)
    expected = torch.rand(3)
    torch.manual_seed(4)
    result = checked(function, dtype, is_strided=True)
    assert result.tolerance_fraction == TOLERANCES[dtype]
    assert 0 < result.deviation_fraction < TOLERANCES[dtype] / 2
    assert (result.cases, result.refused) == (13, [])
    # The check does not touch the run's random state.
    assert torch.equal(torch.rand(3), expected)


def test_a_right_function_is_right_in_each_row_of_many_heads():
    """Also in rows where the gradient of a score happens to be a small difference of large numbers."""
    assert checked("fused", size=Size(2, 8, 100, 128)).deviation_fraction < TOLERANCES[torch.float32] / 4


def test_shapes_that_a_function_refuses_are_noted_unless_they_are_the_runs_own():
    result = checked("only_tens")
    assert (result.cases, len(result.refused)) == (3, 10)
    assert "batch 2, heads 3, seq 1, head_dim 16, causal" in result.refused
    with usage_error(r"raised at test_attention_check.py:\d+ in only_tens, for batch 1"):
        checked("only_tens", size=Size(1, 1, 41, 16))


@cases("""
function | line
writes_to_k_afterwards | in the gradient of [qkv]
scaled | in the output at batch
never_causal | in the output at .*, causal
forgets_the_last_block | in the output at .*seq (100|129|77|193|40)
wrong_gradient | in the gradient of k at
nan | is off by inf in the
""")
def test_a_wrong_function_is_incorrect_in_its_output_or_else_in_a_gradient(function, line):
    with usage_error(line) as caught:
        checked(function, torch.bfloat16)
    assert str(caught.value).startswith("incorrect: test_attention_check:")
    assert "allowed in bfloat16 is " in str(caught.value)


def test_a_function_that_takes_a_models_v_for_contiguous_is_wrong_in_the_model_alone():
    checked("takes_v_for_contiguous")
    with usage_error("incorrect: "):
        checked("takes_v_for_contiguous", is_strided=True)


@cases(r"""
function | line
two_arguments | is called with \(query, key, value, is_causal=...\), .*: too many positional
one_head | returned a tensor of shape \(2, 1, 40, 16\), .* where q has shape \(2, 2, 40, 16\)
detached | gives q no gradient, .*; it must be differentiable
no_gradient_of_k | gives k no gradient, for batch 2, heads 2, seq 40, head_dim 16, causal
fails_in_backward | raised at test_attention_check.py:\d+ in backward, .*: no back
number | 1 is not a callable object
fusd | module test_attention_check has no fusd; did you mean test_attention_check:fused?
no such | module test_attention_check has no no such
""")
def test_a_function_that_is_not_attention_is_refused_in_one_line(function, line):
    with usage_error(line):
        checked(function)


SHORT = ("--trainer.accelerator=cpu", "--data.context_length=24", "--data.batch_size=2")
LAYER = ("--model=lmbench.AttentionLayer", "--model.head_dim=8", *SHORT)
MODEL = ("--model.size=tiny", "--model.vocab_size=50", *SHORT)


def attention(function):
    return f"--model.attention=test_attention_check:{function}"


@cases("subject", (*LAYER, "--trainer.compile.backend=aot_eager"), MODEL)
def test_a_librarys_operator_is_checked_and_measured(subject, tmp_path, capsys):
    record = bench(tmp_path, *subject, attention("operator")).record
    assert record.model.attention == "test_attention_check:operator"
    assert record.model.attention_check.cases == 13
    assert record.flops.per_token_flops
    assert "13 shapes" in flat(capsys.readouterr().out)
    if subject is not MODEL:
        # The operator saves q, k and v alone.
        assert (record.memory.saved_bytes, record.memory.expected_saved_bytes) == (0, None)


def test_a_wrong_function_has_an_exit_code_and_one_line_and_no_speed(tmp_path, capsys):
    assert run(["fit", *MODEL, attention("OF.scaled"), f"--measure.results_dir={tmp_path}"]) == 2
    printed = capsys.readouterr()
    assert printed.err.startswith("lmbench: incorrect: test_attention_check:OF.scaled is off by ")
    assert printed.err.count("\n") == 1
    assert "ms" not in printed.out
    assert not list(tmp_path.iterdir())


def test_a_function_that_was_right_only_before_the_run_has_no_speed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys.modules["test_attention_check"], "CALLS", [])
    record = bench(tmp_path, *MODEL, attention("right_at_first"), code=2).record
    printed = capsys.readouterr().out
    assert "outcome " in printed
    assert not [label for label in ("mean step", "throughput", "MFU", "forward ") if f"\n{label}" in printed]
    assert record.outcome == "error"
    assert record.error.message.startswith("incorrect: after the run, though it was right before: ")
