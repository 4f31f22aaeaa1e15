"""A run as loggers show it: `section/name` for every number, in the unit that people read and that the name ends in.

A section is what W&B, TensorBoard and others group charts by: `time`, `host`, `lag`, `throughput`, `memory`, `train`.
logged.csv has the name of each number of a run's record that decides; a phase's mean has the name of its series.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from functools import cache

from lmbench.records.run import RunRecord
from lmbench.records.schema import fields, value_at
from lmbench.records.step import StepRecord
from lmbench.records.summary import host_bound_fraction
from lmbench.report import shipped

#: What a series is drawn over.
STEP = "step"
#: Share of the step in phases in which the device waited for the host.
HOST_BOUND = "time/host_bound_percent"

#: What a number in SI is multiplied by, by what its name ends in.
_SCALES = {
    "_ms": 1e3, "_percent": 100.0, "_gib": 2.0**-30, "_tflops_per_s": 1e-12, "millijoules_per_token": 1e3,
}  # fmt: skip


@cache
def run_names() -> Mapping[str, str]:
    """The name of each number of a run's record that is logged."""
    return {row["field"]: row["name"] for row in csv.DictReader(shipped("logged.csv").splitlines())}


@cache
def step_names() -> Mapping[str, str]:
    """The series of each number and flag of a step record."""
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
    """A step's numbers by the names of their series, with its own tokens/s; nothing that was not measured."""
    logged = _scaled({field: getattr(step, field) for field in step_names()}, step_names())
    if step.tokens is not None and step.step_s:
        rate = step.tokens * (run.data_parallel_size or 1) / step.step_s
        logged |= _scaled({"throughput.tokens_per_s": rate}, run_names())
    return logged


def of_run(run: RunRecord) -> dict[str, float]:
    """What decides of a run, some 40 numbers; nothing that was not measured."""
    logged = _scaled({field: value_at(run, field) for field in run_names()}, run_names())
    if (share := host_bound_fraction(run)) is not None:
        logged[HOST_BOUND] = share * 100.0
    if run.kernels is not None and (step := run.kernels.phases.step) is not None:
        for what, times_s in (("kind", step.kinds), ("part", step.parts)):
            logged |= {kernel_name(what, name.removesuffix("_s")): value * 1e3 for name, value in times_s.items()}
    return logged


def _scaled(values: Mapping[str, float | None], names: Mapping[str, str]) -> dict[str, float]:
    """The values that there are by their logged names, in the units of those. Counts and flags stay whole numbers."""
    return {names[field]: value * _scale(names[field]) for field, value in values.items() if value is not None}


def kernel_name(what: str, name: str) -> str:
    """The name of a step's kernel time of a kind (`gemm`) or part of the model (`ffn`); `what` is `kind` or `part`."""
    return f"kernels/{what}_{name}_ms"
