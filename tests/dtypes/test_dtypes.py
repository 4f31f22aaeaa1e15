"""Dtypes recorded in a probe step: those of every module and tensor, with the reason for each cast."""

from __future__ import annotations

import pytest
import torch
from fit_process import QUICK
from lightning.pytorch import LightningModule
from tables import cases
from torch import nn
from torch.nn import functional

from lmbench.autocast import autocast_lists
from lmbench.callbacks import DtypeRecorder, MeasurementSession
from lmbench.dtypes.answer import DTYPES_FILE, read_notes
from lmbench.fit.trainer import BenchTrainer
from lmbench.instruments.window import Schedule
from lmbench.precision import PRECISIONS
from lmbench.records.load import load_run

from conftest import QUIET, SlowBatches, quiet_trainer

LOWER, FLOAT32 = "autocast's lower-precision list", "autocast's float32 list"
#: A call on a tensor for each operator.
CALLS = {
    "linear": lambda x: functional.linear(x, x[0, 0]),
    "matmul": lambda x: x @ x,
    "layer_norm": lambda x: functional.layer_norm(x, (2,)),
    "cross_entropy": lambda x: functional.cross_entropy(x[0, 0], x.new_tensor([0, 1], dtype=torch.int64)),
    "mse_loss": lambda x: functional.mse_loss(x, x),
    "softmax": lambda x: x.softmax(-1),
    "pow": lambda x: x**2,
    **{name: getattr(torch, name) for name in ("prod", "sum", "exp", "relu")},
}
RESULTS = {LOWER: [torch.bfloat16] * 2, FLOAT32: [torch.float32] * 2, None: [torch.float32, torch.bfloat16]}


class Scale(nn.Module):
    def forward(self, value):
        return value * 2


class Doubled(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, value):
        return self.inner(value) * 2


class Nested(nn.Module):
    """Takes and returns tensors in dictionaries, lists and a tuple."""

    def forward(self, held, *, named):
        return {"sum": held["values"] + named[0], "rest": [held["ids"], (named[0],)]}


class Odd(LightningModule):
    def __init__(self):
        super().__init__()
        self.nested, self.scale = Nested(), Scale()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.unused = nn.Sequential(nn.Linear(4, 4))
        self.lent = nn.Linear(16, 1)
        self.scripted = torch.jit.script(nn.Linear(16, 16))
        self.quantized = nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn), requires_grad=False)

    def training_step(self, batch, batch_idx):
        ids = torch.arange(4)
        with torch.autocast("cpu", torch.bfloat16):
            value = self.nested({"values": batch, "ids": ids}, named=(batch.double(),))["sum"].float()
            for block in self.blocks:
                value = block(value)
        narrow, wide = self.scale(value), self.scale(self.scripted(value.float()))
        weight = self.lent.weight
        loss = nn.functional.linear(wide + narrow, weight).pow(2).mean()
        return nn.functional.mse_loss(loss, torch.zeros(()))

    def validation_step(self, batch, batch_idx):
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self):
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.01)


def noted(module, tmp_path, make=quiet_trainer, **flags):
    """Fit with one probe step; returns the record, and the modules by path."""
    session = MeasurementSession(Schedule(warmup_steps=1, steps=1, probe_steps=1))
    make(DtypeRecorder(), session, default_root_dir=str(tmp_path), **flags).fit(module, SlowBatches())
    record = session.run.dtypes
    assert record.reason is None
    assert record.notes_file == DTYPES_FILE
    return record, {module.path: module for module in read_notes(tmp_path).modules}


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    module = Odd()
    return module, *noted(module, tmp_path_factory.mktemp("odd"))


def tensors(record):
    return {kind.name: kind.dtypes for kind in record.tensors}


def test_a_module_has_the_dtypes_of_nested_tensors_and_a_call_for_each_combination(odd):
    (call,), scaled = odd[2]["nested"].calls, odd[2]["scale"].calls
    assert call.inputs == ["float32", "int64", "float64"]
    assert call.outputs == ["float64", "int64", "float64"]
    assert [call.inputs for call in scaled] == [["bfloat16"], ["float32"]]
    assert [call.outputs for call in scaled] == [["bfloat16"], ["float32"]]


