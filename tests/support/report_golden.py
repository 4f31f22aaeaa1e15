"""The golden tables of `lmbench report`: what each case writes to the disk, and the words that show it.

`python tests/support/report_golden.py` writes the files in golden/ anew; read the difference before you keep it.
"""

from __future__ import annotations

import contextlib
import io
import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from attention_results import write_attention
from paths import GOLDEN
from report_results import add_kernels, make_record, set_outcome, write_run, write_sweep

from lmbench.cli import main

MODES = ["inference", "forward", "forward_backward", "train_step"]
PROFILED = {"trainer.profiler": "lmbench.KernelProfiler", "model.attention": "naive", "trainer.precision": "32-true"}
BF16 = {"trainer.precision": "bf16-mixed", "model.attention": "sdpa"}


def step_times(folder: Path) -> list[str]:
    """Every way in which a run can end, a failed guard, and repeats of which one is missing."""

    def edit(run: dict[str, Any], axes: Mapping[str, Any], repeat: int) -> None:
        place = (axes["model.size"], axes["mode"])
        if place == ("large", "inference") and repeat == 1:
            run["guards"].append(guard("window_identity", "fail", "steps sum to 3.10 s, the window took 3.07 s"))
        if place == ("large", "forward") and repeat == 2:
            set_outcome(run, "timeout", "forward")
        if place == ("large", "forward_backward"):
            set_outcome(run, "error", "setup", "no such optimizer: <Adam|W>\nsecond line")
        if place == ("large", "train_step"):
            set_outcome(run, "interrupted", "backward")
            run["outcome"], run["pid"] = "running", None

    axes = {"model.size": ["small", "large", "2.7B"], "mode": MODES}
    home = write_sweep(folder, "step_times", axes, view="step_times", fixed=BF16, repeats=3, edit=edit)
    (home / "runs" / "2.7B-train_step-r0" / "run.json").write_text('{"schema_version": 1, "outc')
    return [str(home), "--reference"]


def context(folder: Path) -> list[str]:
    """A grid with cells that do not fit, and published figures beside it."""
    axes = {"model.size": ["medium", "large", "2.7B"], "data.context_length": [128, 512, 2048]}
    fixed = {"data.batch_size": 16, "mode": "forward_backward"}
    return [str(write_sweep(folder, "context", axes, view="context", fixed=fixed, repeats=2)), "--reference"]


def precision(folder: Path) -> list[str]:
    """Pairs of precision against fp32 eager, one size without its baseline, with published figures."""

    def edit(run: dict[str, Any], axes: Mapping[str, Any], _repeat: int) -> None:
        run["warmup"] = {"gradient_norm": 1.0 if run["precision"] == "32-true" else 1.013}
        if run["precision"] == "16-mixed":
            run["window"]["skipped_count"], run["model"]["optimizer"] = 2, "AdamW foreach"
        if axes["model.size"] == "large" and run["precision"] == "32-true" and run["matmul_precision"] == "highest":
            set_outcome(run, "oom", "backward", requested_bytes=2**30)

    pairs = [("32-true", "highest"), ("32-true", "high"), ("bf16-mixed", "highest"), ("16-mixed", "highest")]
    fixed = {"mode": "forward_backward", "data.batch_size": 64, "data.context_length": 256}
    for name, size in (("small", "small"), ("large", "large")):
        for precision_, matmul in pairs:
            axes = {"model.size": [size], "trainer.precision": [precision_], "measure.matmul_precision": [matmul]}
            write_sweep(folder, f"{name}-{precision_}-{matmul}", axes, fixed=fixed, repeats=3, edit=edit)
    return [str(gathered_sweep(folder, "precision")), "--reference"]


def compiled(folder: Path) -> list[str]:
    """Eager and compiled, with a cold first repeat."""
    axes = {"model.size": ["small", "medium"], "mode": ["forward", "train_step"], "trainer.compile": [False, True]}
    return [str(write_sweep(folder, "compile", axes, view="compile", fixed=BF16, repeats=3))]


