"""The recording of some steps: named ranges around modules and phases, and a trace by torch.profiler.

Nsight can record from outside instead: the ranges are set for torch.profiler and, by NVTX, for Nsight.

A compiled region runs without the hooks of modules, and a fused kernel can belong to several of them. Inductor tells
which: at its provenance level 1 it notes, for each graph, the operations behind every kernel launch, in the order of
the launches. Each operation carries the stack of modules it was traced in (in a backward graph, the forward's stack).
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal
from unittest.mock import patch

import msgspec
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from lmbench.device import Device
from lmbench.errors import UsageError
from lmbench.instruments.phases import PhaseTrack
from lmbench.instruments.ranges import ModuleRanges, StepRanges
from lmbench.kernels.names import NAMES
from lmbench.kernels.trace_notes import NOTES, GraphNotes, TraceNotes

# Level 9, gzip's default, takes four times as long and saves 5 %.
COMPRESSION_LEVEL = 4
Tool = Literal["torch", "nsys"]


class Recording:
    """A recording of a module's steps; `steps` counts the whole ones.

    From its construction until `stop`, it notes the graphs that Inductor compiles.

    Args:
        module: the trained module; each of its submodules gets a range around its forward.
        device: the device that the module runs on.
        track: tells the phases of the steps.
        tool: `torch` records a trace; `nsys` only sets ranges, and the marks between which Nsight Systems records.
        with_stack: whether the trace has calls of Python functions.
    """

    def __init__(
        self, module: nn.Module, device: Device, track: PhaseTrack, tool: Tool, with_stack: bool = False
    ) -> None:
        self.steps, self._with_stack = 0, with_stack
        self._module, self._device, self._tool = module, device, tool
        self.ranges = StepRanges(track, device.markers)
        self._capture = self._device.capture if tool == "nsys" else None
        self._modules: ModuleRanges | None = None
        self._profile: Any = None
        # What the recording has changed in PyTorch and in the module.
        self._undo = ExitStack()
        self._graphs = self._undo.enter_context(noted_graphs()) if tool == "torch" else []

    def prepare(self) -> None:
        """Switch the profiler on early, so that the steps before `start`, not the recorded ones, pay for that.

        Raises:
            UsageError: another profiler is running; PyTorch allows one in a process.
        """
        if self._tool != "torch" or self._profile is not None:
            return
        if torch.autograd.profiler._is_profiler_enabled:
            raise UsageError("a profiler is running in this process already; stop it, or drop the KernelProfiler")
        # Keep Kineto from printing to standard error when it starts and stops.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        activities = [ProfilerActivity.CPU, *self._device.activities]
        self._profile = profile(activities=activities, acc_events=True, with_stack=self._with_stack)
        self._profile.prepare_trace()

    def start(self) -> None:
        """Begin to record; call this between two steps, with an idle device."""
        self._modules = ModuleRanges(self._module, self._device.markers)
        self._undo.callback(self._modules.remove)
        if self._profile is not None:
            self._profile.start_trace()
        elif self._capture is not None:
            self._capture.start()
            self._undo.callback(self._capture.stop)

    def end_step(self) -> None:
        """Count a whole step, which is now over."""
        self.ranges.end()
        self.steps += 1

    def stop(self, file: Path) -> int | None:
        """Stop, once, in any state and write the trace.

        Returns:
            The size of the trace in bytes; None without a trace.

        Raises:
            OSError: the trace cannot be written.
        """
        self.ranges.end()
        self._undo.close()
        modules, profiler = self._modules, self._profile
        if profiler is None:
            return None
        self._device.synchronize()
        if modules is None:
            # Once prepared, Kineto only stops after it was started.
            profiler.start_trace()
        classes = modules.classes if modules else {}
        notes = TraceNotes(1, self.steps, classes, self._graphs)
        profiler.add_metadata_json(NOTES, json.dumps(msgspec.to_builtins(notes)))
        profiler.stop_trace()
        return _write(profiler, file) if self.steps else None


def _write(profiler: Any, path: Path) -> int:
    """Write the trace as a gzip file, whole or not at all; returns its size in bytes.

    Raises:
        OSError: the trace cannot be written, even where Kineto gives no reason.
    """
    path.parent.mkdir(exist_ok=True)
    # Write in a temporary folder: Kineto leaves unfinished files under names of its choice.
    with TemporaryDirectory(dir=path.parent, prefix=".trace-") as folder:
        plain, packed = Path(folder, "trace.json"), Path(folder, path.name)
        profiler.export_chrome_trace(str(plain))
        if not plain.exists():
            free_mib = shutil.disk_usage(folder).free >> 20
            for unfinished in Path(folder).iterdir():
                # Free its space now: Kineto keeps the file open while the run's last steps are written.
                os.truncate(unfinished, 0)
            raise OSError(f"the profiler wrote no trace, with {free_mib} MiB of disk free")
        with plain.open("rb") as source, gzip.open(packed, "wb", COMPRESSION_LEVEL) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        packed.replace(path)
    return path.stat().st_size


@contextmanager
def noted_graphs() -> Iterator[list[GraphNotes]]:
    """A context in which the list that it gives gets an entry for each graph that Inductor compiles, in order.

    Inductor has no notes on a graph from its cache, so the cache of graphs is off meanwhile. If another version of
    PyTorch keeps its notes elsewhere, there are no entries, or empty ones.
    """
    from torch._inductor import config, debug

    before = config.post_grad_custom_post_pass
    users_passes = before if isinstance(before, list | tuple) else [before] if before is not None else []
    dump = getattr(debug, "dump_inductor_provenance_info", dict)
    graphs, paths, weightless = list[GraphNotes](), dict[str, str](), set[str]()

    def notes() -> dict[str, list[str]]:
        """Inductor's notes on the current graph: the names of operations by kernel launch."""
        return getattr(debug, "_inductor_triton_kernel_to_post_grad_node_info", {})

    def note_graph(graph: torch.fx.Graph) -> None:
        """Note the innermost module of each operation of a graph that Inductor is about to compile."""
        nonlocal paths, weightless
        # A function rather than a method: PyTorch makes a deep copy of its configuration, and so of a method's object.
        for users_pass in users_passes:
            users_pass(graph)
        paths = {node.name: path for node in graph.nodes if (path := _module_path(node))}
        weightless = {node.name for node in graph.nodes if _operation(node) in NAMES.weightless}
        notes().clear()

    def note_kernels() -> Any:
        """Add an entry: Inductor dumps its own notes on a graph once all kernels of the graph are made."""
        launches = {}
        for key, nodes in notes().items():
            # A key is `<kernel>:<number of the launch>`.
            name, _, number = key.rpartition(":")
            # Weightless operations only count in a kernel that has no others.
            working = [node for node in nodes if node not in weightless] or nodes
            launches[int(number)] = name, sorted({paths[node] for node in working if node in paths})
        graphs.append(GraphNotes([launches[number] for number in sorted(launches)]))
        return dump()

    settings = {"fx_graph_cache": False, "post_grad_custom_post_pass": note_graph}
    with (
        config.patch({"trace.provenance_tracking_level": 1, **settings}),
        _unlisted_kernels(),
        patch.object(debug, "dump_inductor_provenance_info", note_kernels, create=True),
    ):
        yield graphs


def _operation(node: torch.fx.Node) -> str:
    """The name of a node's operation, such as `mul` for `aten.mul.Tensor`."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet)).rpartition(".")[2]


def _module_path(node: torch.fx.Node) -> str:
    """The path of the innermost module that a node was traced in, such as `blocks.0.ffn`; empty if unknown.

    The stack has it as an expression, in which the path follows an expression for the root module.
    """
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ""
    expression = str(list(stack.values())[-1][0])
    return re.sub(r"^.*?(\['\w+'\]\.__self__|\['self'\]|L__self___)\.?", "", expression)


@contextmanager
def _unlisted_kernels() -> Iterator[None]:
    """A context in which Inductor's notes also list the kernels that it forgets (torch 2.11 to 2.13).

    A mixed-order reduction, such as a norm's backward pass for input and weight at once, is defined and called in one
    go. Inductor then writes the call's comment, and with it the note, without a kernel's name. The patch notes the
    kernel that was just defined.
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

    with patch.multiple(scheduling, define_kernel=define_kernel, codegen_comment=codegen_comment):
        yield
