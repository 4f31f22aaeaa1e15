"""On a GPU: kernels of a norm, a softmax, a loss and a RoPE run alone take what their part has in the whole model."""

from __future__ import annotations

import pytest
import torch
from planted_parts import Call, calls_in_the_model, kernel_time_alone
from torch import nn

from lmbench.cli import main
from lmbench.kernels.findings import examine
from lmbench.model.attention import ScaleAndMask
from lmbench.model.layers import NextTokenLoss, Residual, RMSNorm, RotaryEmbedding
from lmbench.sizes import SIZES

BATCH, SEQ = 4, 512
SHAPE = SIZES["small"]
TOLERANCE = 0.10

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels need a CUDA device"),
]


def whole(results, *flags):
    """The small model in fp32, recorded as a user would."""
    words = ["fit", "--model.size", "small", "--model.attention", "naive", "--trainer.precision", "32-true"]
    words += ["--data.batch_size", str(BATCH), "--data.context_length", str(SEQ), "--trainer.profiler", "kernels"]
    assert main([*words, "--measure.results_dir", str(results), *flags]) == 0
    (run,) = (path.parent for path in results.glob("*/trace.json.gz"))
    return examine(run)


def share_of(findings, phase, part):
    """Kernel time a step, in s, of a part, or of several that were fused (`mask+softmax`), each by itself included."""
    parts = set(part.split("+"))
    times = findings.work.seconds("part", phase)
    return sum(seconds for name, seconds in times.items() if set(name.split("+")) <= parts)


def calls_of(*kinds):
    return calls_in_the_model(SHAPE, BATCH, SEQ, *kinds)


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    return whole(tmp_path_factory.mktemp("eager"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    return whole(tmp_path_factory.mktemp("compiled"), "--trainer.compile", "true")


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(
    ("part", "kind"),
    [("norm", RMSNorm), ("softmax", nn.Softmax), ("loss", NextTokenLoss), ("rope", RotaryEmbedding)],
)
def test_a_part_run_alone_takes_its_share(eager, tmp_path, part, kind, phase):
    (calls,) = calls_of(kind)
    planted = kernel_time_alone(calls, tmp_path / "trace.json")
    assert share_of(eager, phase, part) == pytest.approx(planted[phase], rel=TOLERANCE)


def other_bytes(size):
    """Memory that has nothing to do with the part."""
    return torch.zeros(size // 4, device="cuda")


def compiled_losses():
    (losses,) = calls_of(NextTokenLoss)
    work = torch.compile(losses[0].work)
    return [Call(work, loss.inputs, loss.gradients) for loss in losses]


def compiled_masked_softmaxes():
    masks, softmaxes = calls_of(ScaleAndMask, nn.Softmax)
    mask, softmax = masks[0].work, softmaxes[0].work
    work = torch.compile(lambda scores, forbidden: softmax(mask(scores, forbidden)))
    return [Call(work, before.inputs, after.gradients) for before, after in zip(masks, softmaxes, strict=True)]


def compiled_residuals_with_norms():
    residuals, norms = calls_of(Residual, RMSNorm)
    residual, norm = residuals[0].work, norms[0].work

    @torch.compile
    def work(x, branch):
        stream = residual(x, branch)
        return stream, norm(stream)

    # The stream is a whole branch older than what is added to it. The first norm follows the embedding.
    read_after = [other_bytes(128 * 2**20)]
    pairs = zip(residuals, norms[1:], strict=True)
    return [
        Call(work, before.inputs, [*before.gradients, *after.gradients], read_after=read_after)
        for before, after in pairs
    ]


def compiled_ropes():
    (calls,) = calls_of(RotaryEmbedding)
    rope = calls[0].work

    @torch.compile
    def work(q, k, cos, sin):
        return rope(q, cos, sin), rope(k, cos, sin)

    # The queries are older by the keys' projection, and the keys by that of the values: input, weights and output.
    stream, weights = BATCH * SEQ * SHAPE.d_model * 4, SHAPE.d_model**2 * 4
    read_after = [other_bytes(2 * stream + weights), other_bytes(2 * stream + weights)]
    pairs = zip(calls[::2], calls[1::2], strict=True)
    return [Call(work, [q.inputs[0], *k.inputs], [*q.gradients, *k.gradients], read_after=read_after) for q, k in pairs]


@pytest.mark.parametrize(
    ("part", "case", "phase"),
    [
        ("loss", compiled_losses, "forward"),
        ("loss", compiled_losses, "backward"),
        ("mask+softmax", compiled_masked_softmaxes, "forward"),
        ("mask+softmax", compiled_masked_softmaxes, "backward"),
        # Backward of the two below is fused with their neighbours in the model, and has no share of its own.
        ("norm+residual", compiled_residuals_with_norms, "forward"),
        ("rope", compiled_ropes, "forward"),
    ],
)
def test_a_compiled_part_run_alone_takes_its_share(compiled, tmp_path, part, case, phase):
    planted = kernel_time_alone(case(), tmp_path / "trace.json")
    assert share_of(compiled, phase, part) == pytest.approx(planted[phase], rel=TOLERANCE)
