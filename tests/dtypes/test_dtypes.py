"""Dtypes noted on a probe step: of every module and tensor, with the reason for each cast."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from functorch.compile import make_boxed_func
from lightning.pytorch import LightningModule
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.nn import functional

from lmbench.callbacks import DtypeRecorder, MeasurementSession
from lmbench.cli import main
from lmbench.dtypes.notes import DTYPES_FILE, read_notes
from lmbench.dtypes.reasons import LISTS
from lmbench.fit.trainer import BenchTrainer
from lmbench.instruments.schedule import Schedule
from lmbench.model.toy import Toy
from lmbench.records.load import load_run

from conftest import QUIET, SlowBatches, quiet_trainer

SHORT = ["--trainer.accelerator", "cpu", "--measure.steps", "2", "--measure.warmup_steps", "1",
         "--measure.probe_steps", "1", "--quiet"]  # fmt: skip
LOWER, FLOAT32 = "autocast's lower-precision list", "autocast's float32 list"
#: By operator, a call on a tensor in a dtype, and the list that it is in.
LISTED = {
    "matmul": (lambda x, dtype: x.to(dtype) @ x.to(dtype), LOWER),
    "linear": (lambda x, dtype: functional.linear(x.to(dtype), x[0, 0].to(dtype)), LOWER),
    "einsum": (lambda x, dtype: torch.einsum("abcd,abde->abce", x.to(dtype), x.to(dtype)), LOWER),
    "prod": (lambda x, dtype: x.to(dtype).prod(), FLOAT32),
    "mse_loss": (lambda x, dtype: functional.mse_loss(x.to(dtype), x.to(dtype)), FLOAT32),
    "cross_entropy": (lambda x, dtype: functional.cross_entropy(x[0, 0].to(dtype), torch.tensor([0, 1])), FLOAT32),
    "relu": (lambda x, dtype: x.to(dtype).relu(), None),
    "layer_norm": (lambda x, dtype: functional.layer_norm(x.to(dtype), (2,)), None),
    "softmax": (lambda x, dtype: x.to(dtype).softmax(-1), None),
}


@dataclass
class Held:
    """A batch as somebody may hand it on."""

    values: torch.Tensor
    numbers: dict[str, Any]


class Scale(nn.Module):
    def forward(self, value):
        return value * 2


class Doubled(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, value):
        return self.inner(value) * 2


class Nested(nn.Module):
    """Takes and returns tensors in a dataclass, a dictionary and a tuple."""

    def forward(self, held: Held, *, named: tuple[torch.Tensor, ...]) -> dict[str, Any]:
        return {"sum": held.values + named[0], "rest": [held.numbers["ids"], (named[0],)]}


class Odd(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.nested, self.scale = Nested(), Scale()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.unused = nn.Sequential(nn.Linear(4, 4))
        self.lent = nn.Linear(16, 1)
        self.scripted = torch.jit.script(nn.Linear(16, 16))
        self.quantized = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)
        self.turned = nn.Parameter(torch.ones(2, dtype=torch.complex64))

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        ids = torch.arange(4)
        with torch.autocast("cpu", torch.bfloat16):
            found = self.nested(Held(batch, {"ids": ids}), named=(batch.double(),))["sum"].float()
            for block in self.blocks:
                found = block(found)
        narrow, wide = self.scale(found), self.scale(self.scripted(found.float()))
        weight = self.lent.weight
        loss = nn.functional.linear(wide + narrow, weight).pow(2).mean() + self.turned.abs().sum()
        return nn.functional.mse_loss(loss, torch.zeros(()))

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01)


def noted(module, tmp_path, batches=None, make=quiet_trainer, **flags):
    """A fit with one probe step; the record and, by path, the modules."""
    session = MeasurementSession(Schedule(warmup_steps=1, steps=1, probe_steps=1))
    make(DtypeRecorder(), session, default_root_dir=str(tmp_path), **flags).fit(module, batches or SlowBatches())
    record = session.run.dtypes
    assert record.reason is None
    assert record.notes_file == DTYPES_FILE
    return record, {module.path: module for module in read_notes(tmp_path).modules}


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    module = Odd()
    return module, *noted(module, tmp_path_factory.mktemp("odd"))


def tensors(record):
    return {each.name: each.dtypes for each in record.tensors}


def test_inputs_and_outputs_are_found_however_they_are_nested(odd):
    (call,) = odd[2]["nested"].calls
    assert call.inputs == ["float32", "int64", "float64"]
    assert call.outputs == ["float64", "int64", "float64"]


def test_a_module_called_with_several_dtypes_has_a_call_for_each(odd):
    calls = odd[2]["scale"].calls
    assert [(call.inputs, call.outputs) for call in calls] == [
        (["bfloat16"], ["bfloat16"]),
        (["float32"], ["float32"]),
    ]
    assert [call.gradients for call in calls] == [["bfloat16"], ["float32"]]


def test_what_never_ran_is_listed_and_what_others_use_is_told_apart(odd):
    _, record, modules = odd
    assert record.unused_modules == ["unused", "unused.0"]
    assert modules["unused.0"].reason == "never ran"
    assert modules["lent"].reason == "not called, but its parameters have gradients: another module uses them"
    assert modules["scripted"].reason == "TorchScript: no hook sees its calls"
    assert "blocks" not in modules


def test_casts_of_the_code_and_of_promotion_are_no_autocasts(odd):
    _, record, modules = odd
    (addition,) = modules["nested"].operators
    assert addition.reason == "takes a mixture, gives float64"
    of_step = {(each.name, each.output, each.reason) for each in modules[""].operators}
    assert ("double", "float64", "the code casts to float64") in of_step
    assert ("add", "float32", "takes a mixture, gives float32") in of_step
    # Outside of the code's own autocast, though it is in a list.
    assert ("linear", "float32", "autocast was off for it: takes what it gets") in of_step
    assert record.autocast_dtype == "bfloat16"


def test_complex_parameters_have_complex_gradients_and_float8_ones_are_told(odd):
    found = tensors(odd[1])
    assert found["parameters"]["float8_e4m3fn"] == 1
    assert found["parameters"]["complex64"] == found["gradients"]["complex64"] == 1
    assert found["loss"] == {"float32": 1}


def test_nothing_stays_behind(odd):
    module = odd[0]
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in module.modules())
    assert not torch.overrides._get_current_function_mode_stack()


@pytest.mark.parametrize("name", sorted(LISTED))
def test_autocasts_lists_of_a_cpu_are_those_of_this_pytorch(name):
    call, words = LISTED[name]
    with torch.autocast("cpu", torch.bfloat16):
        dtypes = [call(torch.rand(2, 2, 2, 2), dtype).dtype for dtype in (torch.float32, torch.bfloat16)]
    assert words == LISTS.get(("cpu", name))
    assert (
        dtypes
        == {LOWER: [torch.bfloat16] * 2, FLOAT32: [torch.float32] * 2, None: [torch.float32, torch.bfloat16]}[words]
    )


@pytest.mark.parametrize(
    ("precision", "weights", "product"),
    [
        ("32-true", "float32", "float32"),
        ("bf16-mixed", "float32", "bfloat16"),
        ("16-mixed", "float32", "float16"),
        ("bf16-true", "bfloat16", "bfloat16"),
        ("16-true", "float16", "float16"),
        ("64-true", "float64", "float64"),
    ],
)
def test_every_precision_plugin_shows_what_it_does(sleeper, tmp_path, precision, weights, product):
    def make(*callbacks, **flags):
        return BenchTrainer(callbacks=list(callbacks), **{**QUIET, **flags})

    record, modules = noted(sleeper, tmp_path, make=make, precision=precision)
    found = tensors(record)
    assert found["parameters"] == found["gradients"] == {weights: 6}
    assert modules["net.0"].calls[0].outputs == [product]
    assert record.autocast_dtype == (product if "mixed" in precision else None)
    assert (record.loss_scale is not None) == (precision == "16-mixed")
    assert all(precision in each.reason for each in record.tensors if each.name == "parameters")


def test_compiled_modules_are_noted_without_compiled_code_and_stay_compiled(sleeper, tmp_path):
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    sleeper.net = Doubled(sleeper.net)
    sleeper.net.compile(backend=backend)
    record, modules = noted(sleeper, tmp_path)
    assert record.was_compiled
    assert modules["net.inner.2"].calls[0].inputs == ["float32"]
    assert len(graphs) == 1
    sleeper.net(torch.randn(4, 16))
    assert len(graphs) == 1


def test_a_compiled_graph_has_the_casts_that_are_noted_without_it(tmp_path):
    module, graphs = Toy(), []

    def backend(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph.forward)

    compiled = torch.compile(module, backend=aot_autograd(fw_compiler=backend))
    with torch.autocast("cpu", torch.float16):
        compiled(torch.randn(8, 20))
    of_graph = [
        str(node.meta["val"].dtype).removeprefix("torch.") for node in graphs[0].graph.nodes if "to_copy" in str(node)
    ]

    def make(*callbacks, **flags):
        return BenchTrainer(callbacks=list(callbacks), **{**QUIET, **flags})

    _, modules = noted(module, tmp_path, module.train_dataloader(), make, precision="16-mixed")
    eager = [
        operator.output
        for path, each in modules.items()
        for operator in each.operators * bool(path)
        for given in operator.inputs
        if operator.reason.startswith("autocast") and given != operator.output
    ]
    assert of_graph == eager == ["float16"] * 3


def test_a_trainer_without_probe_steps_says_why_there_is_nothing(sleeper, tmp_path):
    session = MeasurementSession()
    quiet_trainer(DtypeRecorder(), session, max_steps=7, default_root_dir=str(tmp_path)).fit(sleeper, SlowBatches())
    assert session.run.dtypes.reason == "no probe step was taken to note them"


def test_validation_has_no_gradients_and_says_so(tmp_path):
    session = MeasurementSession(Schedule(warmup_steps=1, steps=1, probe_steps=1))
    trainer = quiet_trainer(DtypeRecorder(), session, default_root_dir=str(tmp_path))
    trainer.validate(Odd(), SlowBatches(), verbose=False)
    found = {each.name: each for each in session.run.dtypes.tensors}
    assert found["gradients"].dtypes == found["optimizer_state"].dtypes == {}
    assert found["loss"].dtypes == {"float32": 1}


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--measure.probe_steps", "0"], "needs a probe step"),
        (["--trainer.precision", "transformer-engine"], "precision transformer-engine"),
    ],
)
def test_what_cannot_be_noted_is_refused_in_one_line(words, told, tmp_path, capsys):
    code = main(["fit", "--config", "toy_fp16", *SHORT, "--measure.results_dir", str(tmp_path), *words])
    error = capsys.readouterr().err
    assert (code, error.count("\n")) == (2, 1)
    assert told in error
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def toys(tmp_path_factory):
    folder = tmp_path_factory.mktemp("toys")
    for name, precision in (("fp16", "16-mixed"), ("bf16", "bf16-mixed")):
        words = ["--measure.results_dir", str(folder), "--measure.run_id", name, "--trainer.precision", precision]
        assert main(["fit", "--config", "toy_fp16", *SHORT, *words]) == 0
    return folder


@pytest.mark.parametrize(("name", "lower"), [("fp16", "float16"), ("bf16", "bfloat16")])
def test_the_toy_agrees_with_what_was_published_but_for_what_a_cpus_lists_lack(toys, name, lower, capsys):
    assert main(["dtypes", str(toys / name), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (found,) = answer["runs"]
    outputs = {row["module"]: row["returns"] for row in answer["tables"]["modules"]}
    published = found["published"]
    assert outputs["fc1"] == outputs["relu"] == outputs["fc2"] == lower == published["fc1_output"]
    assert (outputs["ln"], published["layernorm_output"]) == (lower, "float32")
    dtypes = {each["name"]: next(iter(each["dtypes"])) for each in found["tensors"]}
    assert {key: dtypes[key] for key in ("parameters", "logits", "loss", "gradients")} == {
        key: published[key] for key in ("parameters", "logits", "loss", "gradients")
    }
    assert found["autocast_dtype"] == lower


def test_the_command_shows_one_run_with_reasons_and_several_side_by_side(toys, capsys):
    paths = [str(toys / "fp16"), str(toys / "bf16")]
    assert main(["dtypes", paths[0]]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "differs in layernorm output; the published runs had CUDA's autocast lists" in text
    assert "multiplied by the loss scale 65536" in text
    assert main(["dtypes", *paths, "--format", "markdown"]) == 0
    out = capsys.readouterr().out
    assert "| 16-mixed on a CPU" in out
    assert "float16 (published: float32)" in out
    assert "- **published**: differs in layernorm output" in out
    assert main(["dtypes", paths[0], "--format", "csv", "--table", "operators"]) == 0
    (linear, *_) = [row for row in csv.DictReader(io.StringIO(capsys.readouterr().out)) if row["operator"] == "linear"]
    assert (linear["given"], linear["gives"]) == ("float32 x 2", "float16")
    run = load_run(toys / "fp16").record
    assert any("float16" in repair for repair in run.repairs)


def test_a_result_without_dtypes_or_with_damaged_ones_is_told_in_one_line(toys, tmp_path, capsys):
    (tmp_path / "run.json").write_bytes((toys / "fp16" / "run.json").read_bytes())
    assert main(["dtypes", str(tmp_path)]) == 2
    assert "cannot be read: No such file" in capsys.readouterr().err
    (tmp_path / DTYPES_FILE).write_text('{"modules": 3}')
    assert main(["dtypes", str(tmp_path)]) == 2
    assert "is damaged" in capsys.readouterr().err
    assert main(["dtypes", str(toys)]) == 2
    assert "is no result" in capsys.readouterr().err
