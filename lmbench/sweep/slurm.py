"""Tasks of a sweep as a job array of SLURM, submitted by submitit.

States of tasks come from `squeue`, or from `sacct` for jobs that `squeue` has forgotten. submitit asks `sacct` alone,
and waits for ever on the many clusters without accounting.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from msgspec import Struct, ValidationError, convert, to_builtins

from lmbench.errors import UsageError, check_one_line
from lmbench.files import short_digest
from lmbench.programs import run_program
from lmbench.records.vocabulary import Values
from lmbench.sweep.engine import Needs, TaskState

#: States in which a task is over (man squeue, JOB STATE CODES).
_OVER = re.compile("BOOT_FAIL|CANCELLED|COMPLETED|DEADLINE|FAILED|NODE_FAIL|OUT_OF_MEMORY|PREEMPTED|REVOKED|TIMEOUT")
_TIMEOUT_S = 60.0


class SlurmOptions(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Options `--slurm.NAME`, named as in submitit. `additional` holds other options of sbatch: `mem=64G,exclusive`."""

    partition: str | None = None
    time: int | None = None
    gpus_per_node: int | None = None
    constraint: str | None = None
    account: str | None = None
    setup: str | None = None
    array_parallelism: int | None = None
    additional: str | None = None


class Slurm:
    """The engine for the SLURM cluster that this machine belongs to.

    Raises:
        UsageError: there is no SLURM, submitit is missing, or an option is not understood.
    """

    def __init__(self, options: Values) -> None:
        try:
            self._options = to_builtins(convert(dict(options), SlurmOptions, strict=False))
        except ValidationError as error:
            names = ", ".join(SlurmOptions.__struct_fields__)
            raise UsageError(f"--slurm: {error}; options are {names}") from None
        for name, value in self._options.items():
            # A setup is lines of the script by its meaning.
            if name != "setup":
                check_one_line(f"--slurm.{name}", str(value))
        if shutil.which("sbatch") is None:
            raise UsageError("--on slurm: there is no SLURM here (no `sbatch`); submit from a machine of the cluster")
        try:
            from submitit import SlurmExecutor
        except ImportError:
            raise UsageError("--on slurm needs submitit; install it with `pip install '.[slurm]'`") from None
        self._executor = SlurmExecutor

    def describe(self, commands: Sequence[Sequence[str]], needs: Needs, folder: Path) -> str:
        executor = self._submitter(needs, folder)
        executor.parameters["map_count"] = len(commands)
        text: str = executor._make_submission_file_text(executor._submitit_command_str, "")
        check = run_program(["sbatch", "--test-only"], _TIMEOUT_S, text)
        if check.returncode:
            raise UsageError(f"SLURM refuses this: {check.stderr}")
        return text

    def submit(self, commands: Sequence[Sequence[str]], needs: Needs, folder: Path) -> list[str]:
        executor = self._submitter(needs, folder)
        # execv replaces submitit's process, which ignores SIGTERM and hides the command's exit code.
        jobs = executor.map_array(os.execv, [command[0] for command in commands], commands)
        return [job.job_id for job in jobs]

    def states(self, tasks: Sequence[str], folder: Path) -> dict[str, TaskState]:
        states: dict[str, TaskState] = {}
        for job in {task.partition("_")[0] for task in tasks if task.replace("_", "").isdecimal()}:
            # The name is asked for, too: a folder from another cluster may hold ids of somebody else's jobs here.
            selection = ["--jobs", job, "--name", _name(folder)]
            words = ["squeue", *selection, "--states", "all", "--array", "--noheader", "--format", "%i %T"]
            queue = run_program(words, _TIMEOUT_S)
            lines = queue.stdout.splitlines()
            if queue.returncode and "Invalid job id" in queue.stderr:
                # SLURM forgets a job some minutes after its end.
                accounts = run_program(["sacct", *selection, "-X", "-n", "-P", "-o", "JobID,State"], _TIMEOUT_S)
                lines = accounts.stdout.replace("|", " ").splitlines()
                states |= {task: TaskState("forgotten", True) for task in tasks if task.partition("_")[0] == job}
            for name, state, *_ in map(str.split, lines):
                log = folder / "slurm" / f"{name}_0_log.err"
                states[name] = TaskState(state, _OVER.fullmatch(state) is not None, log)
        return {task: states[task] for task in tasks if task in states}

    def cancel(self, tasks: Sequence[str], folder: Path) -> None:
        if tasks:
            run_program(["scancel", "--name", _name(folder), *tasks], _TIMEOUT_S)

    def _submitter(self, needs: Needs, folder: Path) -> Any:
        options = {
            "job_name": _name(folder),
            "time": math.ceil(needs.time_s / 60),
            "nodes": needs.nodes,
            "ntasks_per_node": needs.ranks_per_node if needs.nodes > 1 else None,
            "gpus_per_node": needs.gpus_per_node or None,
            # By default SLURM ends ranks started by `srun` 90 s before the time limit.
            "signal_delay_s": 1,
            # A task is one process on the first node, which starts ranks on several nodes by `srun` itself.
            "use_srun": False,
            **self._options,
        }
        if setup := options.pop("setup", None):
            options["setup"] = [setup]
        if additional := options.pop("additional", None):
            pairs = (pair.partition("=") for pair in additional.split(","))
            options["additional_parameters"] = {name: value if equals else True for name, equals, value in pairs}
        executor = self._executor(folder / "slurm")
        executor.update_parameters(**{name: value for name, value in options.items() if value is not None})
        return executor


def _name(folder: Path) -> str:
    """The name of the jobs of a sweep's folder."""
    return f"lmbench-{folder.name}-{short_digest(str(folder.resolve()))}"
