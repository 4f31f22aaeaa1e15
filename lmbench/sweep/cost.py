"""What a cell cost, and where: from the milestones that its process recorded and the sweep's own clock."""

from __future__ import annotations

from lmbench.records.paths import number
from lmbench.records.vocabulary import Record
from lmbench.sweep.supervise import End

#: Parts of `sweep.cost`, each from one milestone to another.
_PARTS = (
    ("import_s", "started", "imported"),
    ("parse_s", "imported", "parsed"),
    ("device_s", "parsed", "device_ready"),
    ("build_s", "device_ready", "built"),
    ("capture_s", "built", "ready"),
    ("first_step_s", "ready", "first_step"),
    ("warmup_s", "first_step", "window_opened"),
    ("window_s", "window_opened", "window_closed"),
    ("probe_s", "window_closed", "stepped"),
    ("close_s", "stepped", "closed"),
)


def cost_of(run: Record, end: End) -> dict[str, float | None]:
    """The fields of `sweep.cost`; None for what was not reached."""
    total_s = end.ended_s - end.launched_s
    cost: dict[str, float | None] = {"total_s": total_s}
    # The process began after it was launched, by what the kernel dates it.
    begun_s = number(run, "process_start_s")
    offset_s = None if begun_s is None else begun_s - end.launched_s
    cost["start_s"] = _sum(offset_s, _at(run, "started"))
    for name, start, stop in _PARTS:
        cost[name] = _difference(_at(run, stop), _at(run, start))
    if not run.get("window", {}).get("warmup_steps"):
        # The window opened before step 0, which is a part of it.
        cost["first_step_s"] = None
        cost["warmup_s"] = _difference(_at(run, "window_opened"), _at(run, "ready"))
    closed_s = _sum(offset_s, _at(run, "closed"))
    cost["exit_s"] = None if closed_s is None else total_s - closed_s
    cost["compile_s"] = _compile_s(run)
    steps_s = _difference(_at(run, "window_closed"), _at(run, "ready"))
    cost["overhead_s"] = None if steps_s is None else total_s - steps_s + (cost["compile_s"] or 0.0)
    return cost


def _compile_s(run: Record) -> float | None:
    first_s, step_s = number(run, "compile.first_step_s"), number(run, "phases.step.median_s")
    return None if first_s is None or step_s is None else max(0.0, first_s - step_s)


def _at(run: Record, milestone: str) -> float | None:
    return number(run, f"milestones.{milestone}_s")


def _sum(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


def _difference(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a - b
