"""The toy on a GPU has the dtypes that are known of it.

python -m pytest -q -m gpu tests/gpu/test_gpu_dtypes.py
"""

from __future__ import annotations

import pytest
from fit_process import run_here
from tables import cases

pytestmark = pytest.mark.gpu

SHORT = ["--measure.steps", "3", "--measure.warmup_steps", "2", "--measure.probe_steps", "2"]


@cases("""
- [precision, lower]
- [16-mixed, float16]
- [bf16-mixed, bfloat16]
""")
def test_the_toy_has_the_dtypes_of_published_write_ups(precision, lower, tmp_path, capsys, answered):
    toy = run_here(tmp_path, "fit", "--config", "toy_fp16", *SHORT, "--trainer.precision", precision)
    capsys.readouterr()
    answer = answered("dtypes", toy.path)
    (run,) = answer["runs"]
    assert (run["device_type"], run["autocast_dtype"]) == ("cuda", lower)
    modules = {row["module"]: row for row in answer["tables"]["modules"]}
    dtypes = {tensor["name"]: list(tensor["dtypes"]) for tensor in run["tensors"]}
    outputs = {path: modules[path]["returns"] for path in ("fc1", "relu", "ln", "fc2")}
    assert outputs == {"fc1": lower, "relu": lower, "ln": "float32", "fc2": lower}
    assert dtypes["logits"] == [lower]
    assert dtypes["parameters"] == dtypes["loss"] == dtypes["gradients"] == ["float32"]
    assert modules["ln"]["why"] == "layer_norm: autocast's float32 list"
