"""Linear layers in fp8, by torchao: they train like bf16, the record lists them, and refusals are one line."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from fit_process import measure_here as measure
from lightning.pytorch.strategies import SingleDeviceStrategy
from refusals import usage_error
from strangers import OwnLoaders
from tables import cases

from lmbench.fit.mixed_precision import Fp8Precision
from lmbench.instruments.recomputing import RecomputeOptions
from lmbench.model.language_model import LanguageModel

BATCH = tuple(torch.randint(96, (2, 2, 16), generator=torch.Generator().manual_seed(0)))
LAYERS = "attention.q attention.k attention.v attention.output ffn.gate ffn.up ffn.down"


def model(**changes):
    torch.manual_seed(0)
    shape = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": 96, "context_length": 16}
    return LanguageModel(size=None, **shape | changes)


@cases(
    "recipe | settings",
    ("tensorwise", {"trainer": {"recompute": RecomputeOptions()}}),
    ("tensorwise", {"mode": "inference"}),
    ("tensorwise-fast", {}),
    ("rowwise", {"compile": {"backend": "aot_eager", "fullgraph": True}}),
)
def test_fp8_trains_like_bf16_and_the_record_lists_the_layers(recipe, settings):
    plain = measure(model(), BATCH, precision="bf16-mixed", **{**settings, "compile": False})
    module = model()
    run = measure(module, BATCH, precision=f"fp8-{recipe}", **settings)
    losses, expected = [step.loss for step in run.steps], [step.loss for step in plain.steps]
    assert losses == pytest.approx(expected, abs=0.01)
    assert losses != expected
    record, fp8 = run.record, run.record.model.fp8
    assert (record.precision, plain.record.model.fp8) == (f"fp8-{recipe}", None)
    assert fp8.converted == [f"2 network.blocks.*.{name}" for name in LAYERS.split()]
    assert (fp8.left_out, fp8.converted_count) == (["network.head (the last)"], 14)
    parameters = 2 * (4 * 32 * 32 + 3 * 32 * 64)
    assert fp8.parameter_count == parameters
    assert record.flops.per_token_flops == plain.record.flops.per_token_flops
    assert record.flops.fp8_per_token_flops == 2 * parameters * record.flops.multiplier
    assert "\nfp8 " in str(run)
    assert record.compile.graph_count == int("compile" in settings)
    # The caller's module has its own layers again.
    assert {type(part).__name__ for part in module.modules()} & {"Float8Linear", "Projection"} == {"Projection"}


def test_flops_of_a_users_module_are_counted_as_in_bf16():
    class Users(OwnLoaders):
        def __init__(self):
            super().__init__()
            # Behind a norm all inputs need a gradient, which an fp8 layer computes in any case.
            layers = torch.nn.Linear(16, 32), torch.nn.Linear(32, 20), torch.nn.Linear(20, 1)
            self.net = torch.nn.Sequential(torch.nn.LayerNorm(16), *layers)
            self.net[3].requires_grad_(False)

        def tokens_per_batch(self, batch):
            return 16

    batch = (torch.randn(16, 16),)
    plain, run = (measure(Users(), batch, precision=name) for name in ("bf16-mixed", "fp8-tensorwise"))
    assert run.record.model.fp8.left_out == ["net.2 (32 x 20)", "net.3 (the last)"]
    expected = 6 * (16 * 32 + 32 * 20) + 4 * 20
    assert run.record.flops.per_token_flops == plain.record.flops.per_token_flops == expected
    assert run.record.flops.fp8_per_token_flops == 6 * 16 * 32


@cases(
    "module | data | line",
    (model(), tuple(tokens[:, :15] for tokens in BATCH), "with 30 tokens in a batch; give a multiple of 16"),
    (OwnLoaders(12), None, r"converts no linear layer of OwnLoaders: net.0 \(12 x 32\), net.2 \(the last\)"),
    (model(d_model=40), BATCH, r"LanguageModel: 2 network.blocks.\*.attention.q \(40 x 40\), 2"),
)
def test_a_module_or_batch_that_fp8_cannot_take_is_refused_in_one_line(module, data, line):
    with usage_error(f"^precision fp8-rowwise .*{line}"):
        measure(module, data, precision="fp8-rowwise")


def test_fp8_without_fp8_units_or_with_another_strategy_is_refused_in_one_line(monkeypatch):
    with usage_error(r"^precision fp8-rowwise with trainer.strategy SimpleNamespace: not"):
        Fp8Precision("fp8-rowwise", SimpleNamespace(root_device=torch.device("cpu")))
    strategy = SingleDeviceStrategy(torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (8, 0))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA A100-SXM4-80GB")
    with usage_error(r"^precision fp8-rowwise on NVIDIA A100-SXM4-80GB, which has no fp8 units"):
        Fp8Precision("fp8-rowwise", strategy)
