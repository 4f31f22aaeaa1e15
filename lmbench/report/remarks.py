"""What must be said of a group of runs beside its tables: environment, warnings, runs kept out of timing tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence

from lmbench.records.paths import lookup
from lmbench.records.vocabulary import Record
from lmbench.report.cells import Cell
from lmbench.report.columns import host_bound, phase_time
from lmbench.report.sample import Sample

#: A row whose host-bound share is above this tells of the host.
_MOSTLY = 0.5
_VERSIONS = ("torch", "cuda", "driver", "lightning", "lmbench")


def environment_lines(cells: Iterable[Cell]) -> list[str]:
    """Device, power limit and versions, a line for each combination that occurs."""
    samples = [sample for cell in cells for sample in (*cell.samples, *cell.passes) if sample.record]
    return sorted({line for sample in samples if (line := _environment(sample))})


def _environment(sample: Sample) -> str:
    record = sample.record
    if not sample.gpu:
        return ""
    limit = sample.number("environment.gpu.power_limit_w")
    parts = [sample.gpu, f"power limit {limit:.0f} W" if limit else ""]
    versions = record["environment"].get("versions") or {}
    parts += [f"{name} {versions[name]}" for name in _VERSIONS if versions.get(name)]
    parts += [_code(record, "lmbench", "lmbench commit"), _code(record, "project", "code at")]
    return ", ".join(part for part in parts if part)


def _code(record: Record, whose: str, words: str) -> str:
    commit = lookup(record, f"environment.code.{whose}.commit")
    dirty = " with changes" if lookup(record, f"environment.code.{whose}.is_dirty") else ""
    return f"{words} {commit[:9]}{dirty}" if isinstance(commit, str) else ""


def cost_lines(cells: Iterable[Cell]) -> list[str]:
    """Where the time of a sweep's run went, from its process's start to its end: the median over ok runs by part."""
    costs: dict[str, list[float]] = {}
    for cell in cells:
        for sample in cell.ok:
            for name, value in (lookup(sample.record, "sweep.cost") or {}).items():
                if isinstance(value, int | float) and name.endswith("_s"):
                    costs.setdefault(name.removesuffix("_s"), []).append(value)
    if not costs:
        return []
    medians = ", ".join(f"{name} {statistics.median(values):.2f} s" for name, values in costs.items())
    return [f"where the time of a run went (median): {medians}"]


def pass_lines(cells: Sequence[Cell], has_kernels: bool = False) -> list[str]:
    """A line for the runs that are in no timing table, and how much slower than the timing run the profiled were.

    Args:
        has_kernels: whether the view shows the profiled runs' kernels; else the line says which one does.
    """
    profiled = [s for cell in cells for s in cell.passes if s.record.get("is_profiled")]
    synchronized = [s for cell in cells for s in cell.passes if not s.record.get("is_profiled")]
    lines = []
    if synchronized:
        lines.append(f"{_runs(synchronized)} with clock sync (synchronized at every phase): in no timing table")
    if profiled:
        where = "" if has_kernels else "; `--view kernels` shows their kernels"
        lines.append(f"{_runs(profiled)} under a profiler: in no timing table{_slower(cells)}{where}")
        unread = [s for s in profiled if s.outcome == "ok" and not s.record.get("kernels")]
        if has_kernels and unread:
            lines.append(f"{_runs(unread)} without kernel figures in run.json: `lmbench kernels RUN` reads the trace")
    return lines


def _runs(samples: Sequence[Sample]) -> str:
    return f"{len(samples)} run{'' if len(samples) == 1 else 's'}"


def _slower(cells: Iterable[Cell]) -> str:
    ratios = []
    for cell in cells:
        timed = phase_time("step")(cell)
        times = [s.number("phases.step.mean_s") for s in cell.passes if s.record.get("is_profiled")]
        ratios += [time / timed.value for time in times if timed and time]
    if not ratios:
        return ""
    low, high = min(ratios), max(ratios)
    figure = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
    return f"; their steps took {figure} times as long"


def host_bound_lines(cells: Sequence[Cell]) -> list[str]:
    """A line where the host, not the device, set the times of rows: what changes the device's work changes little."""
    shares = [measure.value for cell in cells if (measure := host_bound(cell)) is not None]
    bound = sum(share > _MOSTLY for share in shares)
    if not bound:
        return []
    rows = "row" if bound == 1 else "rows"
    return [
        f"host-bound over 50 % in {bound} {rows}: the device waited for the host there, and precision, compilation or "
        "a bigger batch show what they do to the host"
    ]


def warning_lines(cells: Iterable[Cell]) -> list[str]:
    """Guards that warned, by name, with how many runs they are about and what the worst of them says."""
    samples = [sample for cell in cells for sample in cell.ok]
    found: dict[str, list[tuple[float, str]]] = {}
    for sample in samples:
        for guard in sample.guards:
            if guard.get("status") == "warn":
                value = guard.get("value")
                size = abs(value) if isinstance(value, int | float) else 0.0
                found.setdefault(str(guard.get("name")), []).append((size, str(guard.get("message"))))
    lines = []
    for name, seen in sorted(found.items()):
        lines.append(f"guard {name} warns in {len(seen)} of {_runs(samples)}; the worst: {max(seen)[1]}")
    return lines
