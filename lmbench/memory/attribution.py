"""What each block of a history is for, and which part of the model it belongs to.

In lmbench's own recordings the notes say it, by address and moment; what they leave open, the phases in which the block
was allocated and freed say. In anybody else's, only the stacks do. No category is guessed by size: the rest is
`unknown`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from lmbench.memory.categories import Category
from lmbench.memory.recorded import BACKWARD, MOMENT, WORKSPACES, MemoryNotes
from lmbench.memory.replay import BEFORE, Replay
from lmbench.memory.snapshot import NO_STACK, Annotation, Frame, Snapshot
from lmbench.records.intervals import Integers, locate, paint
from lmbench.records.vocabulary import MODULE, PHASE, STEP

_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")
#: What a block is first of all, where it is noted as several things: a saved tensor may be a parameter.
_RANKS: Sequence[Category] = ("parameters", "optimizer_state", "gradients", "inputs", "logits", "activations")


class Ranges:
    """Named ranges of time in us of Unix time, which may be nested: from `start` up to `end`."""

    def __init__(self, ranges: Iterable[tuple[str, int, int]]) -> None:
        ranges = sorted(ranges, key=lambda named: named[1:])
        self.names = [name for name, _, _ in ranges]
        self.start = np.array([start for _, start, _ in ranges], np.int64)
        self.end = np.array([end for _, _, end in ranges], np.int64)
        self._pieces = paint(self.start, self.end)

    def __len__(self) -> int:
        return len(self.names)

    def at(self, time_us: Integers) -> Any:
        """The name of the innermost range around each moment, empty outside of all."""
        start, end, owner = self._pieces
        piece = locate(start, end, time_us)
        return np.array([*self.names, ""], object)[np.where(piece >= 0, np.append(owner, -1)[piece], -1)]

    def outermost(self) -> Ranges:
        """The ranges that lie in no other one."""
        kept: list[tuple[str, int, int]] = []
        for name, start, end in sorted(zip(self.names, self.start, self.end, strict=True), key=lambda r: (r[1], -r[2])):
            if not kept or start >= kept[-1][2]:
                kept.append((name, start, end))
        return Ranges(kept)


@dataclass(frozen=True)
class Bands:
    """The ranges of one device's history: steps, phases, modules in their forward, modules from the beginning of their
    backward to the next one's, and ranges of any other name, a stranger's `record_function`."""

    steps: Ranges
    phases: Ranges
    modules: Ranges
    backward: Ranges
    workspaces: Ranges
    others: Ranges
    #: When each moment of the notes was, by its index.
    moments: dict[int, int]


def bands_of(annotations: Iterable[Annotation], device: int) -> Bands:
    """The ranges of a device, by the annotations of a snapshot."""
    notes = sorted((note for note in annotations if note.device == device), key=lambda note: note.time_us)
    ranges: list[tuple[str, int, int]] = []
    opened: list[Annotation] = []
    for note in notes:
        place = next((i for i in reversed(range(len(opened))) if opened[i].name == note.name), None)
        if note.stage == "START":
            opened.append(note)
        elif place is not None:
            ranges.append((note.name, opened[place].time_us, note.time_us))
            # Ranges that are left open inside were cut off by an exception; ranges of other kinds may overlap.
            del opened[place]

    def of(prefix: str) -> Ranges:
        return Ranges((name[len(prefix) :], start, end) for name, start, end in ranges if name.startswith(prefix))

    phases, marks = of(PHASE), of(BACKWARD)
    borders = np.unique(np.concatenate((marks.start, phases.start)))
    following = np.append(borders, np.iinfo(np.int64).max)[np.searchsorted(borders, marks.start, side="right")]
    marked = of(MOMENT)
    moments = {
        int(name): time for name, time in zip(marked.names, marked.start.tolist(), strict=True) if name.isdecimal()
    }
    return Bands(
        of(STEP), phases, of(MODULE), Ranges(zip(marks.names, marks.start.tolist(), following.tolist(), strict=True)),
        of(WORKSPACES), Ranges(named for named in ranges if not named[0].startswith("lmbench.")), moments,
    )  # fmt: skip


@dataclass(frozen=True)
class Attribution:
    """The blocks of a replay with more columns: `category`, `owner` (the path of a module), the `phase` and `step` in
    which the block was allocated, and the `operator` that saved it; each empty where nobody knows.

    `unmatched` are noted storages that no block of the history holds; `streams` are the rows of what the model's
    repeated modules returned.
    """

    blocks: Any
    bands: Bands
    unmatched: int = 0
    streams: Sequence[int] = ()


def attribute(snapshot: Snapshot, played: Replay, notes: MemoryNotes | None) -> Attribution:
    """Categories, owners and phases of a device's blocks."""
    bands, blocks = bands_of(snapshot.external_annotations, played.device), played.blocks
    is_begun, start_us, end_us = blocks["start"] != BEFORE, played.clock(blocks["start"]), played.clock(blocks["end"])
    module, backward = bands.modules.at(start_us), bands.backward.at(start_us)
    # Autograd's thread has no ranges of modules: a gradient tells whose backward begins.
    columns = {
        "owner": np.where(module == "", backward, module), "phase": bands.phases.at(start_us),
        "step": bands.steps.at(start_us),
    }  # fmt: skip
    known = {name: pd.Series(names, dtype=object).where(is_begun, "") for name, names in columns.items()}
    blocks = blocks.assign(category="unknown", operator="", **known).astype({"category": object, "operator": object})
    if notes is None:
        return Attribution(blocks.assign(category=_by_stacks(played)), bands)
    moments = bands.moments
    if played.entry_count >= notes.max_entries > 0:
        # What lay at an address before the history begins, nobody knows; what stays is noted again at every step's end.
        moments = {place: time for place, time in moments.items() if time >= played.time_us[0]}
    noted = pd.DataFrame(
        [
            (moments[place], block.address, block.category, block.owner, block.operator)
            for place, moment in enumerate(notes.moments) if place in moments for block in moment.blocks
        ],
        columns=["time_us", "address", "category", "owner", "operator"],
    )  # fmt: skip
    noted["block"] = _block_at(played, noted)
    outputs = pd.DataFrame(
        [
            (moments[place], output.address)
            for place, moment in enumerate(notes.moments) if place in moments
            for output in moment.outputs if block_of(output.owner) == output.owner
        ],
        columns=["time_us", "address"],
    )  # fmt: skip
    streams = [row for row in _block_at(played, outputs) if row >= 0]
    matched = noted[noted["block"] >= 0]
    rank = matched["category"].map({name: rank for rank, name in enumerate(_RANKS)}).fillna(len(_RANKS))
    first = matched.assign(rank=rank).sort_values("rank", kind="stable").drop_duplicates("block").set_index("block")
    blocks.loc[first.index, "category"] = first["category"]
    # An activation is saved by others than the module that made it.
    owned = first[(first["owner"] != "") & (first["category"] != "activations")]
    blocks.loc[owned.index, "owner"] = owned["owner"]
    saved = matched[matched["operator"] != ""].drop_duplicates("block").set_index("block")
    blocks.loc[saved.index, "operator"] = saved["operator"]
    is_open, is_freed = blocks["category"] == "unknown", blocks["end"] < played.entry_count
    is_in_one_phase = (bands.phases.at(end_us) == blocks["phase"]) & (bands.steps.at(end_us) == blocks["step"])
    blocks.loc[is_open & is_freed & is_in_one_phase & (blocks["phase"] != ""), "category"] = "temporaries"
    is_dropped = np.zeros(len(blocks), bool)
    for start, end in zip(bands.workspaces.start, bands.workspaces.end, strict=True):
        is_dropped |= (end_us >= start) & (end_us <= end)
    blocks.loc[is_open & is_freed & is_dropped, "category"] = "workspaces"
    return Attribution(blocks, bands, int((noted["block"] < 0).sum()), streams)


