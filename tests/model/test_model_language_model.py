"""The LightningModule in a real Trainer: how the network is built, what a step does, which optimizer runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, seed_everything
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lmbench.data.datamodule import TokenData
from lmbench.errors import UsageError
from lmbench.model.language_model import LanguageModel
from lmbench.model.optimizers import OPTIMIZERS, choose_optimizer

from conftest import quiet_trainer

TINY: dict[str, Any] = {"size": "tiny", "vocab_size": 300, "context_length": 16}


def data() -> TokenData:
    return TokenData(batch_size=2, context_length=16, vocab_size=300)


class FirstLoss(Callback):
    """Keeps the first step's loss and the weights it was computed with."""

    def on_train_start(self, trainer: Any, pl_module: LightningModule) -> None:
        self.weights = [parameter.detach().clone() for parameter in pl_module.parameters()]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 0:
            self.loss = outputs["loss"].item()


def first_weights_and_loss(precision: str) -> tuple[list[Tensor], float]:
    seed_everything(3, verbose=False)
    watch = FirstLoss()
    quiet_trainer(watch, max_steps=1, precision=precision).fit(LanguageModel(**TINY), data())
    return watch.weights, watch.loss


@pytest.mark.parametrize(("precision", "dtype"), [("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)])
def test_one_seed_gives_one_set_of_weights_in_every_precision(precision, dtype):
    full, full_loss = first_weights_and_loss("32-true")
    other, other_loss = first_weights_and_loss(precision)
    for one, two in zip(full, other, strict=True):
        assert two.dtype is dtype
        assert torch.equal(one.to(dtype), two)
    assert other_loss == pytest.approx(full_loss, rel=0.01)


def test_the_network_is_built_by_configure_model_and_only_once():
    model = LanguageModel(**TINY)
    assert not list(model.parameters())
    with torch.device("meta"):
        model.configure_model()
    first = model.network
    assert first.embedding.weight.is_meta
    model.configure_model()
    assert model.network is first
    assert model.compile_targets() == [first]


def test_training_changes_every_weight_and_logs_nothing():
    watch = FirstLoss()
    model = LanguageModel(**TINY)
    trainer = quiet_trainer(watch, max_steps=3)
    trainer.fit(model, data())
    after = [parameter.detach() for parameter in model.parameters()]
    assert all(not torch.equal(one, two) for one, two in zip(watch.weights, after, strict=True))
    assert trainer.callback_metrics == {}


def test_a_bare_loop_over_the_same_network_gives_the_same_loss():
    weights, loss = first_weights_and_loss("32-true")
    seed_everything(3, verbose=False)
    model = LanguageModel(**TINY)
    model.configure_model()
    assert all(torch.equal(one, two) for one, two in zip(weights, model.parameters(), strict=True))
    assert model.training_step(next(iter(data().train_dataloader())), 0).item() == loss


@pytest.mark.parametrize(
    ("variant", "fused", "foreach"),
    [(None, True, None), ("fused", True, None), ("foreach", None, True), ("loop", False, False)],
)
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_optimizers_are_the_ones_named(name, variant, fused, foreach):
    settings: dict[str, Any] = {"learning_rate": 1e-2, "weight_decay": 0.3, "betas": (0.8, 0.9)}
    model = LanguageModel(**TINY, optimizer=name, optimizer_variant=variant, **settings)
    model.configure_model()
    optimizer = model.configure_optimizers()
    assert type(optimizer).__name__ == name
    group = optimizer.param_groups[0]
    assert (group["fused"], group["foreach"]) == (fused, foreach)
    assert (group["lr"], group["weight_decay"]) == (1e-2, 0.3)
    assert group["betas"] == (0.8, 0.9) if name == "AdamW" else group["momentum"] == 0.8
    assert len(group["params"]) == len(list(model.parameters()))
    assert model.describe()["optimizer"] == f"{name} {variant or 'fused'}"


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_takes_a_step_in_every_variant(name):
    for variant in OPTIMIZERS[name].variants:
        weight = torch.nn.Parameter(torch.ones(3, 3))
        settings: dict[str, Any] = {"lr": 0.1, "weight_decay": 0.1, "betas": (0.9, 0.95)}
        optimizer = choose_optimizer(name, variant, **settings).build([("weight", weight)])
        weight.sum().backward()
        optimizer.step()
        assert not torch.equal(weight, torch.ones(3, 3))


def test_tokens_and_flops_are_told():
    model = LanguageModel(**TINY)
    tokens = torch.zeros(3, 16, dtype=torch.long)
    assert model.tokens_per_batch((tokens, tokens)) == 48
    assert model.flops_per_token().per_token_flops == 2 * (8 * 64**2 + 6 * 64 * 128 + 4 * 16 * 64) + 2 * 64 * 300


def test_validate_runs_without_a_graph():
    class Watch(Callback):
        outputs: list[Tensor]

        def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
            self.outputs.append(args[2])

    watch = Watch()
    watch.outputs = []
    quiet_trainer(watch, limit_val_batches=2).validate(LanguageModel(**TINY), data(), verbose=False)
    assert [loss.requires_grad for loss in watch.outputs] == [False] * 2


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"size": "huge"}, "unknown model size"),
        ({"num_heads": 5}, "does not divide"),
        ({"attention": "flash"}, "unknown attention"),
        ({"optimizer": "sgd"}, "unknown optimizer 'sgd'; choose one of AdamW, SGD; did you mean SGD?"),
        (
            {"optimizer_variant": "fuse"},
            "AdamW has no variant 'fuse'; choose one of fused, foreach, loop; did you mean",
        ),
        ({"context_length": 0}, "context_length is 0"),
        ({"learning_rate": 0.0}, "learning_rate is 0.0; it must be above 0"),
        ({"learning_rate": float("nan")}, "learning_rate is nan"),
        ({"weight_decay": -0.1}, "weight_decay is -0.1"),
        ({"betas": (0.9, 1.0)}, "betas are 0.9 and 1.0"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_built(given, message):
    with pytest.raises(UsageError, match=message):
        LanguageModel(**{**TINY, **given})


def test_attention_without_a_kernel_here_is_refused_before_the_network_is_built():
    model = LanguageModel(**TINY, attention="sdpa_cudnn")
    with pytest.raises(UsageError, match="no kernel for float32"):
        quiet_trainer(max_steps=1).fit(model, data())
    assert not hasattr(model, "network")
