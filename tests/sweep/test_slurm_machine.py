"""What the tests' SLURM says of tasks that end in each way, without accounting."""

import time

import psutil
from slurm import slurm_of_this_machine

_TASK = """#!/bin/bash
echo $CUDA_VISIBLE_DEVICES $$ $PPID > started_$SLURM_ARRAY_TASK_ID
exec sleep $((SLURM_ARRAY_TASK_ID == 2 ? 1 : 600))
"""


def test_the_end_of_each_task_is_told_whatever_it_was_and_outlives_the_controller(tmp_path):
    (tmp_path / "task.sh").write_text(_TASK)
    options = ["--parsable", "--gres=gpu:1", "--time=1", f"--chdir={tmp_path}", "--output=/dev/null"]
    with slurm_of_this_machine() as slurm:
        job = slurm.run("sbatch", *options, "--array=0-4", "task.sh").strip()

        def wait_for(**expected):
            deadline_s = time.monotonic() + 60
            while not expected.items() <= (states := {f"task{k}": v for k, v in slurm.states(job).items()}).items():
                assert time.monotonic() < deadline_s, states
                time.sleep(0.1)

        def started(task):
            """The GPU of a task that runs, its process, and SLURM's own of it."""
            wait_for(**{f"task{task}": "RUNNING"})
            while not (file := tmp_path / f"started_{task}").exists() or not file.read_text().endswith("\n"):
                time.sleep(0.1)
            gpu, *processes = map(int, file.read_text().split())
            return gpu, *map(psutil.Process, processes)

        tasks = [started(0), started(1)]
        assert sorted(gpu for gpu, *_ in tasks) == [0, 1]
        slurm.restart_controller()
        tasks[0][1].kill()
        slurm.run("scancel", f"{job}_1")
        wait_for(task0="FAILED", task1="CANCELLED", task2="COMPLETED")
        tasks += [started(3), started(4)]
        # SLURM looks for tasks past their end every 30 s; a limit has whole minutes.
        slurm.run("scontrol", "update", f"JobId={job}_3", "EndTime=now")
        wait_for(task3="TIMEOUT", task4="RUNNING")
    for _, *processes in tasks:
        assert all(process.status() == psutil.STATUS_ZOMBIE for process in processes if process.is_running())
