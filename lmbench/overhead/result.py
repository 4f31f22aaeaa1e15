"""What the arms of `lmbench overhead` took, and what follows from it. Nothing here needs torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from msgspec import Struct
from msgspec.structs import asdict

from lmbench.python_process import ProcessFailed
from lmbench.records.environment import Environment
from lmbench.records.field import PerPhase
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

_PEAKS = ("steady_peak_allocated_bytes", "run_peak_allocated_bytes", "host_peak_rss_bytes")
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
        """The measurement of one process, by its record. Raises ProcessFailed for one without a closed window."""
        window, memory, loss = record.window, record.memory, record.loss
        if not window.steps or window.wall_s is None:
            raise ProcessFailed(f"{arm}: its result has no window")
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
    """What complete rounds of measurements say of the run that `pilot` describes; `command` repeats them."""
    # Here: help does without it.
    import pandas as pd

    rounds = pd.DataFrame(map(asdict, measurements)).astype(dict.fromkeys(_PEAKS, "Int64"))
    # A row for each round and a column for each arm: differences are paired.
    step_s = rounds.assign(step_s=[m.step_s for m in measurements]).pivot(columns="arm", index="round", values="step_s")
    # A peak that one round does not know is not known.
    peaks = rounds.groupby("arm")[list(_PEAKS)].agg(lambda column: column.max(skipna=False))
    verdicts = {str(phase): str(lag.verdict) for phase, lag in (pilot.probe.verdicts or PerPhase()).items()}
    limit = bottleneck(pilot.device_type, verdicts)
    harness = rounds[rounds["arm"] == "harness"]
    pause_s = float((harness["excluded_s"] / harness["steps"]).mean())
    lightnings = Interval.of(step_s["trainer"] - step_s["bare"]).cell(1e3, "+.3f", " ms a step").text
    first_loss, steps = measurements[0].first_loss, measurements[0].steps
    packages = (pilot.environment or Environment()).versions
    versions = Line("versions", f"torch {packages.torch}, lightning {packages.lightning}, python {packages.python}")
    figures = {
        "rounds": len(harness), "steps": steps, "bottleneck": limit, "verdicts": verdicts,
        "pause_s": pause_s, "measurements": list(measurements), "run": pilot,
    }  # fmt: skip
    title = f"{len(harness)} rounds of {steps} steps (warm-up {pilot.window.warmup_steps})"
    return Answer(
        headline=[*banner(pilot), versions, *(Line(arm, meaning) for arm, meaning in ARMS.items())],
        tables=[_arm_table(step_s, peaks, title), _answer_table(step_s, peaks, limit)],
        notes=[
            Line("bottleneck", ", ".join([limit, *(f"{phase} {verdict}" for phase, verdict in verdicts.items())])),
            Line("Lightning", f"trainer - bare: {lightnings}"),
            Line("records", f"written in {pause_s * 1e3:.3f} ms a step of the harness; a run subtracts these pauses"),
            Line("first loss", f"{'not finite' if first_loss is None else f'{first_loss:.4f}'} in every arm"),
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


def _arm_table(step_s: Any, peaks: Any, title: str) -> Table:
    """Arms by time per step, its difference to bare with a 95 % interval, and peak memory."""
    whose, peak = "device", "run_peak_allocated_bytes"
    if peaks[peak].isna().any():
        whose, peak = "host", "host_peak_rss_bytes"
    bare, *others = ARMS
    over = [Interval.of(step_s[arm] - step_s[bare]).cell(1e3, "+.3f") for arm in others]
    frame = step_s[list(ARMS)].agg(["mean", "min", "max"]).T.assign(over=[None, *over], peak=peaks[peak])
    frame["more"] = (frame["peak"] - frame["peak"][bare]).where(frame.index != bare)
    rows = frame.reset_index().astype(object)
    columns = [
        Column("arm"), Column("mean", MS, "step_s"), Column("min", MS, "step_min_s", is_extra=True),
        Column("max", MS, "step_max_s", is_extra=True), Column("over bare", MS, "over_bare_s"),
        Column("peak", _MIB, peak), Column("over", _MORE_MIB, f"over_bare_{peak}"),
    ]  # fmt: skip
    caption = f"time a step, [95 % interval] of the mean over rounds; {whose} peak memory"
    return Table("arms", title, columns, rows.where(rows.notna(), None).to_numpy().tolist(), caption)


def _answer_table(step_s: Any, peaks: Any, limit: str) -> Table:
    """The questions, each with its answer and the figure behind it; `n/a` where a question is not asked."""
    fraction = Interval.of(step_s["harness"] / step_s["bare"] - 1.0)
    added = Interval.of(step_s["harness"] - step_s["trainer"])
    by_time = "n/a" if limit in ("host", "cpu") else fraction.against(TIME_LIMIT_FRACTION)
    by_host = "n/a" if limit == "device" else added.against(HOST_LIMIT_S)
    by_memory, memory = "n/a", Cell(None, text="a CPU has no counter of it")
    more = (peaks.loc["harness"] - peaks.loc["bare"]).iloc[:2]
    if more.notna().all():
        window, run = map(int, more)
        by_memory = "yes" if max(window, run) <= MEMORY_LIMIT_BYTES else "no"
        memory = Cell(max(window, run), text=f"{_MORE_MIB.text(window)} MiB (window), {_MORE_MIB.text(run)} (run)")
    rows: list[list[Value | Cell]] = [
        ["step within 1 % of bare", Cell(by_time, style="outcome"), fraction.cell(100, "+.2f", " %")],
        ["harness - trainer at most 0.1 ms", Cell(by_host, style="outcome"), added.cell(1e3, "+.3f", " ms")],
        ["device memory within 1 MiB of bare", Cell(by_memory, style="outcome"), memory],
    ]
    columns = [Column("question"), Column("answer"), Column("figure")]
    return Table("answers", "Answers", columns, rows, "means over rounds with 95 % intervals")
