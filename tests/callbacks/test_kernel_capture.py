"""The kernel profiler: a Trainer flag that records the window, and only that, whatever happens."""

from __future__ import annotations

import gzip
import json
import os
import stat
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from paths import SUPPORT
from strangers import Data, Regression

import lmbench
from lmbench.cli import main
from lmbench.kernels.recording.graph_origins import GraphOrigins
from lmbench.kernels.sums import operator_times
from lmbench.kernels.trace import load_trace
from lmbench.model.layers import RMSNorm
from lmbench.records.load import find_runs, load_run
from lmbench.records.run import Profile

from conftest import quiet_trainer

TINY = ("fit", "--config", "smoke", "--quiet", "--trainer.logger", "false")


def profiled(tmp_path, *words, code=0, command=TINY):
    assert main([*command, "--measure.results_dir", str(tmp_path), "--trainer.profiler", "kernels", *words]) == code
    (folder,) = find_runs([str(tmp_path)])
    return load_run(folder), folder


def trace_of(folder):
    with gzip.open(folder / "trace.json.gz") as file:
        return json.load(file)


def ranges(trace, kind):
    found = [e for e in trace["traceEvents"] if e.get("ph") == "X" and e["name"].startswith(f"lmbench.{kind}:")]
    return sorted(found, key=lambda event: event["ts"])


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    words = ("--measure.steps", "40", "--measure.min_window_s", "9", "--model.attention", "naive")
    return profiled(tmp_path_factory.mktemp("tiny"), *words)


def test_the_profiled_steps_are_the_window_and_the_run_is_marked(tiny):
    loaded, folder = tiny
    assert loaded.record.is_profiled
    assert loaded.record.window.steps == 3
    size_bytes = (folder / "trace.json.gz").stat().st_size
    assert loaded.record.profile == Profile("torch", 3, 3, trace_file="trace.json.gz", trace_bytes=size_bytes)


def test_phases_last_as_long_as_the_timer_says_and_modules_have_names_and_classes(tiny):
    loaded, folder = tiny
    records, trace = [step for step in loaded.steps if step.stage == "window"], trace_of(folder)
    for phase in ("forward", "backward"):
        spans = [event["dur"] * 1e-6 for event in ranges(trace, "phase") if event["name"].endswith(phase)]
        assert spans == pytest.approx([record.span_s(phase) for record in records], rel=0.02, abs=2e-4)
    names = {event["name"].removeprefix("lmbench.module:") for event in ranges(trace, "module")}
    assert {"network.blocks.0.attention.core.softmax", "network.head", "network.loss"} <= names
    assert trace["lmbench"]["module_classes"]["network.blocks.0.ffn"] == "SwiGLU"


def test_phase_ranges_tile_the_steps_also_under_accumulation_and_clipping(tmp_path):
    _, folder = profiled(
        tmp_path, "--trainer.accumulate_grad_batches", "2", "--trainer.gradient_clip_val", "1",
        "--trainer.profiler", "lmbench.KernelProfiler", "--trainer.profiler.steps", "2",
    )  # fmt: skip
    trace = trace_of(folder)
    steps, phases = ranges(trace, "step"), ranges(trace, "phase")
    assert [step["name"] for step in steps] == ["lmbench.step:3", "lmbench.step:4"]
    for step in steps:
        inside = [p for p in phases if step["ts"] <= p["ts"] < step["ts"] + step["dur"]]
        names = [p["name"].removeprefix("lmbench.phase:") for p in inside]
        assert names.count("forward") == names.count("backward") == 2
        assert names.count("clip") == names.count("optimizer") == 1
        assert all(a["ts"] + a["dur"] <= b["ts"] for a, b in pairwise(inside))
        covered = sum(p["dur"] for p in inside)
        assert covered == pytest.approx(step["dur"], rel=0.05)


def test_a_compiled_graph_tells_which_modules_its_kernels_come_from(tmp_path):
    _, folder = profiled(tmp_path, "--trainer.compile", "true", "--model.attention", "naive")
    forward, backward = trace_of(folder)["lmbench"]["compiled_graphs"]
    for graph in (forward, backward):
        modules = {path.rpartition("blocks.")[2] for _, paths in graph["kernels"] for path in paths}
        assert {"0.attention.q", "1.ffn.down", "0.attention.core.softmax"} <= modules
    norm, *_ = forward["kernels"]
    assert norm[1] == ["blocks.0.attention_norm", "embedding"]
    assert forward["kernels"][1] == ["extern_kernels.mm", ["blocks.0.attention.q"]]
    from torch._inductor import config

    assert config.post_grad_custom_post_pass is None
    assert config.trace.provenance_tracking_level == 0


def test_a_run_that_fails_stops_the_profiler_and_keeps_the_steps_it_had(tmp_path):
    loaded, folder = profiled(
        tmp_path, "--trainer.callbacks+=planted_faults.Planted", "--trainer.callbacks.at=4",
        "--trainer.callbacks.hook=on_train_batch_start", "--trainer.callbacks.deed=raise", code=5,
    )  # fmt: skip
    assert loaded.outcome == "error"
    assert loaded.record.profile.steps == 1
    assert len(ranges(trace_of(folder), "step")) == 2
    # The second was cut short: no mean counts it, and what it did is outside.
    assert load_trace(folder).timeline.steps == 1
    assert "backward" in load_trace(folder).timeline.phases
    assert not torch.autograd.profiler._is_profiler_enabled


