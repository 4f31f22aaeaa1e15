"""The golden tables of `lmbench report`: what each case writes to the disk, and the words that show it."""

from __future__ import annotations

import copy
import itertools
import json
import random

from paths import RUNS
from runs import DEVICE_BYTES, ended, make_run, make_sweep

MODES = ["inference", "forward", "forward_backward", "train_step"]
PROFILED = {"trainer.profiler": "lmbench.KernelProfiler", "model.attention": "naive", "trainer.precision": "32-true"}
BF16 = {"trainer.precision": "bf16-mixed", "model.attention": "sdpa"}
KERNELS = json.loads((RUNS / "h200_kernels.json").read_text())
BATCH = 8
#: By attention and whether it is compiled, picoseconds that forward and backward take for a score of a batch.
WAYS = {
    ("naive", False): (98.8, 193.8),
    ("naive", True): (76.0, 155.7),
    ("sdpa", False): (48.76, 157.5),
    ("flex", False): (48.72, 227.6),
}


def step_times(folder):
    """Every way in which a run can end, a failed guard, and repeats of which one is missing."""
    guard = {"name": "window_identity", "status": "fail", "message": "steps sum to 3.10 s, the window took 3.07 s"}
    changes = {
        ("large", "inference", 1): {"guards": [guard]},
        ("large", "forward", 2): ended("timeout", "forward"),
    }
    for repeat in range(3):
        no_optimizer = ended("error", "setup", "no such optimizer: <Adam|W>\nsecond line")
        changes["large", "forward_backward", repeat] = no_optimizer
        changes["large", "train_step", repeat] = {**ended("running", "backward"), "pid": None}
    axes = {"model.size": ["small", "large", "2.7B"], "mode": MODES}
    home = make_sweep(
        folder / "step_times", axes, view="step_times", fixed=BF16, repeats=3,
        change=lambda run, repeat: changes.get((run["model"]["size"], run["mode"], repeat), {}),
    )  # fmt: skip
    (home / "runs" / "2.7B-train_step-r0" / "run.json").write_text('{"schema_version": 1, "outc')
    return [str(home), "--reference", "published"]


def precision(folder):
    """Pairs of precision against fp32 eager, one size without its baseline, with published figures."""

    def change(run, _repeat):
        changes = {"warmup": {"gradient_norm": 1.0 if run["precision"] == "32-true" else 1.013}}
        if run["precision"] == "16-mixed":
            changes |= {"window.skipped_count": 2, "model.optimizer": "AdamW foreach"}
        if (run["model"]["size"], run["precision"], run["matmul_precision"]) == ("large", "32-true", "highest"):
            changes |= ended("oom", "backward", requested_bytes=2**30)
        return changes

    pairs = [("32-true", "highest"), ("32-true", "high"), ("bf16-mixed", "highest"), ("16-mixed", "highest")]
    cells = [
        {"model.size": size, "trainer.precision": compute, "measure.matmul_precision": matmul}
        for size, (compute, matmul) in itertools.product(("small", "large"), pairs)
    ]
    fixed = {"mode": "forward_backward", "data.batch_size": 64, "data.context_length": 256}
    home = make_sweep(folder / "precision", cells, view="precision", fixed=fixed, repeats=3, change=change)
    return [str(home), "--reference", "published"]


def compiled(folder):
    """Eager and compiled, with a cold first repeat."""
    axes = {"model.size": ["small", "medium"], "mode": ["forward", "train_step"], "trainer.compile": [False, True]}
    return [str(make_sweep(folder / "compile", axes, view="compile", fixed=BF16, repeats=3))]


def any_sweep(folder):
    """A grid over an option that no fact stands for, with a baseline of the user's choice."""
    axes = {"model.learning_rate": [0.1, 0.001], "model.attention": ["sdpa", "naive"]}
    home = make_sweep(folder / "my grid", axes, repeats=2, fixed={"model.size": "small"})
    return [str(home), "--baseline=attention=naive"]


def unrelated(folder):
    """Runs of no sweep: two GPUs, one profiled, one with clock sync, one damaged, one of another schema version."""
    small = {"model.size": "small"}
    step_s = make_run(folder / "a", small)["phases"]["step"]["mean_s"]
    make_run(folder / "b", {"model.size": "medium", **BF16})
    make_run(folder / "c", small, {"environment.gpu.name": "NVIDIA A100-SXM4-80GB"})
    make_run(folder / "d", small, {"clock": "sync"}, repeat=1)
    make_run(folder / "e", small, {"is_profiled": True, "phases.step.mean_s": 1.3 * step_s}, repeat=2)
    make_run(folder / "f", small, {"schema_version": 99}, repeat=3)
    make_run(folder / "g", small)
    (folder / "g" / "run.json").write_text('{"schema')
    return [str(folder)]


def kernels_of(run):
    """The changes of a profiled run: the summary of a real trace (small, float32, eager, context 512), with all times
    by the model's and the context's size, and softmax by the square of the context."""
    share = run["data"]["context_length"] / 512
    kernels = _scaled(KERNELS, run["model"]["num_layers"] / 12 * share)
    for phase in kernels["attention"].values():
        phase["softmax_s"] *= share
        phase["softmax_matmul_time_ratio"] *= share
    if run["mode"] == "inference":
        forward = kernels["phases"]["forward"]
        kernels |= {"phases": {"forward": forward, "step": copy.deepcopy(forward)}, "kernel_s": forward["kernel_s"]}
        del kernels["attention"]["backward"]
    return {"is_profiled": True, "kernels": kernels}


def _scaled(value, scale, name=""):
    """Everything in seconds times a factor."""
    if isinstance(value, dict):
        return {key: _scaled(item, scale, key) for key, item in value.items()}
    return value * scale if isinstance(value, float) and name.endswith("_s") else value


