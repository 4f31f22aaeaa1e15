"""The published toy on a GPU has the published dtypes, and CUDA's autocast lists are what PyTorch says they are.

python -m pytest -q -m gpu tests/gpu/test_gpu_dtypes.py
"""

from __future__ import annotations

import json

import pytest
import torch

from lmbench.cli import main
from lmbench.dtypes.recording.autocast import Asking, listed

pytestmark = pytest.mark.gpu

SHORT = ["--measure.steps", "3", "--measure.warmup_steps", "2", "--measure.probe_steps", "2", "--quiet"]
OUTPUTS = {"fc1": "fc1_output", "relu": "relu_output", "ln": "layernorm_output", "fc2": "fc2_output"}


@pytest.mark.parametrize(("precision", "lower"), [("16-mixed", "float16"), ("bf16-mixed", "bfloat16")])
def test_the_toy_has_the_published_dtypes(precision, lower, tmp_path, capsys):
    words = ["--trainer.precision", precision, "--measure.results_dir", str(tmp_path), "--measure.run_id", "toy"]
    assert main(["fit", "--config", "toy_fp16", *SHORT, *words]) == 0
    capsys.readouterr()
    assert main(["dtypes", str(tmp_path / "toy"), "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["device_type"], found["autocast_dtype"]) == ("cuda", lower)
    outputs = {each["path"]: each["calls"][0]["outputs"] for each in found["modules"] if each["calls"]}
    dtypes = {each["name"]: list(each["dtypes"]) for each in found["tensors"]}
    for path, name in OUTPUTS.items():
        # Of bfloat16 not every tensor was published.
        assert outputs[path] == [found["published"].get(name, outputs[path][0])], path
    for name in ("parameters", "logits", "loss", "gradients"):
        assert dtypes[name] == [found["published"][name]], name
    (norm,) = [each for each in found["modules"] if each["path"] == "ln"]
    assert norm["reason"] == "layer_norm: autocast's float32 list"


@pytest.mark.parametrize("lower", [torch.float16, torch.bfloat16])
def test_cudas_lists_are_asked(lower):
    asking = Asking(torch.device("cuda"), lower)
    expected = {
        "lower": ["linear", "matmul", "conv2d", "scaled_dot_product_attention", "bmm"],
        "float32": ["layer_norm", "softmax", "log_softmax", "pow", "sum", "exp", "nll_loss", "cumsum", "mse_loss"],
        "widest": ["addcmul", "dot"],
        "refused": ["binary_cross_entropy"],
        "none": ["relu", "add", "embedding"],
    }
    found = {rule: [name for name in names if asking.rule(f"aten::{name}") == rule] for rule, names in expected.items()}
    assert found == expected
    rules = [asking.rule(name) for name in sorted(listed("cuda"))]
    assert rules.count("unknown") < len(rules) / 3
