"""Measure what the harness costs: each arm of `lmbench overhead` runs in a fresh process, in turns with a bare loop.

In all of them the heap keeps its memory: how often it gives some back is luck, and costs a CPU more than the harness.
This module works without torch; the processes of the control arms run control.py.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from multiprocessing import Pipe
from pathlib import Path
from statistics import fmean
from typing import Any, Literal

import msgspec
import scipy  # type: ignore[import-untyped]
from msgspec import Struct

from lmbench.progress import Task, progress
from lmbench.python_process import KEPT_HEAP, PAIR, TURNS, ProcessFailed, kill_processes_below, run_python
from lmbench.records.load import find_runs, load_run
from lmbench.records.run import RunRecord
from lmbench.records.statistics import mean_interval
from lmbench.report.answer import Answer, Cell, Column, Line, Table, Value, labelled
from lmbench.report.banner import banner, environment_text
from lmbench.report.units import MS, PERCENT

Arm = Literal["bare", "trainer", "harness", "do_bench"]
#: The arms and their meanings.
ARMS: dict[Arm, str] = {
    "bare": "plain PyTorch loop",
    "trainer": "Lightning's Trainer with everything off",
    "harness": "lmbench fit without probe steps",
    # Only with `--do_bench`.
    "do_bench": "the plain loop timed as triton.testing.do_bench does: events around each step, after a write that "
    "empties the L2 cache; the time between steps is not in it, nor the host's while the device writes",
}
# Rounding and the order of sums differ less; beyond this the arms did not do the same work.
LOSS_TOLERANCE_FRACTION = 1e-3
#: An interval takes so many rounds.
_LEAST_ROUNDS = 2
#: The share of turns that is left out at either end: hosts of shared machines pause.
_TRIMMED = 0.2


class ArmWindow(Struct):
    """What one process measured: the window's mean step, pauses included, and losses, None where they are not finite.

    `turns_s` has the mean step of this process and of the other one in each turn that they took, in seconds.
    """

    steps: int
    step_s: float
    first_loss: float | None
    last_loss: float | None
    turns_s: list[tuple[float, float]] = []


class Pair(Struct):
    """An arm beside the bare loop, in one round. `turns` is 0 where one was measured after the other."""

    arm: Arm
    round: int
    steps: int
    step_s: float
    bare_s: float
    turns: int


def pair_of(arm: Arm, index: int, bare: ArmWindow, other: ArmWindow) -> Pair:
    """The pair of two processes that did the same work.

    Raises:
        ProcessFailed: their numbers of steps or first losses differ.
    """
    if other.steps != bare.steps:
        raise ProcessFailed(f"{arm}: took {other.steps} steps where bare took {bare.steps}")
    # A loss that is not finite is None, and close to none.
    losses = [math.nan if measured.first_loss is None else measured.first_loss for measured in (other, bare)]
    if not math.isclose(*losses, rel_tol=LOSS_TOLERANCE_FRACTION):
        raise ProcessFailed(f"{arm}: its first loss is {other.first_loss}, that of bare {bare.first_loss}")
    # The first turn begins on a machine that has just started two processes.
    turns_s = bare.turns_s[1:]
    if not turns_s:
        return Pair(arm, index, bare.steps, other.step_s, bare.step_s, 0)
    bare_s = float(scipy.stats.trim_mean([own_s for own_s, _ in turns_s], _TRIMMED))
    step_s = bare_s + float(scipy.stats.trim_mean([other_s - own_s for own_s, other_s in turns_s], _TRIMMED))
    # do_bench has another clock than the turns.
    return Pair(arm, index, bare.steps, other.step_s if arm == "do_bench" else step_s, bare_s, len(turns_s))


def overhead_answer(pilot: RunRecord, pairs: Sequence[Pair], command: str) -> Answer:
    """The answer for complete rounds: each arm's time per step, and its difference to the bare loop beside it.

    Args:
        pilot: the record of a run of the same configuration, for the banner.
        pairs: of every arm in every round.
        command: repeats the measurement.
    """
    rows: list[list[Value | Cell]] = []
    arms = [*dict.fromkeys(pair.arm for pair in pairs)]
    for arm in arms:
        times_s = [(pair.step_s, pair.bare_s) for pair in pairs if pair.arm == arm]
        over_s = _interval([step_s - bare_s for step_s, bare_s in times_s], "+.3f", 1e3)
        # The interval of logarithms cannot reach below -100 %.
        over_fraction = _interval([math.log(step_s / bare_s) for step_s, bare_s in times_s], "+.2f", 100, math.expm1)
        step_s, bare_s = map(fmean, zip(*times_s, strict=True))
        rows.append([arm, step_s, bare_s, over_s, over_fraction])
    columns = [
        Column("arm"), Column("step", MS, "step_s"), Column("bare beside it", MS, "bare_s"),
        Column("over bare", MS, "over_bare_s"), Column("over bare", PERCENT, "over_bare_fraction"),
    ]  # fmt: skip
    rounds, (first, *_) = len(times_s), pairs
    environment = pilot.environment
    machine = environment_text(environment, environment.device_name, with_code=True)
    turns = min(pair.turns for pair in pairs)
    how = f"in {turns} turns" if turns else "one after the other"
    length = f"{first.steps} steps after {pilot.window.warmup_steps} of warm-up"
    lines = [
        Line("rounds", f"{rounds}, of {length}, each arm and bare {how}"),
        *(Line(arm, ARMS[arm]) for arm in ("bare", *arms)),
    ]
    return Answer(
        headline=[*banner(pilot), *labelled("measured", machine), *lines],
        tables=[Table("arms", "Time a step", columns, rows, "mean over rounds, [95 % interval]")],
        notes=[Line("repeat", command, is_whole=True)],
        figures={"rounds": rounds, "steps": first.steps, "measurements": pairs, "run": pilot},
    )


def _interval(values: Sequence[float], form: str, scale: float, convert: Callable[[float], float] = float) -> Cell:
    """The mean over rounds with Student's 95 % interval, after `convert`; the text shows multiples of 1 / `scale`."""
    mean, low, high = map(convert, (fmean(values), *mean_interval(values)))
    texts = [format(value * scale, form) for value in (mean, low, high)]
    return Cell(mean, low=low, high=high, text=f"{texts[0]} [{texts[1]}, {texts[2]}]")


