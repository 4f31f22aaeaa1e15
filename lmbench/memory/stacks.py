"""What the stacks of a history tell of a block: the line of code that made it and, without lmbench's notes, what it is
for.

PyTorch records frames of C++ among those of Python unless it is asked for `stacks="python"`. Autograd's own thread has
no frames of Python, those of C++ name its engine.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pandas as pd

from lmbench.memory.blocks import BEFORE
from lmbench.memory.recorded import CATEGORIES, Category
from lmbench.memory.replay import Replay
from lmbench.memory.snapshot import NO_STACK, Stack

#: What a frame ("file name") says of its stack: the category of what it makes, or the phase that it belongs to. Of
#: several frames the innermost counts: a forward in the closure that an optimizer's step calls is a forward.
_ROLES: Mapping[str, str] = {
    "workspaces": r" at::\w+::get\w*(BlasHandle|Workspace)",
    # Buckets of DistributedDataParallel, which gradients are views of.
    "gradients": r"/torch/nn/parallel/distributed\.py _ddp_init_helper$| c10d::Reducer::initialize_buckets",
    "inputs": r"/torch/utils/data/| (move_data_to_device|transfer_batch_to_device|send_to_device|_prepare_inputs?)$",
    "parameters": r"/torch/nn/\S* (_apply|__init__|reset_parameters|_?load_\w*state_dict|_load_from_state_dict)$"
    r"|/torch/nn/parallel/replicate\.py | (from_pretrained|module constructor)$"
    # Shards, and what is gathered of them.
    r"|/torch/distributed/fsdp/\S* (__init__|_init_\w*param\w*|\w*alloc_\w*|\w*all_gather\w*)$",
    "zero_grad": r" zero_grad$",
    "backward": r" (_engine_run_backward|backward)$| torch::autograd::Engine::"
    r"|/torch/utils/checkpoint\.py (unpack_hook|recompute_fn)$",
    "forward": r" (forward|_call_impl|training_step|closure)$",
    "optimizer": r"/torch/optim/",
}
_ROLE = re.compile("|".join(f"(?P<{role}>{frame})" for role, frame in _ROLES.items()))
_PHASES = ("forward", "backward", "optimizer", "zero_grad")
#: What is there when the phase that made it is over.
_LEFT: Mapping[str, Category] = {
    **{name: name for name in CATEGORIES}, "forward": "activations", "backward": "gradients",
    "optimizer": "optimizer_state",
}  # fmt: skip

#: PyTorch's, Lightning's and what wraps functions: their lines do not tell one part of a model from another.
_LIBRARY = re.compile(
    r"/(site-packages|dist-packages|pytorch)/(torch|functorch|triton|lightning\w*|pytorch_lightning|accelerate|einops"
    r"|jaxtyping|beartype|IPython|ipykernel)/|/lmbench/(measure|callbacks|fit|memory|kernels)/"
    r"|/torch_compile_debug/|torchinductor|/lib(64)?/python[\d.]+/(?!site-packages|dist-packages)|^<(?!ipython|stdin)"
    rf"|(?i:/lib/({'|'.join(sorted(sys.stdlib_module_names))})(/|\.py$))"
)
_OPERATOR = re.compile(r"^at::_ops::(?!(?:new_)?empty|resize_|set_)(\w+)::(?:call|redispatch)\b")
#: Between a module and the one that calls it are three frames of this file, which tell nothing.
_CALLING = "/torch/nn/modules/module.py"


def frame_lines(frames: Stack) -> Iterator[str]:
    """A stack for a reader, from the innermost: the operator, where C++ frames name it, and the frames of Python."""
    operator = next(filter(None, (_OPERATOR.match(frame.name) for frame in frames)), None)
    if operator is not None:
        yield f"aten::{operator[1]}"
    for frame in frames:
        if frame.is_python and not frame.path.endswith(_CALLING):
            yield str(frame)


def user_frame(frames: Stack) -> str:
    """The innermost frame of the user's code, or of a library's that holds models; without one, the operator, or the
    innermost frame of PyTorch's modules."""
    users = (str(frame) for frame in frames if frame.is_python and not _LIBRARY.search(frame.path))
    return next(users, "") or next(frame_lines(frames), "")


def stack_roles(played: Replay) -> tuple[Any, list[tuple[str, int, int]]]:
    """What the stacks of a history without notes say, by _ROLES.

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
    phase = latest.where(entries.notna() | (latest == "forward")).where(latest.isin(_PHASES))
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
