"""What the arms of `lmbench overhead` took, and what follows from it. Nothing here needs torch."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec import Struct

from lmbench.records.environment import Environment
from lmbench.records.run import RunRecord
from lmbench.records.statistics import mean_interval
from lmbench.report.answer import Answer, Cell, Column, Line, Table, Value
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

_MIB = Unit("MiB", 2**-20, lambda size_bytes: whole(size_bytes / 2**20))
_MORE_MIB = Unit("MiB", 2**-20, lambda size_bytes: f"{size_bytes / 2**20:+,.1f}")


class Measurement(Struct):
    """An arm's window in one round, with its pauses in it: they too are the harness's cost.

    Peaks are None where the device has no such counter, losses where they are not finite.
    """

    arm: Arm
    round: int
    steps: int
    wall_s: float
    excluded_s: float
    steady_peak_allocated_bytes: int | None
    run_peak_allocated_bytes: int | None
    host_peak_rss_bytes: int | None
    first_loss: float | None
    last_loss: float | None

    @classmethod
    def of(cls, arm: Arm, index: int, record: RunRecord) -> Measurement:
        """The measurement of one process, by its record, which must have a closed window."""
        window, memory, loss = record.window, record.memory, record.loss
        assert window.steps
        assert window.wall_s is not None
        pauses_s = window.excluded_s or 0.0
        return cls(
            arm, index, window.steps, window.wall_s + pauses_s, pauses_s,
            memory.steady_peak_allocated_bytes, memory.run_peak_allocated_bytes, memory.host_peak_rss_bytes,
            loss.first, loss.last,
        )  # fmt: skip

    @property
    def step_s(self) -> float:
        return self.wall_s / self.steps


class Interval(NamedTuple):
    """A mean over rounds with Student's 95 % interval, in SI units."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Any) -> Interval:
        """Of an array of one value a round, two rounds at least."""
        return cls(float(values.mean()), *mean_interval(values.tolist()))

    def against(self, most: float) -> str:
        """Is it at most so much? `yes`, `no`, or `undecided` where the interval has both."""
        if self.high <= most:
            return "yes"
        return "no" if self.low > most else "undecided"

    def cell(self, scale: float, form: str, unit: str = "") -> Cell:
        mean, low, high = (format(value * scale, form) for value in self)
        return Cell(self.mean, low=self.low, high=self.high, text=f"{mean} [{low}, {high}]{unit}")


class Arms:
    """The measurements of complete rounds by arm, in the order of rounds: differences are paired.

    `step_s` has an array of seconds a step for each arm, one a round.
    """

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        ordered = sorted(measurements, key=lambda m: m.round)
        self.by_arm = {arm: [m for m in ordered if m.arm == arm] for arm in ARMS}
        self.step_s = {arm: np.array([m.step_s for m in self.by_arm[arm]]) for arm in ARMS}

    def peak_bytes(self, arm: Arm, name: str, base: Arm | None = None) -> int | None:
        """The highest of all rounds, or by how much that is over another arm's; None where one is not known."""
        highest = [max([-1 if (peak := getattr(m, name)) is None else peak for m in self.by_arm[side]])
                   for side in (arm, base or arm)]  # fmt: skip
        if -1 in highest:
            return None
        return highest[0] - highest[1] if base else highest[0]


