"""The LightningModule in a real Trainer: its initial weights, its training step, and its optimizers."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch import seed_everything
from refusals import usage_error
from tables import cases

from lmbench.data.datamodule import TokenData
from lmbench.model.language_model import LanguageModel

from conftest import quiet_trainer

TINY = {"size": "tiny", "vocab_size": 300, "context_length": 16}


def data():
    return TokenData(batch_size=2, context_length=16, vocab_size=300)


def trained(precision, steps=1, **settings):
    """Train with a fixed seed. Returns the model, the trainer, the initial weights, and the loss of each batch."""
    seed_everything(3, verbose=False)
    model, results = LanguageModel(**TINY, **settings), []
    model.on_train_batch_end = lambda outputs, *_: results.append(outputs["loss"])
    model.on_train_start = lambda: results.append([weight.detach().clone() for weight in model.parameters()])
    trainer = quiet_trainer(max_steps=steps, precision=precision)
    trainer.fit(model, data())
    assert trainer.callback_metrics == {}
    return model, trainer, *results


def test_one_seed_gives_one_set_of_weights_in_every_precision_and_in_a_bare_loop():
    _, _, weights, loss = trained("32-true")
    for precision, dtype in (("bf16-mixed", torch.float32), ("bf16-true", torch.bfloat16)):
        _, _, others, other_loss = trained(precision)
        assert all(map(torch.equal, (weight.to(dtype) for weight in weights), others))
        assert other_loss.item() == pytest.approx(loss.item(), rel=0.01)
    seed_everything(3, verbose=False)
    model = LanguageModel(**TINY)
    model.configure_model()
    assert all(map(torch.equal, weights, model.parameters()))
    assert torch.equal(model.training_step(next(iter(data().train_dataloader())), 0), loss)


@cases("""
- [variant, fused, foreach]
- [null, true, null]
- [fused, true, null]
- [foreach, null, true]
- [loop, false, false]
""")
@cases("name", "AdamW", "SGD")
def test_the_named_optimizer_runs_with_its_variant_and_settings(name, variant, fused, foreach):
    settings = {"learning_rate": 1e-2, "weight_decay": 0.3, "betas": (0.8, 0.9)}
    model, trainer, before, _ = trained("32-true", optimizer=name, optimizer_variant=variant, **settings)
    (optimizer,) = trainer.optimizers
    (group,) = optimizer.param_groups
    assert (type(optimizer).__name__, group["lr"], group["weight_decay"]) == (name, 1e-2, 0.3)
    assert (group["fused"], group["foreach"]) == (fused, foreach)
    assert group["betas"] == (0.8, 0.9) if name == "AdamW" else group["momentum"] == 0.8
    assert model.describe()["optimizer"] == f"{name} {variant or 'fused'}"
    assert not any(map(torch.equal, before, model.parameters()))


OTHERS = "ASGD Adadelta Adafactor Adagrad Adam Adamax LBFGS torch.optim.Muon NAdam RAdam RMSprop Rprop"


@cases("name", *OTHERS.split())
def test_every_optimizer_of_torch_trains_by_its_name(name):
    model, trainer, before, *_ = trained("32-true", 2, optimizer=name)
    assert not any(map(torch.equal, before, model.parameters()))
    assert len(trainer.optimizers[0].state) == (1 if name == "LBFGS" else len(before))


@pytest.fixture
def muon():
    """A model that Muon trains."""
    model = LanguageModel(**TINY, optimizer="Muon")
    model.configure_model()
    return model


def test_muon_has_the_matrices_of_hidden_layers_and_adamw_the_rest(muon):
    optimizer = muon.configure_optimizers()
    assert optimizer.label == muon.describe()["optimizer"] == "Muon + AdamW"
    names = {parameter: name for name, parameter in muon.named_parameters()}
    matrices, others = ({names[parameter] for parameter in group["params"]} for group in optimizer.param_groups)
    assert {name.split(".")[-3] for name in matrices} == {"attention", "ffn"}
    assert others >= {"network.embedding.weight", "network.head.weight", "network.norm.weight"}
    assert len(matrices | others) == len(names)
    # A schedule changes groups of the combined optimizer, which its parts share.
    optimizer.param_groups[0]["lr"] = 0.5
    assert optimizer.parts[0].param_groups[0]["lr"] == 0.5


def test_resumed_parts_of_an_optimizer_have_its_momentum_and_its_groups(muon):
    first, second = muon.configure_optimizers(), muon.configure_optimizers()
    for parameter in muon.parameters():
        parameter.grad = torch.ones_like(parameter)
    first.step()
    second.load_state_dict(first.state_dict())
    second.param_groups[0]["lr"] = 0.5
    assert second.parts[0].param_groups[0]["lr"] == 0.5
    for old, new in zip(first.parts, second.parts, strict=True):
        assert old.state.keys() == new.state.keys()
        for parameter, values in old.state.items():
            assert all(torch.equal(value, new.state[parameter][name]) for name, value in values.items())


def test_a_choice_that_there_is_not_is_refused_in_python_too():
    with usage_error("unknown fused_projections 'kv'; choose one of true, false, qkv"):
        LanguageModel(fused_projections="kv")
