"""The kernel profiler: a Trainer flag that records the window and nothing else, also when a run fails."""

from __future__ import annotations

import gzip
import json
import os
import re
import statistics
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from fit_process import SMOKE, bench, plant
from tables import cases, flat
from torch._inductor import config, metrics

from lmbench.cli import main
from lmbench.commands.rooms import nsys
from lmbench.kernels.recording.trace import noted_graphs
from lmbench.kernels.trace import load_trace
from lmbench.model.layers import RMSNorm
from lmbench.records.load import find_runs, load_run
from lmbench.records.run import Profile


def profiled(tmp_path, *words, code=0):
    run = bench(tmp_path, "--trainer.profiler=kernels", *words, code=code)
    return run, json.loads(gzip.decompress((run.path / "trace.json.gz").read_bytes()))


def ranges(trace, kind):
    events = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e["name"].startswith(f"lmbench.{kind}:")]
    return sorted(events, key=lambda event: event["ts"])


def test_the_profiled_steps_are_the_window_with_phases_as_the_timer_has_them_and_named_modules(tmp_path):
    run, trace = profiled(tmp_path, "--measure.steps=40 --measure.min_window_s=9 --model.attention=naive")
    size_bytes = (run.path / "trace.json.gz").stat().st_size
    profile = replace(run.record.profile, host_step_s=None)
    assert profile == Profile("torch", 3, 3, trace_file="trace.json.gz", trace_bytes=size_bytes)
    warmup_s = [step.step_host_s for step in run.steps if step.is_warmup]
    assert 0 < run.record.profile.host_step_s <= max(warmup_s[1:])
    assert (run.record.is_profiled, run.record.window.steps) == (True, 3)
    for phase in ("forward", "backward"):
        spans = [event["dur"] * 1e-6 for event in ranges(trace, "phase") if event["name"].endswith(phase)]
        timed = [getattr(step, f"{phase}_s") for step in run.steps if step.stage == "window"]
        # On a busy machine a step may be interrupted between both marks.
        assert statistics.median(abs(a - b) for a, b in zip(spans, timed, strict=True)) < 0.05 * max(timed)
    names = {event["name"].removeprefix("lmbench.module:") for event in ranges(trace, "module")}
    assert {"network.blocks.0.attention.core.softmax", "network.head", "network.loss"} <= names
    assert trace["lmbench"]["module_classes"]["network.blocks.0.ffn"] == "SwiGLU"


def test_phase_ranges_tile_the_steps_also_under_accumulation_and_clipping(tmp_path):
    words = "--trainer.profiler=lmbench.KernelProfiler --trainer.profiler.steps=2 --trainer.gradient_clip_val=1"
    # Not the default precision, with which the optimizer is fused and Lightning refuses clipping.
    words += " --trainer.accumulate_grad_batches=2 --trainer.precision=bf16-mixed"
    _, trace = profiled(tmp_path, words)
    steps, phases = ranges(trace, "step"), ranges(trace, "phase")
    assert [step["name"] for step in steps] == ["lmbench.step:3", "lmbench.step:4"]
    shares = []
    for step in steps:
        inside = [p for p in phases if step["ts"] <= p["ts"] < step["ts"] + step["dur"]]
        names = [p["name"].removeprefix("lmbench.phase:") for p in inside]
        counts = [names.count(phase) for phase in ("forward", "backward", "clip", "optimizer")]
        assert counts == [2, 2, 1, 1]
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(inside))
        shares.append(sum(p["dur"] for p in inside) / step["dur"])
    # A busy machine may stop the process between two ranges.
    assert 0.95 < max(shares) <= 1


