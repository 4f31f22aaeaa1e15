"""Result folders with chosen step times, for tests of comparisons: records as `lmbench fit` writes them."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

H200 = {
    "name": "NVIDIA H200", "uuid": "GPU-1", "sku": "692-2G520", "is_mig": False, "power_limit_w": 700.0,
    "memory_total_bytes": 150_754_820_096,
}  # fmt: skip
_PHASES = {"data": 0.001, "forward": 0.3, "backward": 0.6, "optimizer": 0.09, "other": 0.009}
_pids = itertools.count(1000)

TEMPLATE: dict[str, Any] = {
    "schema_version": 1,
    "outcome": "ok",
    "error": None,
    "exit_code": 0,
    "boot_id": "29bf03ba",
    "process_start_s": 5015.96,
    "command": "fit",
    "config": {
        "seed_everything": 0,
        "trainer": {"precision": "bf16-mixed", "compile": False, "benchmark": None, "logger": False},
        "model": {"size": "small", "attention": "sdpa"},
        "data": {"batch_size": 4, "context_length": 512},
        "measure": {
            "mode": "train_step", "matmul_precision": "highest", "results_dir": "results", "zero_grad": "after_step",
        },
    },
    "mode": "train_step",
    "matmul_precision": "highest",
    "precision": "bf16-mixed",
    "zero_grad": "after_step",
    "clock": "events",
    "device_type": "cuda",
    "is_profiled": False,
    "world_size": 1,
    "gc_policy": "off in the window",
    "compile": {"is_enabled": False},
    "environment": {
        "versions": {"torch": "2.13.0", "lmbench": "0.1.0"},
        "code": {
            "project": {"commit": "aaaa", "is_dirty": False},
            "lmbench": {"commit": "1111", "is_dirty": False},
        },
        "gpu": H200,
        "host": {"hostname": "alpha", "cpu_model": "Xeon", "core_count": 32, "python_iteration_s": 2.5e-8},
        "flags": {"float32_matmul_precision": "highest", "cudnn_benchmark": False, "thread_count": 16},
        "variables": {},
    },
    "model": {"size": "small", "parameter_count": 128_625_408, "optimizer": "AdamW fused", "attention": "sdpa"},
    "data": {"batch_size": 4, "context_length": 512},
    "probe": {"verdicts": {name: {"verdict": "queued"} for name in ("forward", "backward", "optimizer")}},
    "guards": [{"name": "finite_loss", "status": "pass", "message": "every loss is finite"}],
}  # fmt: skip


def make_run(folder: Path, step_s: float = 0.05, /, steps: int = 100, **changes: Any) -> Path:
    """One result in `folder`, of a process of its own; `changes` by dotted name, `__` for the dot."""
    run = copy.deepcopy(TEMPLATE)
    number = next(_pids)
    started_at = f"2026-11-21T{number // 3600 % 24:02}:{number // 60 % 60:02}:{number % 60:02}+00:00"
    run |= {"pid": number, "started_at": started_at, "ended_at": started_at}
    run["window"] = {
        "steps": steps, "wall_s": step_s * steps, "tokens": 2048 * steps, "skipped_count": 0, "short_count": 0,
        "micro_batches": 1, "warmup_steps": 5,
    }  # fmt: skip
    run["phases"] = {name: {"mean_s": share * step_s, "n": steps} for name, share in _PHASES.items()}
    run["phases"]["step"] = {"mean_s": step_s, "n": steps}
    run["memory"] = {"steady_peak_allocated_bytes": 4 * 2**30, "run_peak_allocated_bytes": 5 * 2**30}
    for name, value in changes.items():
        _put(run, name.split("__"), value)
    path = folder / changes.get("run_id", f"run-{number}")
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps({"run_id": path.name, **run}))
    return path


def make_runs(folder: Path, step_times_s: Sequence[float], **changes: Any) -> Path:
    """A folder of repeats."""
    for step_s in step_times_s:
        make_run(folder, step_s, **changes)
    return folder


def make_sweep(folder: Path, times: dict[str, Sequence[float]], axis: str = "model.size", **changes: Any) -> Path:
    """A sweep with one axis: its values by the step times of their repeats."""
    for value, step_times_s in times.items():
        for repeat, step_s in enumerate(step_times_s):
            sweep = {"name": folder.name, "cell": f"cell-{value}", "axes": {axis: value}, "repeat": repeat}
            sweep["environment"] = changes.get("environment")
            rest = {name: change for name, change in changes.items() if name != "environment"}
            part, _, option = axis.partition(".")
            run_id = f"cell-{value}-r{repeat}"
            make_run(
                folder / "runs", step_s, sweep=sweep, run_id=run_id, **{f"config__{part}__{option}": value}, **rest
            )
    return folder


def _put(run: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        run = run.setdefault(name, {})
    run[path[-1]] = value
