"""A run as loggers show it: `section/name` for every number, in the unit that people read and that the name ends in.

A section is what W&B, TensorBoard and others group charts by: `time`, `host`, `lag`, `throughput`, `memory`, `train`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from lmbench.records.run import RunRecord
from lmbench.records.schema import fields, value_at
from lmbench.records.step import SCALARS, StepRecord
from lmbench.records.summary import host_bound_fraction
from lmbench.records.vocabulary import SPANS

#: What a series is drawn over.
STEP = "step"
#: Share of the step in phases in which the device waited for the host.
HOST_BOUND = "time/host_bound_percent"

#: What a number in SI is multiplied by, by what its name ends in.
_SCALES = {
    "_ms": 1e3, "_percent": 100.0, "_gib": 2.0**-30, "_tflops_per_s": 1e-12, "millijoules_per_token": 1e3,
}  # fmt: skip

#: Of a run's record: what decides. A phase's mean has the name of its series.
_SUMMARY = {
    **{f"phases.{span}.mean_s": f"time/{span}_ms" for span in SPANS},
    **{f"phases.step.{name}_s": f"time/step_{name}_ms" for name in ("std", "min", "median", "p95")},
    "phases.step.cv_fraction": "time/step_cv_percent",
    "throughput.tokens_per_s": "throughput/tokens_per_s",
    "throughput.mfu_fraction": "throughput/mfu_percent",
    "throughput.hfu_fraction": "throughput/hfu_percent",
    "throughput.model_flops_per_s": "throughput/model_tflops_per_s",
    "throughput.joules_per_token": "throughput/millijoules_per_token",
    "memory.run_peak_allocated_bytes": "memory/peak_allocated_gib",
    "memory.run_peak_reserved_bytes": "memory/peak_reserved_gib",
    "memory.steady_peak_allocated_bytes": "memory/steady_peak_allocated_gib",
    **{
        f"memory.phase_peak_allocated_bytes.{span}": f"memory/{span}_peak_allocated_gib"
        for span in ("forward", "backward", "optimizer")
    },
    "memory.host_peak_rss_bytes": "memory/host_peak_rss_gib",
    "memory.run_alloc_retry_count": "memory/alloc_retry_count",
    "memory.phase_begin_allocated_bytes.backward": "memory/backward_begin_allocated_gib",
    "memory.saved_bytes": "memory/saved_gib",
    "memory_prediction.peak_allocated_bytes": "memory/predicted_peak_allocated_gib",
    **{f"loss.{name}": f"train/{name}_loss" for name in ("first", "last", "mean")},
    **{f"scalars.{name}": f"train/mean_{name}" for name in SCALARS},
    "probe.training.gradient_norm": "train/probed_gradient_norm",
    **{f"compile.{name}": f"compile/{name}" for name in ("first_step_s", "graph_count", "graph_break_count")},
    **{f"device_state.mean_{name}": f"device/mean_{name}" for name in ("power_w", "temperature_c")},
    **{f"device_state.{name}_fraction": f"device/{name}_percent" for name in ("power_capped", "sm_clock_drop")},
    **{f"window.{name}": f"window/{name}" for name in ("steps", "wall_s", "skipped_count")},
    "sweep.cost.total_s": "cost/total_s",
    **{
        f"kernels.phases.{span}.kernel_s": f"kernels/{span}_ms" for span in ("step", "forward", "backward", "optimizer")
    },
    "kernels.phases.step.host_wait_s": "kernels/step_host_wait_ms",
    "kernels.phases.step.matmul_fraction": "kernels/step_matmul_percent",
}


@dataclass(frozen=True)
class Rates:
    """What makes rates of a step: the number of ranks, and the factor from tokens/s to MFU where there is one."""

    ranks: int = 1
    mfu_per_rate: float | None = None

    @staticmethod
    def of(run: RunRecord) -> Rates:
        flops, peak = run.flops.per_token_flops, run.flops.peak_flops_per_s
        return Rates(run.world_size or 1, flops / peak if flops is not None and peak else None)


def _with_scale(name: str) -> tuple[str, float]:
    return name, next((scale for ending, scale in _SCALES.items() if name.endswith(ending)), 1.0)


@cache
def run_names() -> Mapping[str, tuple[str, float]]:
    """The name of each number of a run's record that is logged, and what its value is multiplied by."""
    return {field: _with_scale(name) for field, name in _SUMMARY.items()}


@cache
def step_names() -> Mapping[str, tuple[str, float]]:
    """The series of each number and flag of a step record, and what its value is multiplied by."""
    names = {}
    for field in fields("step").values():
        section = {"<phase>_host_s": "host", "lag_<border>_s": "lag"}.get(field.pattern)
        if section is not None:
            names[field.name] = f"{section}/{field.span}_ms"
        elif field.unit not in ("text", "tree", "index"):
            is_time = field.unit == "s"
            names[field.name] = f"time/{field.name.removesuffix('_s')}_ms" if is_time else f"train/{field.name}"
    return {field: _with_scale(name) for field, name in names.items()}


def of_step(step: StepRecord, rates: Rates) -> dict[str, float]:
    """A step's numbers by the names of their series, with its own tokens/s and MFU; nothing that was not measured."""
    values = {field: getattr(step, field) for field in step_names()}
    logged = _scaled(values, step_names())
    if step.tokens is not None and step.step_s:
        rate = step.tokens * rates.ranks / step.step_s
        mfu = None if rates.mfu_per_rate is None else rate * rates.mfu_per_rate
        logged |= _scaled({"throughput.tokens_per_s": rate, "throughput.mfu_fraction": mfu}, run_names())
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


def _scaled(values: Mapping[str, float | None], names: Mapping[str, tuple[str, float]]) -> dict[str, float]:
    """The values that there are by their logged names. Counts and flags stay whole numbers."""
    known = [(*names[field], value) for field, value in values.items() if value is not None]
    return {name: int(value) if isinstance(value, bool) else value * scale if scale != 1 else value
            for name, scale, value in known}  # fmt: skip


def kernel_name(what: str, name: str) -> str:
    """The name of a step's kernel time of a kind (`gemm`) or part of the model (`ffn`); `what` is `kind` or `part`."""
    return f"kernels/{what}_{name}_ms"