def _block_at(played: Replay, places: Any) -> Integers:
    """The row of the block that held an address at a time, for each of `places`; -1 where there was none."""
    blocks, limits = played.blocks, np.iinfo(np.int64)
    start_us = np.where(blocks["start"] == BEFORE, limits.min, played.clock(blocks["start"]))
    end_us = np.where(blocks["end"] == played.entry_count, limits.max, played.clock(blocks["end"]))
    held = blocks.assign(begin_us=start_us, end_us=end_us, row=np.arange(len(blocks))).sort_values(
        ["begin_us", "start"]
    )
    asked = places[["time_us", "address"]].astype(np.int64).reset_index().sort_values("time_us", kind="stable")
    columns = ["address", "begin_us", "end_us", "row"]
    latest = pd.merge_asof(asked, held[columns], left_on="time_us", right_on="begin_us", by="address")
    row = latest["row"].where(latest["time_us"] <= latest["end_us"], -1).fillna(-1).astype(np.int64)
    found: Integers = row.set_axis(latest["index"]).sort_index().to_numpy()
    return found


# what stacks tell

_LOADING = {"move_data_to_device", "transfer_batch_to_device"}
_BUILDING = {"_apply", "__init__", "reset_parameters", "load_state_dict", "_load_from_state_dict"}


