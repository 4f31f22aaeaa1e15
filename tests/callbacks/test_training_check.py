"""Which steps are checked: the last one of the warm-up for its gradient norm, and one that the scaler does not skip."""

from __future__ import annotations

import pytest
from fit_process import SMALL, bench, measure_here
from strangers import Data, Regression

from lmbench.callbacks import Observer
from lmbench.instruments.window import ProbeKind


@pytest.mark.parametrize("mode", ["train_step", "forward_backward"])
def test_windows_of_any_length_leave_the_same_gradient_norm_of_the_warmup(mode, tmp_path):
    words = f"--measure.mode={mode}", *SMALL
    others = ("steps=2", "steps=7", "warmup_steps=0")
    short, long, none = (bench(tmp_path, *words, f"--measure.{other}").record for other in others)
    assert short.warmup == long.warmup
    assert short.warmup.gradient_norm > 0
    assert short.probe.training.gradient_norm != long.probe.training.gradient_norm
    assert none.warmup.gradient_norm is None


class Overflow(Observer):
    """Makes the gradients of the first steps that are checked infinite."""

    def __init__(self, left):
        self.left = left

    def on_after_backward(self, trainer, module):
        if self.session.probe_kind is ProbeKind.TRAINING and self.left:
            self.left -= 1
            for parameter in module.parameters():
                parameter.grad.fill_(float("inf"))


@pytest.mark.parametrize(("skipped", "is_checked"), [(0, True), (2, True), (100, False)])
def test_after_steps_that_the_scaler_skipped_the_next_one_is_checked(skipped, is_checked):
    trainer = {"precision": "16-mixed", "callbacks": [Overflow(skipped)]}
    record = measure_here(trainer=trainer, probe_steps=1).record
    assert record.probe.training.is_skipped == (not is_checked)
    statuses = {guard.name: guard.status for guard in record.guards}
    assert [statuses[name] for name in ("inputs", "trained")] == ["pass", "pass" if is_checked else "n/a"]


def test_a_step_without_a_loss_is_not_checked():
    # Every second batch has none, and the sixth step is the first that is probed.
    run = measure_here(Regression(answer="none"), Data(), warmup_steps=2, steps=3, probe_steps=1)
    assert run.record.probe.training.is_skipped is False
    assert {guard.name: guard.status for guard in run.record.guards}["gradients"] == "pass"
