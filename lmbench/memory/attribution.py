"""The category, the part of the model and the line of code of each block of a history.

In lmbench's own recordings the notes tell them, by address and moment; for other blocks, the phases in which the block
was allocated and freed. In other recordings only the stacks tell them. No category is guessed by size: blocks without
evidence are `unknown`.

PyTorch records frames of C++ beside those of Python unless it is asked for `stacks="python"`. Autograd's own thread has
no frames of Python, but its frames of C++ name the engine.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np
import pandas as pd
from msgspec.structs import astuple

from lmbench.code_owners import Owner, code_owner
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
from lmbench.records.intervals import Integers, locate, paint, take
from lmbench.records.vocabulary import MODULE, PHASE, PHASES, STEP

#: The role that a frame (as "file function") gives its stack: a category of memory, or a phase. The innermost frame
#: with a role counts: a forward in the closure that an optimizer's step calls is a forward.
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
        # Shards of parameters, and parameters gathered from them.
        | /torch/distributed/fsdp/\S*[ ](__init__|_init_\w*param\w*|\w*alloc_\w*|\w*all_gather\w*)$)
    |(?P<zero_grad> [ ]zero_grad$)
    |(?P<backward> [ ](_engine_run_backward|backward)$ | [ ]torch::autograd::Engine::
        | /torch/utils/checkpoint\.py[ ](unpack_hook|recompute_fn)$)
    |(?P<forward> [ ](forward|_call_impl|training_step|closure)$)
    |(?P<optimizer> /torch/optim/)
    """,
    re.VERBOSE,
)
#: The category of a block that outlives the phase it was made in, by the role of its stack.
_LEFT: Mapping[str, Category] = {
    **{name: name for name in CATEGORIES}, "forward": "activations", "backward": "gradients",
    "optimizer": "optimizer_state",
}  # fmt: skip

_OPERATOR = re.compile(r"^at::_ops::(?!(?:new_)?empty|resize_|set_)(\w+)::(?:call|redispatch)\b")
#: Files worth naming if a stack has no line of the user's: PyTorch's modules and compiled code, but not `module.py`,
#: which only calls modules.
_TELLING = re.compile(r"/torch/nn/modules/(?!module\.py$)|torchinductor")


def user_frame(frames: Stack, folders: Mapping[str, Owner]) -> str:
    """The innermost frame of the user's code, of a library of models, or of lmbench's own models, as text.

    Without one it is the operator, else the innermost frame of PyTorch's modules or of compiled code, else empty.

    Args:
        folders: the recording's folders by owner, from `recorded_folders`.
    """
    # A dataclass's constructor lies in `<string>`, as the code of `python -c` does.
    python = [frame for frame in frames if frame.is_python and (frame.filename, frame.name) != ("<string>", "__init__")]
    users = (
        str(frame)
        for frame in python
        if "/lmbench/model/" in frame.path or code_owner(frame.filename, folders) == "user"
    )
    operators = (f"aten::{match[1]}" for frame in frames if (match := _OPERATOR.match(frame.name)))
    modules = (str(frame) for frame in python if _TELLING.search(frame.path))
    return next(chain(users, operators, modules), "")


def stack_roles(played: Replay) -> tuple[Any, list[tuple[str, int, int]]]:
    """Categories and phases by the stacks of a history without notes, after _ROLE.

    Returns:
        The category of each block, `unknown` where no stack tells it; and the stretches of entries in one phase, each
        as the phase, its first entry, and the entry behind its last. Entries without a role that follow a forward, such
        as those of the loss, belong to it.
    """
    log, blocks = played.entries, played.blocks
    stack_role = _roles_of_stacks(played.stacks)
    # In a recording of Python's stacks, an entry without one is of autograd's thread if others of its action have one.
    has_stacks = log.groupby("action")["stack"].transform("max") != NO_STACK
    is_python = all(frame.is_python for stack in set(log["stack"]) for frame in played.stacks[stack])
    is_engine = (log["stack"] == NO_STACK) & has_stacks & is_python
    role = pd.Series(stack_role[log["stack"]]).mask(is_engine, "backward")
    latest = role.ffill()
    phase = latest.where(role.notna() | (latest == "forward")).where(latest.isin(PHASES))
    latest_phase = phase.ffill()
    # The number of the run of entries in one phase that an entry is in.
    phase_run = (latest_phase != latest_phase.shift()).cumsum()
    start, end, is_older = blocks["start"].clip(0), blocks["end"], blocks["start"] == BEFORE

    def at(entries: Any, column: Any) -> Any:
        """The column's value at an entry of each block."""
        return column.reindex(entries).set_axis(blocks.index)

    start_role = at(start, role).mask(is_older, stack_role[blocks["stack"]])
    end_role = at(end, role)
    # Temporaries begin and end in one phase, without another phase in between.
    is_temporary = (at(start, phase) == at(end, phase)) & (at(start, phase_run) == at(end, phase_run)) & ~is_older
    # Where memory ran out within a phase, its results and its temporaries look alike. The exception frees both.
    is_oom = log["action"] == "oom"
    oom_count = is_oom.cumsum()
    is_cut = at(start, oom_count) < at(end.clip(upper=len(log) - 1), oom_count)
    is_cut &= at(start, phase_run).isin(phase_run[is_oom])
    is_temporary &= ~is_cut
    is_cut &= start_role.isin(("backward", "optimizer"))
    left = start_role.map(_LEFT).mask(end_role == "zero_grad", "gradients")
    left = left.mask(left.isna() & (end_role == "backward") & ~is_older, "activations")
    categories = left.mask(is_cut).mask(is_temporary, "temporaries").fillna("unknown").astype(object)
    names = phase.fillna("")
    borders = [*np.flatnonzero(names != names.shift()).tolist(), len(names)]
    return categories, [(names[first], first, past) for first, past in pairwise(borders) if names[first]]