def warmup(folder: Path) -> list[str]:
    """Steps of warm-up, one run each: the spread is that within a run."""
    axes = {"mode": ["forward", "train_step"], "measure.warmup_steps": [0, 1, 2, 5]}
    return [str(write_sweep(folder, "warmup", axes, view="warmup", fixed={"model.size": "small", **BF16}))]


def batch(folder: Path) -> list[str]:
    """Throughput against batch size, up to what does not fit."""
    axes = {"data.batch_size": [8, 32, 128]}
    return [str(write_sweep(folder, "batch", axes, view="batch", fixed={"model.size": "large", **BF16}, repeats=3))]


def custom(folder: Path) -> list[str]:
    """Shapes outside the named sizes."""
    for name, layers, width in (("narrow", 4, 512), ("wide", 16, 1024)):
        shape = {"model.num_layers": [layers], "model.d_model": [width], "model.d_ff": [4 * width]}
        for precision_ in ("32-true", "bf16-mixed"):
            write_sweep(folder, f"{name}-{precision_}", {**shape, "trainer.precision": [precision_]}, repeats=2)
    return [str(gathered_sweep(folder, "custom"))]


def any_sweep(folder: Path) -> list[str]:
    """A grid over an option that no fact stands for, with a baseline of the user's choice."""
    axes = {"model.learning_rate": [0.1, 0.001], "model.attention": ["sdpa", "naive"]}
    home = write_sweep(folder, "my grid", axes, repeats=2, fixed={"model.size": "small"})
    return [str(home), "--baseline", "attention=naive"]


def unrelated(folder: Path) -> list[str]:
    """Runs of no sweep: two GPUs, one profiled, one with clock sync, one damaged, one of another schema version."""
    write_run(folder / "a", make_record({"model.size": "small"}))
    write_run(folder / "b", make_record({"model.size": "medium", **BF16}))
    other = make_record({"model.size": "small"})
    other["environment"]["gpu"]["name"] = "NVIDIA A100-SXM4-80GB"
    write_run(folder / "c", other)
    write_run(folder / "d", make_record({"model.size": "small"}, 1, lambda run: run.update(clock="sync")))
    write_run(folder / "e", make_record({"model.size": "small"}, 2, profile))
    write_run(folder / "f", make_record({"model.size": "small"}, 3, lambda run: run.update(schema_version=99)))
    (folder / "g").mkdir()
    (folder / "g" / "run.json").write_text('{"schema')
    return [str(folder)]


def kernels(folder: Path) -> list[str]:
    """Profiled runs: inference without a backward, one that died before it could say that it is profiled."""

    def edit(run: dict[str, Any], axes: Mapping[str, Any], _repeat: int) -> None:
        add_kernels(run, axes)
        if axes == {"model.size": "large", "data.context_length": 512, "mode": "train_step"}:
            set_outcome(run, "oom", "backward", requested_bytes=2**30)
            del run["is_profiled"], run["kernels"]

    axes = {"model.size": ["small", "large"], "data.context_length": [256, 512], "mode": ["inference", "train_step"]}
    home = write_sweep(folder, "kernels", axes, view="kernels", fixed=PROFILED, edit=edit)
    return [str(home), "--reference"]


def attention_parts(folder: Path) -> list[str]:
    """Inside attention; one run on a CPU, which has no kernels."""

    def edit(run: dict[str, Any], axes: Mapping[str, Any], _repeat: int) -> None:
        add_kernels(run, axes)
        if axes["model.size"] == "medium":
            run["kernels"] = {"reason": "a trace of a CPU has operators and no kernels", "steps": 3}

    axes = {"model.size": ["small", "medium"], "data.context_length": [256, 512]}
    fixed = {**PROFILED, "mode": "train_step"}
    home = write_sweep(folder, "attention_parts", axes, view="attention_parts", fixed=fixed, edit=edit)
    return [str(home), "--reference"]


