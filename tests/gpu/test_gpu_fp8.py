"""fp8 on a GPU that has it: products run in it and nowhere else, it trains like bf16, and its memory is predicted.

python -m pytest -q -m gpu tests/gpu/test_gpu_fp8.py
"""

from __future__ import annotations

import pytest
import torch  # noqa: F401  (for the mark)
from fit_process import run_here
from tables import cases

pytestmark = [pytest.mark.gpu, pytest.mark.skipif("torch.cuda.get_device_capability() < (8, 9)", reason="no fp8 units")]

CONFIG = ["--config", "small_bf16", "--data.batch_size", "8", "--measure.steps", "10", "--measure.min_window_s", "0"]


def fitted(tmp_path, *words):
    return run_here(tmp_path, "fit", *CONFIG, *words)


@cases("recipe", "tensorwise", "tensorwise-fast", "rowwise")
def test_compiled_fp8_trains_like_bf16_and_its_products_are_in_fp8(recipe, tmp_path, capsys, answered):
    compiled = ["--trainer.precision", f"fp8-{recipe}", "--trainer.compile.regional", "true"]
    plain, run = (fitted(tmp_path, *words).record for words in (["--trainer.precision", "bf16-mixed"], compiled))
    assert run.loss.mean == pytest.approx(plain.loss.mean, rel=0.01)
    assert run.compile.graph_break_count == 0
    assert 1 < run.flops.peak_flops_per_s / plain.flops.peak_flops_per_s < 2
    # A profiled run trains for fewer steps, so its loss is another.
    profiled = fitted(tmp_path, *compiled, "--trainer.profiler", "kernels")
    capsys.readouterr()
    names = [row["name"] for row in answered("kernels", profiled.path)["tables"]["all_kernels"]]
    assert any("nvjet" in name and "qq" in name for name in names) or any("e4m3" in name for name in names)


def test_eager_memory_is_predicted(tmp_path):
    record = fitted(tmp_path, "--trainer.precision", "fp8-tensorwise", "--memory.predict", "true").record
    assert abs(record.memory_prediction.error_fraction) < 0.03