def test_a_step_that_the_training_ends_before_is_not_counted(tmp_path):
    trainer = quiet_trainer(max_steps=6, default_root_dir=tmp_path, profiler=lmbench.KernelProfiler(steps=3))
    trainer.fit(Regression(), Data())
    trace = load_trace(tmp_path / "trace.json.gz")
    assert trace.notes.steps == trace.timeline.steps == 1
    # Two linear layers.
    rows = operator_times(trace).set_index(["phase", "name"])
    assert rows.call_count["forward", "aten::addmm"] == 2


def test_validations_between_recorded_steps_are_outside(tmp_path):
    profiler = lmbench.KernelProfiler()
    trainer = quiet_trainer(max_steps=12, default_root_dir=tmp_path, profiler=profiler, val_check_interval=1)
    trainer.fit(Regression(), Data())
    trace = load_trace(tmp_path / "trace.json.gz")
    assert trace.timeline.steps == 3
    assert "outside" in set(operator_times(trace).phase)


def test_a_trace_that_the_disk_has_no_room_for_is_told_and_costs_no_step(tmp_path, small_disk, capsys):
    small_disk(120)
    loaded, folder = profiled(tmp_path / "results", code=1)
    assert "the trace is lost" in loaded.record.error.message
    assert "space left" in loaded.record.profile.trace_error or "disk free" in loaded.record.profile.trace_error
    assert loaded.record.unwritten_step_count == 0
    assert len(loaded.steps) >= 3 + 3
    assert sorted(path.name for path in folder.iterdir()) == ["config.yaml", "run.json", "steps.jsonl"]
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="Triton needs a CUDA device")
def test_every_triton_kernel_of_a_compiled_graph_is_listed():
    from torch._inductor import metrics

    norm = RMSNorm(1280).cuda()
    x = torch.randn(4, 1024, 1280, device="cuda", requires_grad=True)
    origins = GraphOrigins()
    origins.listen()
    mixed = metrics.codegen_mix_order_reduction
    try:
        work = torch.compile(norm)
        work(x).sum().backward()
    finally:
        origins.close()
    assert metrics.codegen_mix_order_reduction > mixed, "no mixed-order reduction was made: take another size"
    with torch.profiler.profile() as recording:
        work(x).sum().backward()
        torch.cuda.synchronize()
    launched = {event.name for event in recording.events() if event.name.startswith("triton_")}
    listed = {name for graph in origins.graphs for name, _ in graph.kernels}
    assert launched
    assert launched <= listed


def test_a_pass_of_the_users_over_compiled_graphs_goes_on(tmp_path):
    from torch._inductor import config

    seen = []
    with config.patch(post_grad_custom_post_pass=seen.append):
        profiled(tmp_path, "--trainer.compile", "true")
        assert len(seen) == 2
        assert config.post_grad_custom_post_pass is not None


def test_of_several_ranks_the_first_writes_the_trace(tmp_path):
    script = (
        "import sys\n"
        "import lmbench\n"
        "from lightning.pytorch import Trainer\n"
        "from strangers import Data, Regression\n"
        "profiler = lmbench.KernelProfiler(steps=2)\n"
        "Trainer(accelerator='cpu', devices=2, strategy='ddp_fork', max_steps=12, logger=False, profiler=profiler,\n"
        "    enable_checkpointing=False, default_root_dir=sys.argv[1]).fit(Regression(), Data())\n"
    )
    words = [sys.executable, "-c", script, str(tmp_path)]
    subprocess.run(words, cwd=SUPPORT, check=True, capture_output=True, timeout=120)
    trace = load_trace(tmp_path / "trace.json.gz")
    assert trace.timeline.steps == 2
    assert any("allreduce" in name for name in trace.host.names)


def test_a_running_profiler_of_the_users_is_a_usage_error(tmp_path, capsys):
    with torch.profiler.profile():
        assert main([*TINY, "--measure.results_dir", str(tmp_path), "--trainer.profiler", "kernels"]) == 2
    assert "a profiler is running in this process already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--trainer.profiler", "simple", "--trainer.profiler.steps", "2"], "name the class before it"),
        (["--trainer.profiler", "kernles"], "allowed: kernels, simple"),
        (["--trainer.profiler", "lmbench.KernelProfiler", "--trainer.profiler.steps", "0"], "allowed: 1 and more"),
        (["--trainer.profiler", "lmbench.KernelProfiler", "--trainer.profiler.tool", "perf"], "perf"),
    ],
)
def test_mistakes_in_the_flag_are_one_line(tmp_path, capsys, words, told):
    assert main([*TINY, "--measure.results_dir", str(tmp_path), *words]) == 2
    error = capsys.readouterr().err
    assert told in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_nsys_runs_the_command_with_ranges_where_it_is_installed(tmp_path, monkeypatch):
    """The stand-in for nsys checks what it is given and runs what it is asked to."""
    tool = tmp_path / "nsys"
    tool.write_text(f"#!{sys.executable}\nimport os, sys\nos.execv(sys.argv[8], sys.argv[8:])\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    results = tmp_path / "results"
    child = os.fork()
    if not child:
        words = ["--trainer.profiler.steps", "2", "--measure.results_dir", str(results)]
        os._exit(main(["nsys", "--output", "x", *TINY, *words]))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    (folder,) = find_runs([str(results)])
    profile = load_run(folder).record.profile
    assert (profile.tool, profile.steps) == ("nsys", 2)
