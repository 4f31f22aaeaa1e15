"""SIGKILL at any moment: the folder loads, and at most the batch that was being written is missing."""

from __future__ import annotations

import random
import signal
import subprocess
import sys
import time

import pytest

from lmbench.records.load import load_run

BATCH = 25

# Says one byte after every batch that is written; now and then replaces run.json as well.
CHILD = f"""
import os, sys
from lmbench.records.process import process_identity
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.store import RunFolder
folder = RunFolder.create(sys.argv[1], run_id=sys.argv[2])
run = RunRecord(SCHEMA_VERSION, "running")
run.pid, run.boot_id, run.process_start_s = process_identity()
folder.write_run(run)
os.write(1, b"r")
for start in range(0, 10**9, {BATCH}):
    steps = range(start, start + {BATCH})
    folder.append_steps(StepRecord(step=step, step_s=step / 7) for step in steps)
    os.write(1, b".")
    if start % (10 * {BATCH}) == 0:
        run.argv = ["y" * 100] * 200
        folder.write_run(run)
"""


def _killed_after(seconds, results_dir, name):
    """Kill a writing child so long after its start of writing; returns how many batches it had finished."""
    child = subprocess.Popen([sys.executable, "-c", CHILD, results_dir, name], stdout=subprocess.PIPE)
    assert child.stdout.read(1) == b"r"
    time.sleep(seconds)
    child.send_signal(signal.SIGKILL)
    finished = child.stdout.read().count(b".")
    assert child.wait() == -signal.SIGKILL
    return finished


def _check(instants, results_dir):
    for index, seconds in enumerate(instants):
        finished = _killed_after(seconds, results_dir, f"run{index}")
        run = load_run(results_dir / f"run{index}")
        assert (run.outcome, run.damage) == ("killed", None)
        assert [step.step for step in run.steps] == list(range(len(run.steps)))
        assert finished * BATCH <= len(run.steps) <= (finished + 1) * BATCH


def test_a_kill_at_any_of_20_instants_loses_at_most_the_last_batch(tmp_path):
    _check([random.uniform(0, 0.05) for _ in range(20)], tmp_path)


@pytest.mark.slow
def test_a_kill_at_any_of_100_instants_loses_at_most_the_last_batch(tmp_path):
    _check([random.uniform(0, 0.1) for _ in range(100)], tmp_path)
