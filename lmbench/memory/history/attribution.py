"""What each block of a history is for, and which part of the model it belongs to.

In lmbench's own recordings the notes say it, by address and moment; what they leave open, when it was allocated and
freed says. In anybody else's, only the stacks do. No category is guessed by size: what cannot be told is `unknown`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from lmbench.memory.categories import CATEGORIES, Category
from lmbench.memory.history.bands import NONE, Bands
from lmbench.memory.history.replay import BEFORE, Flags, Integers, Replay
from lmbench.memory.history.snapshot import NO_STACK, Frame, Snapshot
from lmbench.memory.recorded import MemoryNotes, NotedBlock

_CODE: dict[Category, int] = {name: code for code, name in enumerate(CATEGORIES)}
UNKNOWN = _CODE["unknown"]
#: What a block is first of all, where it is noted as several things: a saved tensor may be a parameter.
_RANKED: tuple[Category, ...] = (
    "parameters", "optimizer_state", "gradients", "inputs", "logits", "activations",
)  # fmt: skip
_RANK: dict[Category, int] = {name: rank for rank, name in enumerate(_RANKED)}
_LAST_RANK = len(_RANK)
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Attribution:
    """Of every block: its category (an index into CATEGORIES), its owner (into `owners`, NONE where nobody knows), the
    phase and step in which it was allocated (into `bands`), and the operator that saved it (into `operators`).

    `unmatched` are noted storages that no block of the history holds; `streams` are the blocks of what the model's
    repeated modules returned.
    """

    category: Integers
    owner: Integers
    owners: list[str]
    operator: Integers
    operators: list[str]
    phase: Integers
    step: Integers
    bands: Bands
    unmatched: int
    streams: Integers


def attribute(snapshot: Snapshot, played: Replay, notes: MemoryNotes | None) -> Attribution:
    """Categories, owners and phases of a device's blocks."""
    bands = Bands(snapshot.annotations, played.device)
    blocks = played.blocks
    start_us = _time_of(played, blocks.start)
    began = blocks.start != BEFORE
    phase = np.where(began, bands.phase_at.at(start_us), NONE)
    step = np.where(began, bands.step_at.at(start_us), NONE)
    module = np.where(began, bands.module_at.at(start_us), NONE)
    names = _Names(bands.module_at.names)
    later = np.array([*(names.index(name) for name in bands.backward_at.names), NONE], np.int64)
    # Autograd's thread has no ranges of modules: a gradient tells whose backward begins.
    module = np.where(began & (module == NONE), later[bands.backward_at.at(start_us)], module)
    found = Attribution(
        np.full(len(blocks), UNKNOWN), module.copy(), names.all, np.full(len(blocks), NONE), [], phase, step, bands, 0,
        np.empty(0, np.int64),
    )  # fmt: skip
    if notes is None:
        found.category[:] = _by_stacks(snapshot, played)
        return found
    if played.entry_count >= notes.max_entries > 0:
        # What lay at an address before the history begins, nobody knows; what stays is noted again at every step's end.
        bands.forget_moments_before(int(played.time_us[0]))
    lookup = _Lookup(played)
    unmatched = _by_notes(found, names, lookup, notes)
    rest = found.category == UNKNOWN
    end_phase, end_step = _at_end(bands, played)
    # Made and gone within one phase of one step.
    ended = blocks.end < played.entry_count
    is_gone = began & ended & (phase != NONE) & (end_phase == phase) & (end_step == step)
    found.category[rest & is_gone] = _CODE["temporaries"]
    found.category[rest & _freed_as_workspace(bands, played)] = _CODE["workspaces"]
    return replace(found, unmatched=unmatched, streams=_streams(bands, lookup, notes))


class _Names:
    """Names with their indices; some are there already."""

    def __init__(self, names: Sequence[str]) -> None:
        self.all = list(names)
        self._index = {name: place for place, name in enumerate(self.all)}

    def index(self, name: str) -> int:
        place = self._index.setdefault(name, len(self.all))
        if place == len(self.all):
            self.all.append(name)
        return place


def _time_of(played: Replay, entries: Integers) -> Integers:
    """When entries were; of what lies outside of the history, its border."""
    return played.time_us[np.clip(entries, 0, played.entry_count - 1)]


def _at_end(bands: Bands, played: Replay) -> tuple[Integers, Integers]:
    end_us = _time_of(played, played.blocks.end)
    return bands.phase_at.at(end_us), bands.step_at.at(end_us)


