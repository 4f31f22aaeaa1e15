"""Compiles the module in place and records the result."""

from __future__ import annotations

import time
from importlib import import_module
from typing import Any

import torch

from lmbench.callbacks.observer import Observer
from lmbench.errors import UsageError
from lmbench.files import ScratchFolder
from lmbench.instruments.compiling import (
    CompileOptions,
    compile_in_place,
    empty_cache,
    end_compile_workers,
    graph_counts,
    is_attention_fused,
    use_cache,
)


class Compiler(Observer):
    """Compiles the module in place with `torch.compile`, and checks that a graph was compiled.

    Graphs count as well where a module compiles parts of itself.

    Recorded under `compile`:

    - `is_enabled`, and the options by name (`mode`, `backend`, ...).
    - `targets`: names of the compiled modules.
    - `first_step_s`: seconds until the first step ended on the device, compilation included.
    - `graph_count`, `graph_break_count`: graphs compiled and graph breaks met by the window's end.
    - `window_recompile_count`: graphs compiled inside the window.
    - `is_attention_fused`: whether Inductor replaced written-out attention by a fused kernel; null if unknown.

    Args:
        options: how to compile; None leaves the module as it is, and `is_enabled` false.

    Raises:
        UsageError: the warm-up compiled no graph, or gradients are accumulated in a mode with CUDA graphs.
    """

    def __init__(self, options: CompileOptions | None = None) -> None:
        self.options = options
        self.listen(options is not None and options.uses_cudagraphs)

    def run_started(self) -> None:
        facts = self.run.compile
        facts.is_enabled = self.options is not None
        # This process may have compiled other modules before.
        torch._dynamo.utils.counters.clear()
        if self.options is None:
            return
        self.options.check(self.trainer.accumulate_grad_batches)
        # Code that was compiled earlier in this process would be taken, and count against Dynamo's limit of graphs.
        torch._dynamo.reset()
        if self.options.cache == "private":
            # The folder is removed with this object, at the latest when the process ends.
            self._cache = ScratchFolder("compile")
            use_cache(empty_cache() or self._cache.name, self.undo)
        for name, value in vars(self.options).items():
            setattr(facts, name, value)
        self.undo.enter_context(self.options.splitting())
        facts.targets = compile_in_place(self.module, self.options, self.undo)
        if self.options.backend == "inductor":
            # Its import is no part of compiling: the process of a sweep's run may have it already.
            import_module("torch._inductor.compile_fx")
        self._started_s = time.perf_counter()

    def on_train_batch_start(self, *_: Any) -> None:
        torch.compiler.cudagraph_mark_step_begin()

    def step_ended(self) -> None:
        if self.options is not None and self.session.step.step == 0:
            self.device.synchronize()
            self.run.compile.first_step_s = time.perf_counter() - self._started_s

    def before_window(self) -> None:
        self._warmup_graph_count, _ = graph_counts()
        if self.options is None:
            return
        end_compile_workers()
        # Without warm-up steps the first graphs are compiled inside the window.
        if self.session.steps_done and not self._warmup_graph_count:
            raise UsageError(
                f"trainer.compile compiled no graph of {', '.join(self.run.compile.targets or ())}; "
                "give the module a `compile_targets()` that names what its training_step calls"
            )

    def window_closed(self) -> None:
        facts = self.run.compile
        facts.graph_count, facts.graph_break_count = graph_counts()
        facts.window_recompile_count = facts.graph_count - self._warmup_graph_count
        if self.options is not None:
            facts.is_attention_fused = is_attention_fused()
