"""The toy on a GPU has the dtypes that are known of it, and CUDA's autocast lists are what PyTorch says they are.

python -m pytest -q -m gpu tests/gpu/test_gpu_dtypes.py
"""

from __future__ import annotations

import json

import pytest
import torch

from lmbench.cli import main
from lmbench.dtypes.answer import LISTS

pytestmark = pytest.mark.gpu

SHORT = ["--measure.steps", "3", "--measure.warmup_steps", "2", "--measure.probe_steps", "2", "--quiet"]


@pytest.mark.parametrize(("precision", "lower"), [("16-mixed", "float16"), ("bf16-mixed", "bfloat16")])
def test_the_toy_has_the_dtypes_of_published_write_ups(precision, lower, tmp_path, capsys):
    words = ["--trainer.precision", precision, "--measure.results_dir", str(tmp_path), "--measure.run_id", "toy"]
    assert main(["fit", "--config", "toy_fp16", *SHORT, *words]) == 0
    capsys.readouterr()
    assert main(["dtypes", str(tmp_path / "toy"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (run,) = answer["runs"]
    assert (run["device_type"], run["autocast_dtype"]) == ("cuda", lower)
    modules = {row["module"]: row for row in answer["tables"]["modules"]}
    dtypes = {tensor["name"]: list(tensor["dtypes"]) for tensor in run["tensors"]}
    outputs = {path: modules[path]["returns"] for path in ("fc1", "relu", "ln", "fc2")}
    assert outputs == {"fc1": lower, "relu": lower, "ln": "float32", "fc2": lower}
    assert dtypes["logits"] == [lower]
    assert dtypes["parameters"] == dtypes["loss"] == dtypes["gradients"] == ["float32"]
    assert modules["ln"]["why"] == "layer_norm: autocast's float32 list"


@pytest.mark.parametrize("name", ["linear", "matmul", "layer_norm", "softmax", "pow", "sum", "exp", "relu", "mse_loss"])
def test_cudas_lists_are_those_of_this_pytorch(name):
    values = torch.rand(2, 2, device="cuda")
    arguments = dict.fromkeys(("linear", "matmul", "mse_loss"), (values,))
    arguments |= {"layer_norm": ((2,),), "softmax": (-1,), "pow": (2,)}
    function = getattr(torch, name, None) or getattr(torch.nn.functional, name)
    with torch.autocast("cuda", torch.bfloat16):
        results = [function(values.to(dtype), *arguments.get(name, ())) for dtype in (torch.float32, torch.bfloat16)]
    dtypes = [result.dtype for result in results]
    expected = {
        "autocast's lower-precision list": [torch.bfloat16] * 2,
        "autocast's float32 list": [torch.float32] * 2,
        None: [torch.float32, torch.bfloat16],
    }
    assert dtypes == expected[LISTS.get(("cuda", name))]
