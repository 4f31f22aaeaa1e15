"""Compiles the module in place and records what compiling did."""

from __future__ import annotations

import time
from typing import Any

import torch

from lmbench.callbacks.observer import Observer
from lmbench.errors import UsageError
from lmbench.files import ScratchFolder
from lmbench.instruments.clock import synchronize
from lmbench.instruments.compiling import (
    CompileOptions,
    compile_in_place,
    empty_cache,
    end_compile_workers,
    graph_counts,
    is_attention_fused,
    use_cache,
)
from lmbench.instruments.window import ProbeKind
from lmbench.records.vocabulary import Stage


class Compiler(Observer):
    """torch.compile as a Trainer flag; asserts that something was compiled.

    Args:
        options: how to compile; None leaves the module alone and says so in the record.

    Leaves `compile.*`: the options, `is_enabled`, `targets`, `first_step_s` (the first step up to its end on the
    device, compilation included), `graph_count`, `graph_break_count`, `window_recompile_count`,
    `is_attention_fused`.
    """

    def __init__(self, options: CompileOptions | None = None) -> None:
        self.options = options

    def run_started(self) -> None:
        facts = self.session.run.compile
        facts.is_enabled = self.options is not None
        if self.options is not None:
            self.options.check(self.trainer.accumulate_grad_batches)
            torch._dynamo.utils.counters.clear()
            if self.options.cache == "private":
                # Removed with this object, at the latest when the process ends.
                self._cache = ScratchFolder("compile")
                use_cache(empty_cache() or self._cache.name)
            for name, value in vars(self.options).items():
                setattr(facts, name, value)
            facts.targets = compile_in_place(self.module, self.options)
        self._started_at = time.perf_counter()

    def on_train_batch_start(self, *_: Any) -> None:
        if self.options is not None and self.options.uses_cudagraphs:
            torch.compiler.cudagraph_mark_step_begin()

    def step_ended(self, stage: Stage, kind: ProbeKind | None) -> None:
        if self.options is not None and self.session.step.step == 0:
            synchronize(self.session.device)
            self.session.run.compile.first_step_s = time.perf_counter() - self._started_at

    def before_window(self) -> None:
        if self.options is None:
            return
        end_compile_workers()
        self._graphs_before, _ = graph_counts()
        # Without warm-up the first graphs are the window's own.
        if self.session.steps_done and not self._graphs_before:
            raise UsageError(
                f"trainer.compile compiled no graph of {', '.join(self.session.run.compile.targets or ())}; "
                "give the module a `compile_targets()` that names what its training_step calls"
            )

    def window_closed(self) -> None:
        if self.options is None:
            return
        facts = self.session.run.compile
        facts.graph_count, facts.graph_break_count = graphs, _ = graph_counts()
        facts.window_recompile_count = graphs - self._graphs_before
        facts.is_attention_fused = is_attention_fused()
