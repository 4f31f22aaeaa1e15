"""The words that records are made of (design section 2): phases, modes, outcomes, stages."""

from __future__ import annotations

from typing import Any

#: A run.json or one line of steps.jsonl: names from the field registry to JSON values.
Record = dict[str, Any]

#: The parts of a step, in the order of a table; their spans sum to the step's.
PHASES = ("data", "transfer", "forward", "backward", "clip", "optimizer", "zero_grad", "other")

#: Time inside a step that is not the step's: validation, checkpoints, writing records. Subtracted and counted.
EXCLUDED = "excluded"

#: What has a lag at its end: every phase with a border of its own (`other` is a remainder), and the step.
BORDERS = (*PHASES[:-1], "step")

MODES = ("inference", "forward", "forward_backward", "train_step")

#: Modes whose steps compute gradients.
BACKWARD_MODES = ("forward_backward", "train_step")

STAGES = ("warmup", "window")

#: How a run can end.
OUTCOMES = ("ok", "oom", "timeout", "error", "interrupted", "skipped")

#: Written while a run is going on; read as KILLED once its process is gone.
RUNNING = "running"
KILLED = "killed"

#: Read where run.json cannot tell the outcome.
DAMAGED = "damaged"
