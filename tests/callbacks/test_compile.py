"""`--trainer.compile` compiles in place, records graphs and recompiles, and refuses to compile nothing."""

from __future__ import annotations

import os
from contextlib import ExitStack
from dataclasses import replace

import pytest
import torch
from fit_process import SMALL, bench
from refusals import usage_error
from strangers import Regression
from tables import cases
from torch import nn
from torch._inductor import async_compile
from torch._inductor.async_compile import AsyncCompile
from torch.utils.data import DataLoader

from lmbench.callbacks import Compiler
from lmbench.instruments.compiling import CompileOptions, empty_cache, end_compile_workers, use_cache
from lmbench.instruments.window import Schedule
from lmbench.records.run import Compile

from conftest import measure

# Traces and splits graphs like the default back end, without a minute of code generation.
QUICK = CompileOptions(backend="aot_eager")
EAGER_BACKEND = "--trainer.compile.backend=aot_eager"


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch._dynamo.reset()


def test_the_own_model_compiles_as_one_graph_and_keeps_its_losses(tmp_path):
    words = (EAGER_BACKEND, f"{EAGER_BACKEND} --trainer.compile.regional=true", "")
    whole, regional, eager = (bench(tmp_path, *SMALL, more) for more in words)
    compiled = whole.record.compile
    assert (compiled.is_enabled, compiled.targets) == (True, ["network"])
    assert (compiled.graph_count, compiled.graph_break_count, compiled.window_recompile_count) == (1, 0, 0)
    assert compiled.first_step_s > 0
    assert regional.record.compile.targets == ["network.blocks.0"]
    for run in (whole, regional):
        assert [step.loss for step in run.steps] == pytest.approx([step.loss for step in eager.steps], rel=1e-4)
    assert eager.record.compile == Compile(False, graph_count=0, graph_break_count=0, window_recompile_count=0)


def test_what_inductor_puts_in_the_place_of_attention_is_told(tmp_path, capsys):
    words = "--model=lmbench.AttentionLayer --model.attention=naive --data.context_length=128 --measure.mode=forward"
    # The graph is one kernel of PyTorch, so no C++ is compiled.
    fused = bench(tmp_path, words, "--trainer.compile=true").record
    output = capsys.readouterr().out
    assert fused.compile.is_attention_fused is True
    assert "compiled     Inductor put PyTorch's fused attention in the place of naive" in output
    assert fused.memory.saved_bytes < fused.memory.expected_saved_bytes
    as_written = bench(tmp_path, words, EAGER_BACKEND).record
    assert as_written.compile.is_attention_fused is False


def fit(module, growth=0, options=QUICK):
    batches = [(torch.randn(2 + growth * index, 16),) for index in range(64)]
    loader = DataLoader(batches, batch_size=None)
    return measure(module, Compiler(options), schedule=Schedule(2, 4), loader=loader)[1].run.compile


@cases("""
- [growth, dynamic, graphs, recompiles]
- [0, null, 1, 0]
- [1, null, 2, 0]
- [1, true, 1, 0]
- [1, false, 6, 4]
""")
def test_a_foreign_modules_children_are_compiled_and_new_shapes_take_a_second_graph_unless_they_are_static(
    growth, dynamic, graphs, recompiles
):
    facts = fit(Regression(), growth, replace(QUICK, dynamic=dynamic))
    assert (facts.targets, facts.dynamic) == (["net"], dynamic)
    assert (facts.graph_count, facts.window_recompile_count) == (graphs, recompiles)


def test_graphs_of_a_part_that_the_module_compiles_itself_count_too():
    module = Regression()
    module.net = torch.compile(module.net, backend="aot_eager", dynamic=False)
    facts = fit(module, growth=1, options=None)
    assert (facts.is_enabled, facts.graph_count, facts.window_recompile_count) == (False, 6, 4)


def test_a_second_trainer_of_the_process_compiles_again_and_leaves_nothing():
    module, before = Regression(), dict(os.environ)
    for _ in range(2):
        assert fit(module).graph_count == 1
        assert (module.net._compiled_call_impl, dict(os.environ)) == (None, before)


def test_no_graph_is_an_error():
    class Unreached(Regression):
        def compile_targets(self):
            return [nn.Linear(1, 1)]

    with usage_error("compiled no graph"):
        fit(Unreached())


def test_inductors_workers_are_gone_before_the_window_and_come_back_for_another_graph():
    AsyncCompile.warm_pool()
    processes = [pool.process for pool in async_compile._pool_set if hasattr(pool, "process")]
    assert processes
    end_compile_workers()
    assert [process.poll() for process in processes].count(None) == 0
    assert AsyncCompile.process_pool().submit(len, "ab").result() == 2
    end_compile_workers()


def test_an_empty_folder_that_was_set_is_as_good_as_a_private_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    assert empty_cache() == str(tmp_path)
    (tmp_path / "graph").touch()
    assert empty_cache() is None


def test_a_cache_of_ones_own_leaves_other_variables_as_the_users_code_sets_them(monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "mine")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    monkeypatch.setenv("OF_THE_USER", "before")
    with ExitStack() as undo:
        use_cache("private", undo)
        assert (os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"]) == ("private", "private/triton")
        os.environ["OF_THE_USER"] = "after"
    assert (os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["OF_THE_USER"]) == ("mine", "after")
    assert "TRITON_CACHE_DIR" not in os.environ