def overhead_answer(pilot: RunRecord, measurements: Sequence[Measurement], command: str) -> Answer:
    """What complete rounds of measurements say of the run that `pilot` describes; `command` repeats them."""
    arms = Arms(measurements)
    harness = arms.by_arm["harness"]
    probed = pilot.probe.verdicts.items() if pilot.probe.verdicts else ()
    verdicts = {str(phase): str(lag.verdict) for phase, lag in probed}
    limit = bottleneck(pilot.device_type, verdicts)
    pause_s = statistics.fmean(m.excluded_s / m.steps for m in harness)
    lightnings = Interval.of(arms.step_s["trainer"] - arms.step_s["bare"]).cell(1e3, "+.3f", " ms a step").text
    loss = "not finite" if harness[0].first_loss is None else f"{harness[0].first_loss:.4f}"
    title = f"{len(harness)} rounds of {harness[0].steps} steps (warm-up {pilot.window.warmup_steps})"
    packages = (pilot.environment or Environment()).versions
    versions = Line("versions", f"torch {packages.torch}, lightning {packages.lightning}, python {packages.python}")
    figures = {
        "rounds": len(harness), "steps": harness[0].steps, "bottleneck": limit, "verdicts": verdicts,
        "pause_s": pause_s, "measurements": list(measurements), "run": pilot,
    }  # fmt: skip
    return Answer(
        headline=[*banner(pilot), versions, *(Line(arm, meaning) for arm, meaning in ARMS.items())],
        tables=[_arm_table(arms, title), _answer_table(arms, limit)],
        notes=[
            Line("bottleneck", ", ".join([limit, *(f"{phase} {verdict}" for phase, verdict in verdicts.items())])),
            Line("Lightning", f"trainer - bare: {lightnings}"),
            Line("records", f"written in {pause_s * 1e3:.3f} ms a step of the harness; a run subtracts these pauses"),
            Line("first loss", f"{loss} in every arm"),
            Line("repeat", command, is_whole=True),
        ],
        figures=figures,
    )


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


def _arm_table(arms: Arms, title: str) -> Table:
    """Arms by time per step, its difference to bare with a 95 % interval, and peak memory."""
    on_device = arms.peak_bytes("bare", "run_peak_allocated_bytes") is not None
    peak = "run_peak_allocated_bytes" if on_device else "host_peak_rss_bytes"
    rows: list[list[Value | Cell]] = []
    for arm, step_s in arms.step_s.items():
        over, beyond = None, None
        if arm != "bare":
            over = Interval.of(step_s - arms.step_s["bare"]).cell(1e3, "+.3f")
            beyond = arms.peak_bytes(arm, peak, "bare")
        times = [float(value) for value in (step_s.mean(), step_s.min(), step_s.max())]
        rows.append([arm, *times, over, arms.peak_bytes(arm, peak), beyond])
    columns = [
        Column("arm"), Column("mean", MS, "step_s"), Column("min", MS, "step_min_s", is_extra=True),
        Column("max", MS, "step_max_s", is_extra=True), Column("over bare", MS, "over_bare_s"),
        Column("peak", _MIB, peak), Column("over", _MORE_MIB, f"over_bare_{peak}"),
    ]  # fmt: skip
    caption = f"time a step, [95 % interval] of the mean over rounds; {'device' if on_device else 'host'} peak memory"
    return Table("arms", title, columns, rows, caption)


def _answer_table(arms: Arms, limit: str) -> Table:
    """The questions, each with its answer and the figure behind it; `n/a` where a question is not asked."""
    step_s = arms.step_s["harness"]
    fraction = Interval.of(step_s / arms.step_s["bare"] - 1.0)
    added = Interval.of(step_s - arms.step_s["trainer"])
    by_time = fraction.against(TIME_LIMIT_FRACTION) if limit not in ("host", "cpu") else "n/a"
    by_host = added.against(HOST_LIMIT_S) if limit != "device" else "n/a"
    by_memory, memory = "n/a", Cell(None, text="a CPU has no counter of it")
    window, run = (arms.peak_bytes("harness", f"{part}_peak_allocated_bytes", "bare") for part in ("steady", "run"))
    if window is not None and run is not None:
        by_memory = "yes" if max(window, run) <= MEMORY_LIMIT_BYTES else "no"
        text = f"{_MORE_MIB.text(window)} MiB (window), {_MORE_MIB.text(run)} (run)"
        memory = Cell(max(window, run), text=text)
    rows: list[list[Value | Cell]] = [
        ["step within 1 % of bare", Cell(by_time, style="outcome"), fraction.cell(100, "+.2f", " %")],
        ["harness - trainer at most 0.1 ms", Cell(by_host, style="outcome"), added.cell(1e3, "+.3f", " ms")],
        ["device memory within 1 MiB of bare", Cell(by_memory, style="outcome"), memory],
    ]
    columns = [Column("question"), Column("answer"), Column("figure")]
    return Table("answers", "Answers", columns, rows, "means over rounds with 95 % intervals")