def measure_overhead(fit_options: list[str], rounds: int, folder: Path, command: str, with_do_bench: bool) -> Answer:
    """Measure every arm beside the bare loop in each round. After an interruption the complete rounds are the answer.

    Args:
        fit_options: options of `lmbench fit`.
        rounds: number of rounds.
        folder: folder for the results of the processes.
        command: repeats the measurement.
        with_do_bench: measure the arm `do_bench` too.

    Raises:
        UsageError: the options are wrong.
        ProcessFailed: a process failed, or did not do the same work as the bare loop.
    """
    arms = [arm for arm in ARMS if arm != "bare" and (with_do_bench or arm != "do_bench")]
    with progress("overhead", 1 + rounds * len(arms)) as task:
        task.begin("a first run")
        pilot = run_fit(fit_options, folder / "pilot", heard=task.note, variables=KEPT_HEAP)
        steps = pilot.window.steps
        task.keep(f"a first run of lmbench fit settled on {steps} steps a window")
        # The bare loop gives every rank the loader as it is.
        fixed = (
            f"--measure.steps={steps} --measure.min_window_s=0 --measure.probe_steps=0 --measure.strict=false "
            "--trainer.use_distributed_sampler=false"
        )
        pairs = list[Pair]()
        try:
            # Ranks that wait for their turn would keep their GPUs busy.
            for pair in _pairs(arms, rounds, [*fit_options, *fixed.split()], folder, pilot.world_size == 1, task):
                pairs.append(pair)
        except (KeyboardInterrupt, SystemExit):
            complete = len(pairs) // len(arms)
            if complete < _LEAST_ROUNDS:
                raise
            task.keep(f"interrupted: the answer is of {complete} of {rounds} rounds")
            pairs = pairs[: complete * len(arms)]
        return overhead_answer(pilot, pairs, command)


