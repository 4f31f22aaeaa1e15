"""What a recording and its readers agree on: the names of the ranges that lmbench sets around what runs."""

from __future__ import annotations

#: Each is followed by what it is a range of: a step's number, a phase, a module's path.
STEP, PHASE, MODULE = "lmbench.step:", "lmbench.phase:", "lmbench.module:"
