"""On a GPU: the kernels of a norm, softmax, loss or RoPE take as long alone as their part in the whole model."""

from __future__ import annotations

import pytest
import torch
from planted_parts import calls_in_the_model, kernel_time_alone
from torch import nn

from lmbench.cli import main
from lmbench.kernels.findings import examine
from lmbench.model.layers import NextTokenLoss, RMSNorm, RotaryEmbedding
from lmbench.sizes import SIZES

BATCH, SEQ = 4, 512
SHAPE = SIZES["small"]
TOLERANCE = 0.10

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels need a CUDA device"),
]


def recorded(results, *flags):
    """The findings of the small model in fp32, recorded as a user would."""
    words = ["fit", "--model.size=small", "--model.attention=naive", "--trainer.precision=32-true", *flags]
    words += [f"--data.batch_size={BATCH}", f"--data.context_length={SEQ}", "--trainer.profiler=kernels"]
    assert main([*words, f"--measure.results_dir={results}"]) == 0
    (run,) = (path.parent for path in results.glob("*/trace.json.gz"))
    return examine(run)


def part_s(findings, phase, part):
    """Kernel time per step, in s, of a part, or of fused parts (`mask+softmax`) together with each of them alone."""
    parts = set(part.split("+"))
    times = findings.work.seconds("part", phase)
    return sum(seconds for name, seconds in times.items() if set(name.split("+")) <= parts)


def calls_of(*kinds):
    return calls_in_the_model(SHAPE, BATCH, SEQ, *kinds)


@pytest.fixture(scope="module")
def eager(tmp_path_factory):
    return recorded(tmp_path_factory.mktemp("eager"))


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize(
    ("part", "kind"),
    [("norm", RMSNorm), ("softmax", nn.Softmax), ("loss", NextTokenLoss), ("rope", RotaryEmbedding)],
)
def test_a_part_takes_as_long_alone_as_in_the_model(eager, tmp_path, part, kind, phase):
    (calls,) = calls_of(kind)
    planted = kernel_time_alone(calls, tmp_path / "trace.json")
    assert part_s(eager, phase, part) == pytest.approx(planted[phase], rel=TOLERANCE)
