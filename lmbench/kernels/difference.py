"""Two traces side by side: which kernels, kinds and parts appeared, vanished, grew and shrank, per step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from lmbench.errors import UsageError
from lmbench.kernels.answer import per_what, run_line
from lmbench.kernels.findings import Findings, examine
from lmbench.kernels.parts import part_order
from lmbench.kernels.phases import PHASE_ORDER
from lmbench.kernels.sums import STEP
from lmbench.kernels.tables import Reading, Row, reading, records, sum_of, table_of, with_rest
from lmbench.records.guard import not_passed
from lmbench.records.settings import differences
from lmbench.report.answer import Answer, Line, Table
from lmbench.report.console import KERNEL_WIDTH, shortened
from lmbench.report.units import Unit, milliseconds, percent, signed_percent, whole

#: Two recordings of the same work agree to this share of a kernel's time.
SAME_FRACTION = 0.02
# Of all that grew and shrank: below it nothing is called either.
_SMALL_FRACTION = 0.001
# If what grew and what shrank cancel out to less than this share of both, shares of the rest say nothing.
_CANCELLED_FRACTION = 0.05
# Kinds, parts and kernels that are named first.
_NAMED = 3
# A share of either side that a floating-point sum can be off by: sums over different numbers of steps are.
_DUST = 1e-12

APPEARED, VANISHED, GREW, SHRANK, SAME = "new", "gone", "grew", "shrank", ""


def signed_ms(seconds: float) -> str:
    """A difference in ms with its sign and as many decimals as a time of its size."""
    text = milliseconds(abs(seconds))
    if not float(text.replace(",", "")):
        return text
    return f"{'+' if seconds > 0 else '-'}{text}"


_SIGNED_MS = Unit("", 1e3, signed_ms)
_TIMES: list[Reading] = [
    *reading(A="a_s", B="b_s"),
    ("B - A", _SIGNED_MS, "difference_s"),
    *reading(share="share_fraction"),
]
_SUMMED = ["a_s", "b_s", "a_count", "b_count", "difference_s", "share_fraction"]


class Difference:
    """B against A.

    Raises UsageError for a trace without kernels, or without a known number of steps where the other has one.
    """

    def __init__(self, a: Findings, b: Findings) -> None:
        for side in (a, b):
            if side.why_no_kernels:
                raise UsageError(
                    f"{str(side.trace.path)!r} has no kernels: {side.why_no_kernels}; give traces of a GPU"
                )
        if a.trace.timeline.has_step_count != b.trace.timeline.has_step_count:
            raise UsageError("one trace tells its number of steps and the other does not; give two that do")
        self.a, self.b = a, b
        # Parts that a fused kernel of either side joins, directly or by others, taken together: what vanished from
        # `mask` and `softmax` and appeared in `mask+softmax`.
        groups = _groups({row["part"] for side in (a, b) for row in side.work.rows})
        self._works = [
            replace(work, rows=[{**row, "part_group": groups[row["part"]]} for row in work.rows])
            for work in (a.work, b.work)
        ]

    @property
    def phases(self) -> list[str]:
        """Each phase that has kernels on either side, in the order of a step."""
        return [phase for phase in PHASE_ORDER if any(phase in work.phases for work in self._works)]

    def by(self, key: str, phase: str = STEP) -> list[Row]:
        """Every kind, part, ... (a column of Work) of a phase, or of the step, by `name`, the largest difference first.

        `a_s`, `b_s`, `a_count` and `b_count` are kernel time and number of kernels, means per step, None on a side that
        has none. `difference_s` is B minus A, `share_fraction` that of the total difference, None where the total is
        next to nothing beside what cancels out, and `change` a word for it.
        """
        a, b = ({row[key]: row for row in work.by(key, phase=phase)} for work in self._works)
        rows = []
        for name in a | b:
            sides = {"a": a.get(name, {}), "b": b.get(name, {})}
            row: Row = {"name": name}
            row |= {f"{side}_s": known.get("kernel_s") for side, known in sides.items()}
            row |= {f"{side}_count": known.get("kernel_count") for side, known in sides.items()}
            a_s, b_s = row["a_s"] or 0.0, row["b_s"] or 0.0
            is_dust = abs(b_s - a_s) <= _DUST * max(a_s, b_s)
            rows.append({**row, "difference_s": 0.0 if is_dust else b_s - a_s})
        total, gross = (sum(size(row["difference_s"]) for row in rows) for size in (float, abs))
        for row in rows:
            difference_s, larger_s = row["difference_s"], max(row["a_s"] or 0.0, row["b_s"] or 0.0)
            has_share = abs(total) >= _CANCELLED_FRACTION * gross > 0
            row["share_fraction"] = difference_s / total if has_share else None
            row["change"] = GREW if difference_s > 0 else SHRANK
            if abs(difference_s) <= max(SAME_FRACTION * larger_s, _SMALL_FRACTION * gross):
                row["change"] = SAME
            if None in (row["a_s"], row["b_s"]):
                row["change"] = APPEARED if row["a_s"] is None else VANISHED
        return sorted(
            rows, key=lambda row: (-abs(row["difference_s"]), -(row["a_s"] or 0) - (row["b_s"] or 0), row["name"])
        )


def _groups(parts: Iterable[str]) -> dict[str, str]:
    """For every part the parts that it is joined with, directly or by others, as one name."""
    merged: list[set[str]] = []
    for group in (set(name.split("+")) for name in parts):
        touching = [other for other in merged if not other.isdisjoint(group)]
        merged = [other for other in merged if other.isdisjoint(group)] + [group.union(*touching)]
    return {name: ", ".join(sorted(g, key=part_order)) for name in parts for g in merged if name.partition("+")[0] in g}


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
    difference = Difference(examine(a), examine(b))
    if phase not in (None, STEP, *difference.phases):
        raise UsageError(f"--phase is {phase!r}; these traces have {', '.join([STEP, *difference.phases])}")
    return answer_of(difference, top, phase)


def answer_of(difference: Difference, top: int = 15, phase: str | None = None) -> Answer:
    """The answer of a comparison: tables of the whole step, or of one phase."""
    a, b, per = difference.a, difference.b, per_what(difference.a)
    lines = []
    for label, side in (("A", a), ("B", b)):
        lines.append(Line(label, str(side.trace.path), is_whole=True))
        lines += [Line("", run_line(side.run))] if side.run else []
    lines += [Line("differs", str(setting)) for setting in (differences(a.run, b.run) if a.run and b.run else [])]
    before, after = a.work.total(), b.work.total()
    counts = f"{whole(before['kernel_count'])} -> {whole(after['kernel_count'])} kernels"
    lines += [
        Line("device", f"{_change(a.clocks.total.window_s, b.clocks.total.window_s)} {per} (under the profiler)"),
        Line("kernels", f"{_change(before['kernel_s'], after['kernel_s'])} {per}, {counts}"),
    ]
    pairs = [(name, share, b.matmul_fractions.get(name)) for name, share in a.matmul_fractions.items()]
    lines.append(Line("matmul", ", ".join(f"{percent(x)} -> {percent(y)} of {name}" for name, x, y in pairs)))
    for label, key in (("kinds", "kind"), ("parts", "part"), ("names", "short_name")):
        largest = [row for row in difference.by(key, phase or STEP) if row["change"] != SAME][:_NAMED]
        named = [f"{shortened(row['name'], KERNEL_WIDTH)} {signed_ms(row['difference_s'])} ms" for row in largest]
        lines.append(Line(label, ", ".join(named) or "nothing changed"))
    for label, side in (("A", a), ("B", b)):
        lines += [Line(guard.status.upper(), f"{label}: {guard.message}") for guard in not_passed(side.guards)]
    return Answer(lines, _tables(difference, top, phase), first=())


def _change(before_s: float, after_s: float) -> str:
    """Both times, and the difference in ms and percent."""
    share = f", {signed_percent(after_s / before_s - 1)}" if before_s else ""
    return f"{milliseconds(before_s)} -> {milliseconds(after_s)} ms ({signed_ms(after_s - before_s)} ms{share})"


def _tables(difference: Difference, top: int, phase: str | None) -> list[Table]:
    """Phases and clocks, then the step's kinds, parts and kernels; of one phase only its own, if named."""
    caption = f"kernel time in ms {per_what(difference.a)}; share: of the difference; n: number of kernels"
    counts, word = reading(n_A="a_count", n_B="b_count"), reading(_="change")

    def table(name: str, heading: str, title: str, rows: list[Row], *more: Reading) -> Table:
        shown = with_rest(rows, top if name == "kernels" else len(rows), _SUMMED, "name", name)
        rows = [*shown, sum_of(rows, _SUMMED, name="all")]
        return table_of(name, title, caption, rows, *reading(**{heading: "name"}), *_TIMES, *more)

    span = phase or STEP
    tables = [
        table("kinds", "kind", f"By kind of {span}", difference.by("kind", span), *word),
        table("parts", "part", f"By part of {span}", difference.by("part", span), *word),
    ]
    groups = difference.by("part_group", span)
    if any(", " in row["name"] for row in groups):
        title = f"By part of {span}, those that a fused kernel joins together"
        tables.append(table("parts", "parts", title, groups, *word))
    tables.append(table("kernels", "kernel", f"By kernel of {span}", difference.by("short_name", span), *counts))
    if phase is not None:
        return tables
    by_phase = sorted(difference.by("phase"), key=lambda row: PHASE_ORDER.index(row["name"]))
    phases = table("phases", "phase", "Kernel time by phase", by_phase, *counts, *word)
    return [phases, _clock_table(difference), *tables]


def _clock_table(difference: Difference) -> Table:
    """The phases' device time on both sides, and B minus A of what it consists of."""
    a, b = (side.clocks.phases for side in (difference.a, difference.b))
    names = {
        "window_s": "B - A", "busy_s": "= kernels", "queued_gap_s": "+ gaps", "host_wait_s": "+ waits",
        "other_idle_s": "+ other",
    }  # fmt: skip
    changes = b[[*names]].sub(a[[*names]], fill_value=0.0).assign(a_s=a.window_s, b_s=b.window_s)
    caption = (
        f"the phase's window on the device in ms {per_what(difference.a)}, and what its difference consists of: "
        "kernels, gaps between queued ones, waiting for the host (slowed by the profiler), and other idle time"
    )
    rows = records(changes.loc[[phase for phase in PHASE_ORDER if phase in changes.index]].reset_index())
    return table_of(
        "clocks", "Device time by phase", caption, rows, *reading(phase="phase", A="a_s", B="b_s"),
        *((heading, _SIGNED_MS, name) for name, heading in names.items()),
    )  # fmt: skip
