"""Snapshots of PyTorch's CUDA allocator with known content: an allocator is simulated over a training step in which
every byte is planted. The fields are those of torch 2.13 that a reader needs."""

from __future__ import annotations

import json
import pickle
from contextlib import contextmanager
from functools import cache

MIB = 1 << 20
#: Unix time in us at which every planted history begins.
START_US = 1_790_000_000_000_000
USER, TORCH = "/home/someone/train.py", "/venv/lib/python3.11/site-packages/torch"

FORWARD = (
    ("forward", f"{TORCH}/nn/modules/linear.py", 134),
    ("_call_impl", f"{TORCH}/nn/modules/module.py", 1790),
    ("forward", USER, 21),
    ("_call_impl", f"{TORCH}/nn/modules/module.py", 1790),
    ("train", USER, 60),
)


@cache
def _frames(stack):
    return [{"name": name, "filename": file, "line": line} for name, file, line in stack]


class Allocator:
    """Hands out addresses in segments as the caching allocator does, and writes its history."""

    def __init__(self, device=0, max_entries=None, is_on=True):
        self.device, self.max_entries, self.is_on = device, max_entries, is_on
        self.entries, self.annotations, self.segments, self.live = [], [], {}, {}
        self.time_us, self.allocated, self.peak = START_US, 0, 0
        self._next = 0x7F00_0000_0000 + (device << 40)

    def alloc(self, size, stack=FORWARD):
        """The address of a new block: of the last one of its size that was given back, else in a new segment."""
        held = -(-size // 512) * 512
        free = [address for address, length in self.segments.items() if length == held and address not in self.live]
        if not free:
            free = [self._next]
            self.segments[self._next] = held
            self._enter("segment_alloc", self._next, held, stack)
            self._next += held + 2 * MIB
        self.hold(free[-1], held, size, stack)
        return free[-1]

    def hold(self, address, held, size, stack, is_new=True):
        """A block that was asked for as `size` lies there, `held` large; unless it `is_new`, for longer."""
        self.live[address] = {"held": held, "size": size, "stack": stack if self.is_on else None}
        self.allocated += held
        self.peak = max(self.peak, self.allocated)
        if is_new:
            self._enter("alloc", address, size, stack)

    def free(self, address, stack=()):
        """Give a block back."""
        block = self.live.pop(address)
        self.allocated -= block["held"]
        for action in ("free_requested", "free_completed"):
            self._enter(action, address, block["size"], stack)

    def _enter(self, action, address, size, stack):
        self.time_us += 3
        if self.is_on:
            entry = {"action": action, "addr": address, "size": size, "time_us": self.time_us}
            self.entries.append({**entry, "frames": _frames(stack)})
            del self.entries[: -(self.max_entries or len(self.entries))]

    def refuse(self, size, device_free, stack=FORWARD):
        """An allocation that fails for want of memory."""
        self._enter("oom", 0, size, stack)
        self.entries[-1] |= {"device_free": device_free}
        del self.entries[-1]["addr"]

    def mark(self, name, stage):
        self.time_us += 3
        if self.is_on:
            self.annotations.append({"name": name, "stage": stage, "device": self.device, "time_us": self.time_us})

    @contextmanager
    def range(self, name):
        """A range of the history around what happens in it."""
        self.mark(name, "START")
        yield
        self.mark(name, "END")

    def snapshot_segments(self):
        """A segment for each block, held or free."""
        for address, length in self.segments.items():
            known = {"state": "inactive"}
            if block := self.live.get(address):
                frames = {} if block["stack"] is None else {"frames": _frames(block["stack"])}
                known = {"state": "active_allocated", "requested_size": block["size"], **frames}
            blocks = [{"address": address, "size": length, **known}]
            yield {"device": self.device, "address": address, "total_size": length, "blocks": blocks}


def snapshot(*allocators):
    """The plain value that PyTorch would pickle."""
    traces = [[] for _ in range(max(memory.device for memory in allocators) + 1)]
    for memory in allocators:
        traces[memory.device] = memory.entries
    return {
        "segments": [segment for memory in allocators for segment in memory.snapshot_segments()],
        "device_traces": traces,
        "allocator_settings": {"expandable_segments": False},
        "external_annotations": [note for memory in allocators for note in memory.annotations],
    }


def write(path, *allocators):
    path.write_bytes(pickle.dumps(snapshot(*allocators), protocol=4))
    return path


#: What is held at the peak of a planted run, in MiB: in the backward of a step's second block.
PEAK = {
    "parameters": 40, "gradients": 20, "optimizer_state": 80, "activations": 60, "logits": 16, "inputs": 1,
    "temporaries": 24, "workspaces": 8, "unknown": 3,
}  # fmt: skip


class Step:
    """A planted history, and what the notes say."""

    def __init__(self, memory):
        self.memory, self.moments = memory, []

    def note(self, blocks):
        with self.memory.range(f"lmbench.memory:{len(self.moments)}"):
            self.moments.append(blocks)


def planted_run(max_entries=None):
    """A recording of steps in which parameters are 40, optimizer state 80, gradients 40, inputs 1 MiB; each block saves
    30 MiB and logits are 16 MiB; forwards make 5 MiB of temporaries, backwards 24; 3 MiB are unknown, 8 a workspace."""
    memory = Allocator(max_entries=max_entries, is_on=False)
    owners = [f"blocks.{i}.ffn" for i in range(2)]
    stays = [[memory.alloc(20 * MIB), "parameters", owner, ""] for owner in owners]
    stays += [[memory.alloc(40 * MIB), "optimizer_state", owner, ""] for owner in owners]
    memory.alloc(3 * MIB)
    batch, workspace = memory.alloc(MIB), memory.alloc(8 * MIB)
    memory.is_on = True
    step = Step(memory)
    step.note(stays)
    for number in (7, 8):
        with memory.range(f"lmbench.step:{number}"):
            _planted_step(step, batch, owners)
            step.note(stays)
    with memory.range("lmbench.workspaces"):
        memory.free(workspace)
    return step


def _planted_step(step, batch, owners):
    memory = step.memory
    with memory.range("lmbench.phase:forward"):
        step.note([[batch, "inputs", "", ""]])
        saved, streams = [], []
        for owner in owners:
            block = owner.rpartition(".")[0]
            with memory.range(f"lmbench.module:{block}"):
                streams.append(memory.alloc(10 * MIB))
                with memory.range(f"lmbench.module:{owner}"):
                    saved.append(memory.alloc(20 * MIB))
                    memory.free(memory.alloc(5 * MIB))
        logits = memory.alloc(16 * MIB)
        step.note(
            [[address, "activations", "", "MmBackward0"] for address in saved]
            + [[address, "activations", "", "AddBackward0"] for address in streams]
            + [[logits, "logits", "head", "LogSoftmaxBackward0"]]
        )
    with memory.range("lmbench.phase:backward"):
        gradients = []
        for owner, activation, stream in reversed(list(zip(owners, saved, streams, strict=True))):
            passing = memory.alloc(24 * MIB)
            gradients.append([memory.alloc(20 * MIB), "gradients", owner, ""])
            for address in (passing, activation, stream):
                memory.free(address)
        memory.free(logits)
        step.note(gradients)
    with memory.range("lmbench.phase:optimizer"):
        memory.free(memory.alloc(7 * MIB))
    with memory.range("lmbench.phase:zero_grad"):
        for gradient in gradients:
            memory.free(gradient[0])


def write_recording(folder, step, **fields):
    """The path of a step's snapshot in a folder, with lmbench's notes beside it."""
    folder.mkdir(exist_ok=True)
    first = {"schema_version": 2, "device": step.memory.device, "first_step": 7, "steps": 2, "max_entries": 1_000_000}
    (folder / "memory_notes.json").write_text(json.dumps({**first, **fields, "moments": step.moments}))
    return write(folder / "memory_snapshot.pickle", step.memory)
