"""Two GPUs: every strategy trains the same, a failed rank is told with its line, and planted truths come back.

python -m pytest -q -m gpus tests/gpu/test_gpu_ranks.py
"""

from __future__ import annotations

import re
import subprocess
import sys
import time

import psutil
import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from tables import cases

import lmbench
from lmbench import selfcheck
from lmbench.cli import main
from lmbench.model.language_model import LanguageModel

pytestmark = [
    pytest.mark.gpus,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
]

WORDS = [
    "fit", "small_bf16", "--trainer.devices=2", "--model.num_layers=4", "--measure.steps=12",
    "--measure.min_window_s=0", "--measure.warmup_steps=3", "--measure.probe_steps=1", "--quiet",
]  # fmt: skip
TIMEOUT_S = 8


class Failing(LanguageModel):
    """A user's module whose rank 1 does its `deed` in the tenth step."""

    def __init__(self, deed: str, size: str = "small", num_layers: int = 4):
        super().__init__(size=size, num_layers=num_layers)
        self.deed = deed

    def training_step(self, batch, batch_idx):
        if self.global_rank == 1 and batch_idx == 9:
            {"hang": hang, "oom": run_out_of_memory, "reduce": reduce_alone}[self.deed]()
        return super().training_step(batch, batch_idx)


def hang():
    time.sleep(600)


def run_out_of_memory():
    torch.empty(200 << 30, dtype=torch.uint8, device="cuda")


def reduce_alone():
    torch.distributed.all_reduce(torch.ones(7, device="cuda"))


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yield
    # No rank outlives its run.
    assert [child for child in psutil.Process().children() if "test_gpu_ranks" in " ".join(child.cmdline())] == []


def fit(*words):
    code = main([*WORDS, *words])
    return code, lmbench.load("results")[-1]


@pytest.fixture(scope="module")
def first_losses():
    return []


USES_GPU_AT_IMPORT = """
import torch
from lmbench.model.language_model import LanguageModel

torch.zeros(1, device="cuda")


class Early(LanguageModel):
    pass
"""


def test_ranks_of_a_module_that_uses_the_gpu_at_import_start_anew(tmp_path):
    (tmp_path / "early.py").write_text(USES_GPU_AT_IMPORT)
    words = [sys.executable, "-m", "lmbench", *WORDS[:-1], "--model=early.Early"]
    process = subprocess.run(words, check=False, capture_output=True, text=True, timeout=300)
    assert (process.returncode, process.stderr.count("each rank imports it anew")) == (0, 1), process.stderr
    record = lmbench.load("results")[-1].record
    assert (record.outcome, len(record.per_rank)) == ("ok", 2)


@cases("compiled", "false", "true")
@cases("strategy", "ddp", "fsdp2", "fsdp2_zero2")
def test_every_strategy_trains_the_same(strategy, compiled, first_losses):
    words = [f"--trainer.strategy={strategy}", "--trainer.precision=32-true"]
    words += ["--trainer.compile.regional=true"] if compiled == "true" else []
    code, run = fit(*words)
    assert (code, run.record.world_size) == (0, 2)
    losses = [step.loss for step in run.steps[:10]]
    first_losses[:] = first_losses or losses
    assert losses == pytest.approx(first_losses, rel=1e-3)


def test_lightnings_own_ddp_is_told_what_it_costs():
    code, run = fit(f"--trainer.strategy={DDPStrategy.__module__}.DDPStrategy", "--measure.sigterm_broadcast=true")
    messages = {guard.name: guard.message for guard in run.record.guards if guard.status == "warn"}
    assert code == 0
    assert "training_epoch_loop.py" in messages["sigterm_check"]
    assert "training_epoch_loop.py" in messages["hidden_syncs"]
    assert messages["bucket_copies"].startswith("DDP copies")


@cases("deed | code | outcome | message", 
        (
            "hang", 1, "error",
            r"rank 1 hung in hang at .*test_gpu_ranks.py:\d+; rank 0 waited 8 s in nccl:all_reduce, number \d+ of its "
            r"group, of \d+ elements",
        ),
        ("oom", 3, "oom", r"rank 1: CUDA out of memory. Tried to allocate 200.00 GiB.*"),
        (
            "reduce", 1, "error",
            r"rank 0 waited 8 s in nccl:\w+, number (\d+) of its group, .*, where rank 1 called nccl:all_reduce, "
            r"number \1 of its group, of 7 elements",
        ))  # fmt: skip
def test_a_failed_rank_is_told_within_the_timeout_and_15_s(deed, code, outcome, message, capfd):
    words = [f"--model={__name__}.Failing", f"--model.deed={deed}", "--trainer.strategy=ddp"]
    ended, run = fit(*words, f"--measure.collective_timeout_s={TIMEOUT_S}")
    assert (ended, run.outcome) == (code, outcome)
    assert re.fullmatch(message, run.record.error.message)
    assert run.record.error.requested_bytes == (200 << 30 if deed == "oom" else None)
    # C++ code's pages of stacks are in the rank's log, not on the screen.
    assert "frame #" not in capfd.readouterr().err
    assert (run.path / "log.txt").stat().st_size > 0


def test_traces_of_two_ranks_match_their_collectives(capsys, answered):
    code, run = fit("--trainer.strategy=ddp", "--trainer.profiler=kernels")
    capsys.readouterr()
    assert (code, "rank_wait_fraction" in answered("kernels", run.path)) == (0, True)


def test_planted_truths_of_two_ranks_are_found():
    truths = list(selfcheck.ranks(torch.device("cuda")))
    assert [truth for truth in truths if not truth.is_right] == []
