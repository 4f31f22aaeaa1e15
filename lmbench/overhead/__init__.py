"""Measure what the harness costs: run the arms of `lmbench overhead` in fresh processes, and compare their step times.

This module works without torch; the processes of the control arms run control.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean
from typing import Literal

import msgspec

from lmbench.progress import progress
from lmbench.python_process import ProcessFailed, run_python
from lmbench.records.load import find_runs, load_run
from lmbench.records.run import RunRecord
from lmbench.records.statistics import mean_interval
from lmbench.records.vocabulary import Values
from lmbench.report.answer import Answer, Cell, Column, Line, Table, Value
from lmbench.report.run import banner
from lmbench.report.units import MS, PERCENT

Arm = Literal["bare", "trainer", "harness", "do_bench"]
#: The arms and their meanings, in the order of the first round.
ARMS: dict[Arm, str] = {
    "bare": "plain PyTorch loop",
    "trainer": "Lightning's Trainer with everything off",
    "harness": "lmbench fit without probe steps",
}
#: The arm that `--do_bench` adds.
DO_BENCH: dict[Arm, str] = {
    "do_bench": "the plain loop timed as triton.testing.do_bench does: events around each step, after a write that "
    "empties the L2 cache; the time between steps is not in it, nor the host's while the device writes"
}

#: One arm's window in one round, with the keys `arm`, `round`, `steps`, `step_s` and `first_loss`.
ArmMeasurement = Values


def measurement_of(arm: Arm, index: int, record: RunRecord) -> ArmMeasurement:
    """The measurement of one process, from its record.

    `step_s` includes pauses, which the harness costs too. `first_loss` is None if the loss is not finite.

    Raises:
        ProcessFailed: the record has no closed window.
    """
    window = record.window
    if not window.steps or window.wall_s is None:
        raise ProcessFailed(f"{arm}: its result has no window")
    step_s = (window.wall_s + (window.excluded_s or 0.0)) / window.steps
    return {"arm": arm, "round": index, "steps": window.steps, "step_s": step_s, "first_loss": record.loss.first}


def overhead_answer(pilot: RunRecord, measurements: Sequence[ArmMeasurement], command: str) -> Answer:
    """The answer for complete rounds: each arm's time per step, and its difference to `bare`, paired by round.

    Args:
        pilot: the record of a run of the same configuration, for the banner.
        measurements: of every arm in every round.
        command: repeats the measurement.
    """
    arms = {arm: ARMS.get(arm) or DO_BENCH[arm] for arm in dict.fromkeys(window["arm"] for window in measurements)}
    times_s = {arm: [window["step_s"] for window in measurements if window["arm"] == arm] for arm in arms}
    rows: list[list[Value | Cell]] = [["bare", fmean(times_s["bare"]), None, None]]
    for arm in list(arms)[1:]:
        pairs = list(zip(times_s[arm], times_s["bare"], strict=True))
        over_s = _interval([step_s - bare_s for step_s, bare_s in pairs], "+.3f", 1e3)
        # The interval of logarithms cannot reach below -100 %.
        over_fraction = _interval([math.log(step_s / bare_s) for step_s, bare_s in pairs], "+.2f", 100, math.expm1)
        rows.append([arm, fmean(times_s[arm]), over_s, over_fraction])
    columns = [
        Column("arm"), Column("mean", MS, "step_s"), Column("over bare", MS, "over_bare_s"),
        Column("over bare", PERCENT, "over_bare_fraction"),
    ]  # fmt: skip
    rounds, steps = len(times_s["bare"]), measurements[0]["steps"]
    title = f"{rounds} rounds of {steps} steps (warm-up {pilot.window.warmup_steps})"
    caption = "time a step, [95 % interval] of the mean over rounds"
    return Answer(
        headline=[*banner(pilot), *(Line(arm, meaning) for arm, meaning in arms.items())],
        tables=[Table("arms", title, columns, rows, caption)],
        notes=[Line("repeat", command, is_whole=True)],
        figures={"rounds": rounds, "steps": steps, "measurements": measurements, "run": pilot},
    )


def _interval(values: Sequence[float], form: str, scale: float, convert: Callable[[float], float] = float) -> Cell:
    """The mean over rounds with Student's 95 % interval, after `convert`; the text shows multiples of 1 / `scale`."""
    mean, low, high = map(convert, (fmean(values), *mean_interval(values)))
    texts = [format(value * scale, form) for value in (mean, low, high)]
    return Cell(mean, low=low, high=high, text=f"{texts[0]} [{texts[1]}, {texts[2]}]")


