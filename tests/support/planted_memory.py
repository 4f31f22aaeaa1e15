"""Snapshots of PyTorch's CUDA allocator with known content: an allocator is simulated over a training step in which
every byte is planted. The fields are those that torch 2.13 pickles (../shared/memory_facts.md, A3)."""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 1 << 20
#: Unix time in us at which every planted history begins.
START_US = 1_790_000_000_000_000
USER, TORCH = "/home/someone/train.py", "/venv/lib/python3.11/site-packages/torch"

Stack = tuple[tuple[str, str, int], ...]
FORWARD: Stack = (
    ("forward", f"{TORCH}/nn/modules/linear.py", 134),
    ("_call_impl", f"{TORCH}/nn/modules/module.py", 1790),
    ("forward", USER, 21),
    ("_call_impl", f"{TORCH}/nn/modules/module.py", 1790),
    ("train", USER, 60),
)
OPTIMIZER: Stack = (
    ("_init_group", f"{TORCH}/optim/adamw.py", 190),
    ("step", f"{TORCH}/optim/adamw.py", 220),
    ("train", USER, 64),
)
ZERO_GRAD: Stack = (("zero_grad", f"{TORCH}/optim/optimizer.py", 1000), ("train", USER, 65))
BUILD: Stack = (("__init__", f"{TORCH}/nn/modules/linear.py", 105), ("main", USER, 12))
LOADER: Stack = (("next_batch", USER, 33),)
#: What autograd's own thread has.
ENGINE: Stack = ()


