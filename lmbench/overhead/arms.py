"""Measuring the arms of `lmbench overhead`, each in a process of its own. Nothing here needs torch."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path

import msgspec

from lmbench.errors import ExitCode, UsageError, tell
from lmbench.interruption import received
from lmbench.overhead.result import ARMS, Arm, Measurement, overhead_answer
from lmbench.records.load import find_runs, load_run
from lmbench.records.run import RunRecord
from lmbench.report.answer import Answer

# More than rounding and the order of sums makes: the arms did not do the same work.
LOSS_TOLERANCE_FRACTION = 1e-3
_LAST_LINES = 3


class ArmFailed(Exception):
    """An arm did not measure, or not the same as the others; in one line, with the exit code to end with."""

    def __init__(self, arm: str, why: str, exit_code: ExitCode = ExitCode.INTERNAL) -> None:
        super().__init__(f"{arm}: {why}")
        self.exit_code = exit_code


def measure_overhead(fit_options: list[str], rounds: int, folder: Path, command: str) -> Answer:
    """Run every arm `rounds` times, one round after the other, each round beginning with another arm.

    Args:
        fit_options: options of `lmbench fit`.
        rounds: how many; two complete ones are shown when a signal ends them.
        folder: takes what the processes leave.
        command: how to repeat it all.

    Raises:
        UsageError: the options are wrong.
        ArmFailed: a process did not end well, or did other work than the others.
    """
    pilot = run_fit(fit_options, folder / "pilot")
    tell(f"overhead: a first run of lmbench fit settled on {pilot.window.steps} steps a window")
    fixed = ["--measure.steps", str(pilot.window.steps), "--measure.min_window_s", "0"]
    options = [*fit_options, *fixed, "--measure.probe_steps", "0", "--measure.strict", "false"]
    measurements: list[Measurement] = []
    try:
        for index in range(rounds):
            turn = index % len(ARMS)
            for arm in [*ARMS, *ARMS][turn : turn + len(ARMS)]:
                record = measure_arm(arm, options, folder / f"{arm}-{index}")
                measurements.append(Measurement.of(arm, index, record))
                check_same_work(measurements)
                tell(f"overhead: round {index + 1} of {rounds}, {arm}: {measurements[-1].step_s * 1e3:.3f} ms/step")
    except BaseException:
        complete = len(measurements) // len(ARMS)
        # An interval needs two rounds; with them, what was measured before a signal is shown.
        if received() is None or complete < 2:
            raise
        del measurements[complete * len(ARMS) :]
        tell(f"overhead: stopped; below is what {complete} complete rounds say")
    return overhead_answer(pilot, measurements, command)


def check_same_work(measurements: list[Measurement]) -> None:
    """Refuse to compare arms that took another number of steps, or began with another loss.

    Raises:
        ArmFailed: one did.
    """
    reference = measurements[0]
    first_loss = math.nan if reference.first_loss is None else reference.first_loss
    for m in measurements[1:]:
        if m.steps != reference.steps:
            raise ArmFailed(m.arm, f"took {m.steps} steps where {reference.arm} took {reference.steps}")
        loss = math.nan if m.first_loss is None else m.first_loss
        if not math.isclose(loss, first_loss, rel_tol=LOSS_TOLERANCE_FRACTION):
            raise ArmFailed(m.arm, f"its first loss is {loss}, that of {reference.arm} {first_loss}")


def measure_arm(arm: Arm, options: list[str], folder: Path) -> RunRecord:
    """Measure an arm once, with options of `lmbench fit`; `folder` is new and takes what it leaves.

    Returns a record with a closed window, memory and losses.

    Raises:
        UsageError: the options are wrong.
        ArmFailed: the process did not end well.
    """
    if arm != "harness":
        file = folder.with_suffix(".json")
        results = ["--measure.results_dir", str(folder)]
        execute(arm, ["-m", "lmbench.overhead.control", arm, str(file), "fit", *options, *results])
        return msgspec.json.decode(file.read_bytes(), type=RunRecord)
    record = run_fit(options, folder)
    if not record.window.steps or record.window.wall_s is None:
        raise ArmFailed("harness", "its result has no window")
    return record


def run_fit(options: list[str], folder: Path) -> RunRecord:
    """`lmbench fit` with its results in `folder`; returns its record. Raises like `measure_arm`."""
    try:
        execute("harness", ["-m", "lmbench", "fit", *options, "--measure.results_dir", str(folder)])
    except ArmFailed as failure:
        error = _load(folder).error if folder.is_dir() else None
        if error is None:
            raise
        # What the record says of it is shorter and clearer than the end of a traceback.
        raise ArmFailed("harness", f"{error.kind}: {error.message}", failure.exit_code) from None
    return _load(folder)


def execute(arm: str, words: list[str]) -> None:
    """Run this Python with the given words, to its end. Raises like `measure_arm`."""
    # -P: the installed lmbench, as this process, whatever lies in the working directory.
    done = subprocess.run([sys.executable, "-P", *words], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == ExitCode.OK:
        return
    if done.returncode == ExitCode.USAGE:
        # The user's own code may have said something before it, and after it.
        raise UsageError(done.stderr.rpartition("lmbench: ")[2].partition("\n")[0])
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    why = " | ".join(lines[-_LAST_LINES:]) or "nothing on standard error"
    is_known = done.returncode == ExitCode.OUT_OF_MEMORY
    exit_code = ExitCode.OUT_OF_MEMORY if is_known else ExitCode.INTERNAL
    raise ArmFailed(arm, f"failed with exit code {done.returncode}: {why}", exit_code)


def _load(folder: Path) -> RunRecord:
    return load_run(find_runs([folder])[0]).record
