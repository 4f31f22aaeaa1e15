"""Measuring the arms of `lmbench overhead`, each in a process of its own. Nothing here needs torch."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import msgspec

from lmbench.interruption import received
from lmbench.overhead.result import ARMS, Arm, Measurement, measurement_of, overhead_answer
from lmbench.progress import progress
from lmbench.python_process import ProcessFailed, run_python
from lmbench.records.load import find_runs, load_run
from lmbench.records.run import RunRecord
from lmbench.report.answer import Answer

# More than rounding and the order of sums makes: the arms did not do the same task.
LOSS_TOLERANCE_FRACTION = 1e-3


def measure_overhead(fit_options: list[str], rounds: int, folder: Path, command: str) -> Answer:
    """Run every arm `rounds` times, one round after the other, each round beginning with another arm.

    Args:
        fit_options: options of `lmbench fit`.
        rounds: how many; two complete ones are shown when a signal ends them.
        folder: takes what the processes leave.
        command: how to repeat it all.

    Raises:
        UsageError: the options are wrong.
        ProcessFailed: a process did not end well, or did other work than the others.
    """
    with progress("overhead", 1 + rounds * len(ARMS)) as task:
        task.begin("a first run")
        pilot = run_fit(fit_options, folder / "pilot", task.note)
        steps = pilot.window.steps
        task.keep(f"a first run of lmbench fit settled on {steps} steps a window")
        fixed = f"--measure.steps={steps} --measure.min_window_s=0 --measure.probe_steps=0 --measure.strict=false"
        options = [*fit_options, *fixed.split()]
        measurements: list[Measurement] = []
        try:
            for index in range(rounds):
                turn = index % len(ARMS)
                for arm in [*ARMS, *ARMS][turn : turn + len(ARMS)]:
                    task.begin(arm)
                    record = measure_arm(arm, options, folder / f"{arm}-{index}", task.note)
                    measurements.append(measurement_of(arm, index, record))
                    check_same_work(measurements)
                    task.keep(f"round {index + 1} of {rounds}, {arm}: {measurements[-1]['step_s'] * 1e3:.3f} ms/step")
        except BaseException:
            complete = len(measurements) // len(ARMS)
            # An interval needs two rounds; with them, what was measured before a signal is shown.
            if received() is None or complete < 2:
                raise
            del measurements[complete * len(ARMS) :]
            task.keep(f"stopped; below is what {complete} complete rounds say")
        return overhead_answer(pilot, measurements, command)


def check_same_work(measurements: list[Measurement]) -> None:
    """Refuse to compare the latest arm with the first one where it took another number of steps, or began with another
    loss. Raises ProcessFailed."""
    (first, steps, first_loss), (last, last_steps, last_loss) = (
        (each["arm"], each["steps"], math.nan if each["first_loss"] is None else each["first_loss"])
        for each in (measurements[0], measurements[-1])
    )
    if last_steps != steps:
        raise ProcessFailed(f"{last}: took {last_steps} steps where {first} took {steps}")
    if not math.isclose(last_loss, first_loss, rel_tol=LOSS_TOLERANCE_FRACTION):
        raise ProcessFailed(f"{last}: its first loss is {last_loss}, that of {first} {first_loss}")


def measure_arm(
    arm: Arm, options: list[str], folder: Path, heard: Callable[[str], None] = lambda text: None
) -> RunRecord:
    """Measure an arm once, with options of `lmbench fit`; `folder` is new and takes what it leaves.

    Returns a record with a closed window, memory and losses.

    Raises:
        UsageError: the options are wrong.
        ProcessFailed: the process did not end well.
    """
    if arm == "harness":
        return run_fit(options, folder, heard)
    file = folder.with_suffix(".json")
    words = ["fit", *options, f"--measure.results_dir={folder}"]
    run_python("-m", "lmbench.overhead.control", arm, str(file), *words, heard=heard)
    return msgspec.json.decode(file.read_bytes(), type=RunRecord)


def run_fit(options: list[str], folder: Path, heard: Callable[[str], None] = lambda text: None) -> RunRecord:
    """`lmbench fit` with its results in `folder`; returns its record. Raises like `measure_arm`."""
    try:
        run_python("-m", "lmbench", "fit", *options, f"--measure.results_dir={folder}", heard=heard)
    except ProcessFailed as failure:
        runs = find_runs([folder]) if folder.is_dir() else []
        error = load_run(runs[0]).record.error if runs else None
        # What the record says of it is shorter and clearer than the end of a traceback.
        reason = f"{error.kind}: {error.message}" if error else str(failure)
        raise ProcessFailed(f"harness: {reason}", failure.exit_code) from None
    return load_run(find_runs([folder])[0]).record
