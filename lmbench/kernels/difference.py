"""Two traces side by side: which kernels, kinds and parts appeared, vanished, grew and shrank, per step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from lmbench.errors import UsageError
from lmbench.kernels.answer import per_what, run_line
from lmbench.kernels.findings import Findings, examine
from lmbench.kernels.phases import PHASE_ORDER
from lmbench.kernels.sums import STEP
from lmbench.kernels.tables import reading, records, sum_of, table_of, with_rest
from lmbench.records.guard import not_passed
from lmbench.records.settings import differences
from lmbench.report.answer import Answer, Line, Table
from lmbench.report.console import KERNEL_WIDTH, shortened
from lmbench.report.units import Unit, milliseconds, signed_percent, whole

#: Two recordings of the same work agree to this share of a kernel's time.
SAME_FRACTION = 0.02
# Of all that grew and shrank: below it nothing is called either.
_SMALL_FRACTION = 0.001
# If what grew and what shrank cancel out to less than this share of both, shares of the rest say nothing.
_CANCELLED_FRACTION = 0.05
# Phases, kinds, parts and kernels that are named first, and what is named: of kernel time.
_NAMED = 3
_SAID_FRACTION = 0.001
_AXES = {"phases": "phase", "kinds": "kind", "parts": "part", "kernels": "short_name"}
# A share of either side that a floating-point sum can be off by: sums over different numbers of steps are.
_DUST = 1e-12

APPEARED, VANISHED, GREW, SHRANK, SAME = "new", "gone", "grew", "shrank", ""


def signed_ms(seconds: float) -> str:
    """A difference in ms with its sign and as many decimals as a time of its size."""
    text = milliseconds(abs(seconds))
    return f"{'+' if seconds > 0 else '-'}{text}" if float(text.replace(",", "")) else text


_SIGNED_MS = Unit("", 1e3, signed_ms)
_SUMMED = ["a_s", "b_s", "a_count", "b_count", "difference_s", "share_fraction"]


def compared(a: Findings, b: Findings, key: str, phase: str = STEP) -> pd.DataFrame:
    """Every kind, part, ... (a column of Work) of a phase, or of the step, by `name`, the largest difference first.

    `a_s`, `b_s`, `a_count` and `b_count` are kernel time and number of kernels, means per step, missing on a side that
    has none. `difference_s` is B minus A, `share_fraction` that of the total difference, missing where the total is
    next to nothing beside what cancels out, and `change` a word for it.
    """
    columns = {key: "name", "kernel_s": "s", "kernel_count": "count"}
    sides = (
        pd.DataFrame(side.work.by(key, phase=phase), columns=[*columns]).rename(columns=columns).set_index("name")
        for side in (a, b)
    )
    rows = pd.concat([side.add_prefix(label) for side, label in zip(sides, ("a_", "b_"), strict=True)], axis=1)
    larger_s, difference_s = rows[["a_s", "b_s"]].max(axis=1), rows.b_s.fillna(0) - rows.a_s.fillna(0)
    difference_s = difference_s.mask(difference_s.abs() <= _DUST * larger_s, 0.0)
    total, gross = difference_s.sum(), difference_s.abs().sum()
    is_same = difference_s.abs() <= np.maximum(SAME_FRACTION * larger_s, _SMALL_FRACTION * gross)
    changes = {APPEARED: rows.a_s.isna(), VANISHED: rows.b_s.isna(), SAME: is_same, GREW: difference_s > 0}
    rows = rows.assign(
        difference_s=difference_s,
        share_fraction=difference_s / total if abs(total) >= _CANCELLED_FRACTION * gross > 0 else np.nan,
        change=np.select([*changes.values()], [*changes], SHRANK),
        size_s=difference_s.abs(),
        both_s=rows.a_s.fillna(0) + rows.b_s.fillna(0),
    )
    ordered = rows.reset_index().sort_values(["size_s", "both_s", "name"], ascending=[False, False, True])
    return ordered.drop(columns=["size_s", "both_s"])


def difference_answer(a: str | Path, b: str | Path, top: int = 15, phase: str | None = None) -> Answer:
    """How kernel time changed from one run or trace to another, and what changed most.

    Args:
        a: a run's folder or a trace file, before.
        b: the same, after.
        top: kernels that are shown of each table.
        phase: a phase to show alone.

    Raises:
        UsageError: a trace cannot be compared, or has no such phase.
    """
    return answer_of(examine(a), examine(b), top, phase)


def answer_of(a: Findings, b: Findings, top: int = 15, phase: str | None = None) -> Answer:
    """The answer of a comparison: tables of the whole step, or of one phase.

    Raises UsageError for a trace without kernels, or without a known number of steps where the other has one.
    """
    for side in (a, b):
        if side.why_no_kernels:
            raise UsageError(f"{str(side.trace.path)!r} has no kernels: {side.why_no_kernels}; give traces of a GPU")
    if a.trace.timeline.has_step_count != b.trace.timeline.has_step_count:
        raise UsageError("one trace tells its number of steps and the other does not; give two that do")
    phases = [STEP, *(name for name in PHASE_ORDER if name in {*a.work.phases, *b.work.phases})]
    if phase not in (None, *phases):
        raise UsageError(f"--phase is {phase!r}; these traces have {', '.join(phases)}")
    lines = []
    for label, side in (("A", a), ("B", b)):
        lines.append(Line(label, str(side.trace.path), is_whole=True))
        lines += [Line("", run_line(side.run))] if side.run else []
    lines += [Line("differs", str(setting)) for setting in (differences(a.run, b.run) if a.run and b.run else [])]
    before, after = a.work.total(), b.work.total()
    counts = f"{whole(before['kernel_count'])} -> {whole(after['kernel_count'])} kernels"
    spans, exposed = ([side.clocks.total[name] for side in (a, b)] for name in ("window_s", "comm_exposed_s"))
    lines.append(Line("device", f"{_change(*spans)} {per_what(a)} (with the profiler)"))
    if any(exposed):
        lines.append(Line("", f"{_change(*exposed)} of exposed communication"))
    lines.append(Line("kernels", f"{_change(before['kernel_s'], after['kernel_s'])} {per_what(a)}, {counts}"))
    for label, key in _AXES.items():
        rows = compared(a, b, key, STEP if key == "phase" else phase or STEP)
        largest = rows[rows.difference_s.abs() > _SAID_FRACTION * before["kernel_s"]][:_NAMED].itertuples()
        named = [f"{shortened(row.name, KERNEL_WIDTH)} {signed_ms(row.difference_s)} ms" for row in largest]
        lines.append(Line(label, ", ".join(named) or "nothing changed"))
    for label, side in (("A", a), ("B", b)):
        lines += [Line(guard.status.upper(), f"{label}: {guard.message}") for guard in not_passed(side.guards)]
    return Answer(lines, _tables(a, b, top, phase), first=())


def _change(before_s: float, after_s: float) -> str:
    """Both times, and the difference in ms and percent."""
    share = f", {signed_percent(after_s / before_s - 1)}" if before_s else ""
    return f"{milliseconds(before_s)} -> {milliseconds(after_s)} ms ({signed_ms(after_s - before_s)} ms{share})"


def _tables(a: Findings, b: Findings, top: int, phase: str | None) -> list[Table]:
    """Phases and clocks, then the step's kinds, parts and kernels; of one phase only its own, if named."""
    per, span = per_what(a), phase or STEP
    tables = []
    for name, key in _AXES.items():
        rows = records(compared(a, b, key, STEP if name == "phases" else span))
        shown = with_rest(rows, top if name == "kernels" else len(rows), _SUMMED, "name", name)
        table = table_of(
            name, f"Kernel time by {name.removesuffix('s')} of {span}",
            f"kernel time in ms {per}; share: of the difference; n: number of kernels",
            [*shown, sum_of(rows, _SUMMED, name="all")],
            *reading(**{name.removesuffix("s"): "name"}, A="a_s", B="b_s"), ("B - A", _SIGNED_MS, "difference_s"),
            *reading(share="share_fraction", n_A="a_count", n_B="b_count", _="change"),
        )  # fmt: skip
        tables.append(table)
    before, after = a.clocks.phases, b.clocks.phases
    names = {
        "window_s": "B - A", "busy_s": "= kernels", "queued_gap_s": "+ gaps", "host_wait_s": "+ waits",
        "other_idle_s": "+ other",
    }  # fmt: skip
    changes = after[[*names]].sub(before[[*names]], fill_value=0.0).assign(a_s=before.window_s, b_s=after.window_s)
    caption = (
        f"the phase's window on the device in ms {per}, and what its difference consists of: kernels, gaps between "
        "queued ones, waiting for the host (slowed by the profiler), and other idle time"
    )
    clocks = table_of(
        "clocks", "Device time by phase", caption,
        records(changes.reindex([name for name in PHASE_ORDER if name in changes.index]).reset_index()),
        *reading(phase="phase", A="a_s", B="b_s"), *((heading, _SIGNED_MS, name) for name, heading in names.items()),
    )  # fmt: skip
    return tables[1:] if phase else [tables[0], clocks, *tables[1:]]
