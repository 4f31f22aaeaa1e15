"""The gradient norm of every step on a GPU: without the loss scale, of compiled modules too, and without a synchronize.

python -m pytest -q -m gpu tests/gpu/test_gpu_gradient_norm.py
"""

from __future__ import annotations

import pytest
from fit_process import bench

pytestmark = pytest.mark.gpu


def measured(folder, *words):
    quick = "--trainer.accelerator=gpu --data.context_length=128 --measure.gradient_norm=true --measure.probe_steps=10"
    return bench(folder, quick, "--measure.warmup_steps=5 --measure.steps=60", *words)


def test_it_is_that_of_fp32_without_the_loss_scale_and_compiled_and_nothing_waits_for_it(tmp_path):
    words = ("", "--trainer.precision=16-mixed", "--trainer.compile=true")
    fp32, *others = runs = [measured(tmp_path, each) for each in words]
    for run in others:
        first = next(step for step in run.steps if not step.is_skipped)
        assert first.gradient_norm == pytest.approx(fp32.steps[0].gradient_norm, rel=0.05)
        assert run.steps[4].gradient_norm == pytest.approx(run.record.warmup.gradient_norm, rel=1e-3)
    for run in runs:
        places = [sync.location for sync in run.record.probe.hidden_syncs or ()]
        assert not any("gradient_norm" in place or "training.py" in place for place in places), places
        assert run.record.phases.clip.mean_s > 0