def _roles_of_stacks(stacks: Sequence[Stack]) -> Any:
    """The role of each stack, None for a stack without one."""
    functions = {(frame.filename, frame.name): frame.path for frames in stacks for frame in frames}
    # A constructor belongs to a module if its file has a forward, too: no function that it calls tells.
    module_files = {file for file, name in functions if name == "forward"}
    frame_roles = {}
    for (file, name), path in functions.items():
        function = "module constructor" if name == "__init__" and file in module_files else name
        match = _ROLE.search(f"{path} {function}")
        frame_roles[file, name] = match.lastgroup if match else None
    roles = []
    for frames in stacks:
        inner_first = [role for frame in frames if (role := frame_roles[frame.filename, frame.name])]
        # A forward that a checkpoint computes again belongs to the backward.
        is_recomputed = inner_first[:1] == ["forward"] and "backward" in inner_first
        roles.append("backward" if is_recomputed else next(iter(inner_first), None))
    return np.array(roles, object)


#: The key, in place of a prefix, of ranges that `record_function` made outside of lmbench.
OTHERS = ""
_LIMITS = np.iinfo(np.int64)


class Ranges:
    """Named ranges of time, from `start` up to `end` in us of Unix time, which may be nested.

    `pieces` has each range's name, start and end, in order, without the time of inner ranges.
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
        """The name of the innermost range around each moment; empty outside of all ranges."""
        return take(np.array(self._owners, object), locate(self._start, self._end, time_us), "")


def bands_of(annotations: Iterable[Annotation], device: int) -> dict[str, Ranges]:
    """The ranges of a device by the prefix of their names, without it; OTHERS has the ranges that are not lmbench's.

    A range of BACKWARD is named by a module and lasts from the start of its backward to the start of the next one's.
    """
    ranges = list[tuple[str, int, int]]()
    # Ranges with different names may overlap, so starts are kept by name. An exception leaves a range without an end.
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
    marks = bands[BACKWARD]
    borders = np.unique([*marks.start, *bands[PHASE].start, _LIMITS.max])
    end = borders[np.searchsorted(borders, marks.start, side="right")]
    bands[BACKWARD] = Ranges(zip(marks.names, marks.start, end, strict=True))
    return bands


def attribute(snapshot: Snapshot, played: Replay, notes: MemoryNotes | None) -> tuple[Any, dict[str, Ranges]]:
    """The blocks of a replay with the columns of their attribution, and the ranges of its device (see `bands_of`).

    The columns are `category`, `owner` (the path of a module), and the `phase` and `step` in which the block was
    allocated. `operator` is the one that saved the block for the backward. A category that nothing tells is `unknown`,
    other columns are then empty.
    """
    bands = bands_of(snapshot.external_annotations, played.device)
    blocks = played.blocks
    start_us, end_us = played.clock(blocks["start"]), played.clock(blocks["end"])
    category: Any = "unknown"
    if notes is None:
        category, phases = stack_roles(played)
        if not bands[PHASE].names:
            times = [*played.entries["time_us"], played.entries["time_us"].iloc[-1] + 1]
            bands[PHASE] = Ranges((name, times[first], times[past]) for name, first, past in phases)
    module = bands[MODULE].at(start_us)
    # Autograd's thread has no module ranges: there, marks tell whose backward has begun.
    columns = {
        "owner": np.where(module == "", bands[BACKWARD].at(start_us), module), "phase": bands[PHASE].at(start_us),
        "step": bands[STEP].at(start_us), "operator": "",
    }  # fmt: skip
    blocks = blocks.assign(category=category, **columns).astype({"operator": object})
    blocks.loc[blocks["start"] == BEFORE, list(columns)] = ""
    if notes is None:
        return blocks, bands
    noted = _noted(notes, bands[MOMENT], played)
    noted = noted.assign(rank=noted["category"].map(LASTING.index))
    first = noted.sort_values("rank", kind="stable").drop_duplicates("block").set_index("block")
    blocks["category"] = first["category"].reindex(blocks.index, fill_value="unknown").astype(object)
    # A noted activation does not tell its owner: the module that saved it need not have made it.
    owned = first[(first["owner"] != "") & (first["category"] != "activations")]
    saved = noted[noted["operator"] != ""].drop_duplicates("block").set_index("block")
    for column, rows in (("owner", owned), ("operator", saved)):
        blocks.loc[rows.index, column] = rows[column]
    is_open = (blocks["category"] == "unknown") & (blocks["end"] < len(played.entries))
    is_in_one_phase = (bands[PHASE].at(end_us) == blocks["phase"]) & (bands[STEP].at(end_us) == blocks["step"])
    blocks.loc[is_open & is_in_one_phase & (blocks["phase"] != ""), "category"] = "temporaries"
    for _, start, end in bands[WORKSPACES].pieces:
        blocks.loc[is_open & (end_us >= start) & (end_us <= end), "category"] = "workspaces"
    return blocks, bands


def _noted(notes: MemoryNotes, moments: Ranges, played: Replay) -> Any:
    """The storages in the notes, each with the `block` that held its address at that moment, as the block's index."""
    # A cut history does not tell which block was at an address before its start, so earlier notes are left out. Lasting
    # state is noted again at the end of every step.
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
