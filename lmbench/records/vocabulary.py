"""The vocabulary of records: phases, modes, stages and outcomes."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Any, Literal, TypeAlias, get_args

#: Values by name: options by their dotted names, or fields of a record by theirs.
Values: TypeAlias = dict[str, Any]

#: The parts of a step; their times sum to the time of the step.
Phase = Literal["data", "transfer", "forward", "backward", "clip", "optimizer", "zero_grad", "other"]
#: A phase or the whole step.
Span = Literal["step", Phase]
Mode = Literal["inference", "forward", "forward_backward", "train_step"]

#: In the order of the columns of a table.
PHASES: tuple[Phase, ...] = get_args(Phase)
SPANS: tuple[Span, ...] = get_args(Span)
MODES: tuple[Mode, ...] = get_args(Mode)

#: Saving, validation, and writing of records inside a step. Their time is subtracted from the step and counted.
CHECKPOINT, VALIDATION, EXCLUDED = PAUSES = ("checkpoint", "validation", "excluded")


def recompute_words(
    first: int | None = None, group: int = 1, nested: bool = False, keep: str = "inputs", offload: bool = False
) -> str:
    """The settings of `--trainer.recompute` in words, such as `first 4 blocks, keep matmuls`."""
    words = "all blocks" if first is None else "first block" if first == 1 else f"first {first} blocks"
    if keep != "inputs":
        words += f", keep {keep}"
    if group > 1:
        words += f", {'nested ' if nested else ''}groups of {group}"
    return f"{words}, on the host" if offload else words


#: Modes whose steps compute gradients.
BACKWARD_MODES: tuple[Mode, ...] = ("forward_backward", "train_step")


class Stage(StrEnum):
    """The stages of a run, in their order."""

    WARMUP = "warmup"
    WINDOW = "window"
    PROBE = "probe"
    DONE = "done"


#: Stages whose steps are recorded.
STAGES = (Stage.WARMUP, Stage.WINDOW)

#: The axis of the sweep that `compare --run` measures: its values are the sides A and B, measured in turn.
SIDE = "side"

#: The environment variable that says how threads of PyTorch wait for each other. By default they hold their cores, and
#: on a busy machine wait for whole time slices of other processes: on two cores with a load of 10, a step of
#: `fit smoke` took 880 to 2,130 ms, and 145 to 235 ms with `passive`; `sweep` the same.
WAIT_POLICY = "OMP_WAIT_POLICY"

#: Changes up to this fraction count as none, where nobody says otherwise (`--gate`).
GATE_FRACTION = 0.01
#: Processes on each side that a verdict takes.
MIN_REPEATS = 3
#: Repeats that a noise floor takes, since each half stands for one side of a comparison.
MIN_NOISE_REPEATS = 2 * MIN_REPEATS

#: How a run can end.
OUTCOMES = ("ok", "oom", "timeout", "error", "interrupted", "skipped")

#: First word of an error's message where the user's own attention function gave wrong results.
INCORRECT = "incorrect"

#: The outcome in run.json while a run is going on; readers say KILLED once its process is gone.
RUNNING = "running"
KILLED = "killed"

#: The outcome that readers give a run whose run.json is damaged.
DAMAGED = "damaged"

#: Prefixes of the ranges that lmbench sets in traces and memory recordings. Behind them comes the number of a step, the
#: name of a phase or the path of a module.
STEP, PHASE, MODULE = "lmbench.step:", "lmbench.phase:", "lmbench.module:"
#: An index in the path of a module.
INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


def collapsed(path: str) -> str:
    """The path of a module with `*` for its indices: `blocks.3.attention.q` becomes `blocks.*.attention.q`."""
    return INDEX.sub("*", path)
