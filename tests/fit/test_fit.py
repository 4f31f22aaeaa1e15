"""`lmbench fit` and `validate` from the command line to the result folder."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time

import pytest
import torch
import yaml
from fit_process import bench, measure_here, statuses
from refusals import usage_error
from strangers import Regression
from tables import cases
from torch.utils.data import DataLoader, IterableDataset

from lmbench.configs import shipped_configs
from lmbench.records.vocabulary import PHASES


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return bench(tmp_path_factory.mktemp("fit"), "--wandb.mode=disabled")


def test_a_run_leaves_a_complete_result_whose_summary_follows_from_the_raw_steps(run):
    files = {path.name: path.read_text() for path in run.path.iterdir()}
    assert files.keys() == {"config.yaml", "run.json", "steps.jsonl"}
    assert json.loads(files["run.json"])["outcome"] == run.outcome == "ok"
    assert yaml.safe_load(files["config.yaml"])["model"]["size"] == "tiny"
    record, window = run.record, [step for step in run.steps if step.stage == "window"]
    assert (len(run.steps), len(window), record.window.steps) == (9, 6, 6)
    assert record.model.parameter_count == 1_362_240
    assert statuses(record)["window_identity"] == "pass"
    assert record.phases.forward.mean_s == pytest.approx(statistics.fmean(step.forward_s for step in window))
    tokens = sum(step.tokens for step in window)
    assert record.throughput.tokens_per_s == pytest.approx(tokens / record.window.wall_s)


def test_the_same_seed_gives_the_same_losses_in_either_order_of_zeroing_gradients_for_as_long_as_asked(run, tmp_path):
    native = bench(tmp_path, "--measure.zero_grad=native", "--measure.min_window_s=0.0001h")
    assert native.record.window.requested_s == pytest.approx(0.36)
    assert [step.loss for step in run.steps] == [step.loss for step in native.steps[: len(run.steps)]]
    assert (run.record.zero_grad, native.record.zero_grad) == ("after_step", "native")
    assert native.steps[-1].zero_grad_s is not None


@cases(
    "mode | phases | flops",
    ("forward_backward", {"forward", "backward", "zero_grad"}, 1),
    ("forward", {"forward"}, 1 / 3),
    ("inference", {"forward"}, 1 / 3),
)
def test_a_mode_runs_only_its_part_of_the_step(run, tmp_path, mode, phases, flops):
    command, words = ("validate", "") if mode == "inference" else ("fit", f"--measure.mode={mode}")
    result = bench(tmp_path, "--data.num_batches=8", words, command=command)
    assert result.record.mode == mode
    spans_s = {phase: getattr(result.steps[-1], f"{phase}_s") for phase in PHASES}
    assert phases <= {phase for phase, span_s in spans_s.items() if span_s is not None}
    forward_s, backward_s = (
        statistics.median(getattr(step, f"{phase}_s") or 0.0 for step in result.steps)
        for phase in ("forward", "backward")
    )
    assert (backward_s > forward_s / 10) == ("backward" in phases)
    assert (spans_s["optimizer"], run.steps[-1].optimizer_s is None) == (None, False)
    losses = [step.loss for step in result.steps]
    # The data repeats after eight batches; with frozen weights the loss repeats too.
    assert losses[0] == losses[8]
    assert result.record.flops.per_token_flops == flops * run.record.flops.per_token_flops


def test_shipped_configurations_all_parse(printed):
    for name in shipped_configs():
        printed("fit", "--config", name, "--print_config")


def test_a_measurement_imports_no_scipy_signal_transformers_or_pandas_and_leaves_them_usable():
    code = "import sys, lmbench.fit.run; assert not {'scipy.signal', 'transformers', 'pandas'} & sys.modules.keys(); "
    code += "import scipy, scipy.signal; scipy.signal.find_peaks([0, 1, 0]); "
    code += "from torchmetrics.functional.text import bert; bert.AutoTokenizer.from_pretrained"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=120).returncode == 0


class Stream(IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def test_data_that_is_used_up_ends_the_window_and_none_is_an_error():
    rows = [(torch.ones(16),)] * 9
    # An iterator gives its rows once, a list in every epoch.
    run = measure_here(Regression(), DataLoader(Stream(iter(rows)), batch_size=1), steps=20)
    assert (run.outcome, run.record.window.steps) == ("ok", 8)
    window = measure_here(Regression(), DataLoader(Stream(rows), batch_size=1), steps=20).record.window
    assert (window.steps, window.loader_end_count, window.loader_batches) == (20, 2, 9)
    with usage_error("nothing was measured"):
        measure_here(Regression(), DataLoader(Stream([]), batch_size=1))


class Refusing(Regression):
    def on_train_batch_start(self, batch, batch_idx):
        return -1 if self.global_step >= 8 else None


class Unending(Regression):
    def training_step(self, batch, batch_idx):
        if self.global_step >= 8:
            raise StopIteration
        return super().training_step(batch, batch_idx)


@cases("module", Refusing, Unending)
def test_epochs_that_end_before_a_step_end_the_window(module):
    run = measure_here(module(), DataLoader(torch.ones(40, 16)), steps=20)
    assert (run.outcome, run.record.window.steps) == ("ok", 7)
    assert statuses(run.record)["window_complete"] == "warn"


def test_a_clock_that_the_module_stops_neither_times_a_step_nor_holds_the_window_open(monkeypatch):
    class Stopping(Regression):
        def training_step(self, batch, batch_idx):
            monkeypatch.setattr(time, "perf_counter_ns", lambda: 0)
            return super().training_step(batch, batch_idx)

    record = measure_here(Stopping(), DataLoader(torch.ones(40, 16)), steps=3, min_window_s=0.05).record
    assert record.window.wall_s + record.window.excluded_s >= 0.05
    assert record.phases.step.min_s > 0
    assert statuses(record)["clocks"] == "fail"
