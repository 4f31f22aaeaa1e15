"""The recording of some steps: named ranges around what runs, and a trace by torch.profiler (or Nsight, from outside).

The ranges are for both: those of the profiler, and by NVTX those of an external one.

A compiled region runs without the hooks of modules, and a fused kernel can belong to several. Inductor knows: at its
provenance level 1 it notes, for each graph, the operations behind every kernel launch, in the order of the launches;
the operations carry the stack of modules they were traced in (those of a backward graph the forward's). That a graph is
done shows in the structured log that PyTorch's `tlparse` reads.
"""

from __future__ import annotations

import gzip
import json
import logging
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import msgspec
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lmbench.errors import UsageError
from lmbench.instruments.clock import synchronize
from lmbench.instruments.ranges import ModuleRanges, StepRanges
from lmbench.kernels.names import NAMES
from lmbench.kernels.recording import NOTES, GraphNotes, TraceNotes

# Level 9, gzip's default, takes four times as long for 5 % less.
COMPRESSION_LEVEL = 4
Tool = Literal["torch", "nsys"]


class Recording:
    """Recording of steps of a module; whole ones are counted in `steps`.

    Args:
        module: what is trained; each of its modules has a range around its forward.
        device: where it runs.
        tool: `torch` records a trace, `nsys` only sets ranges, and the marks between which Nsight Systems records.

    From its making until `stop`, it listens to what Inductor compiles.
    """

    def __init__(self, module: nn.Module, device: torch.device, tool: Tool) -> None:
        self.steps = 0
        self._module, self._device, self._tool = module, device, tool
        self._uses_nvtx = device.type == "cuda"
        self.ranges = StepRanges(self._uses_nvtx)
        self._modules: ModuleRanges | None = None
        self._profile: Any = None
        self._origins: GraphOrigins | None = None
        if tool == "torch":
            self._origins = GraphOrigins()
            self._origins.listen()

    def prepare(self) -> None:
        """Switch the instruments on, so that the steps until `start` pay for that and not the recorded ones.

        Raises UsageError where another profiler is running: PyTorch has one in a process.
        """
        if self._origins is None or self._profile is not None:
            return
        if torch.autograd.profiler._is_profiler_enabled:
            raise UsageError("a profiler is running in this process already; stop it, or drop the KernelProfiler")
        # Kineto tells standard error when it starts and stops.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._uses_nvtx else [])]
        self._profile = profile(activities=activities, acc_events=True)
        self._profile.prepare_trace()

    def start(self) -> None:
        """Begin, on an idle device and outside of steps."""
        self._modules = ModuleRanges(self._module, self._uses_nvtx)
        if self._profile is not None:
            self._profile.start_trace()
        elif self._tool == "nsys" and self._uses_nvtx:
            torch.cuda.profiler.start()

    def end_step(self) -> None:
        """A whole step is over."""
        self.ranges.end()
        self.steps += 1

    def stop(self, file: Path) -> int | None:
        """Stop, whatever state it is in, and write the trace; returns its size in bytes, None where there is none.

        May be called again. Raises OSError where the trace cannot be written.
        """
        self.ranges.end()
        modules, self._modules = self._modules, None
        recorded, self._profile = self._profile, None
        if modules is not None:
            modules.remove()
            if self._tool == "nsys" and self._uses_nvtx:
                torch.cuda.profiler.stop()
        graphs = self._origins.graphs if self._origins else []
        if self._origins is not None:
            self._origins.close()
            self._origins = None
        if recorded is None:
            return None
        synchronize(self._device)
        if modules is None:
            # Kineto, once prepared, goes on until it was started and stopped.
            recorded.start_trace()
        notes = TraceNotes(1, self.steps, self._device.type, modules.classes if modules else {}, graphs)
        recorded.add_metadata_json(NOTES, json.dumps(msgspec.to_builtins(notes)))
        recorded.stop_trace()
        return _write(recorded, file) if self.steps else None


def _write(recorded: Any, path: Path) -> int:
    """The trace as a gzip file, whole or not at all; returns its size in bytes.

    Raises:
        OSError: it cannot be written, also where Kineto keeps to itself why.
    """
    path.parent.mkdir(exist_ok=True)
    # In a folder of its own: Kineto leaves unfinished files under names of its choice.
    with TemporaryDirectory(dir=path.parent, prefix=".trace-") as folder:
        plain, packed = Path(folder, "trace.json"), Path(folder, path.name)
        recorded.export_chrome_trace(str(plain))
        if not plain.exists():
            free_mib = shutil.disk_usage(folder).free >> 20
            for unfinished in Path(folder).iterdir():
                # Kineto keeps it open, and its space would stay taken while the last steps are written.
                os.truncate(unfinished, 0)
            raise OSError(f"the profiler wrote no trace, with {free_mib} MiB of disk free")
        with plain.open("rb") as source, gzip.open(packed, "wb", COMPRESSION_LEVEL) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        packed.replace(path)
    return path.stat().st_size


