"""A run's numbers for loggers: each is named `section/name`, is in a unit that people read, and its name ends in the
unit.

W&B, TensorBoard and others group charts by section: `time`, `host`, `lag`, `throughput`, `memory`, `train`, and
`scalars` for the user's own. logged.csv
names the important numbers of a run's record. The mean of a phase has the same name as the series of its steps.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache

from lmbench.masking import leaves
from lmbench.records.run import RunRecord
from lmbench.records.schema import fields, value_at
from lmbench.records.step import GRADIENT_NORM, StepRecord
from lmbench.records.summary import host_bound_fraction
from lmbench.report import shipped

#: The x axis of every series.
STEP = "step"
#: The factor from an SI unit to the unit in which a logged name ends.
_SCALES = {
    "_ms": 1e3, "_percent": 100.0, "_gib": 2.0**-30, "_tflops_per_s": 1e-12, "millijoules_per_token": 1e3,
}  # fmt: skip


@cache
def run_names() -> Mapping[str, str]:
    """The logged name of each field of a run's record that is logged."""
    return {row["field"]: row["name"] for row in csv.DictReader(shipped("logged.csv").splitlines())}


@cache
def step_names() -> Mapping[str, str]:
    """The series name of each number and flag of a step record."""
    names = {}
    for field in fields("step").values():
        section = {"<phase>_host_s": "host", "lag_<border>_s": "lag"}.get(field.pattern)
        if section is not None:
            names[field.name] = f"{section}/{field.span}_ms"
        elif field.unit not in ("text", "tree", "index"):
            is_time = field.unit == "s"
            names[field.name] = f"time/{field.name.removesuffix('_s')}_ms" if is_time else f"train/{field.name}"
    return names


@cache
def _scale(name: str) -> float:
    return next((scale for ending, scale in _SCALES.items() if name.endswith(ending)), 1)


def of_step(step: StepRecord, run: RunRecord) -> dict[str, float]:
    """A step's measured numbers by the names of their series, and its tokens/s over all ranks.

    Times of a warm-up step have series of their own (`warmup/time/step_ms`), so that no chart or mean mixes them in.
    """
    logged = _scaled({field: getattr(step, field) for field in step_names()}, step_names())
    if step.tokens is not None and step.step_s:
        logged[run_names()["throughput.tokens_per_s"]] = step.tokens * (run.data_parallel_size or 1) / step.step_s
    logged |= _scalars(step.scalars)
    if step.is_warmup:
        kept = ("train/", "scalars/")
        return {name if name.startswith(kept) else f"warmup/{name}": value for name, value in logged.items()}
    return logged


def of_run(run: RunRecord) -> dict[str, float]:
    """The important numbers of a run that were measured, some 40 of them."""
    logged = _scaled({field: value_at(run, field) for field in run_names()}, run_names())
    if (share := host_bound_fraction(run)) is not None:
        logged["time/host_bound_percent"] = share * 100.0
    if run.kernels is not None and (step := run.kernels.phases.step) is not None:
        for grouping, times_s in (("kind", step.kinds), ("part", step.parts)):
            logged |= {f"kernels/{grouping}_{name.removesuffix('_s')}_ms": s * 1e3 for name, s in times_s.items()}
    logged |= {
        name.replace(".", "/"): value for name, value in leaves(run.rooms, "rooms") if isinstance(value, int | float)
    }
    return logged | _scalars({name: value for name, value in run.scalars.items() if name != GRADIENT_NORM})


def _scalars(values: Mapping[str, float | None]) -> dict[str, float]:
    """Scalars of the user's by their logged names, each in the unit in which it was logged."""
    return {f"scalars/{name}": value for name, value in values.items() if value is not None}


def _scaled(values: Mapping[str, float | None], names: Mapping[str, str]) -> dict[str, float]:
    """The values that are not None by their logged names, in the names' units. Counts and flags stay integers."""
    return {names[field]: value * _scale(names[field]) for field, value in values.items() if value is not None}