def _pairs(
    arms: Sequence[Arm], rounds: int, options: list[str], folder: Path, fits_together: bool, task: Task
) -> Iterator[Pair]:
    """Measure the pairs of all rounds, in turns where two processes fit."""
    for index, arm in product(range(rounds), arms):
        task.begin(arm)
        place = folder / f"{arm}-{index}"
        if fits_together:
            try:
                measured = _in_turns(arm, options, place, task.note)
            except ProcessFailed as failure:
                task.keep(f"two processes do not run together ({failure}): they are measured one by one")
                fits_together = False
        if not fits_together:
            measured = _one_by_one(arm, options, place, task.note, is_bare_first=index % 2 == 1)
        pair = pair_of(arm, index, *measured)
        task.keep(f"round {index + 1} of {rounds}, {arm}: {(pair.step_s - pair.bare_s) * 1e3:+.3f} ms/step over bare")
        yield pair


def _in_turns(arm: Arm, options: list[str], folder: Path, heard: Callable[[str], None]) -> tuple[ArmWindow, ArmWindow]:
    """Measure `bare` and another arm in two processes that take turns."""
    here, there = Pipe()
    # The seed of the coins, and which process it is.
    first, second = ({**KEPT_HEAP, PAIR: str(os.getpid()), TURNS: f"{folder.name} {position}"} for position in range(2))
    with ThreadPoolExecutor() as pool:
        try:
            bare = pool.submit(measure_arm, "bare", options, folder / "bare", pipe=here, variables=first)
            other = pool.submit(measure_arm, arm, options, folder / arm, heard=heard, pipe=there, variables=second)
            return bare.result(), other.result()
        except BaseException:
            kill_processes_below()
            raise


def _one_by_one(
    arm: Arm, options: list[str], folder: Path, heard: Callable[[str], None], *, is_bare_first: bool
) -> tuple[ArmWindow, ArmWindow]:
    """Measure `bare` and another arm, one after the other."""
    order: tuple[Arm, Arm] = ("bare", arm) if is_bare_first else (arm, "bare")
    windows = {each: measure_arm(each, options, folder / each, heard=heard, variables=KEPT_HEAP) for each in order}
    return windows["bare"], windows[arm]


def measure_arm(arm: Arm, options: list[str], folder: Path, **process: Any) -> ArmWindow:
    """Measure an arm once, in a process of its own.

    Args:
        arm: the arm.
        options: options of `lmbench fit`.
        folder: a new folder for the result.
        process: arguments of `run_python`.

    Raises:
        UsageError: the options are wrong.
        ProcessFailed: the process failed.
    """
    if arm == "harness":
        record = run_fit(options, folder, **process)
        window = record.window
        if not window.steps or window.wall_s is None:
            raise ProcessFailed(f"{arm}: its result has no window")
        # The harness costs its pauses, too.
        step_s = window.lasted_s / window.steps
        return ArmWindow(window.steps, step_s, record.loss.first, record.loss.last)
    file = folder.with_suffix(".json")
    file.parent.mkdir(exist_ok=True)
    words = ["fit", *options, f"--measure.results_dir={folder}"]
    run_python("-m", "lmbench.overhead.control", arm, str(file), *words, **process)
    return msgspec.json.decode(file.read_bytes(), type=ArmWindow)


def run_fit(options: list[str], folder: Path, **process: Any) -> RunRecord:
    """Run `lmbench fit` in a process of its own, with its results in `folder`, and return its record.

    Raises:
        UsageError: the options are wrong.
        ProcessFailed: the process failed.
    """
    try:
        run_python("-m", "lmbench", "fit", *options, f"--measure.results_dir={folder}", **process)
    except ProcessFailed as failure:
        runs = find_runs([folder]) if folder.is_dir() else []
        error = load_run(runs[0]).record.error if runs else None
        # The record's error is shorter and clearer than the end of a traceback.
        reason = f"{error.kind}: {error.message}" if error else str(failure)
        raise ProcessFailed(f"harness: {reason}", failure.exit_code) from None
    return load_run(find_runs([folder])[0]).record