GRAPH_DONE = "inductor_provenance_tracking_kernel_stack_traces"


class GraphOrigins(logging.Handler):
    """Listens to Inductor from `listen` to `close`; `graphs` has one entry for each compiled graph, in order.

    A graph that comes out of a cache says nothing, so the cache of graphs is off meanwhile. Where this PyTorch keeps
    its notes elsewhere, the entries are empty.
    """

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.graphs: list[GraphNotes] = []
        self._paths: dict[str, str] = {}
        self._weightless: set[str] = set()
        self._log = logging.getLogger("torch.__trace")
        self._patches = ExitStack()

    def listen(self) -> None:
        from torch._inductor import config

        before: Any = config.post_grad_custom_post_pass
        users_passes = before if isinstance(before, list | tuple) else [before] if before is not None else []

        def begin(graph: torch.fx.Graph) -> None:
            # A function and no method: PyTorch copies its configuration deeply.
            for users_pass in users_passes:
                users_pass(graph)
            self._begin(graph)

        # A graph that comes out of a cache says nothing.
        noting: Any = {"fx_graph_cache": False, "post_grad_custom_post_pass": begin}
        self._patches.enter_context(config.patch({"trace.provenance_tracking_level": 1, **noting}))
        self._patches.enter_context(_unlisted_kernels())
        self._log.addHandler(self)

    def close(self) -> None:
        self._patches.close()
        self._log.removeHandler(self)
        super().close()

    def _begin(self, graph: torch.fx.Graph) -> None:
        """Note the innermost module of every operation of the graph that is about to be made into kernels."""
        self._paths = {node.name: path for node in graph.nodes if (path := _module_path(node))}
        self._weightless = {node.name for node in graph.nodes if _operation(node) in NAMES["weightless"]}
        _notes().clear()

    def emit(self, record: logging.LogRecord) -> None:
        metadata = getattr(record, "metadata", None) or {}
        if (metadata.get("artifact") or {}).get("name") != GRAPH_DONE:
            return
        # A name ends in `:<number of the launch>`.
        launches = [(int(n), name, nodes) for key, nodes in _notes().items() for name, _, n in [key.rpartition(":")]]
        launches.sort(key=lambda launch: launch[0])
        self.graphs.append(GraphNotes([(name, self._modules(nodes)) for _, name, nodes in launches]))

    def _modules(self, nodes: list[str]) -> list[str]:
        working = [node for node in nodes if node not in self._weightless] or nodes
        return sorted({self._paths[node] for node in working if node in self._paths})


def _notes() -> dict[str, list[str]]:
    from torch._inductor import debug

    return getattr(debug, "_inductor_triton_kernel_to_post_grad_node_info", {})


def _operation(node: torch.fx.Node) -> str:
    """`mul` of `aten.mul.Tensor`."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet)).rpartition(".")[2]


def _module_path(node: torch.fx.Node) -> str:
    """`blocks.0.ffn` of the stack's innermost entry; the root is named by the expression that reached it."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    expression = str(list(stack.values())[-1][0])
    return re.sub(r"^.*?(\['\w+'\]\.__self__|\['self'\]|L__self___)\.?", "", expression)


@contextmanager
def _unlisted_kernels() -> Iterator[None]:
    """Meanwhile Inductor notes what it forgets (torch 2.11 to 2.13): each kernel whose call is commented without its
    name.

    A mixed-order reduction, such as a norm's backward pass for input and weight at once, is defined and called in one
    go; Inductor writes the call's comment, and with it the note, for no name. The kernel is the one just defined.
    """
    from torch._inductor.codegen.triton import TritonScheduling
    from torch._inductor.debug import set_kernel_post_grad_provenance_tracing

    scheduling: Any = TritonScheduling
    define, comment = scheduling.define_kernel, scheduling.codegen_comment
    defined = ""

    def define_kernel(self: Any, *args: Any, **kwargs: Any) -> str:
        nonlocal defined
        defined = str(define(self, *args, **kwargs))
        return defined

    def codegen_comment(self: Any, node_schedule: Any, kernel_name: str | None = None) -> None:
        comment(self, node_schedule, kernel_name)
        if kernel_name is None and defined:
            set_kernel_post_grad_provenance_tracing(node_schedule, defined)

    scheduling.define_kernel, scheduling.codegen_comment = define_kernel, codegen_comment
    try:
        yield
    finally:
        scheduling.define_kernel, scheduling.codegen_comment = define, comment