def kernels(folder):
    """Profiled runs: inference without a backward, one that died before it could say that it is profiled."""

    def change(run, _repeat):
        if (run["model"]["size"], run["data"]["context_length"], run["mode"]) != ("large", 512, "train_step"):
            return kernels_of(run)
        return {**ended("oom", "backward", requested_bytes=2**30), "is_profiled": None}

    axes = {"model.size": ["small", "large"], "data.context_length": [256, 512], "mode": ["inference", "train_step"]}
    return [
        str(make_sweep(folder / "kernels", axes, view="kernels", fixed=PROFILED, change=change)),
        "--reference",
        "published",
    ]


def memory(folder):
    """Predictions beside what was measured, histories from runs of their own, one of them none; a run on a CPU, of
    which all is predicted."""

    def change(run, repeat):
        peak, is_block = run["memory"]["run_peak_allocated_bytes"], run["model"]["checkpoint"] != "none"
        if repeat == 1 and is_block:
            return {"memory_history": {"steps": 0, "reason": "the snapshot could not be written: no space"}}
        if repeat == 1:
            categories = {"parameters_bytes": peak // 4, "optimizer_state_bytes": peak // 2}
            return {"memory_history": {"steps": 3, "peak_allocated_bytes": peak, "categories": categories}}
        share = 0.5 if is_block else 0.98
        prediction = {"memory_prediction": {"peak_allocated_bytes": int(share * peak), "error_fraction": share - 1}}
        is_cpu = run["model"]["size"] == "medium"
        return prediction | ({"memory": {"host_peak_rss_bytes": 2**30}} if is_cpu else {})

    axes = {"model.size": ["small", "medium"], "trainer.recompute": [None, {"keep": "inputs"}]}
    fixed = {"mode": "train_step"}
    return [str(make_sweep(folder / "memory", axes, view="memory", fixed=fixed, repeats=2, change=change))]


def make_attention(home, contexts, repeats=3, profiled=(), change=None):
    """A sweep's folder as the study `attention` leaves it on an H200, with a profiled run of cells of some lengths.

    Times grow with the square of the context, with a small spread between processes.
    """
    cells = [
        {
            "data.context_length": context, "model.head_dim": 64, "model.attention": attention,
            "trainer.compile": is_compiled, "mode": "forward_backward", "pass": look,
        }
        for context, (attention, is_compiled) in itertools.product(contexts, WAYS)
        for look in ("timing", *(["kernels"] if context in profiled else []))
    ]  # fmt: skip

    def measured(run, repeat):
        changes = _attention(run, repeat)
        return {**changes, **(change(run | changes, repeat) if change else {})}

    return make_sweep(home, cells, view="attention", repeats=repeats, steps=1, change=measured)


def _attention(run, repeat):
    """The changes of one process that measured attention by itself."""
    axes, context, head_dim = run["sweep"]["axes"], run["data"]["context_length"], run["model"]["head_dim"]
    attention, is_compiled = axes["model.attention"], axes["trainer.compile"]
    is_written_out = attention == "naive"
    square, flat = BATCH * context**2 * 4, BATCH * context * head_dim * 4
    saved = square if is_written_out else flat + BATCH * context * 4
    spread = random.Random(f"{sorted(axes.items(), key=str)}-{repeat}")
    forward_ps, backward_ps = WAYS[attention, is_compiled]
    times_s = {
        "forward": context**2 * forward_ps * 1e-12 * spread.gauss(1.0, 0.0005),
        "backward": context**2 * backward_ps * 1e-12 * spread.gauss(1.0, 0.0005),
    }
    busy = {phase: {"kernel_s": time_s, "busy_s": time_s} for phase, time_s in times_s.items()}
    times_s["step"] = sum(times_s.values()) * 1.02
    peak = 8 * flat + (3 * square if is_written_out else flat)
    model = {"name": "lmbench.AttentionLayer", "d_model": head_dim, "num_heads": 1, "head_dim": head_dim}
    model |= {"is_causal": True, "attention": attention}
    memory = {"expected_saved_bytes": saved}
    changes = {
        "outcome": "ok",
        "error": None,
        "model": model,
        "config.data.batch_size": BATCH,
        "data.batch_size": BATCH,
        "flops.causal_per_token_flops": 6 * context * head_dim,
        "phases": {phase: {"mean_s": time_s} for phase, time_s in times_s.items()},
        "probe": {},
        "memory": memory | {
            "run_peak_allocated_bytes": peak, "saved_bytes": saved,
            "phase_begin_allocated_bytes": {"forward": 4 * flat, "backward": 5 * flat + saved},
        },
    }  # fmt: skip
    if axes["pass"] == "kernels":
        changes |= {"is_profiled": True, "kernels": {"steps": 3, "phases": busy}}
    if peak > DEVICE_BYTES:
        memory["refused"] = {"phase": "forward", "requested_bytes": square}
        changes |= {**ended("oom", "forward", requested_bytes=square), "memory": memory}
    return changes


def attention(folder):
    """Attention by itself: device times beside it, a shape that does not fit, and published figures."""
    return [str(make_attention(folder / "attention", [256, 16384, 65536], profiled=[256])), "--reference", "published"]


def attention_backends(folder):
    """The fastest back end, where one is told from all others and where not."""
    home = make_attention(folder / "attention", [256, 16384, 65536])
    return [str(home), "--view=attention_backends"]


CASES = {
    case.__name__: case
    for case in (
        compiled, step_times, precision, any_sweep, unrelated, kernels, memory, attention, attention_backends,
    )
}  # fmt: skip
