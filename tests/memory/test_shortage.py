"""The explanation of a run that ran out of memory: what was held, and the plan that fits."""

from __future__ import annotations

import pytest
import torch
from planted_memory import planted_run, write_recording
from runs import ended, make_run
from torch import nn

from lmbench.memory import plan
from lmbench.memory.answer import shortage_answer
from lmbench.memory.chain import Chain, ChainFacts
from lmbench.memory.plan import MemoryPlan, PlanPoint
from lmbench.memory.recipe import Recipe
from lmbench.memory.recording import held_by
from lmbench.python_process import ProcessFailed
from lmbench.records.codec import as_dict
from lmbench.records.load import load_run
from lmbench.records.measured import RefusedAllocation

GIB = 2**30


REFUSED = RefusedAllocation("forward", 2 * GIB, 137 * GIB, 138 * GIB, GIB // 2, 4 * GIB, 4 * GIB, 8 * GIB, 121 * GIB)


def out_of_memory(folder, config="{}", **changes):
    """Write a run on an H200 that was refused 2 GiB to `run` in a folder; returns the answer about it."""
    folder = folder / "run"
    memory = {"device_total_bytes": 140 * GIB, "refused": as_dict(REFUSED)}
    make_run(folder, {}, {**ended("oom", "forward"), "memory": memory, **changes})
    (folder / "config.yaml").write_text(config)
    return shortage_answer(load_run(folder).record, folder / "config.yaml")


def reason_of(answer):
    assert answer.headline[-1].label == "no plan"
    return answer.figures["shortage"]["reason"]


BEST = PlanPoint(
    Recipe(48, 2, "matmuls", 5), {"data.batch_size": 48, "trainer.recompute": {"keep": "matmuls"}},
    130 * GIB, 134 * GIB, 1.0, 0.25, is_checked=True,
)  # fmt: skip


@pytest.fixture(autouse=True)
def plans(monkeypatch):
    """A plan with one point, for the run's own configuration and GPU."""

    def plan_for(words, request):
        assert words[0].startswith("--config=")
        chain = Chain(48, False, [0] * 12, ChainFacts(*[0.0] * 7), {}, {})
        return MemoryPlan([BEST], [BEST], request.gpu, False, [chain], 116)

    monkeypatch.setattr(plan, "ask_plan", plan_for)


def test_a_run_that_cannot_be_planned_has_a_reason(tmp_path, monkeypatch):
    def refuses(words, request):
        assert request.gpu.total_bytes == 140 * GIB
        raise ProcessFailed("killed")

    monkeypatch.setattr(plan, "ask_plan", refuses)
    assert reason_of(out_of_memory(tmp_path)) == "killed"


def test_a_run_whose_configuration_may_run_code_is_not_planned(tmp_path):
    reason = reason_of(out_of_memory(tmp_path, "model: {attention: 'evil:attend'}"))
    assert reason.startswith("model.attention may run code; if you trust it: lmbench memory --config")


def test_the_command_prints_held_memory_the_plan_and_the_history(tmp_path, printed, answered):
    out_of_memory(tmp_path)
    write_recording(tmp_path / "run", planted_run())
    out = printed("memory", tmp_path / "run")
    words = (
        "2.00 GiB more in forward, with 0.50 GiB free", "parameters 4.00 GiB, gradients 4.00 GiB",
        "batch 48 x 2, recomputed: first 5 blocks, keep matmuls", "0.25 GiB in backward of step 7",
    )  # fmt: skip
    assert sorted(words, key=out.index) == list(words)
    answer = answered("memory", tmp_path / "run")
    assert answer["sections"][0]["peak"]["allocated_bytes"] == 252 << 20
    assert answer["shortage"]["refused"]["allocated_bytes"] == 137 * GIB
    assert answer["fitting"][0]["reserved_bytes"] == 134 * GIB


def test_a_lack_of_host_memory_is_not_explained_by_the_device(tmp_path):
    error = {"kind": "OutOfMemoryKill", "message": "the kernel ended it", "where": "host"}
    assert "host" in reason_of(out_of_memory(tmp_path, error=error))


def test_memory_of_a_module_is_counted_by_storage():
    net = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False))
    net[1].weight = net[0].weight
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    net(torch.ones(1, 128)).sum().backward()
    optimizer.step()
    # AdamW has two moments, and a step count in a block of its own.
    assert held_by(net, [optimizer], "cpu") == (65536, 65536, 2 * 65536 + 512)