def test_modules_that_never_ran_are_listed_but_not_those_whose_parameters_others_use(odd):
    module, _, modules = odd
    assert [path for path, noted in modules.items() if noted.reason == "never ran"] == ["unused", "unused.0"]
    reasons = [modules[name].reason.partition(",")[0] for name in ("lent", "scripted")]
    assert reasons == ["not called", "TorchScript: no hook sees its calls"]
    assert "blocks" not in modules
    # No hook or mode is left behind.
    assert not any(child._forward_hooks or child._forward_pre_hooks for child in module.modules())
    assert not torch.overrides._get_current_function_mode_stack()


def test_casts_by_the_code_and_by_promotion_are_not_called_autocast_and_odd_dtypes_are_noted(odd):
    _, record, modules = odd
    kinds = tensors(record)
    assert kinds["parameters"]["float8_e4m3fn"] == 1
    assert kinds["loss"] == {"float32": 1}
    (addition,) = modules["nested"].operators
    assert addition.reason == "takes mixed inputs, gives float64"
    assert record.autocast_dtype == "bfloat16"
    assert {
        ("double", "float64", "the code casts to float64"),
        ("add", "float32", "takes mixed inputs, gives float32"),
        # The operator is in autocast's list, but the call is outside of the code's own autocast.
        ("linear", "float32", "autocast was off for it: follows its inputs"),
    } <= {(operator.name, operator.output, operator.reason) for operator in modules[""].operators}


@cases("device", "cpu", pytest.param("cuda", marks=pytest.mark.gpu))
@cases("name", *CALLS)
def test_autocasts_lists_agree_with_this_pytorch(name, device):
    x = torch.rand(2, 2, 2, 2, device=device)
    with torch.autocast(device, torch.bfloat16):
        dtypes = [CALLS[name](x.to(dtype)).dtype for dtype in (torch.float32, torch.bfloat16)]
    assert dtypes == RESULTS[autocast_lists(device).get(name)]


def bench_trainer(*callbacks, **flags):
    return BenchTrainer(callbacks=list(callbacks), **{**QUIET, **flags})


@cases("name", *[name for name, precision in PRECISIONS.items() if precision.runs_on_cpu])
def test_a_precision_means_what_its_plugin_does(sleeper, tmp_path, name):
    # Lightning's own Trainer would take bfloat16 for 16-mixed on a CPU.
    record, modules = noted(sleeper, tmp_path, make=bench_trainer, precision=name)
    kinds, meaning = tensors(record), PRECISIONS[name]
    assert kinds["parameters"] == kinds["gradients"] == {meaning.weights: 6}
    assert meaning.weight_bytes == meaning.weight_dtype().itemsize
    assert modules["net.0"].calls[0].outputs == [meaning.compute]
    assert record.autocast_dtype == (meaning.compute if meaning.is_mixed else None)
    assert (record.loss_scale is not None) == meaning.has_scaler
    assert all(name in kind.reason for kind in record.tensors if kind.name == "parameters")
    assert ("multiplies in fp8, gives bfloat16" in modules["net.0"].reason) == (meaning.peak == "fp8")


def test_compiled_modules_run_eagerly_for_the_notes_and_stay_compiled(sleeper, tmp_path):
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


def test_without_probe_steps_there_is_a_reason_and_validation_has_no_gradients(sleeper, tmp_path):
    session = MeasurementSession()
    quiet_trainer(DtypeRecorder(), session, max_steps=7, default_root_dir=str(tmp_path)).fit(sleeper, SlowBatches())
    assert session.run.dtypes.reason == "no probe step was taken to note them"
    session = MeasurementSession(Schedule(warmup_steps=1, steps=1, probe_steps=1))
    trainer = quiet_trainer(DtypeRecorder(), session, default_root_dir=str(tmp_path))
    trainer.validate(Odd(), SlowBatches(), verbose=False)
    kinds = tensors(session.run.dtypes)
    assert (kinds["gradients"], kinds["optimizer_state"], kinds["loss"]) == ({}, {}, {"float32": 1})


def test_the_command_shows_a_run_with_reasons(tmp_path, printed, answered):
    words = ["--trainer.accelerator=cpu", f"--measure.results_dir={tmp_path}", "--measure.run_id=fp16"]
    printed("fit", "toy_fp16", *QUICK, *words)
    tables = answered("dtypes", tmp_path / "fp16")["tables"]
    reasons = {row["tensors"]: row["why"] for row in tables["tensors"]}
    assert "multiplied by the loss scale 65536" in reasons["gradients"]
    linear = {"operator": "linear", "count": 1, "given": "float32 x 2", "gives": "float16", "why": LOWER}
    assert linear in tables["operators"]
    assert any("float16" in repair for repair in load_run(tmp_path / "fp16").record.repairs)
