"""How a run ended follows from the facts at its closing: the first failure counts."""

from __future__ import annotations

import signal

import pytest

from lmbench.errors import ExitCode
from lmbench.instruments.ending import COMPLETE, ending_of, failed

FAULT, FULL = ValueError("no number"), OSError(28, "No space left on device")


@pytest.mark.parametrize(("facts", "outcome", "code", "phase", "message"), [
    ({}, "ok", ExitCode.OK, None, None),
    ({"has_failed_guard": True}, "ok", ExitCode.GUARD_FAILED, None, None),
    ({"trace_error": "torn", "has_failed_guard": True}, "error", ExitCode.INTERNAL, "recording",
     "torn: the trace is lost, the steps are there"),
    ({"unwritten_count": 3, "trace_error": "torn"}, "error", ExitCode.INTERNAL, "recording",
     "memory for records that wait was used up: 3 steps are not in steps.jsonl; the summary has them"),
    ({"write_error": FULL}, "error", ExitCode.INTERNAL, "recording",
     "No space left on device: 0 steps are not in steps.jsonl; the summary has them"),
    ({"signum": signal.SIGINT, "write_error": FULL}, "interrupted", ExitCode.INTERRUPTED, "summary",
     "stopped by SIGINT (Ctrl-C)"),
    ({"summary_fault": FAULT, "signum": signal.SIGINT}, "error", ExitCode.INTERNAL, "summary",
     "lmbench's own summary failed: no number"),
    ({"ending": failed("Mine", "it broke", "forward", ExitCode.USER_CODE), "summary_fault": FAULT}, "error",
     ExitCode.USER_CODE, "forward", "it broke"),
])  # fmt: skip
def test_the_first_failure_decides_the_ending(facts, outcome, code, phase, message):
    ending = ending_of(**{"ending": COMPLETE, **facts})
    error = ending.error and (ending.error.phase, ending.error.message)
    assert (ending.outcome, ending.exit_code, error) == (outcome, code, message and (phase, message))