@dataclass
class Allocator:
    """Hands out addresses in segments as the caching allocator does, and writes its history."""

    device: int = 0
    max_entries: int | None = None
    entries: list[dict[str, Any]] = field(default_factory=list)
    annotations: list[dict[str, Any]] = field(default_factory=list)
    time_us: int = START_US
    is_on: bool = True

    def __post_init__(self) -> None:
        self.segments: list[dict[str, Any]] = []
        self.live: dict[int, dict[str, Any]] = {}
        self._free: list[tuple[int, int]] = []
        self._next = 0x7F00_0000_0000 + (self.device << 40)
        self._stacks: dict[Stack, list[dict[str, Any]]] = {}
        self.allocated = self.peak = self.reserved = 0

    def alloc(self, size: int, stack: Stack = FORWARD) -> int:
        """The address of a new block."""
        held = -(-size // 512) * 512
        for place, (address, length) in enumerate(self._free):
            if length >= held:
                self._free[place : place + 1] = [(address + held, length - held)] if length > held else []
                break
        else:
            address = self._segment(max(held, 20 * MIB))
            return self.alloc(size, stack)
        self.live[address] = {"held": held, "size": size, "stack": stack if self.is_on else None, "pending": False}
        self.allocated += held
        self.peak = max(self.peak, self.allocated)
        self._enter("alloc", address, size, stack)
        return address

    def free(self, address: int, stack: Stack = ENGINE, waits: bool = False) -> None:
        """Give a block back; where it `waits`, another stream has it still."""
        block = self.live[address]
        self.allocated -= block["held"]
        self._enter("free_requested", address, block["size"], stack)
        if waits:
            block["pending"] = True
        else:
            self.complete(address, stack)

    def complete(self, address: int, stack: Stack = ENGINE) -> None:
        block = self.live.pop(address)
        self._enter("free_completed", address, block["size"], stack)
        self._free.append((address, block["held"]))
        self._free.sort()
        merged: list[tuple[int, int]] = []
        for start, length in self._free:
            if merged and sum(merged[-1]) == start and not any(s["address"] == start for s in self.segments):
                merged[-1] = (merged[-1][0], merged[-1][1] + length)
            else:
                merged.append((start, length))
        self._free = merged

    def _segment(self, size: int) -> int:
        address, self._next = self._next, self._next + size + (2 << 20)
        self.segments.append({"address": address, "total_size": size})
        self._free.append((address, size))
        self.reserved += size
        self._enter("segment_alloc", address, size, FORWARD)
        return address

    def _enter(self, action: str, address: int, size: int, stack: Stack) -> None:
        self.time_us += 3
        if not self.is_on:
            return
        entry = {
            "action": action, "addr": address, "size": size, "stream": 0, "time_us": self.time_us,
            "compile_context": "N/A", "user_metadata": "", "frames": self._frames(stack), "pool_id": (0, 0),
        }  # fmt: skip
        self.entries.append(entry)
        if self.max_entries is not None and len(self.entries) > self.max_entries:
            del self.entries[0]

    def _frames(self, stack: Stack) -> list[dict[str, Any]]:
        if stack not in self._stacks:
            self._stacks[stack] = [{"name": n, "filename": f, "line": at} for n, f, at in stack]
        return self._stacks[stack]

    def mark(self, name: str, stage: str) -> None:
        self.time_us += 3
        if self.is_on:
            self.annotations.append({"name": name, "stage": stage, "device": self.device, "time_us": self.time_us})

    def moment(self, name: str) -> None:
        self.mark(name, "START")
        self.mark(name, "END")

    def snapshot_segments(self) -> list[dict[str, Any]]:
        made = []
        for segment in self.segments:
            start, end = segment["address"], segment["address"] + segment["total_size"]
            rows = []
            for address, block in self.live.items():
                if start <= address < end:
                    row = {
                        "address": address, "size": block["held"], "requested_size": block["size"],
                        "state": "active_pending_free" if block["pending"] else "active_allocated",
                    }  # fmt: skip
                    if block["stack"] is not None:
                        row["frames"] = self._frames(block["stack"])
                    rows.append(row)
            for address, length in self._free:
                if start <= address < end:
                    rows.append({"address": address, "size": length, "requested_size": 0, "state": "inactive"})
            rows.sort(key=lambda row: row["address"])
            held = [row for row in rows if row["state"] == "active_allocated"]
            active = [row for row in rows if row["state"] != "inactive"]
            made.append({
                "device": self.device, **segment, "allocated_size": sum(row["size"] for row in held),
                "active_size": sum(row["size"] for row in active),
                "requested_size": sum(row["requested_size"] for row in active), "stream": 0,
                "segment_type": "large", "segment_pool_id": (0, 0), "is_expandable": False, "frames": [],
                "blocks": rows,
            })  # fmt: skip
        return made


def snapshot(*allocators: Allocator) -> dict[str, Any]:
    """The plain value that PyTorch would pickle."""
    devices = max(each.device for each in allocators) + 1
    traces: list[list[dict[str, Any]]] = [[] for _ in range(devices)]
    for each in allocators:
        traces[each.device] = each.entries
    return {
        "segments": [segment for each in allocators for segment in each.snapshot_segments()],
        "device_traces": traces,
        "allocator_settings": {"PYTORCH_CUDA_ALLOC_CONF": "", "expandable_segments": False, "max_split_size": -1},
        "external_annotations": [note for each in allocators for note in each.annotations],
    }


def write(path: Path, *allocators: Allocator) -> Path:
    path.write_bytes(pickle.dumps(snapshot(*allocators), protocol=4))
    return path


@dataclass
class Step:
    """A planted history, what the notes say, and what is held at its peak: MiB by category."""

    memory: Allocator
    moments: list[dict[str, Any]] = field(default_factory=list)
    peak: dict[str, int] = field(default_factory=dict)

    def note(self, blocks: list[Any], outputs: list[Any] | None = None) -> None:
        self.memory.moment(f"lmbench.memory:{len(self.moments)}")
        self.moments.append({"blocks": blocks, "outputs": outputs or []})


def planted_run(max_entries: int | None = None, steps: int = 2) -> Step:
    """A recording of steps in which parameters are 40, optimizer state 80, gradients 40, inputs 1 MiB; each block saves
    30 MiB and logits are 16 MiB; forwards make 5 MiB of temporaries, backwards 24; 3 MiB are unknown, 8 a workspace."""
    memory = Allocator(max_entries=max_entries)
    memory.is_on = False
    parameters = {f"blocks.{i}.ffn.weight": memory.alloc(20 * MIB, BUILD) for i in range(2)}
    states = {f"blocks.{i}.ffn.weight": memory.alloc(40 * MIB, OPTIMIZER) for i in range(2)}
    memory.alloc(3 * MIB, BUILD)
    batch = memory.alloc(MIB, LOADER)
    workspace = memory.alloc(8 * MIB)
    memory.is_on = True
    step = Step(memory)
    held = {"parameters": 40, "optimizer_state": 80, "inputs": 1, "workspaces": 8, "unknown": 3}

    def hold(**changes: int) -> None:
        for name, size in changes.items():
            held[name] = held.get(name, 0) + size
        if memory.allocated == memory.peak:
            step.peak = {name: size for name, size in held.items() if size}

    hold()
    stays = [[address, "parameters", owner.rpartition(".")[0], ""] for owner, address in parameters.items()]
    stays += [[address, "optimizer_state", owner.rpartition(".")[0], ""] for owner, address in states.items()]
    step.note(stays)
    for number in range(steps):
        memory.mark(f"lmbench.step:{7 + number}", "START")
        memory.mark("lmbench.phase:forward", "START")
        step.note([[batch, "inputs", "", ""]])
        saved, streams = [], []
        for i in range(2):
            memory.mark(f"lmbench.module:blocks.{i}", "START")
            streams.append([f"blocks.{i}", memory.alloc(10 * MIB), [4, 512, 1280], 4])
            hold(activations=10)
            memory.mark(f"lmbench.module:blocks.{i}.ffn", "START")
            saved.append(memory.alloc(20 * MIB))
            hold(activations=20)
            passing = memory.alloc(5 * MIB)
            hold(temporaries=5)
            memory.free(passing, FORWARD)
            hold(temporaries=-5)
            memory.mark(f"lmbench.module:blocks.{i}.ffn", "END")
            memory.mark(f"lmbench.module:blocks.{i}", "END")
        logits = memory.alloc(16 * MIB)
        hold(logits=16)
        step.note(
            [[address, "activations", "", "MmBackward0"] for address in saved]
            + [[stream[1], "activations", "", "AddBackward0"] for stream in streams]
            + [[logits, "logits", "head", "LogSoftmaxBackward0"]],
            streams,
        )
        memory.mark("lmbench.phase:forward", "END")
        memory.mark("lmbench.phase:backward", "START")
        gradients = {}
        for i in (1, 0):
            passing = memory.alloc(24 * MIB, ENGINE)
            hold(temporaries=24)
            gradients[f"blocks.{i}.ffn"] = memory.alloc(20 * MIB, ENGINE)
            hold(gradients=20)
            memory.free(passing)
            hold(temporaries=-24)
            memory.free(saved[i])
            memory.free(streams[i][1])
            hold(activations=-30)
        memory.free(logits)
        hold(logits=-16)
        step.note([[address, "gradients", owner, ""] for owner, address in gradients.items()])
        memory.mark("lmbench.phase:backward", "END")
        memory.mark("lmbench.phase:optimizer", "START")
        passing = memory.alloc(7 * MIB, OPTIMIZER)
        hold(temporaries=7)
        memory.free(passing, OPTIMIZER)
        hold(temporaries=-7)
        memory.mark("lmbench.phase:optimizer", "END")
        memory.mark("lmbench.phase:zero_grad", "START")
        for address in gradients.values():
            memory.free(address, ZERO_GRAD)
        hold(gradients=-40)
        memory.mark("lmbench.phase:zero_grad", "END")
        step.note(stays)
        memory.mark(f"lmbench.step:{7 + number}", "END")
    memory.mark("lmbench.workspaces", "START")
    memory.free(workspace, (("_cuda_clearCublasWorkspaces", USER, 1),))
    memory.mark("lmbench.workspaces", "END")
    return step


def notes_of(step: Step, **fields: Any) -> bytes:
    """The content of the notes' file."""
    first = {"schema_version": 1, "device": step.memory.device, "first_step": 7, "steps": 2, "max_entries": 1_000_000}
    return json.dumps({**first, **fields, "moments": step.moments}).encode()
