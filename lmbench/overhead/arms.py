"""The arms of `lmbench overhead`, each measured in a process of its own, and what follows from them. Nothing here needs
torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from lmbench.interruption import received
from lmbench.progress import progress
from lmbench.python_process import ProcessFailed, run_python
from lmbench.records.field import PerPhase
from lmbench.records.load import find_runs, load_run
from lmbench.records.run import Environment, RunRecord
from lmbench.records.statistics import mean_interval
from lmbench.report.answer import Answer, Cell, Column, Line, Table
from lmbench.report.run import banner
from lmbench.report.units import MS, Unit, whole

Arm = Literal["bare", "trainer", "harness"]
#: In the order of the first round.
ARMS: dict[Arm, str] = {
    "bare": "plain PyTorch loop",
    "trainer": "Lightning's Trainer with everything off",
    "harness": "lmbench fit without probe steps",
}

#: What the harness may cost: in step time where the device is the bottleneck, beyond the plain Trainer where the host
#: is, and in device memory.
TIME_LIMIT_FRACTION = 0.01
HOST_LIMIT_S = 0.1e-3
MEMORY_LIMIT_BYTES = 2**20

_PEAKS = ("run_peak_allocated_bytes", "host_peak_rss_bytes")
_MIB = Unit("MiB", 2**-20, lambda size_bytes: whole(size_bytes / 2**20))
_MORE_MIB = Unit("MiB", 2**-20, lambda size_bytes: f"{size_bytes / 2**20:+,.1f}")


#: An arm's window in one round; see `measurement_of`.
Measurement = dict[str, Any]


def measurement_of(arm: Arm, index: int, record: RunRecord) -> Measurement:
    """`arm`, `round`, `steps`, `step_s`, `first_loss` and two peaks of one process, by its record.

    Pauses are in its step: they too are the harness's cost. Peaks are None where the device has no such counter, the
    loss where it is not finite. Raises ProcessFailed for a record without a closed window.
    """
    window = record.window
    if not window.steps or window.wall_s is None:
        raise ProcessFailed(f"{arm}: its result has no window")
    step_s = (window.wall_s + (window.excluded_s or 0.0)) / window.steps
    facts = {"arm": arm, "round": index, "steps": window.steps, "step_s": step_s, "first_loss": record.loss.first}
    return facts | {peak: getattr(record.memory, peak) for peak in _PEAKS}


class Interval(NamedTuple):
    """A mean over rounds with Student's 95 % interval, in SI units."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Any) -> Interval:
        """Of a series of one value a round, two rounds at least."""
        return cls(float(values.mean()), *mean_interval(values.tolist()))

    def against(self, most: float) -> str:
        """Is it at most so much? `yes`, `no`, or `undecided` where the interval has both."""
        if self.high <= most:
            return "yes"
        return "no" if self.low > most else "undecided"

    def cell(self, scale: float, form: str, unit: str = "") -> Cell:
        mean, low, high = (format(value * scale, form) for value in self)
        return Cell(self.mean, low=self.low, high=self.high, text=f"{mean} [{low}, {high}]{unit}")


def overhead_answer(pilot: RunRecord, measurements: Sequence[Measurement], command: str) -> Answer:
    """What complete rounds of measurements say of the run that `pilot` describes; `command` repeats them.

    Tables: arms by time per step, its difference to bare, and peak memory; and the questions, each with its answer and
    the figure behind it, `n/a` where a question is not asked.
    """
    # Here: help does without it.
    import pandas as pd

    frame = pd.DataFrame(measurements)
    # A row for each round and a column for each arm: differences are paired.
    step_s = frame.pivot(columns="arm", index="round", values="step_s")[list(ARMS)]
    over = step_s.sub(step_s["bare"], axis=0)
    verdicts = {str(phase): str(lag.verdict) for phase, lag in (pilot.probe.verdicts or PerPhase()).items()}
    limit = bottleneck(pilot.device_type, verdicts)
    # A peak that one round does not know is not known.
    peaks = frame.dropna(axis="columns").groupby("arm").max()
    whose, peak = ("device", _PEAKS[0]) if _PEAKS[0] in peaks else ("host", _PEAKS[1])
    more = (peaks[peak] - peaks[peak]["bare"]).astype(int)
    arms: list[list[Any]] = [
        [arm, step_s[arm].mean(), Interval.of(over[arm]).cell(1e3, "+.3f"), int(peaks[peak][arm]), int(more[arm])]
        for arm in ARMS
    ]
    arms[0][2] = arms[0][4] = None
    fraction = Interval.of(step_s["harness"] / step_s["bare"] - 1.0)
    added = Interval.of(step_s["harness"] - step_s["trainer"])
    by_time = "n/a" if limit in ("host", "cpu") else fraction.against(TIME_LIMIT_FRACTION)
    by_host = "n/a" if limit == "device" else added.against(HOST_LIMIT_S)
    by_memory, memory = "n/a", Cell(None, text="a CPU has no counter of it")
    if whose == "device":
        by_memory = "yes" if more["harness"] <= MEMORY_LIMIT_BYTES else "no"
        memory = Cell(int(more["harness"]), text=f"{_MORE_MIB.text(more['harness'])} MiB")
    questions: list[list[str | Cell]] = [
        ["step within 1 % of bare", Cell(by_time, style="outcome"), fraction.cell(100, "+.2f", " %")],
        ["harness - trainer at most 0.1 ms", Cell(by_host, style="outcome"), added.cell(1e3, "+.3f", " ms")],
        ["device memory within 1 MiB of bare", Cell(by_memory, style="outcome"), memory],
    ]
    columns = [
        Column("arm"), Column("mean", MS, "step_s"), Column("over bare", MS, "over_bare_s"),
        Column("peak", _MIB, peak), Column("over", _MORE_MIB, f"over_bare_{peak}"),
    ]  # fmt: skip
    steps, first_loss = measurements[0]["steps"], measurements[0]["first_loss"]
    packages = (pilot.environment or Environment()).versions
    versions = Line("versions", f"torch {packages.torch}, lightning {packages.lightning}, python {packages.python}")
    title = f"{len(step_s)} rounds of {steps} steps (warm-up {pilot.window.warmup_steps})"
    caption = f"time a step, [95 % interval] of the mean over rounds; {whose} peak memory"
    return Answer(
        headline=[*banner(pilot), versions, *(Line(arm, meaning) for arm, meaning in ARMS.items())],
        tables=[
            Table("arms", title, columns, arms, caption),
            Table(
                "answers", "Answers", [Column("question"), Column("answer"), Column("figure")], questions,
                "means over rounds with 95 % intervals",
            ),
        ],
        notes=[
            Line("bottleneck", ", ".join([limit, *(f"{phase} {verdict}" for phase, verdict in verdicts.items())])),
            Line("first loss", f"{first_loss:.4f} in every arm"),
            Line("repeat", command, is_whole=True),
        ],
        figures={
            "rounds": len(step_s), "steps": steps, "bottleneck": limit, "measurements": measurements, "run": pilot,
        },
    )  # fmt: skip


def bottleneck(device_type: str | None, verdicts: Mapping[str, str]) -> str:
    """What a step waits for: `device` where every phase has work queued, `host` where one waits for the host,
    `cpu` where both are the same, `mixed` or `unknown` where the lag probes were undecided or did not run.

    Args:
        device_type: `cuda` or `cpu`.
        verdicts: of the lag probes, by phase.
    """
    if device_type == "cpu":
        return "cpu"
    names = {"host-bound": "host", "mixed": "mixed", "queued": "device"}
    return next((name for verdict, name in names.items() if verdict in verdicts.values()), "unknown")


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
