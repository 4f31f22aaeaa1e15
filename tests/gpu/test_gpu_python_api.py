"""`lmbench.measure` on a GPU: what it moved is back, what memory ended frees it, and compiling again compiles.

python -m pytest -q -m gpu tests/gpu/test_gpu_python_api.py
"""

from __future__ import annotations

import pytest
import torch
from strangers import OwnLoaders

import lmbench
from lmbench.model.language_model import LanguageModel

pytestmark = pytest.mark.gpu

QUICK = {"steps": 10, "warmup_steps": 3, "min_window_s": 0.0}


def test_module_and_random_state_are_back_and_nothing_stays_on_the_device():
    module = OwnLoaders()
    allocated_before = torch.cuda.memory_allocated()
    torch.cuda.manual_seed_all(7)
    before = torch.cuda.get_rng_state()
    run = lmbench.measure(module, **QUICK)
    assert (run.outcome, run.record.device_type, run.record.clock) == ("ok", "cuda", "events")
    assert run.record.phases.forward.lag is not None
    assert {parameter.device.type for parameter in module.parameters()} == {"cpu"}
    assert torch.equal(torch.cuda.get_rng_state(), before)
    assert module.device.type == "cpu"
    assert module.net(torch.zeros(1, 16)).device.type == "cpu"
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() <= allocated_before


def test_a_run_out_of_memory_leaves_room_for_the_next():
    model = LanguageModel(size="small", context_length=1024)
    free_before = torch.cuda.memory_allocated()
    data = torch.randint(10_000, (2, 4096, 1024))
    # The rest of the memory is for tests that run beside this one.
    torch.cuda.set_per_process_memory_fraction(0.2)
    try:
        run = lmbench.measure(model, (data[0], data[1]), **QUICK)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    assert run.outcome == "oom"
    assert run.record.error.requested_bytes > 0
    # What cuBLAS keeps in both threads that multiplied is the process's; 64 MiB of a batch would not be.
    torch._C._cuda_clearCublasWorkspaces()
    assert torch.cuda.memory_allocated() <= free_before + 2**20
    assert lmbench.measure(model, (data[0, :2], data[1, :2]), **QUICK).outcome == "ok"


def test_compiling_again_compiles_again():
    # One more than the graphs that Dynamo makes of one piece of code.
    for _ in range(9):
        model = LanguageModel(size="tiny", context_length=64)
        run = lmbench.measure(model, precision="bf16-mixed", compile={"backend": "aot_eager"}, **QUICK)
        assert run.record.compile.graph_count >= 1
        assert run.record.compile.window_recompile_count == 0
