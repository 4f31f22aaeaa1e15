"""On a GPU: kernels of a norm, a softmax, a loss and a RoPE run alone take what their part has in the whole model."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.profiler import ProfilerActivity, profile, record_function

from lmbench.cli import main
from lmbench.model.attention import ScaleAndMask
from lmbench.model.layers import NextTokenLoss, RMSNorm
from lmbench.model.rope import RotaryEmbedding, rope_tables
from lmbench.sizes import SIZES
from lmbench.trace.findings import Findings, examine

BATCH, SEQ = 4, 512
SHAPE = SIZES["small"]
TOLERANCE = 0.10
#: What is run, and what it takes gradients of.
Case = tuple[Callable[[], Tensor], list[Tensor]]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels need a CUDA device"),
]


def whole(results: Path, *flags: str) -> Findings:
    """The small model in fp32, recorded as a user would."""
    words = ["fit", "--model.size", "small", "--model.attention", "naive", "--trainer.precision", "32-true"]
    words += ["--data.batch_size", str(BATCH), "--data.context_length", str(SEQ), "--trainer.profiler", "kernels"]
    assert main([*words, "--measure.results_dir", str(results), *flags]) == 0
    (run,) = (path.parent for path in results.glob("*/trace.json.gz"))
    return examine(run)


def alone(path: Path, case: Case, repeats: int) -> dict[str, float]:
    """Kernel time of forward and backward of something run by itself, `repeats` times."""
    work, inputs = case
    gradient = torch.ones_like(work())
    for _ in range(3):
        torch.autograd.grad(work(), inputs, gradient)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recording:
        recording.add_metadata_json("lmbench", json.dumps({"schema_version": 1, "steps": 1}))
        for _ in range(repeats):
            with record_function("lmbench.phase:forward"):
                out = work()
            with record_function("lmbench.phase:backward"):
                torch.autograd.grad(out, inputs, gradient)
        torch.cuda.synchronize()
    recording.export_chrome_trace(str(path))
    return {share.phase: share.kernel_s for share in examine(path).phases if share.phase != "outside"}


def leaf(*size: int) -> Tensor:
    return torch.randn(size, device="cuda", requires_grad=True)


def norm() -> Case:
    x, module = leaf(BATCH, SEQ, SHAPE.d_model), RMSNorm(SHAPE.d_model).cuda()
    return lambda: module(x), [x, *module.parameters()]


def softmax() -> Case:
    scores = leaf(BATCH, SHAPE.num_heads, SEQ, SEQ)
    return lambda: nn.Softmax(-1)(scores), [scores]


def masked_softmax() -> Case:
    scores, module = leaf(BATCH, SHAPE.num_heads, SEQ, SEQ), ScaleAndMask(SHAPE.head_dim)
    mask = torch.ones(SEQ, SEQ, dtype=torch.bool, device="cuda").triu(1)
    return torch.compile(lambda: functional.softmax(module(scores, mask), -1)), [scores]


def loss() -> Case:
    logits = leaf(BATCH, SEQ, SHAPE.vocab_size)
    targets = torch.randint(SHAPE.vocab_size, (BATCH, SEQ), device="cuda")
    return lambda: NextTokenLoss()(logits, targets), [logits]


def rope() -> Case:
    # As the projections leave it: heads behind the sequence, seen the other way round.
    x = leaf(BATCH, SEQ, SHAPE.num_heads, SHAPE.head_dim)
    cos, sin = (table.cuda() for table in rope_tables(SEQ, SHAPE.head_dim))
    return lambda: RotaryEmbedding()(x.transpose(1, 2), cos, sin), [x]


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Findings:
    return whole(tmp_path_factory.mktemp("eager"))


@pytest.mark.parametrize(
    ("part", "case", "per_step", "tolerance"),
    [
        ("norm", norm, 2 * SHAPE.num_layers + 1, TOLERANCE),
        ("loss", loss, 1, TOLERANCE),
        # The same kernels, as often, but alone they find their operands (50 and 6 MB) in the H200's 50 MB of cache and
        # in the layout they like: 21 % faster in softmax's forward, 33 % in RoPE's backward (H200, torch 2.11).
        ("softmax", softmax, SHAPE.num_layers, 0.30),
        ("rope", rope, 2 * SHAPE.num_layers, 0.40),
    ],
)
def test_a_part_run_alone_takes_its_share(
    eager: Findings, tmp_path: Path, part: str, case: Callable[[], Case], per_step: int, tolerance: float
) -> None:
    planted = alone(tmp_path / "t.json", case(), repeats := 20)
    for share in eager.phases:
        if share.phase in ("forward", "backward"):
            expected = planted[share.phase] / repeats * per_step
            assert share.parts_s[part] / eager.steps == pytest.approx(expected, rel=tolerance), share.phase


def test_a_compiled_part_run_alone_takes_its_share(tmp_path: Path) -> None:
    found = whole(tmp_path / "results", "--trainer.compile", "true")
    forward = next(share for share in found.phases if share.phase == "forward")
    planted = alone(tmp_path / "t.json", masked_softmax(), repeats := 20)
    together = sum(seconds for part, seconds in forward.parts_s.items() if part in ("mask", "softmax", "mask+softmax"))
    expected = planted["forward"] / repeats * SHAPE.num_layers
    assert together / found.steps == pytest.approx(expected, rel=TOLERANCE)
