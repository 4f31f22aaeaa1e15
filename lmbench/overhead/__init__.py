"""What the harness costs: the arms of `lmbench overhead`, each measured in a process of its own, and what follows from
them. Nothing here needs torch; control.py is what the processes run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import msgspec

from lmbench.progress import progress
from lmbench.python_process import ProcessFailed, run_python
from lmbench.records.load import find_runs, load_run
from lmbench.records.run import RunRecord
from lmbench.records.statistics import mean_interval
from lmbench.report.answer import Answer, Cell, Column, Line, Table, Value
from lmbench.report.run import banner
from lmbench.report.units import MS, PERCENT

Arm = Literal["bare", "trainer", "harness"]
#: In the order of the first round.
ARMS: dict[Arm, str] = {
    "bare": "plain PyTorch loop",
    "trainer": "Lightning's Trainer with everything off",
    "harness": "lmbench fit without probe steps",
}

#: An arm's window in one round; see `measurement_of`.
Measurement = dict[str, Any]


def measurement_of(arm: Arm, index: int, record: RunRecord) -> Measurement:
    """`arm`, `round`, `steps`, `step_s` and `first_loss` of one process, by its record.

    Pauses are in its step: they too are the harness's cost. The loss is None where it is not finite. Raises
    ProcessFailed for a record without a closed window.
    """
    window = record.window
    if not window.steps or window.wall_s is None:
        raise ProcessFailed(f"{arm}: its result has no window")
    step_s = (window.wall_s + (window.excluded_s or 0.0)) / window.steps
    return {"arm": arm, "round": index, "steps": window.steps, "step_s": step_s, "first_loss": record.loss.first}


def overhead_answer(pilot: RunRecord, measurements: Sequence[Measurement], command: str) -> Answer:
    """What complete rounds of measurements say of the run that `pilot` describes; `command` repeats them.

    Its table has each arm by time per step and by the difference to bare, which is paired by round.
    """
    rounds = {arm: [each["step_s"] for each in measurements if each["arm"] == arm] for arm in ARMS}
    rows: list[list[Value | Cell]] = [["bare", fmean(rounds["bare"]), None, None]]
    for arm in list(ARMS)[1:]:
        pairs = list(zip(rounds[arm], rounds["bare"], strict=True))
        over_s = _interval([step_s - bare_s for step_s, bare_s in pairs], "+.3f", 1e3)
        # Of logarithms, so that no end is below -100 %.
        over_fraction = _interval([math.log(step_s / bare_s) for step_s, bare_s in pairs], "+.2f", 100, math.expm1)
        rows.append([arm, fmean(rounds[arm]), over_s, over_fraction])
    columns = [
        Column("arm"), Column("mean", MS, "step_s"), Column("over bare", MS, "over_bare_s"),
        Column("over bare", PERCENT, "over_bare_fraction"),
    ]  # fmt: skip
    steps = measurements[0]["steps"]
    title = f"{len(rounds['bare'])} rounds of {steps} steps (warm-up {pilot.window.warmup_steps})"
    caption = "time a step, [95 % interval] of the mean over rounds"
    return Answer(
        headline=[*banner(pilot), *(Line(arm, meaning) for arm, meaning in ARMS.items())],
        tables=[Table("arms", title, columns, rows, caption)],
        notes=[Line("repeat", command, is_whole=True)],
        figures={"rounds": len(rounds["bare"]), "steps": steps, "measurements": measurements, "run": pilot},
    )


def _interval(values: Sequence[float], form: str, scale: float, result: Callable[[float], float] = float) -> Cell:
    """A mean over rounds with Student's 95 % interval, as what `result` makes of it."""
    mean, low, high = map(result, (fmean(values), *mean_interval(values)))
    shown = [format(value * scale, form) for value in (mean, low, high)]
    return Cell(mean, low=low, high=high, text=f"{shown[0]} [{shown[1]}, {shown[2]}]")


# More than rounding and the order of sums makes: the arms did not do the same task.
LOSS_TOLERANCE_FRACTION = 1e-3


def measure_overhead(fit_options: list[str], rounds: int, folder: Path, command: str) -> Answer:
    """Run every arm `rounds` times, one round after the other, each round beginning with another arm.

    Args:
        fit_options: options of `lmbench fit`.
        rounds: how many.
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
        for index in range(rounds):
            turn = index % len(ARMS)
            for arm in [*ARMS, *ARMS][turn : turn + len(ARMS)]:
                task.begin(arm)
                record = measure_arm(arm, options, folder / f"{arm}-{index}", task.note)
                measurements.append(measurement_of(arm, index, record))
                check_same_work(measurements)
                task.keep(f"round {index + 1} of {rounds}, {arm}: {measurements[-1]['step_s'] * 1e3:.3f} ms/step")
        return overhead_answer(pilot, measurements, command)


def check_same_work(measurements: list[Measurement]) -> None:
    """Refuse to compare the latest arm with the first one where it took another number of steps, or began with another
    loss. Raises ProcessFailed."""
    first, last = measurements[0], measurements[-1]
    if last["steps"] != first["steps"]:
        raise ProcessFailed(f"{last['arm']}: took {last['steps']} steps where {first['arm']} took {first['steps']}")
    # A loss that is not finite is None.
    known = [each["first_loss"] or math.nan for each in (first, last)]
    if not math.isclose(*known, rel_tol=LOSS_TOLERANCE_FRACTION):
        raise ProcessFailed(f"{last['arm']}: its first loss is {known[1]}, that of {first['arm']} {known[0]}")


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