def _by_notes(found: Attribution, names: _Names, lookup: _Lookup, notes: MemoryNotes) -> int:
    """Fill in what the notes say; returns how many noted storages have no block."""
    rank = np.full(len(found.category), _LAST_RANK + 1)
    operators: dict[str, int] = {}
    unmatched = 0
    for place, moment in enumerate(notes.moments):
        at_us = found.bands.moments.get(place)
        if at_us is None:
            continue
        for noted in moment.blocks:
            block = lookup.block(noted.address, at_us)
            if block is None:
                unmatched += 1
                continue
            own = _RANK.get(noted.category, _LAST_RANK)
            if own < rank[block]:
                rank[block] = own
                found.category[block] = _CODE[noted.category]
                if noted.owner and _owns(noted):
                    found.owner[block] = names.index(noted.owner)
            if noted.operator and found.operator[block] == NONE:
                place_of = operators.setdefault(noted.operator, len(operators))
                found.operator[block] = place_of
    found.operators.extend(operators)
    return unmatched


def _streams(bands: Bands, lookup: _Lookup, notes: MemoryNotes) -> Integers:
    """Blocks of the outputs of modules in a list, such as `blocks.3`."""
    found = []
    for place, moment in enumerate(notes.moments):
        at_us = bands.moments.get(place)
        if at_us is None:
            continue
        outputs = [output for output in moment.outputs if block_of(output.owner) == output.owner]
        blocks = [lookup.block(output.address, at_us) for output in outputs]
        found += [block for block in blocks if block is not None]
    return np.array(found, np.int64)


def _owns(noted: NotedBlock) -> bool:
    """Whether the note's owner is the one who made it: an activation is saved by others than the one that made it."""
    return noted.category != "activations"


class _Lookup:
    """The block at an address at a time."""

    def __init__(self, played: Replay) -> None:
        blocks = played.blocks
        order = np.lexsort((blocks.start, blocks.address))
        self._order = order
        self._address = blocks.address[order]
        self._begin_us = np.where(
            blocks.start[order] == BEFORE, np.iinfo(np.int64).min, _time_of(played, blocks.start[order])
        )
        self._end_us = np.where(
            blocks.end[order] == played.entry_count, np.iinfo(np.int64).max, _time_of(played, blocks.end[order])
        )

    def block(self, address: int, time_us: int) -> int | None:
        first, last = np.searchsorted(self._address, [address, address + 1])
        for place in range(int(last) - 1, int(first) - 1, -1):
            if self._begin_us[place] <= time_us <= self._end_us[place]:
                return int(self._order[place])
        return None


def _freed_as_workspace(bands: Bands, played: Replay) -> Flags:
    end_us = _time_of(played, played.blocks.end)
    freed = played.blocks.end < played.entry_count
    found = np.zeros(len(played.blocks), bool)
    for band in bands.workspaces:
        found |= freed & (end_us >= band.start_us) & (end_us <= band.end_us)
    return found


# what stacks tell

_MODULE_CALLS = {"_call_impl", "_wrapped_call_impl"}
_BUILDING = {"_apply", "__init__", "reset_parameters", "load_state_dict", "_load_from_state_dict"}


def _is_module_call(frame: Frame) -> bool:
    return frame.name in _MODULE_CALLS and frame.filename.endswith("torch/nn/modules/module.py")


def _is_engine(frame: Frame) -> bool:
    return frame.name == "_engine_run_backward" or "torch::autograd::Engine" in frame.name


def _is_optimizer(frame: Frame) -> bool:
    return "/torch/optim/" in frame.filename and frame.name != "zero_grad"


def _is_state(frame: Frame) -> bool:
    return "/torch/optim/" in frame.filename and frame.name in ("_init_group", "_init_state")


def _is_zero_grad(frame: Frame) -> bool:
    return frame.name == "zero_grad"


def _is_loader(frame: Frame) -> bool:
    return "/torch/utils/data/" in frame.filename or frame.name in ("move_data_to_device", "transfer_batch_to_device")


def _is_building(frame: Frame) -> bool:
    return frame.name in _BUILDING and "/torch/nn/" in frame.filename


