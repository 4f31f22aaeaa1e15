"""torch.compile in place: the modules to compile, the caches, and counts of graphs and graph breaks."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.fsdp import FSDPModule

from lmbench.errors import UsageError
from lmbench.instruments.module_parts import compile_targets, is_compiled_whole
from lmbench.records.vocabulary import Values

#: Seconds that a compile worker gets to end by itself.
_WORKER_PATIENCE_S = 0.2

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@dataclass
class CompileOptions:
    """How to compile: `--trainer.compile true`, or any of these as `--trainer.compile.mode max-autotune`.

    Args:
        mode: torch.compile's mode.
        fullgraph: a graph break is an error.
        dynamic: null lets torch.compile decide, as `torch.compile(model)` does: a second shape compiles a graph for all
            shapes. True compiles such a graph at once, false one for every shape.
        regional: compile each block by itself (fast to compile) instead of the whole network.
        backend: torch.compile's backend.
        split_at_buckets: under ddp, split each graph at DDP's buckets, so that gradients can be reduced before the
            graph's backward ends. Null splits a network that is compiled as a whole. Blocks end often enough by
            themselves, and splitting them costs time: 22 of 259 ms for `large` on four H200s.
        cache: private starts from an empty cache, so that compile times are cold ones; shared uses the cache on the
            disk. The private cache is in the folder that TORCHINDUCTOR_CACHE_DIR names if it is empty, else in a
            temporary one.
    """

    mode: CompileMode = "default"
    fullgraph: bool = False
    dynamic: bool | None = None
    regional: bool = False
    backend: str = "inductor"
    split_at_buckets: bool | None = None
    cache: Literal["private", "shared"] = "private"

    @property
    def uses_cudagraphs(self) -> bool:
        return self.mode in ("reduce-overhead", "max-autotune")

    def check(self, micro_batches: int) -> None:
        """Refuse CUDA graphs where a step has several micro-batches.

        PyTorch then fails, or keeps the gradients of one micro-batch alone (pytorch/pytorch#169545, #96693).

        Raises:
            UsageError: the mode uses CUDA graphs, and gradients are accumulated.
        """
        if self.uses_cudagraphs and micro_batches > 1:
            raise UsageError(
                f"trainer.compile.mode is {self.mode}, whose CUDA graphs lose gradients that are accumulated; give "
                "trainer.accumulate_grad_batches 1, or mode default or max-autotune-no-cudagraphs"
            )

    def splitting(self) -> AbstractContextManager[None]:
        """Let Dynamo split graphs at DDP's buckets within, or not, as `split_at_buckets` says."""
        splits = not self.regional if self.split_at_buckets is None else self.split_at_buckets
        context: AbstractContextManager[None] = torch._dynamo.config.patch(optimize_ddp=splits)
        return context

    def arguments(self) -> Values:
        """Keyword arguments of `torch.compile`."""
        mode = None if self.mode == "default" else self.mode
        return {"mode": mode, "fullgraph": self.fullgraph, "dynamic": self.dynamic, "backend": self.backend}


def is_compiled(module: nn.Module) -> bool:
    """Whether a part of a module is compiled as a whole."""
    return any(map(is_compiled_whole, module.modules()))


def compile_in_place(module: LightningModule, options: CompileOptions, undo: ExitStack) -> list[str]:
    """Compile the module's targets, without renaming a parameter; returns the names of the targets.

    When the stack `undo` is closed, they are as they were.
    """
    names = {id(child): name or type(child).__name__ for name, child in module.named_modules()}
    targets = compile_targets(module, options.regional)
    for target in targets:
        _compile_call(target, options, undo)
    return [names.get(id(target), type(target).__name__) for target in targets]


def empty_cache() -> str | None:
    """The folder that TORCHINDUCTOR_CACHE_DIR names, if it is empty or missing, and so as good as a private one."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return folder if folder and not (Path(folder).is_dir() and any(Path(folder).iterdir())) else None


def use_cache(folder: str, undo: ExitStack) -> None:
    """Point Inductor's and Triton's caches of this process at a folder until the stack is closed."""
    variables = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": str(Path(folder) / "triton")}
    # Not by `patch.dict`, which also takes back what the user's code sets meanwhile.
    for name, value in variables.items():
        undo.callback(_set_variable, name, os.environ.get(name))
        os.environ[name] = value


def _set_variable(name: str, value: str | None) -> None:
    """Give an environment variable a value; None removes it."""
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _compile_call(target: nn.Module, options: CompileOptions, undo: ExitStack) -> None:
    # FSDP2 gathers and frees parameters by hooks around `forward`, which stay outside of the graph.
    is_sharded = isinstance(target, FSDPModule)
    call = target.forward if is_sharded else target._call_impl

    compiled = torch.compile(framed(call), **options.arguments())
    undo.enter_context(patch.object(target, "forward" if is_sharded else "_compiled_call_impl", compiled))


def framed(call: Callable[..., Any]) -> Callable[..., Any]:
    """The call in a frame for Dynamo, which skips frames of torch.nn: `nn.Sequential().compile()` compiles nothing."""

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return forward


def end_compile_workers() -> None:
    """End Inductor's compile workers; a later graph starts new ones.

    Inductor starts one worker a core, and each imports PyTorch, which takes ten seconds on 16 cores. The imports would
    go on beside the window, and the end of the run would wait for them: 4 s of 12 for a graph of three kernels (one
    H200, torch 2.11).
    """
    from torch._inductor import async_compile
    from torch._inductor.compile_worker.subproc_pool import SubprocPool

    for pool in list(async_compile._pool_set):
        # The shutdown below asks every pool to end. Kill this kind, Inductor's default, if it does not.
        if isinstance(pool, SubprocPool):
            timer = threading.Timer(_WORKER_PATIENCE_S, pool.process.kill)
            timer.daemon = True
            timer.start()
    async_compile.shutdown_compile_workers()


def graph_counts() -> tuple[int, int]:
    """Numbers of compiled graphs and of graph breaks in this process so far."""
    return int(counters["stats"]["unique_graphs"]), int(sum(counters["graph_break"].values()))


def bucket_split_count() -> int:
    """How many further graphs came from Dynamo's splitting of its graphs at DDP's buckets, in this process so far."""
    # AOTAutograd compiles each part of a graph that Dynamo has split.
    return max(int(counters["aot_autograd"]["total"] - counters["stats"]["unique_graphs"]), 0)


def is_attention_fused() -> bool | None:
    """Whether Inductor put `scaled_dot_product_attention` in the place of written-out attention in this process.

    Its pass `fuse_attention` counts that. None where a graph came from a cache, which does not tell.
    """
    if counters["inductor"]["fuse_attention"]:
        return True
    is_cached = counters["inductor"]["fxgraph_cache_hit"] or counters["aot_autograd"]["autograd_cache_hit"]
    return None if is_cached else False
