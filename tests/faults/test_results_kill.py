"""SIGKILL at any moment: the folder loads, and at most the batch that was being written is missing."""

from __future__ import annotations

import os
import random
import signal
import time
from functools import partial
from itertools import count

from warm_server import warm_server

from lmbench.records.load import load_run
from lmbench.records.process import process_identity
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.store import RunFolder

BATCH = 25


def write_for_ever(results_dir, name):
    """Say one byte after every batch that is written; now and then replace run.json as well."""
    folder = RunFolder.create(results_dir, run_id=name)
    run = RunRecord(SCHEMA_VERSION, "running")
    run.pid, run.boot_id, run.process_start_s = process_identity()
    folder.write_run(run)
    os.write(1, b"r")
    for batch in count():
        steps = range(batch * BATCH, (batch + 1) * BATCH)
        folder.append_steps(StepRecord(step=step, step_s=step / 7) for step in steps)
        os.write(1, b".")
        if batch % 10 == 0:
            run.argv = ["y" * 100] * 200
            folder.write_run(run)


def killed_after(seconds, results_dir, name):
    """Kill a writing process so long after its start of writing; returns how many batches it had finished."""
    ours, theirs = os.pipe()
    writer = warm_server().start(target=partial(write_for_ever, results_dir, name), streams=(None, theirs, theirs))
    os.close(theirs)
    with os.fdopen(ours, "rb") as told:
        assert told.read(1) == b"r"
        time.sleep(seconds)
        writer.send_signal(signal.SIGKILL)
        finished = told.read().count(b".")
    assert writer.wait() == -signal.SIGKILL
    return finished


def test_a_kill_at_any_of_100_instants_loses_at_most_the_last_batch(tmp_path):
    for index in range(100):
        finished = killed_after(random.uniform(0, 0.1), tmp_path, f"run{index}")
        run = load_run(tmp_path / f"run{index}")
        assert (run.outcome, run.damage) == ("killed", None)
        assert [step.step for step in run.steps] == list(range(len(run.steps)))
        assert finished * BATCH <= len(run.steps) <= (finished + 1) * BATCH
