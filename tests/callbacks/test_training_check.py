"""The gradient norm at the last warm-up step: of that step, and the same however long the window is."""

from __future__ import annotations

import pytest
import torch

from lmbench.callbacks import MeasurementSession, TrainingCheck
from lmbench.cli import main
from lmbench.instruments.schedule import Schedule
from lmbench.instruments.training import MovementSample
from lmbench.records.load import find_runs, load_run

from conftest import SlowBatches, quiet_trainer


def fit(tmp_path, *words):
    quick = ["--measure.min_window_s", "0", "--measure.probe_steps", "1", "--data.context_length", "16", "--quiet"]
    folder = tmp_path / str(len(list(tmp_path.iterdir())))
    assert main(["fit", "--config", "smoke", *quick, "--measure.results_dir", str(folder), *words]) == 0
    (path,) = find_runs([folder])
    return load_run(path).record


@pytest.mark.parametrize("mode", ["train_step", "forward_backward"])
def test_windows_of_any_length_leave_the_same_gradient_norm(mode, tmp_path):
    short, long = (fit(tmp_path, "--measure.mode", mode, "--measure.steps", steps) for steps in ("2", "7"))
    assert short.warmup == long.warmup
    assert short.warmup.gradient_norm > 0
    assert short.probe.training.gradient_norm != long.probe.training.gradient_norm


def test_where_there_is_no_gradient_or_no_warm_up_there_is_no_norm(tmp_path):
    assert fit(tmp_path, "--measure.mode", "forward", "--measure.steps", "2").warmup.gradient_norm is None
    assert fit(tmp_path, "--measure.warmup_steps", "0", "--measure.steps", "2").warmup.gradient_norm is None


@pytest.mark.parametrize("accumulated", [1, 3])
def test_it_is_the_norm_that_the_module_itself_sees_in_that_step(sleeper, accumulated):
    seen, norm = [], torch.nn.utils.get_total_norm
    sleeper.on_before_optimizer_step = lambda _: seen.append(float(norm([p.grad for p in sleeper.parameters()])))
    session = MeasurementSession(Schedule(warmup_steps=3, steps=2, probe_steps=1))
    quiet_trainer(TrainingCheck(), session, accumulate_grad_batches=accumulated).fit(sleeper, SlowBatches())
    assert session.run.warmup.gradient_norm == pytest.approx(seen[2], rel=1e-6)
    assert seen[2] != pytest.approx(seen[1], rel=1e-6)


def test_one_element_that_comes_to_rest_is_no_unmoved_parameter():
    weight = torch.nn.Parameter(torch.ones(3, 4))
    weight.grad = torch.zeros(3, 4)
    weight.grad[1, 2] = 5.0
    sample = MovementSample()
    sample.add({"weight": weight})
    assert sample.unmoved() == ["weight"]
    with torch.no_grad():
        # The element with the largest gradient stays; its neighbour moves.
        weight[1, 3] += 1e-6
    assert sample.unmoved() == []
