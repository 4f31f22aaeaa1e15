"""The LightningModule in a real Trainer: how the network is built, what a step does, which optimizer runs."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import seed_everything
from lightning.pytorch.callbacks import Callback

from lmbench.data.datamodule import TokenData
from lmbench.errors import UsageError
from lmbench.model.language_model import LanguageModel

from conftest import quiet_trainer

TINY = {"size": "tiny", "vocab_size": 300, "context_length": 16}


def data():
    return TokenData(batch_size=2, context_length=16, vocab_size=300)


class Watch(Callback):
    """Keeps the first weights, and each batch's loss."""

    def __init__(self):
        self.losses = []

    def on_train_start(self, trainer, pl_module):
        self.weights = [parameter.detach().clone() for parameter in pl_module.parameters()]

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.losses.append(outputs["loss"])


def watched(precision):
    """A training of one step, seeded."""
    seed_everything(3, verbose=False)
    watch = Watch()
    trainer = quiet_trainer(watch, max_steps=1, precision=precision)
    trainer.fit(LanguageModel(**TINY), data())
    assert trainer.callback_metrics == {}
    return watch


def test_one_seed_gives_one_set_of_weights_in_every_precision_and_in_a_bare_loop():
    full = watched("32-true")
    for precision, dtype in (("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)):
        other = watched(precision)
        assert all(map(torch.equal, (weight.to(dtype) for weight in full.weights), other.weights))
        assert other.losses[0].item() == pytest.approx(full.losses[0].item(), rel=0.01)
    seed_everything(3, verbose=False)
    model = LanguageModel(**TINY)
    model.configure_model()
    assert all(map(torch.equal, full.weights, model.parameters()))
    assert torch.equal(model.training_step(next(iter(data().train_dataloader())), 0), full.losses[0])


def test_the_network_is_built_by_configure_model_and_only_once():
    model = LanguageModel(**TINY)
    assert not list(model.parameters())
    with torch.device("meta"):
        model.configure_model()
    (first,) = model.compile_targets()
    assert first.embedding.weight.is_meta
    model.configure_model()
    assert model.network is first


@pytest.mark.parametrize(
    ("variant", "fused", "foreach"),
    [(None, True, None), ("fused", True, None), ("foreach", None, True), ("loop", False, False)],
)
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_optimizers_are_the_ones_named(name, variant, fused, foreach):
    settings = {"learning_rate": 1e-2, "weight_decay": 0.3, "betas": (0.8, 0.9)}
    model = LanguageModel(**TINY, optimizer=name, optimizer_variant=variant, **settings)
    model.configure_model()
    optimizer = model.configure_optimizers()
    assert type(optimizer).__name__ == name
    group = optimizer.param_groups[0]
    assert (group["fused"], group["foreach"], group["lr"], group["weight_decay"]) == (fused, foreach, 1e-2, 0.3)
    assert group["betas"] == (0.8, 0.9) if name == "AdamW" else group["momentum"] == 0.8
    assert model.describe()["optimizer"] == f"{name} {variant or 'fused'}"
    before = [parameter.detach().clone() for parameter in model.parameters()]
    model.training_step(next(iter(data().train_dataloader())), 0).backward()
    optimizer.step()
    assert not any(map(torch.equal, before, group["params"]))


@pytest.mark.parametrize(
    "name",
    [
        "ASGD",
        "Adadelta",
        "Adafactor",
        "Adagrad",
        "Adam",
        "Adamax",
        "LBFGS",
        "Muon",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
    ],
)
def test_every_optimizer_of_torch_trains_by_its_name(name):
    model = LanguageModel(**TINY, optimizer=f"torch.optim.{name}" if name == "Muon" else name)
    trainer = quiet_trainer(max_steps=2)
    model.configure_model()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    trainer.fit(model, data())
    assert not any(map(torch.equal, before, model.parameters()))
    assert len(trainer.optimizers[0].state) == (1 if name == "LBFGS" else len(before))


def test_muon_has_the_matrices_of_hidden_layers_and_adamw_the_rest():
    model = LanguageModel(**TINY, optimizer="Muon", learning_rate=1e-2)
    model.configure_model()
    optimizer = model.configure_optimizers()
    muon, adamw = ({id(parameter) for parameter in group["params"]} for group in optimizer.param_groups)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    assert {names[one].split(".")[-3] for one in muon} == {"attention", "ffn"}
    assert {names[one] for one in adamw} >= {"network.embedding.weight", "network.head.weight", "network.norm.weight"}
    assert len(muon | adamw) == len(names)
    # A schedule changes groups of the whole, which the parts share.
    optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer.parts[0].param_groups[0]["lr"] == 0.5
    again = model.configure_optimizers()
    optimizer.parts[0].state[next(iter(optimizer.param_groups[0]["params"]))]["momentum_buffer"] = torch.ones(1)
    again.load_state_dict(optimizer.state_dict())
    assert len(again.parts[0].state) == 1


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"size": "huge"}, "unknown model size"),
        ({"num_heads": 5}, "does not divide"),
        ({"attention": "flash"}, "unknown attention"),
        ({"checkpoint": "blocks"}, "unknown checkpoint 'blocks'; choose one of none, block, every_2, selective"),
        ({"optimizer": "sgd"}, "unknown optimizer 'sgd'; choose one of .*; did you mean SGD?"),
        ({"optimizer": "Muon", "optimizer_variant": "fused"}, "unknown variant of Muon"),
        ({"optimizer": "SparseAdam"}, "unknown optimizer"),
        ({"optimizer_variant": "fuse"}, "unknown variant of AdamW 'fuse'; choose one of fused, foreach, loop"),
        ({"context_length": 0}, "context_length is 0"),
        ({"learning_rate": float("nan")}, "optimizer AdamW fused: Invalid learning rate: nan"),
        ({"weight_decay": -0.1}, "Invalid weight_decay value: -0.1"),
        ({"betas": (0.9, 1.0)}, "Invalid beta parameter at index 1: 1.0"),
    ],
)
def test_wrong_settings_are_refused_before_anything_is_built(setting, message):
    with pytest.raises(UsageError, match=message):
        LanguageModel(**{**TINY, **setting})
