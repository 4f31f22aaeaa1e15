"""Results on the disk for the tests of the report: folders such as real runs leave, with figures of a simple model.

The record starts from a real run on an H200 (report_data/h200_run.json, its bulk taken out); what a cell changes is
set in it, and times follow from FLOPs and bytes with a small spread that depends on the cell alone.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from paths import RUNS

from lmbench.commands.report import make_catalogue
from lmbench.records.run import SCHEMA_VERSION
from lmbench.records.vocabulary import PHASES
from lmbench.report.answer import Answer, Table
from lmbench.report.results import Options, report_on
from lmbench.sizes import SIZES, ModelShape

BASE: dict[str, Any] = json.loads((RUNS / "h200_run.json").read_text())
KERNELS: dict[str, Any] = json.loads((RUNS / "h200_kernels.json").read_text())
DEVICE_BYTES = 150_109_880_320
_RATE = {("32-true", "highest"): 40e12, ("32-true", "high"): 180e12}
_SHARES = {
    "inference": {"forward": 1.0},
    "forward": {"forward": 1.0},
    "forward_backward": {"forward": 0.34, "backward": 0.66},
    "train_step": {"forward": 0.31, "backward": 0.6, "optimizer": 0.09},
}
_WORK = {"inference": 1.0, "forward": 1.0, "forward_backward": 3.0, "train_step": 3.2}
Edit = Callable[[dict[str, Any]], None]


def make_record(axes: Mapping[str, Any], repeat: int = 0, edit: Edit | None = None) -> dict[str, Any]:
    """run.json of a cell whose axes are dotted options (`model.size`, `trainer.precision`, `measure.mode`, ...)."""
    run = copy.deepcopy(BASE)
    for option, value in axes.items():
        _set_option(run, option, value)
    _measure(run, random.Random(f"{sorted(axes.items(), key=str)}-{repeat}"))
    run["schema_version"] = SCHEMA_VERSION
    if edit is not None:
        edit(run)
    return run


def _set_option(run: dict[str, Any], option: str, value: Any) -> None:
    holder = run["config"]
    *parents, last = option.split(".")
    for parent in parents:
        holder = holder.setdefault(parent, {})
    holder[last] = value
    if option == "model.size":
        shape = SIZES[value]
        shown = {"d_model": shape.d_model, "d_ff": shape.d_ff, "num_layers": shape.num_layers}
        run["model"] |= {"size": value, **shown}
    elif option in ("model.d_model", "model.num_layers"):
        run["config"]["model"]["size"] = run["model"]["size"] = None
        run["model"][last] = value
        run["model"]["d_ff"] = 4 * run["model"]["d_model"]
    elif option in ("mode", "measure.mode"):
        run["mode"] = value
        run["command"] = "validate" if value == "inference" else "fit"
    elif option == "measure.warmup_steps":
        run["window"]["warmup_steps"] = run["window"]["first_step"] = value
    elif option == "measure.matmul_precision":
        run["matmul_precision"] = value
    elif option == "trainer.precision":
        run["precision"] = value
    elif option == "model.attention":
        run["model"]["attention"] = value
    elif option.startswith("data."):
        run["data"][last] = value
    elif option == "trainer.compile" and value:
        run["compile"] = {
            "is_enabled": True, "mode": "default", "cache": "private", "graph_count": 3, "graph_break_count": 2,
            "window_recompile_count": 0,
        }  # fmt: skip


def _measure(run: dict[str, Any], rng: random.Random) -> None:
    model = run["model"]
    shape = ModelShape(model["d_model"], model["d_ff"], model["num_layers"], 8)
    model["parameter_count"] = shape.parameter_count
    mode, batch, context = run["mode"], run["data"]["batch_size"], run["data"]["context_length"]
    per_token = 2 * shape.parameter_count + 4 * shape.num_layers * context * shape.d_model
    compiled = run["compile"]["is_enabled"]
    rate = _RATE.get((run["precision"], run["matmul_precision"]), 380e12) * (1.12 if compiled else 1.0)
    device_s = per_token * _WORK[mode] * batch * context / rate
    host_s = shape.num_layers * _WORK[mode] * (0.25e-3 if compiled else 0.55e-3)
    step_s = max(device_s, host_s) * rng.gauss(1.0, 0.002)
    run["phases"] = _phases(step_s, mode, rng, 3.0 if run["window"]["warmup_steps"] == 0 else 0.004)
    verdict = "host-bound" if host_s > device_s else "queued"
    run["probe"]["verdicts"] = {phase: {"verdict": verdict} for phase in _SHARES[mode]}
    tokens = batch * context
    run["throughput"] |= {
        "tokens_per_s": tokens / step_s,
        "mfu_fraction": tokens / step_s * per_token * (3 if _WORK[mode] > 1 else 1) / 989.4e12,
        "joules_per_token": 300 * step_s / tokens,
    }
    wide = 4 if run["precision"] == "32-true" else 2.6
    taken = shape.parameter_count * (16 if mode == "train_step" else 8 if "backward" in mode else 4)
    taken += int(wide * batch * context * shape.num_layers * (14 * shape.d_model + 2 * shape.num_heads * context))
    run["memory"] |= {"run_peak_allocated_bytes": taken, "device_total_bytes": DEVICE_BYTES}
    run["window"]["steps"] = max(20, int(3 / step_s))
    run["loss"] |= {"first": 9.30756 + (0 if run["precision"] == "32-true" else 0.0021)}
    if compiled:
        run["compile"]["first_step_s"] = 9.0 + shape.num_layers * 0.9
    if taken > DEVICE_BYTES:
        set_outcome(run, "oom", "forward", requested_bytes=taken - DEVICE_BYTES)


def _phases(step_s: float, mode: str, rng: random.Random, cv: float) -> dict[str, Any]:
    shares = _SHARES[mode]
    phases = {}
    for phase in ("step", *(phase for phase in PHASES if phase in shares), "other"):
        share = 1.0 if phase == "step" else 0.003 if phase == "other" else shares[phase] * 0.997
        mean = step_s * share
        std = abs(mean * cv * rng.uniform(0.8, 1.2))
        phases[phase] = {
            "n": 60, "mean_s": mean, "std_s": std, "min_s": mean * 0.992, "median_s": mean * 0.999,
            "max_s": mean * 1.03, "p5_s": mean * 0.995, "p95_s": mean * 1.008,
            "cv_fraction": cv, "share_fraction": share,
        }  # fmt: skip
    return phases


def set_outcome(run: dict[str, Any], outcome: str, phase: str | None, message: str = "", **error: Any) -> None:
    """Make the record one of a run that did not end well: nothing measured."""
    kinds = {"oom": "OutOfMemoryError", "timeout": "Timeout"}
    message = message or {"oom": "CUDA out of memory.", "timeout": "no end after 60 s"}.get(outcome, "it broke")
    run |= {
        "outcome": outcome,
        "error": {"kind": kinds.get(outcome, "RuntimeError"), "message": message, "phase": phase},
    }
    run["error"] |= error
    run |= {"phases": {}, "guards": [], "probe": {}}
    run["throughput"] = {"tokens_per_s": None, "mfu_fraction": None}
    run["loss"] = {"first": None}


def add_kernels(run: dict[str, Any], axes: Mapping[str, Any]) -> None:
    """Make the record one of a profiled run: the summary of a real trace (small, float32, eager, context 512), with all
    times by the model's and the context's size, and softmax by the square of the context."""
    context, layers = run["data"]["context_length"], run["model"]["num_layers"]
    scale = layers / 12 * context / 512
    kernels = _scaled(copy.deepcopy(KERNELS), scale)
    for phase in kernels["attention"].values():
        phase["softmax_s"] *= context / 512
        phase["softmax_matmul_time_ratio"] *= context / 512
    if run["mode"] == "inference":
        forward = kernels["phases"]["forward"]
        kernels |= {"phases": {"forward": forward, "step": copy.deepcopy(forward)}, "kernel_s": forward["kernel_s"]}
        del kernels["attention"]["backward"]
    run |= {"is_profiled": True, "kernels": kernels}


def _scaled(value: Any, scale: float, name: str = "") -> Any:
    """Everything in seconds times a factor."""
    if isinstance(value, dict):
        return {key: _scaled(item, scale, key) for key, item in value.items()}
    if isinstance(value, list):
        return [_scaled(item, scale) for item in value]
    return value * scale if isinstance(value, float) and name.endswith("_s") else value


def write_run(folder: Path, run: Mapping[str, Any], steps: int = 8) -> Path:
    """A run's folder with a few step records, the first of them slow."""
    folder.mkdir(parents=True)
    (folder / "run.json").write_text(json.dumps(run))
    if run["phases"]:
        (folder / "steps.jsonl").write_text("".join(f"{json.dumps(step)}\n" for step in make_steps(run, steps)))
    return folder


