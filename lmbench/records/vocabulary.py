"""The words that records are made of : phases, modes, outcomes, stages."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Literal, get_args

#: The parts of a step; their spans sum to the step's.
Phase = Literal["data", "transfer", "forward", "backward", "clip", "optimizer", "zero_grad", "other"]
#: A phase, or the step that they make up.
Span = Literal["step", "data", "transfer", "forward", "backward", "clip", "optimizer", "zero_grad", "other"]
#: What has a lag at its end: every phase with a border of its own (`other` is a remainder), and the step.
Border = Literal["data", "transfer", "forward", "backward", "clip", "optimizer", "zero_grad", "step"]
Mode = Literal["inference", "forward", "forward_backward", "train_step"]

#: In the order of a table.
PHASES: tuple[Phase, ...] = get_args(Phase)
SPANS: tuple[Span, ...] = get_args(Span)
BORDERS: tuple[Border, ...] = get_args(Border)
MODES: tuple[Mode, ...] = get_args(Mode)

#: Time inside a step that is not the step's: validation, checkpoints, writing records. Subtracted and counted.
EXCLUDED = "excluded"

#: Modes whose steps compute gradients.
BACKWARD_MODES: tuple[Mode, ...] = ("forward_backward", "train_step")


class Stage(StrEnum):
    """Where a run stands. Only steps of the first two are recorded."""

    WARMUP = "warmup"
    WINDOW = "window"
    PROBE = "probe"
    DONE = "done"


STAGES = (Stage.WARMUP, Stage.WINDOW)

#: The axis of a sweep of two sides, which are measured in turn to be compared.
SIDE = "side"

#: How a run can end.
OUTCOMES = ("ok", "oom", "timeout", "error", "interrupted", "skipped")

#: How the message of an `error` begins where attention of the user's own was found to be wrong.
INCORRECT = "incorrect"

#: Written while a run is going on; read as KILLED once its process is gone.
RUNNING = "running"
KILLED = "killed"

#: Read where run.json cannot tell the outcome.
DAMAGED = "damaged"

#: Names of the ranges that lmbench sets around what runs, and that a recording's reader looks for, each before a step's
#: number, a phase or a module's path.
STEP, PHASE, MODULE = "lmbench.step:", "lmbench.phase:", "lmbench.module:"
#: An index in a module's path.
INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


def collapsed(path: str) -> str:
    """A module's path with `*` for its indices: `blocks.3.attention.q` is one of `blocks.*.attention.q`."""
    return INDEX.sub("*", path)
