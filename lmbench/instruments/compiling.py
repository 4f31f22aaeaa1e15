"""torch.compile in place: what is compiled, and what compiling did."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import LightningModule
from torch import nn

from lmbench.errors import UsageError

_PATIENCE_S = 0.2

CompileMode = Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"]


@dataclass
class CompileOptions:
    """How to compile: `--trainer.compile true`, or any of these as `--trainer.compile.mode max-autotune`.

    Args:
        mode: torch.compile's mode.
        fullgraph: a graph break is an error.
        dynamic: shapes that may change without a new graph; false gives every shape its own.
        regional: compile each block by itself (fast to compile) instead of the whole network.
        backend: torch.compile's backend.
        cache: private starts from an empty cache, so that the cold time is one (the folder that TORCHINDUCTOR_CACHE_DIR
            names if it is empty, else a temporary one); shared uses what is on the disk.
    """

    mode: CompileMode = "default"
    fullgraph: bool = False
    dynamic: bool | None = False
    regional: bool = False
    backend: str = "inductor"
    cache: Literal["private", "shared"] = "private"

    @property
    def uses_cudagraphs(self) -> bool:
        return self.mode in ("reduce-overhead", "max-autotune")

    def check(self, accumulated: int) -> None:
        """Raises UsageError for CUDA graphs over micro-batches: PyTorch fails there, or counts one of them alone
        (pytorch/pytorch#169545, #96693)."""
        if self.uses_cudagraphs and accumulated > 1:
            raise UsageError(
                f"trainer.compile.mode is {self.mode}, whose CUDA graphs lose gradients that are accumulated; give "
                "trainer.accumulate_grad_batches 1, or mode default or max-autotune-no-cudagraphs"
            )

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `torch.compile`."""
        mode = None if self.mode == "default" else self.mode
        return {"mode": mode, "fullgraph": self.fullgraph, "dynamic": self.dynamic, "backend": self.backend}


def compile_in_place(module: LightningModule, options: CompileOptions) -> list[str]:
    """Compile `module`'s targets, keeping every parameter's name; returns the targets' names.

    Targets are the module's own `compile_targets()` if it has one, else the module itself if it defines `forward`, else
    each of its children. With `regional`, the members of the lists of modules inside those.
    """
    names = {id(child): name or type(child).__name__ for name, child in module.named_modules()}
    targets = compile_targets(module, options)
    for target in targets:
        _compile_call(target, options)
    return [names.get(id(target), type(target).__name__) for target in targets]


def compile_targets(module: LightningModule, options: CompileOptions) -> list[nn.Module]:
    """The modules that are compiled, each by itself."""
    targets_of_module = getattr(module, "compile_targets", None)
    if callable(targets_of_module):
        targets: list[nn.Module] = list(targets_of_module())
    elif type(module).forward is not LightningModule.forward:
        targets = [module]
    else:
        targets = list(module.children())
    if not options.regional:
        return targets
    lists = [m for t in targets for m in t.modules() if isinstance(m, nn.ModuleList | nn.Sequential)]
    nested = {id(m) for outer in lists for child in outer for m in child.modules()}
    return [child for outer in lists if id(outer) not in nested for child in outer] or targets


def empty_cache() -> str | None:
    """The folder that was set for this process's cache, if nothing is in it: then it is as good as a private one."""
    folder = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    return folder if folder and not (Path(folder).is_dir() and any(Path(folder).iterdir())) else None


def use_cache(folder: str) -> None:
    """Point Inductor's and Triton's caches of this process at a folder."""
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
    os.environ["TRITON_CACHE_DIR"] = str(Path(folder) / "triton")


def _compile_call(target: nn.Module, options: CompileOptions) -> None:
    # `nn.Sequential().compile()` and its like compile nothing, since frames of torch.nn are skipped; a frame of our
    # own around the call is compiled for every module.
    call = target._call_impl

    def forward(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)  # type: ignore[no-untyped-call]

    target._compiled_call_impl = torch.compile(forward, **options.arguments())


def end_compile_workers() -> None:
    """End the processes that Inductor compiles in; a later graph starts them anew.

    One a core imports PyTorch, for ten seconds where there are 16. That would go on beside the window, and the run's
    own end would wait for it: 4 s of 12 for a graph of three kernels (one H200, torch 2.11).
    """
    from torch._inductor import async_compile
    from torch._inductor.compile_worker.subproc_pool import SubprocPool

    for pool in list(async_compile._pool_set):
        # It is asked to end, and made to. Pools of another kind, which a setting of Inductor's chooses, are only asked.
        if isinstance(pool, SubprocPool):
            timer = threading.Timer(_PATIENCE_S, pool.process.kill)
            timer.daemon = True
            timer.start()
    async_compile.shutdown_compile_workers()


def graph_counts() -> tuple[int, int]:
    """Graphs compiled and graph breaks met in this process so far."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"]), int(sum(counters["graph_break"].values()))


def is_attention_fused() -> bool | None:
    """Whether Inductor put `scaled_dot_product_attention` in the place of attention that is written out (its pass
    `fuse_attention`) since the counters were cleared. None where a graph came from a cache, which does not say.
    """
    from torch._dynamo.utils import counters

    if counters["inductor"]["fuse_attention"]:
        return True
    is_cached = counters["inductor"]["fxgraph_cache_hit"] or counters["aot_autograd"]["autograd_cache_hit"]
    return None if is_cached else False