def _by_stacks(snapshot: Snapshot, played: Replay) -> Integers:
    """Categories of a history without notes.

    Parameters are made by a module's constructor or moved by it; optimizer state by an optimizer's initialisation;
    inputs by a loader. What the forward of a module makes is an activation if autograd frees it, temporary if the
    forward does. What autograd makes (on a thread of its own, without a Python stack) is temporary if autograd frees
    it, and a gradient if it is there when an optimizer runs, or when gradients are zeroed.
    """
    blocks = played.blocks
    made, freed = (_StackFlags(snapshot, stack) for stack in (blocks.stack, blocks.free_stack))
    began, ended = blocks.start != BEFORE, blocks.end < played.entry_count
    # Without stacks of Python's anywhere, their absence says nothing.
    has_stacks = bool((blocks.stack[began] != NO_STACK).any())
    by_forward = made.any(_is_module_call) & ~made.any(_is_engine)
    by_engine = began & has_stacks & (~made.exist | made.any(_is_engine))
    engine_frees = ended & has_stacks & (~freed.exist | freed.any(_is_engine))
    in_optimizer = made.any(_is_optimizer)
    found = np.full(len(blocks), UNKNOWN)
    for name, flags in (
        ("temporaries", by_forward & freed.any(_is_module_call)),
        ("activations", by_forward & engine_frees),
        ("temporaries", by_engine & engine_frees),
        ("gradients", by_engine & ~engine_frees & (_meets_optimizer(snapshot, played) | freed.any(_is_zero_grad))),
        ("temporaries", in_optimizer & freed.any(_is_optimizer)),
        ("inputs", made.any(_is_loader) & ~made.any(_is_module_call)),
        ("parameters", made.any(_is_building)),
        ("optimizer_state", made.any(_is_state) & ~freed.any(_is_optimizer)),
    ):
        found[flags] = _CODE[name]  # type: ignore[index]
    return found


class _StackFlags:
    """Properties of the stack of each block, each looked up once for every stack."""

    def __init__(self, snapshot: Snapshot, stack: Integers) -> None:
        self._snapshot, self._stack = snapshot, stack
        self.exist: Flags = stack != NO_STACK

    def any(self, test: Callable[[Frame], bool]) -> Flags:
        """Whether any frame of the stack passes."""
        frames = [test(frame) for frame in self._snapshot.frames]
        passed = np.array([*(any(frames[i] for i in stack) for stack in self._snapshot.stacks), False], dtype=bool)
        # NO_STACK is the last.
        return np.asarray(passed[self._stack])


def _meets_optimizer(snapshot: Snapshot, played: Replay) -> Flags:
    """Blocks that are held while an optimizer allocates or frees something."""
    stack = np.frombuffer(snapshot.traces[played.device].stack, np.int64)
    entries = np.flatnonzero(_StackFlags(snapshot, stack).any(_is_optimizer))
    if not len(entries):
        return np.zeros(len(played.blocks), bool)
    following = np.searchsorted(entries, played.blocks.start, side="right")
    is_there = following < len(entries)
    found: npt.NDArray[np.bool_] = is_there & (entries[np.minimum(following, len(entries) - 1)] < played.blocks.end)
    return found


def collapsed(owner: str) -> str:
    """A module's path with `*` for its indices: `blocks.3.attention.q` is one of `blocks.*.attention.q`."""
    return _INDEX.sub("*", owner)


def block_of(owner: str) -> str | None:
    """The path of the innermost indexed module around a module, such as `blocks.3`: None for what lies in none."""
    found = None
    for match in _INDEX.finditer(owner):
        found = owner[: match.end()]
        break
    return found


#: Not the user's: PyTorch's, Lightning's, lmbench's own around the step, and what the interpreter makes up.
_NOT_USERS = re.compile(
    r"/(torch|lightning|pytorch_lightning|lightning_fabric|triton|functorch)/|/torch_compile_debug/|torchinductor"
    r"|/lmbench/(measure|callbacks|fit|memory|kernels)/|^<|/contextlib\.py$|/functools\.py$|/_ops\.py$"
    r"|\.(cpp|h|cu|c|so)$"
)


def user_frame(snapshot: Snapshot, stack: int) -> Frame | None:
    """The innermost frame of the user's code, or of a library that is not PyTorch's or Lightning's."""
    if stack == NO_STACK:
        return None
    frames = (snapshot.frames[index] for index in snapshot.stacks[stack])
    return next((frame for frame in frames if frame.filename and not _NOT_USERS.search(frame.filename)), None)
