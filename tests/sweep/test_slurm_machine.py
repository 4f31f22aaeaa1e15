"""What the tests' SLURM says of tasks that end in each way, without accounting."""

import os
import signal
import time

_TASK = """#!/bin/bash
echo $CUDA_VISIBLE_DEVICES $$ > started_$SLURM_ARRAY_TASK_ID
exec sleep $((SLURM_ARRAY_TASK_ID == 3 ? 1 : 600))
"""


def test_the_end_of_each_task_is_told_whatever_it_was_and_outlives_the_controller(slurm, tmp_path):
    (tmp_path / "task.sh").write_text(_TASK)
    options = ["--parsable", "--array=0-3", "--gres=gpu:1", "--time=1", f"--chdir={tmp_path}", "--output=/dev/null"]
    job = slurm.run("sbatch", *options, str(tmp_path / "task.sh")).strip()

    def wait_for(**expected):
        deadline_s = time.monotonic() + 60
        while not expected.items() <= (states := {f"task{k}": v for k, v in slurm.states(job).items()}).items():
            assert time.monotonic() < deadline_s, states
            time.sleep(0.1)

    def started(task):
        """The GPU of a task that runs, and its process."""
        wait_for(**{f"task{task}": "RUNNING"})
        while len(words := (tmp_path / f"started_{task}").read_text().split()) < 2:
            time.sleep(0.1)
        return words[0], int(words[1])

    gpus, processes = zip(started(0), started(1), strict=True)
    assert sorted(gpus) == ["0", "1"]
    slurm.restart_controller()
    os.kill(processes[0], signal.SIGKILL)
    slurm.run("scancel", f"{job}_1")
    wait_for(task0="FAILED", task1="CANCELLED", task3="COMPLETED")
    # SLURM looks for tasks past their end every 30 s; a limit has whole minutes.
    started(2)
    slurm.run("scontrol", "update", f"JobId={job}_2", "EndTime=now")
    wait_for(task2="TIMEOUT")
