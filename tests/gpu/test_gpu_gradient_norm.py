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


@pytest.fixture(scope="module")
def fp32(tmp_path_factory):
    return measured(tmp_path_factory.mktemp("fp32"))


@pytest.mark.parametrize("precision", ["16-mixed", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("optimizer", ["fused", "foreach"])
def test_it_is_that_of_fp32_in_every_precision(fp32, precision, optimizer, tmp_path):
    words = [f"--trainer.precision={precision}", f"--model.optimizer_variant={optimizer}"]
    found = measured(tmp_path, *words)
    first = next(step for step in found.steps if not step.is_skipped)
    assert first.gradient_norm == pytest.approx(fp32.steps[0].gradient_norm, rel=0.05)
    assert found.steps[4].gradient_norm == pytest.approx(found.record.warmup.gradient_norm, rel=1e-3)


def test_a_compiled_module_has_the_same_and_nothing_waits_for_it(fp32, tmp_path):
    found = measured(tmp_path, "--trainer.compile=true")
    assert found.steps[0].gradient_norm == pytest.approx(fp32.steps[0].gradient_norm, rel=1e-3)
    for run in (fp32, found):
        places = [sync.location for sync in run.record.probe.hidden_syncs or ()]
        assert not any("gradient_norm" in place or "training.py" in place for place in places), places
        assert run.record.phases.clip.mean_s > 0
