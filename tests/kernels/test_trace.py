"""Phase, kind and part of every kernel of two real training steps, against stored answers.

The answers were checked by hand: the launches of every row follow from the layers of the model's source. In the eager
bf16 step of 12 layers, for instance, `qkv` casts input and weight of three projections (72) and multiplies (36), RoPE
multiplies four halves of queries and keys (96), and each of 25 norms has 6 kernels forward.
"""

from __future__ import annotations

import csv
from collections import Counter

import pytest
import torch
from paths import TRACES
from tables import cases
from trace_events import examined

from lmbench.cli import main
from lmbench.kernels.findings import examine


@cases("name", "small_bf16_eager", "small_bf16_compiled")
def test_every_kernel_of_a_real_step_has_its_phase_kind_and_part(name):
    with (TRACES / name / "answers.csv").open(newline="") as file:
        columns = ("phase", "kind", "part", "kernel")
        expected = {tuple(row[name] for name in columns): int(row["launches"]) for row in csv.DictReader(file)}
    table = examined(name).trace.kernels
    launches = Counter(table[["phase", "kind", "part", "name"]].itertuples(index=False, name=None))
    assert launches == expected


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="kernels need a CUDA device")
@cases("compiled", "false", "true")
def test_on_this_gpu_every_kernel_has_its_launch_kind_and_part(compiled, tmp_path):
    words = ["fit", "--model.size=small", "--model.attention=naive", "--trainer.precision=32-true"]
    words += ["--data.batch_size=4", "--data.context_length=512", "--trainer.profiler=kernels"]
    assert main([*words, f"--trainer.compile={compiled}", f"--measure.results_dir={tmp_path}"]) == 0
    (path,) = tmp_path.glob("*/trace.json.gz")
    assert {guard.status for guard in examine(path).guards} <= {"pass", "n/a"}
