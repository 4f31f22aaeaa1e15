"""The gradient norm at the last warm-up step, which does not depend on the length of the window."""

from __future__ import annotations

import pytest
import torch
from fit_process import SMALL, bench

from lmbench.instruments.training import norms


@pytest.mark.parametrize("mode", ["train_step", "forward_backward"])
def test_windows_of_any_length_leave_the_same_gradient_norm_of_the_warmup(mode, tmp_path):
    words = f"--measure.mode={mode}", *SMALL
    others = ("steps=2", "steps=7", "warmup_steps=0")
    short, long, none = (bench(tmp_path, *words, f"--measure.{other}").record for other in others)
    assert short.warmup == long.warmup
    assert short.warmup.gradient_norm > 0
    assert short.probe.training.gradient_norm != long.probe.training.gradient_norm
    assert none.warmup.gradient_norm is None


def test_the_smallest_step_of_one_element_changes_the_norm_of_a_large_parameter():
    weight = torch.randn(1000, 1000)
    before = norms({"weight": weight, "frozen": None}, torch.float64)
    assert norms({"weight": weight}, torch.float64) == before
    weight[1, 3] = torch.nextafter(weight[1, 3], torch.tensor(9.0))
    assert norms({"weight": weight}, torch.float64) != before