def test_a_compiled_graph_tells_which_modules_its_kernels_come_from_beside_a_pass_of_the_users(tmp_path, monkeypatch):
    # Graphs are traced again, but their C++ comes from PyTorch's own cache.
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    seen = []
    with config.patch(post_grad_custom_post_pass=seen.append):
        words = "--model=strangers.OneBatch --trainer.compile.cache=shared --measure.probe_steps=0"
        _, trace = profiled(tmp_path, words)
        assert len(seen) == 2
        assert config.post_grad_custom_post_pass == seen.append
    assert config.trace.provenance_tracking_level == 0
    forward, backward = trace["lmbench"]["compiled_graphs"]
    assert [paths for _, paths in forward["kernels"]] == [["0"], ["1"], ["2"]]
    assert {path for _, paths in backward["kernels"] for path in paths} == {"0", "1", "2"}


def test_a_run_that_fails_stops_the_profiler_and_keeps_the_steps_it_had(tmp_path):
    run, trace = profiled(tmp_path, *plant("on_train_batch_start", "raise", 4), code=5)
    assert (run.outcome, run.record.profile.steps) == ("error", 1)
    assert len(ranges(trace, "step")) == 2
    # The second step was cut short, so no mean counts it and its kernels count as outside.
    timeline = load_trace(run.path).timeline
    assert timeline.steps == 1
    assert "backward" in timeline.phases
    assert not torch.autograd.profiler._is_profiler_enabled


def test_a_trace_that_the_disk_has_no_room_for_is_told_and_costs_no_step(tmp_path, small_disk, capsys):
    small_disk(120)
    run = bench(tmp_path, "--trainer.profiler=kernels", code=1)
    assert "the trace is lost" in run.record.error.message
    assert "space left" in run.record.profile.trace_error or "disk free" in run.record.profile.trace_error
    assert run.record.unwritten_step_count == 0
    assert len(run.steps) >= 3 + 3
    assert sorted(path.name for path in run.path.iterdir()) == ["config.yaml", "run.json", "steps.jsonl"]
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton needs a CUDA device")
def test_every_triton_kernel_of_a_compiled_graph_is_listed():
    norm = RMSNorm(1280).cuda()
    x = torch.randn(4, 1024, 1280, device="cuda", requires_grad=True)
    mixed = metrics.codegen_mix_order_reduction
    with noted_graphs() as graphs:
        work = torch.compile(norm)
        work(x).sum().backward()
    assert metrics.codegen_mix_order_reduction > mixed, "no mixed-order reduction was made: take another size"
    with torch.profiler.profile() as recording:
        work(x).sum().backward()
        torch.cuda.synchronize()
    launched = {event.name for event in recording.events() if event.name.startswith("triton_")}
    listed = {name for graph in graphs for name, _ in graph.kernels}
    assert launched
    assert launched <= listed


@cases("with_stack", "true", "false")
def test_a_trace_with_stacks_names_the_function_that_the_host_is_in(with_stack, tmp_path, capsys):
    words = f"--model=strangers.ByHand --data=strangers.Data --trainer.profiler.with_stack={with_stack}"
    run, _ = profiled(tmp_path, words)
    capsys.readouterr()
    assert main(["kernels", str(run.path)]) == 0
    text = flat(capsys.readouterr().out)
    advice = "a trace with_stack=True (--trainer.profiler.with_stack true) names its function"
    assert (bool(re.search(r" ms in \S*strangers.py\(\d+\): sleep", text)), advice in text) == (
        with_stack == "true",
        with_stack == "false",
    )


def test_beside_another_profiler_it_is_refused(tmp_path, capsys):
    with torch.profiler.profile():
        assert bench(tmp_path, "--trainer.profiler=kernels", code=2) is None
    assert "a profiler is running in this process already" in capsys.readouterr().err


def test_nsys_runs_the_command_with_ranges_where_it_is_installed(tmp_path, monkeypatch):
    """A stand-in for nsys runs the command in this process."""
    (tmp_path / "nsys").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setattr(os, "execv", lambda program, words: main(words[words.index("lmbench") + 1 :]))
    results = tmp_path / "results"
    nsys(*f"fit --config={SMOKE} --trainer.profiler.steps=2 --measure.results_dir={results}".split())
    (folder,) = find_runs([str(results)])
    profile = load_run(folder).record.profile
    assert (profile.tool, profile.steps) == ("nsys", 2)