def make_steps(run: Mapping[str, Any], count: int) -> list[dict[str, Any]]:
    mean, warmup = run["phases"]["step"]["mean_s"], run["window"]["warmup_steps"]
    first_s = run["compile"].get("first_step_s") or 0.9 + 3 * mean
    slow = {0: first_s, 1: mean * 1.6, 2: mean * 1.05}
    rng = random.Random(mean)
    return [
        {
            "step": index, "rank": 0, "stage": "warmup" if index < warmup else "window", "is_warmup": index < warmup,
            "micro_batches": 1, "step_s": slow.get(index, mean * rng.gauss(1, 0.004)),
            "forward_s": mean * 0.3, "backward_s": mean * 0.6, "optimizer_s": mean * 0.1, "loss": 9.3,
        }
        for index in range(count)
    ]  # fmt: skip


def write_sweep(
    results_dir: Path,
    name: str,
    axes: Mapping[str, Sequence[Any]],
    *,
    view: str | None = None,
    fixed: Mapping[str, Any] | None = None,
    repeats: int = 1,
    edit: Callable[[dict[str, Any], Mapping[str, Any], int], None] | None = None,
    steps: int = 8,
) -> Path:
    """A sweep's folder with all its runs; `edit` may change each record (given the cell's axes and the repeat)."""
    home = results_dir / name
    cells = []
    for values in itertools.product(*axes.values()):
        place = dict(zip(axes, values, strict=True))
        cell = "-".join(str(value).replace(" ", "_") for value in values)
        options = {option: value for option, value in {**(fixed or {}), **place}.items() if option != "mode"}
        cells.append({"id": cell, "axes": place, "command": "fit", "options": options})
        for repeat in range(repeats):
            run = make_record({**(fixed or {}), **place}, repeat)
            run["run_id"] = f"{cell}-r{repeat}"
            run["sweep"] = {"name": name, "cell": cell, "axes": place, "repeat": repeat, "environment": None}
            if run["compile"].get("is_enabled") and repeat > 0:
                run["compile"] |= {"cache": "shared", "first_step_s": run["compile"]["first_step_s"] * 0.2}
            if edit is not None:
                edit(run, place, repeat)
            write_run(home / "runs" / str(run["run_id"]), run, steps)
    sweep = {
        "schema_version": SCHEMA_VERSION, "name": name, "view": view,
        "axes": {axis: list(values) for axis, values in axes.items()}, "cells": cells,
    }  # fmt: skip
    (home / "sweep.json").write_text(json.dumps(sweep))
    return home


def answer_of(*folders: Path, **options: Any) -> Answer:
    """What `lmbench report` works out of results; options are those of `report.results.Options`."""
    return report_on(folders, make_catalogue(), Options(**options))


def rows_of(*folders: Path, **options: Any) -> list[dict[str, Any]]:
    """A row for each cell, as CSV has them."""
    data = answer_of(*folders, **options).data
    assert data is not None
    return data().records()


def table_rows(table: Table) -> list[dict[str, str]]:
    """The rows of a table by its columns' titles, as they are read; of two with one title the first."""
    titles = [column.title for column in table.columns]
    return [dict(reversed(list(zip(titles, row, strict=True)))) for row in table.texts()]


def edit_runs(home: Path, edit: Edit) -> None:
    """Change the record of every run of a sweep."""
    for path in home.glob("runs/*/run.json"):
        run = json.loads(path.read_text())
        edit(run)
        path.write_text(json.dumps(run))