def memory(folder: Path) -> list[str]:
    """Predictions beside what was measured, histories from runs of their own, one of them none; a run on a CPU, of
    which all is predicted."""

    def edit(run: dict[str, Any], axes: Mapping[str, Any], repeat: int) -> None:
        peak = run["memory"]["run_peak_allocated_bytes"]
        if repeat == 1:
            sizes = {"parameters_bytes": 0.25, "optimizer_state_bytes": 0.5, "activations_bytes": 0.2}
            run["memory_history"] = {
                "steps": 3, "is_complete": True, "peak_allocated_bytes": peak, "unknown_fraction": 0.0,
                "categories": {name: int(share * peak) for name, share in sizes.items()},
            }  # fmt: skip
            if axes["model.checkpoint"] == "block":
                run["memory_history"] = {"steps": 0, "reason": "the snapshot could not be written: no space"}
            return
        share = 0.5 if axes["model.checkpoint"] == "block" else 0.98
        run["memory_prediction"] = {"peak_allocated_bytes": int(share * peak), "error_fraction": share - 1}
        if axes["model.size"] == "medium":
            run["memory"] = {"host_peak_rss_bytes": 2**30}
            run["memory_prediction"]["error_fraction"] = None

    axes = {"model.size": ["small", "medium"], "model.checkpoint": ["none", "block"]}
    home = write_sweep(folder, "memory", axes, view="memory", fixed={"mode": "train_step"}, repeats=2, edit=edit)
    return [str(home)]


def attention(folder: Path) -> list[str]:
    """Attention by itself: host-bound small shapes with device times beside them, one that does not fit, and published
    figures."""
    home = write_attention(folder, [256, 16384, 65536], [64], profiled_contexts=[256])
    return [str(home), "--reference"]


def attention_backends(folder: Path) -> list[str]:
    """The fastest back end, where one is told from all others and where not."""
    home = write_attention(folder, [256, 16384, 65536], [64])
    return [str(home), "--view", "attention_backends"]


CASES: dict[str, Callable[[Path], list[str]]] = {
    "step_times": step_times,
    "context": context,
    "precision": precision,
    "compile": compiled,
    "warmup": warmup,
    "batch": batch,
    "custom": custom,
    "any_sweep": any_sweep,
    "unrelated": unrelated,
    "kernels": kernels,
    "attention_parts": attention_parts,
    "memory": memory,
    "attention": attention,
    "attention_backends": attention_backends,
}


def guard(name: str, status: str, message: str) -> dict[str, Any]:
    return {"name": name, "status": status, "value": 0.01, "limit": 0.001, "unit": "", "message": message, "advice": ""}


def profile(run: dict[str, Any]) -> None:
    run["is_profiled"] = True
    run["phases"]["step"]["mean_s"] *= 1.3


def gathered_sweep(folder: Path, name: str) -> Path:
    """Move the runs of all sweeps in the folder into one: a grid that is no full product."""
    home = folder / name
    (home / "runs").mkdir(parents=True)
    cells, axes = [], {}
    for source in sorted(path for path in folder.iterdir() if path != home):
        sweep = json.loads((source / "sweep.json").read_text())
        axes |= sweep["axes"]
        cells += [{**cell, "id": f"{source.name}"} for cell in sweep["cells"]]
        for run in (source / "runs").iterdir():
            record = json.loads((run / "run.json").read_text())
            record["sweep"]["cell"] = source.name
            (run / "run.json").write_text(json.dumps(record))
            run.rename(home / "runs" / f"{source.name}-r{record['sweep']['repeat']}")
    (home / "sweep.json").write_text(json.dumps({"name": name, "view": name, "axes": axes, "cells": cells}))
    return home


def render(words: list[str], folder: Path) -> str:
    """Standard output of `lmbench report`, the folder's own path taken out."""
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream):
        assert main(["report", *words, "--format", "markdown"]) == 0
    return stream.getvalue().replace(str(folder.resolve()), "FOLDER").replace(str(folder), "FOLDER")


def build(name: str, results: Path) -> str:
    """The Markdown of a case whose results are written below the folder."""
    results.mkdir()
    return render(CASES[name](results), results)


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for case in CASES:
        with tempfile.TemporaryDirectory() as scratch:
            text = build(case, Path(scratch) / "results")
        (GOLDEN / f"report_{case}.md").write_text(text, encoding="utf-8")