def _is_module_call(frame: Frame) -> bool:
    is_call = frame.name in ("_call_impl", "_wrapped_call_impl")
    return is_call and frame.filename.endswith("torch/nn/modules/module.py")


def _is_engine(frame: Frame) -> bool:
    return frame.name == "_engine_run_backward" or "torch::autograd::Engine" in frame.name


def _is_optimizer(frame: Frame) -> bool:
    return "/torch/optim/" in frame.filename and frame.name != "zero_grad"


def _by_stacks(played: Replay) -> Any:
    """Categories of a history without notes.

    Parameters are made by a module's constructor or moved by it; optimizer state by an optimizer's initialisation;
    inputs by a loader. What the forward of a module makes is an activation if autograd frees it, temporary if the
    forward does. What autograd makes (on a thread of its own, without a Python stack) is temporary if autograd frees
    it, and a gradient if it is there when an optimizer runs, or when gradients are zeroed.
    """

    def has(stack: Any, test: Callable[[Frame], bool]) -> Any:
        """Whether any frame of each stack passes; NO_STACK is the last place."""
        return np.array([*(any(map(test, frames)) for frames in played.stacks.frames), False])[stack]

    blocks, actions = played.blocks, played.actions
    made, freed, start, end = (blocks[name].to_numpy() for name in ("stack", "free_stack", "start", "end"))
    is_begun, is_ended = start != BEFORE, end < played.entry_count
    # Without stacks of Python's anywhere, their absence says nothing.
    has_stacks = bool((made[is_begun] != NO_STACK).any())
    by_forward = has(made, _is_module_call) & ~has(made, _is_engine)
    by_engine = is_begun & has_stacks & ((made == NO_STACK) | has(made, _is_engine))
    engine_frees = is_ended & has_stacks & ((freed == NO_STACK) | has(freed, _is_engine))
    # Blocks that are held while an optimizer allocates or frees something.
    optimizing = np.append(np.flatnonzero(has(actions["stack"].to_numpy(), _is_optimizer)), np.iinfo(np.int64).max)
    meets_optimizer = optimizing[np.searchsorted(optimizing, start, side="right")] < end
    is_zeroed = has(freed, lambda frame: frame.name == "zero_grad")
    loads = has(made, lambda frame: "/torch/utils/data/" in frame.filename or frame.name in _LOADING)
    builds = has(made, lambda frame: frame.name in _BUILDING and "/torch/nn/" in frame.filename)
    initializes = has(made, lambda f: "/torch/optim/" in f.filename and f.name in ("_init_group", "_init_state"))
    category = np.full(len(blocks), "unknown", object)
    for name, is_of_it in (
        ("temporaries", by_forward & has(freed, _is_module_call)),
        ("activations", by_forward & engine_frees),
        ("temporaries", by_engine & engine_frees),
        ("gradients", by_engine & ~engine_frees & (meets_optimizer | is_zeroed)),
        ("temporaries", has(made, _is_optimizer) & has(freed, _is_optimizer)),
        ("inputs", loads & ~has(made, _is_module_call)),
        ("parameters", builds),
        ("optimizer_state", initializes & ~has(freed, _is_optimizer)),
    ):
        category[is_of_it] = name
    return category


def collapsed(owner: str) -> str:
    """A module's path with `*` for its indices: `blocks.3.attention.q` is one of `blocks.*.attention.q`."""
    return _INDEX.sub("*", owner)


def block_of(owner: str) -> str | None:
    """The path of the outermost indexed module around a module, such as `blocks.3`: None for what lies in none."""
    match = _INDEX.search(owner)
    return owner[: match.end()] if match else None


#: Not the user's: PyTorch's, Lightning's, lmbench's own around the step, and what the interpreter makes up.
_NOT_USERS = re.compile(
    r"/(torch|lightning|pytorch_lightning|lightning_fabric|triton|functorch)/|/torch_compile_debug/|torchinductor"
    r"|/lmbench/(measure|callbacks|fit|memory|kernels)/|^<|/contextlib\.py$|/functools\.py$|/_ops\.py$"
    r"|\.(cpp|h|cu|c|so)$|^$"
)


def user_frame(frames: Iterable[Frame]) -> str:
    """The innermost frame of the user's code, or of a library that is not PyTorch's or Lightning's, as text."""
    return next((str(frame) for frame in frames if not _NOT_USERS.search(frame.filename)), "")
