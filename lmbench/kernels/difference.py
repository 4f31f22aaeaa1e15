"""Two traces side by side: which kernels, kinds and parts are new or gone, and whose time per step grew or shrank."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from lmbench.errors import UsageError
from lmbench.kernels.answer import run_lines
from lmbench.kernels.findings import KernelFindings, examine
from lmbench.kernels.trace import PHASE_ORDER
from lmbench.records.settings import differences
from lmbench.report.answer import Answer, Line, guard_lines
from lmbench.report.console import KERNEL_WIDTH, shortened
from lmbench.report.described import signed_ms, table
from lmbench.report.units import milliseconds, signed_percent, whole

#: Two recordings of the same work agree to this share of a kernel's time.
SAME_FRACTION = 0.02
# A headline names at most this many phases, kinds, parts or kernels, and only changes above this share of kernel time.
_TOP = 3
_MIN_FRACTION = 0.001
_AXES = {"phases": "phase", "kinds": "kind", "parts": "part", "kernels": "short_name"}
_SUMMED = ["a_s", "b_s", "a_count", "b_count", "difference_s"]


def compared(a: KernelFindings, b: KernelFindings, key: str) -> pd.DataFrame:
    """A row for each value of a column of `Work`, such as `kind`, in the step; the largest difference first.

    `a_s`, `b_s`, `a_count` and `b_count` are kernel time and number of kernels as means per step, missing on a side
    without such kernels. `difference_s` is B minus A, and `change` is `new`, `gone`, `grew`, `shrank` or empty.
    """
    sides = [side.work.by(key).set_index(key)[["kernel_s", "kernel_count"]] for side in (a, b)]
    rows = pd.concat(sides, axis=1).set_axis(["a_s", "a_count", "b_s", "b_count"], axis=1).rename_axis("name")
    difference_s, larger_s = rows.b_s.fillna(0) - rows.a_s.fillna(0), rows[["a_s", "b_s"]].max(axis=1)
    is_same = difference_s.abs() <= SAME_FRACTION * larger_s
    changes = {"new": rows.a_s.isna(), "gone": rows.b_s.isna(), "": is_same, "grew": difference_s > 0}
    change = np.select([*changes.values()], [*changes], "shrank")
    rows = rows.assign(difference_s=difference_s, change=change).reset_index()
    return rows.iloc[np.lexsort((rows.name, -larger_s, -difference_s.abs().round(12)))]


def difference_answer(*sources: str | Path) -> Answer:
    """How kernel time changed from one run or trace to another, and what changed most.

    Args:
        sources: two runs' folders or trace files, before and after.

    Raises:
        UsageError: a trace has no kernels, or only one of the two traces tells its number of steps.
    """
    a, b = sides = [examine(source) for source in sources]
    per, lines = a.per, list[Line]()
    for label, side in zip("AB", sides, strict=True):
        if side.why_no_kernels:
            raise UsageError(f"{str(side.trace.path)!r} has no kernels: {side.why_no_kernels}; give traces of a GPU")
        lines.append(Line(label, str(side.trace.path), is_whole=True))
        lines += run_lines(side, "")
    if per != b.per:
        raise UsageError("one trace tells its number of steps and the other does not; give two that do")
    if a.run and b.run:
        lines += [Line("differs", str(setting)) for setting in differences(a.run, b.run)]
    before, after = a.clocks.total, b.clocks.total
    lines.append(Line("device", f"{_change(before.window_s, after.window_s)} {per} (with the profiler)"))
    if before.comm_exposed_s or after.comm_exposed_s:
        lines.append(Line("", f"{_change(before.comm_exposed_s, after.comm_exposed_s)} of exposed communication"))
    counts = " -> ".join(whole(side.work.rows.number.sum() / side.work.steps) for side in sides)
    lines.append(Line("busy", f"{_change(before.busy_s, after.busy_s)} {per}, {counts} kernels"))
    tables = []
    for name, key in _AXES.items():
        rows = compared(a, b, key)
        largest = rows[rows.difference_s.abs() > _MIN_FRACTION * before.busy_s][:_TOP].itertuples()
        texts = [f"{shortened(row.name, KERNEL_WIDTH)} {signed_ms(row.difference_s)} ms" for row in largest]
        lines.append(Line(name, ", ".join(texts) or "nothing changed"))
        total = {"name": "all", **rows[_SUMMED].sum(min_count=1)}
        tables.append(table("kernels/differences", rows, [total], name, per=per, what=name.removesuffix("s")))
    for label, side in zip("AB", sides, strict=True):
        lines += guard_lines(side.guards, f"{label}: ")
    windows = ["window_s", "busy_s", "queued_gap_s", "host_wait_s", "other_idle_s"]
    changes = b.clocks.phases[windows].sub(a.clocks.phases[windows], fill_value=0.0)
    changes = changes.assign(a_s=a.clocks.phases.window_s, b_s=b.clocks.phases.window_s)
    changes = changes.reindex([name for name in PHASE_ORDER if name in changes.index]).reset_index()
    tables.insert(1, table("kernels/clock_differences", changes, name="clocks", per=per))
    return Answer(lines, tables, first=())


def _change(before_s: float, after_s: float) -> str:
    """Both times and their difference, in ms and as a percentage."""
    percentage = f", {signed_percent(after_s / before_s - 1)}" if before_s else ""
    return f"{milliseconds(before_s)} -> {milliseconds(after_s)} ms ({signed_ms(after_s - before_s)} ms{percentage})"
