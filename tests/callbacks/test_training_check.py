"""The gradient norm at the last warm-up step: of that step, and the same however long the window is."""

from __future__ import annotations

import pytest
import torch
from fit_process import bench

from lmbench.instruments.training import norms


@pytest.mark.parametrize("mode", ["train_step", "forward_backward"])
def test_windows_of_any_length_leave_the_same_gradient_norm(mode, tmp_path):
    short, long = (bench(tmp_path, f"--measure.mode={mode}", f"--measure.steps={steps}").record for steps in (2, 7))
    assert short.warmup == long.warmup
    assert short.warmup.gradient_norm > 0
    assert short.probe.training.gradient_norm != long.probe.training.gradient_norm


def test_where_there_is_no_gradient_or_no_warm_up_there_is_no_norm(tmp_path):
    for word in ("--measure.mode=forward", "--measure.warmup_steps=0"):
        assert bench(tmp_path, word).record.warmup.gradient_norm is None


def test_the_smallest_step_of_one_element_changes_the_norm_of_a_large_parameter():
    weight = torch.randn(1000, 1000)
    before = norms({"weight": weight, "frozen": None}, torch.float64)
    assert norms({"weight": weight}, torch.float64) == before
    weight[1, 3] = torch.nextafter(weight[1, 3], torch.tensor(9.0))
    assert norms({"weight": weight}, torch.float64) != before
