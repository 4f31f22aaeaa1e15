"""Results of studies of attention by itself, as an H200 might leave them: times follow from bytes, FLOPs and what the
host takes to launch, with a small spread between processes."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from report_results import DEVICE_BYTES, make_record, set_outcome, write_run

from lmbench.records.run import SCHEMA_VERSION

#: By attention and whether it is compiled: FLOP/s of forward and backward, times that a matrix of scores is read or
#: written in each, seconds that the host takes for each.
WAYS = {
    ("naive", False): ((45e12, 40e12), (7, 12), (120e-6, 210e-6)),
    ("naive", True): ((45e12, 40e12), (4, 7), (95e-6, 140e-6)),
    ("sdpa", False): ((21e12, 13e12), (0, 0), (60e-6, 130e-6)),
    ("flex", False): ((21.02e12, 9e12), (0, 0), (110e-6, 190e-6)),
}
_BYTES_PER_S = 4.2e12
BATCH = 8


def write_attention(
    folder: Path,
    contexts: Sequence[int],
    head_dims: Sequence[int],
    view: str = "attention",
    repeats: int = 3,
    profiled_contexts: Sequence[int] = (),
) -> Path:
    """A sweep's folder as the study `attention` leaves it, with a profiled run of cells of some lengths."""
    home = folder / view
    cells = []
    for context, head_dim, (attention, compiled) in itertools.product(contexts, head_dims, WAYS):
        axes = {
            "data.context_length": context, "model.head_dim": head_dim, "model.attention": attention,
            "trainer.compile": compiled, "mode": "forward_backward",
        }  # fmt: skip
        for own_pass in ("timing", *(["kernels"] if context in profiled_contexts else [])):
            name = f"{context}-{head_dim}-{attention}{'-compiled' * compiled}{'-kernels' * (own_pass == 'kernels')}"
            place = {**axes, "pass": own_pass}
            cells.append({"id": name, "axes": place, "command": "fit", "options": {}})
            for repeat in range(repeats if own_pass == "timing" else 1):
                run = make_attention(place, repeat)
                run |= {"run_id": f"{name}-r{repeat}"}
                run["sweep"] = {"name": view, "cell": name, "axes": place, "repeat": repeat, "environment": None}
                write_run(home / "runs" / str(run["run_id"]), run, steps=1)
    content = {"schema_version": SCHEMA_VERSION, "name": view, "view": view, "axes": {}, "cells": cells}
    (home / "sweep.json").write_text(json.dumps(content))
    return home


def make_attention(axes: Mapping[str, Any], repeat: int = 0) -> dict[str, Any]:
    """run.json of one process."""
    context, head_dim = axes["data.context_length"], axes["model.head_dim"]
    attention, compiled = axes["model.attention"], axes["trainer.compile"]
    rates, matrices, host_s = WAYS[attention, compiled]
    run = make_record({"data.batch_size": BATCH, "measure.mode": "forward_backward"})
    run["data"]["context_length"] = context
    run["config"] = {"model": {"class_path": "lmbench.AttentionLayer"}, "data": {"context_length": context}}
    run["model"] = {
        "name": "lmbench.model.attention_layer.AttentionLayer", "d_model": head_dim, "num_heads": 1,
        "head_dim": head_dim, "is_causal": True, "attention": attention,
        "attention_backend": "sdpa_efficient" if attention == "sdpa" else None,
    }  # fmt: skip
    run["compile"] = {"is_enabled": compiled, "mode": "default" if compiled else None}
    forward_flops = 2 * context * head_dim
    run["flops"] |= {
        "per_token_flops": 6 * forward_flops, "causal_per_token_flops": 3 * forward_flops, "multiplier": 3,
    }  # fmt: skip
    run["loss"] = {}
    square, flat = BATCH * context**2 * 4, BATCH * context * head_dim * 4
    seed = random.Random(f"{sorted(axes.items(), key=str)}-{repeat}")
    verdicts, kernels = {}, {}
    for index, (phase, flops) in enumerate((("forward", 1), ("backward", 2))):
        needed = forward_flops * flops * BATCH * context * (1 if attention != "naive" else 2)
        device_s = max(needed / rates[index], 4e-6) + matrices[index] * square / _BYTES_PER_S
        span_s = max(device_s, host_s[index]) * seed.gauss(1.0, 0.02 if device_s < host_s[index] else 0.0005)
        summary = {"n": 100, "mean_s": span_s, "std_s": span_s * 0.01, "median_s": span_s, "share_fraction": 0.49}
        run["phases"][phase] = summary
        is_waiting = device_s < host_s[index]
        lag_s = 3e-6 if is_waiting else 0.02
        verdicts[phase] = {"verdict": "host-bound" if is_waiting else "queued", "min_lag_s": lag_s}
        kernels[phase] = {"kernel_s": device_s, "busy_s": device_s}
    run["probe"] = {"verdicts": verdicts}
    whole_s = sum(run["phases"][phase]["mean_s"] for phase in ("forward", "backward")) * 1.02
    run["phases"]["step"] = {"n": 100, "mean_s": whole_s, "std_s": whole_s * 0.01, "median_s": whole_s}
    is_written_out = attention == "naive"
    saved = square if is_written_out else flat + BATCH * context * 4
    run["memory"] = {
        "run_peak_allocated_bytes": 8 * flat + (3 * square if is_written_out else flat),
        "phase_begin_allocated_bytes": {"forward": 4 * flat, "backward": 5 * flat + saved},
        "saved_bytes": saved, "expected_saved_bytes": saved, "device_total_bytes": DEVICE_BYTES,
    }  # fmt: skip
    if axes.get("pass") == "kernels":
        run |= {"is_profiled": True, "kernels": {"steps": 3, "phases": kernels}}
    if run["memory"]["run_peak_allocated_bytes"] > DEVICE_BYTES:
        set_outcome(run, "oom", "forward", requested_bytes=square)
        run["memory"] = {
            "device_total_bytes": DEVICE_BYTES, "expected_saved_bytes": saved,
            "refused": {"phase": "forward", "requested_bytes": square, "allocated_bytes": 4 * flat},
        }  # fmt: skip
    return run


if __name__ == "__main__":
    import sys

    grid = [256, 1024, 4096, 8192, 16384, 32768, 65536], [16, 32, 64, 128]
    write_attention(Path(sys.argv[1]), *grid, profiled_contexts=[256, 1024])