# Rounding and the order of sums differ less; beyond this the arms did not do the same work.
LOSS_TOLERANCE_FRACTION = 1e-3


def measure_overhead(fit_options: list[str], rounds: int, folder: Path, command: str, with_do_bench: bool) -> Answer:
    """Measure every arm in each round; the first arm rotates from round to round.

    Args:
        fit_options: options of `lmbench fit`.
        rounds: number of rounds.
        folder: folder for the results of the processes.
        command: repeats the measurement.
        with_do_bench: measure the arm `do_bench` too.

    Raises:
        UsageError: the options are wrong.
        ProcessFailed: a process failed, or did not do the same work as the first one.
    """
    arms = [*ARMS, *(DO_BENCH if with_do_bench else ())]
    with progress("overhead", 1 + rounds * len(arms)) as task:
        task.begin("a first run")
        pilot = run_fit(fit_options, folder / "pilot", task.note)
        steps = pilot.window.steps
        task.keep(f"a first run of lmbench fit settled on {steps} steps a window")
        fixed = f"--measure.steps={steps} --measure.min_window_s=0 --measure.probe_steps=0 --measure.strict=false"
        options = [*fit_options, *fixed.split()]
        measurements = []
        for index in range(rounds):
            turn = index % len(arms)
            for arm in [*arms[turn:], *arms[:turn]]:
                task.begin(arm)
                record = measure_arm(arm, options, folder / f"{arm}-{index}", task.note)
                measurements.append(measurement_of(arm, index, record))
                check_same_work(measurements)
                task.keep(f"round {index + 1} of {rounds}, {arm}: {measurements[-1]['step_s'] * 1e3:.3f} ms/step")
        return overhead_answer(pilot, measurements, command)


def check_same_work(measurements: list[ArmMeasurement]) -> None:
    """Compare the latest measurement with the first one.

    Raises:
        ProcessFailed: the number of steps or the first loss differs.
    """
    first, last = measurements[0], measurements[-1]
    if last["steps"] != first["steps"]:
        raise ProcessFailed(f"{last['arm']}: took {last['steps']} steps where {first['arm']} took {first['steps']}")
    first_loss, last_loss = first["first_loss"], last["first_loss"]
    # A loss that is not finite is None.
    if None in (first_loss, last_loss) or not math.isclose(first_loss, last_loss, rel_tol=LOSS_TOLERANCE_FRACTION):
        raise ProcessFailed(f"{last['arm']}: its first loss is {last_loss}, that of {first['arm']} {first_loss}")


def measure_arm(
    arm: Arm, options: list[str], folder: Path, heard: Callable[[str], None] = lambda text: None
) -> RunRecord:
    """Measure an arm once, in a process of its own.

    Args:
        arm: the arm.
        options: options of `lmbench fit`.
        folder: a new folder for the result.
        heard: called with every line about progress that the process prints.

    Returns:
        A record with window and losses.

    Raises:
        UsageError: the options are wrong.
        ProcessFailed: the process failed.
    """
    if arm == "harness":
        return run_fit(options, folder, heard)
    file = folder.with_suffix(".json")
    words = ["fit", *options, f"--measure.results_dir={folder}"]
    run_python("-m", "lmbench.overhead.control", arm, str(file), *words, heard=heard)
    return msgspec.json.decode(file.read_bytes(), type=RunRecord)


def run_fit(options: list[str], folder: Path, heard: Callable[[str], None]) -> RunRecord:
    """Run `lmbench fit` in a process of its own, with its results in `folder`, and return its record.

    Raises:
        UsageError: the options are wrong.
        ProcessFailed: the process failed.
    """
    try:
        run_python("-m", "lmbench", "fit", *options, f"--measure.results_dir={folder}", heard=heard)
    except ProcessFailed as failure:
        runs = find_runs([folder]) if folder.is_dir() else []
        error = load_run(runs[0]).record.error if runs else None
        # The record's error is shorter and clearer than the end of a traceback.
        reason = f"{error.kind}: {error.message}" if error else str(failure)
        raise ProcessFailed(f"harness: {reason}", failure.exit_code) from None
    return load_run(find_runs([folder])[0]).record
