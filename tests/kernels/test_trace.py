"""Phase, kind and part of every kernel of two real training steps, against stored answers.

The answers were gone through by hand: every row is so many launches per layer of the model's source. In the eager bf16
step of 12 layers, say, `qkv` casts input and weight of three projections (72) and multiplies (36), RoPE multiplies four
halves of queries and keys (96), and each of 25 norms has 6 kernels forward.
"""

from __future__ import annotations

import csv
from collections import Counter

import pytest
from paths import TRACES

from lmbench.kernels.findings import examine
from lmbench.kernels.trace import load_trace


@pytest.mark.parametrize("name", ["small_bf16_eager", "small_bf16_compiled"])
def test_every_kernel_of_a_real_step_has_its_phase_kind_and_part(name):
    with (TRACES / name / "answers.csv").open(newline="") as file:
        columns = ("phase", "kind", "part", "kernel")
        expected = {tuple(row[name] for name in columns): int(row["launches"]) for row in csv.DictReader(file)}
    table = load_trace(TRACES / name / "trace.json.gz").kernels
    found = Counter(table[["phase", "kind", "part", "name"]].itertuples(index=False, name=None))
    assert found == expected


def test_a_rank_of_a_real_pair_has_its_communication_beside_its_backward_pass():
    """One step of DistributedDataParallel on two H200s, 12 layers of 2048 squared: 7 buckets of gradients."""
    findings = examine(TRACES / "two_gpus" / "trace.json.gz")
    kernels = findings.work.kernels("backward")
    (reduces,) = kernels[kernels.kind == "comm"].itertuples()
    assert (reduces.short_name, reduces.kernel_count) == ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 7)
    # Other kernels run meanwhile: the device is busy for less than the sum of both.
    total_s = findings.work.total_s("backward")
    assert reduces.kernel_s < findings.phases.busy_s["backward"] < 0.9 * total_s


def test_the_answers_are_those_of_the_models_source():
    layers, norms = 12, 25
    with (TRACES / "small_bf16_eager" / "answers.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))

    def launches(phase, part, kind=None):
        own = (row for row in rows if (row["phase"], row["part"]) == (phase, part))
        return sum(int(row["launches"]) for row in own if kind in (None, row["kind"]))

    products = {"qkv": 3, "scores": 1, "values": 1, "output": 1, "ffn": 3}
    for part, count in products.items():
        assert launches("forward", part, "gemm") == count * layers
        assert launches("backward", part, "gemm") == 2 * count * layers
    assert launches("forward", "norm") == 6 * norms
    assert launches("forward", "rope") == 2 * (4 + 2 + 1) * layers
    assert launches("forward", "mask") == 2 * layers
    assert launches("forward", "softmax") == 2 * layers
    assert launches("forward", "residual") == launches("backward", "residual") / 2 == 2 * layers
    assert launches("backward", "qkv", "elementwise") == (6 + 2) * layers
