"""What each block of a history is for, which part of the model it belongs to, and which line of code made it.

In lmbench's own recordings the notes say it, by address and moment; what they leave open, the phases in which the block
was allocated and freed say. In anybody else's, only the stacks do. No category is guessed by size: the rest is
`unknown`. PyTorch records frames of C++ among those of Python unless it is asked for `stacks="python"`. Autograd's own
thread has no frames of Python, those of C++ name its engine.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pandas as pd
from msgspec.structs import astuple

from lmbench.memory.blocks import (
    BACKWARD,
    BEFORE,
    CATEGORIES,
    LASTING,
    MOMENT,
    WORKSPACES,
    Category,
    MemoryNotes,
    NotedBlock,
)
from lmbench.memory.snapshot import NO_STACK, Annotation, Replay, Snapshot, Stack
from lmbench.records.intervals import Integers, locate, paint
from lmbench.records.vocabulary import MODULE, PHASE, PHASES, STEP

#: What a frame ("file name") says of its stack: the category of what it makes, or the phase that it belongs to. Of
#: several frames the innermost counts: a forward in the closure that an optimizer's step calls is a forward.
_ROLE = re.compile(
    r"""
    (?P<workspaces> [ ]at::\w+::get\w*(BlasHandle|Workspace))
    # Buckets of DistributedDataParallel, which gradients are views of.
    |(?P<gradients> /torch/nn/parallel/distributed\.py[ ]_ddp_init_helper$ | [ ]c10d::Reducer::initialize_buckets)
    |(?P<inputs> /torch/utils/data/
        | [ ](move_data_to_device|transfer_batch_to_device|send_to_device|_prepare_inputs?)$)
    |(?P<parameters>
        /torch/nn/\S*[ ](_apply|__init__|reset_parameters|_?load_\w*state_dict|_load_from_state_dict)$
        | /torch/nn/parallel/replicate\.py[ ] | [ ](from_pretrained|module[ ]constructor)$
        # Shards, and what is gathered of them.
        | /torch/distributed/fsdp/\S*[ ](__init__|_init_\w*param\w*|\w*alloc_\w*|\w*all_gather\w*)$)
    |(?P<zero_grad> [ ]zero_grad$)
    |(?P<backward> [ ](_engine_run_backward|backward)$ | [ ]torch::autograd::Engine::
        | /torch/utils/checkpoint\.py[ ](unpack_hook|recompute_fn)$)
    |(?P<forward> [ ](forward|_call_impl|training_step|closure)$)
    |(?P<optimizer> /torch/optim/)
    """,
    re.VERBOSE,
)
#: What is there when the phase that made it is over.
_LEFT: Mapping[str, Category] = {
    **{name: name for name in CATEGORIES}, "forward": "activations", "backward": "gradients",
    "optimizer": "optimizer_state",
}  # fmt: skip

#: PyTorch's, Lightning's and what wraps functions: their lines do not tell one part of a model from another.
_LIBRARY = re.compile(
    r"/(site-packages|dist-packages|pytorch|[^/]*link-tree)/(torch|functorch|triton|lightning\w*|pytorch_lightning|accelerate|einops"
    r"|jaxtyping|beartype|IPython|ipykernel)/|/lmbench/(measure|callbacks|fit|memory|kernels)/"
    r"|/torch_compile_debug/|torchinductor|/lib(64)?/python[\d.]+/(?!site-packages|dist-packages)|^<(?!ipython|stdin)"
    rf"|^\w:(?i:.*(python|conda|mamba|forge).*/lib/({'|'.join(sorted(sys.stdlib_module_names))})(/|\.py$))"
)
_OPERATOR = re.compile(r"^at::_ops::(?!(?:new_)?empty|resize_|set_)(\w+)::(?:call|redispatch)\b")
#: What tells a reader something where no line of the user's is: a module of PyTorch's, or compiled code; but not what
#: lies between a module and the one that calls it.
_TELLING = re.compile(r"/torch/nn/modules/(?!module\.py$)|torchinductor")


def user_frame(frames: Stack) -> str:
    """The innermost frame of the user's code, or of a library's that holds models; without one, the operator, or the
    innermost frame of PyTorch's modules or of compiled code; empty where only PyTorch's insides are."""
    python = [frame for frame in frames if frame.is_python]
    operators = (f"aten::{match[1]}" for frame in frames if (match := _OPERATOR.match(frame.name)))
    users = (str(frame) for frame in python if not _LIBRARY.search(frame.path))
    modules = (str(frame) for frame in python if _TELLING.search(frame.path))
    return next(chain(users, operators, modules), "")


def stack_roles(played: Replay) -> tuple[Any, list[tuple[str, int, int]]]:
    """What the stacks of a history without notes say, by _ROLE.

    Returns the categories of the blocks, `unknown` where no stack tells, and the stretches of entries in one phase: its
    name, its first entry, and the one that it ends before. What follows a forward and has no role, such as the loss,
    belongs to it.
    """
    log, blocks = played.entries, played.blocks
    of_stack = _roles_of_stacks(played.stacks)
    # Where other entries of an action have a stack of Python's, one without is of autograd's thread.
    has_stacks = log.groupby("action")["stack"].transform("max") != NO_STACK
    is_python = all(frame.is_python for place in set(log["stack"]) for frame in played.stacks[place])
    is_engine = (log["stack"] == NO_STACK) & has_stacks & is_python
    entries = pd.Series(of_stack[log["stack"]]).mask(is_engine, "backward")
    latest = entries.ffill()
    phase = latest.where(entries.notna() | (latest == "forward")).where(latest.isin(PHASES))
    known = phase.ffill()
    rounds = (known != known.shift()).cumsum()
    start, end, is_older = blocks["start"].clip(0), blocks["end"], blocks["start"] == BEFORE

    def at(moments: Any, of_entries: Any = entries) -> Any:
        """A series of entries at the moments of blocks."""
        return of_entries.reindex(moments).set_axis(blocks.index)

    made = at(start).mask(is_older, of_stack[blocks["stack"]])
    # What begins and ends in one phase, with no other one between.
    is_passing = (at(start, phase) == at(end, phase)) & (at(start, rounds) == at(end, rounds)) & ~is_older
    # Where memory ran out within a phase, what it leaves cannot be told from what it has in passing.
    is_cut = (end == len(log)) & at(start, rounds).isin(rounds[log["action"] == "oom"])
    is_cut &= made.isin(("backward", "optimizer"))
    left = made.map(_LEFT).mask(at(end) == "zero_grad", "gradients")
    left = left.mask(left.isna() & (at(end) == "backward") & ~is_older, "activations")
    categories = left.mask(is_cut).mask(is_passing, "temporaries").fillna("unknown").astype(object)
    names = phase.fillna("")
    borders = [*np.flatnonzero(names != names.shift()).tolist(), len(names)]
    return categories, [(names[first], first, past) for first, past in pairwise(borders) if names[first]]


def _roles_of_stacks(stacks: Sequence[Stack]) -> Any:
    """The role of each stack; None of those that have none."""
    functions = {(frame.filename, frame.name): frame.path for frames in stacks for frame in frames}
    # A constructor of a module calls no function that is only for modules: its file has a forward too.
    modules = {file for file, name in functions if name == "forward"}
    role_of = {}
    for (file, name), path in functions.items():
        called = "module constructor" if name == "__init__" and file in modules else name
        match = _ROLE.search(f"{path} {called}")
        role_of[file, name] = match.lastgroup if match else None
    roles = []
    for frames in stacks:
        known = [role for frame in frames if (role := role_of[frame.filename, frame.name])]
        # A forward that a checkpoint computes once more is of the backward.
        is_again = known[:1] == ["forward"] and "backward" in known
        roles.append("backward" if is_again else next(iter(known), None))
    return np.array(roles, object)


#: In the place of what names of ranges begin with: of those that a stranger's `record_function` made.
OTHERS = ""
_LIMITS = np.iinfo(np.int64)


class Ranges:
    """Named ranges of time in us of Unix time, which may be nested: from `start` up to `end`.

    `pieces` are the ranges without what inner ones take of them, in order.
    """

    def __init__(self, ranges: Iterable[Any]) -> None:
        frame = pd.DataFrame(ranges, columns=["name", "start", "end"]).astype({"start": np.int64, "end": np.int64})
        frame = frame.sort_values(["start", "end"], kind="stable")
        self.names = frame["name"].tolist()
        self.start, self.end = frame["start"].to_numpy(), frame["end"].to_numpy()
        self._start, self._end, owner = paint(self.start, self.end)
        self._owners = [self.names[index] for index in owner]
        self.pieces = list(zip(self._owners, self._start.tolist(), self._end.tolist(), strict=True))

    def at(self, time_us: Integers) -> Any:
        """The name of the innermost range around each moment, empty outside of all."""
        return np.array([*self._owners, ""], object)[locate(self._start, self._end, time_us)]


def bands_of(annotations: Iterable[Annotation], device: int) -> dict[str, Ranges]:
    """The ranges of a device by what their names begin with, and in OTHERS those that are not lmbench's.

    BACKWARD has modules from the beginning of their backward to the next one's.
    """
    ranges: list[tuple[str, int, int]] = []
    # Ranges that are left open were cut off by an exception; ranges of different names may overlap.
    opened = defaultdict[str, list[int]](list)
    for note in sorted((note for note in annotations if note.device == device), key=lambda note: note.time_us):
        if note.stage == "START":
            opened[note.name].append(note.time_us)
        elif opened[note.name]:
            ranges.append((note.name, opened[note.name].pop(), note.time_us))
    bands = {
        prefix: Ranges((name[len(prefix) :], *span) for name, *span in ranges if name.startswith(prefix))
        for prefix in (STEP, PHASE, MODULE, BACKWARD, MOMENT, WORKSPACES)
    }
    bands[OTHERS] = Ranges(named for named in ranges if not named[0].startswith("lmbench."))
    begun = bands[BACKWARD]
    borders = np.unique([*begun.start, *bands[PHASE].start, _LIMITS.max])
    following = borders[np.searchsorted(borders, begun.start, side="right")]
    bands[BACKWARD] = Ranges(zip(begun.names, begun.start, following, strict=True))
    return bands


def attribute(snapshot: Snapshot, played: Replay, notes: MemoryNotes | None) -> tuple[Any, dict[str, Ranges]]:
    """The blocks of a replay with more columns, and the ranges of its device (see bands_of).

    The columns: `category`, `owner` (the path of a module), the `phase` and `step` in which the block was allocated,
    and the `operator` that saved it; each empty where nobody knows; `is_stream` of what one of the model's alike
    modules returned.
    """
    bands, blocks = bands_of(snapshot.external_annotations, played.device), played.blocks
    start_us, end_us = played.clock(blocks["start"]), played.clock(blocks["end"])
    category: Any = "unknown"
    if notes is None:
        category, phases = stack_roles(played)
        if not bands[PHASE].names:
            times = [*played.entries["time_us"], played.entries["time_us"].iloc[-1] + 1]
            bands[PHASE] = Ranges((name, times[first], times[past]) for name, first, past in phases)
    module = bands[MODULE].at(start_us)
    # Autograd's thread has no ranges of modules: a gradient tells whose backward begins.
    columns = {
        "owner": np.where(module == "", bands[BACKWARD].at(start_us), module), "phase": bands[PHASE].at(start_us),
        "step": bands[STEP].at(start_us), "operator": "",
    }  # fmt: skip
    blocks = blocks.assign(is_stream=False, category=category, **columns).astype({"operator": object})
    blocks.loc[blocks["start"] == BEFORE, list(columns)] = ""
    if notes is None:
        return blocks, bands
    noted = _noted(notes, bands[MOMENT], played)
    is_stream = noted["category"] == "stream"
    blocks.loc[noted.loc[is_stream, "block"], "is_stream"] = True
    noted = noted[~is_stream]
    noted = noted.assign(rank=noted["category"].map(LASTING.index))
    first = noted.sort_values("rank", kind="stable").drop_duplicates("block").set_index("block")
    blocks["category"] = first["category"].reindex(blocks.index, fill_value="unknown").astype(object)
    # An activation is saved by others than the module that made it.
    owned = first[(first["owner"] != "") & (first["category"] != "activations")]
    saved = noted[noted["operator"] != ""].drop_duplicates("block").set_index("block")
    for column, known in (("owner", owned), ("operator", saved)):
        blocks.loc[known.index, column] = known[column]
    is_open = (blocks["category"] == "unknown") & (blocks["end"] < len(played.entries))
    is_in_one_phase = (bands[PHASE].at(end_us) == blocks["phase"]) & (bands[STEP].at(end_us) == blocks["step"])
    blocks.loc[is_open & is_in_one_phase & (blocks["phase"] != ""), "category"] = "temporaries"
    for _, start, end in bands[WORKSPACES].pieces:
        blocks.loc[is_open & (end_us >= start) & (end_us <= end), "category"] = "workspaces"
    return blocks, bands


def _noted(notes: MemoryNotes, moments: Ranges, played: Replay) -> Any:
    """The storages that the notes name; `block` is the row of the block that held the address at that moment."""
    # What lay at an address before a cut history begins, nobody knows; what stays is noted again at every step's end.
    begin_us = _LIMITS.min
    if len(played.entries) >= notes.max_entries > 0:
        begin_us = played.entries["time_us"].iloc[0]
    rows = [
        (time_us, *astuple(block))
        for name, time_us in zip(moments.names, moments.start, strict=True)
        if name.isdecimal() and int(name) < len(notes.moments) and time_us >= begin_us
        for block in notes.moments[int(name)]
    ]
    noted = pd.DataFrame(rows, columns=["time_us", *NotedBlock.__struct_fields__])
    noted = noted.astype({"time_us": np.int64, "address": np.int64}).reset_index()
    blocks = played.blocks
    held = blocks[["address", "start"]].assign(
        begin_us=np.where(blocks["start"] == BEFORE, _LIMITS.min, played.clock(blocks["start"])),
        end_us=np.where(blocks["end"] == len(played.entries), _LIMITS.max, played.clock(blocks["end"])),
        block=blocks.index,
    )
    latest = pd.merge_asof(
        noted.sort_values("time_us", kind="stable"), held.sort_values(["begin_us", "start"]),
        left_on="time_us", right_on="begin_us", by="address",
    )  # fmt: skip
    return latest[latest["time_us"] <= latest["end_us"]].astype({"block": np.int64}).sort_values("index")
