"""`--model lmbench.HuggingFace`: a model of transformers from its config, without network; and batches of input_ids."""

from __future__ import annotations

import json
import socket
import sys

import pytest
import torch
from lightning.pytorch import LightningModule
from torch import nn

import lmbench
from lmbench.cli import main

transformers = pytest.importorskip("transformers")

LLAMA = {
    **{"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 100},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 16, "tie_word_embeddings": False},
    # As configs on the hub have them.
    **{"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16", "bos_token_id": 1, "eos_token_id": 2},
}
GPT2 = {"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 8, "vocab_size": 64}
GPT2 |= {"bos_token_id": 1, "eos_token_id": 2}
QUICK = ["--measure.steps", "3", "--measure.warmup_steps", "1", "--measure.min_window_s", "0"]


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    def refuse(*_):
        raise AssertionError("no network")

    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "llama_tiny.json"
    path.write_text(json.dumps(LLAMA))
    return str(path)


def measure(module, data=None, **given):
    quick = {"steps": 3, "warmup_steps": 1, "min_window_s": 0.0, "probe_steps": 0, "trainer": {"accelerator": "cpu"}}
    return lmbench.measure(module, data, **{**quick, **given})


def test_a_llama_is_measured_from_its_config_with_a_shipped_configuration(config, tmp_path, capsys):
    results = tmp_path / "results"
    words = ["--model", "lmbench.HuggingFace", "--model.config", config, *QUICK, "--measure.probe_steps", "1"]
    words += ["--data.context_length", "16", "--measure.results_dir", str(results)]
    assert main(["fit", "--config", "smoke", *words]) == 0
    (run,) = lmbench.load(results)
    record = run.record
    assert "model        llama_tiny, 24.99 k parameters, attention sdpa, AdamW fused" in str(run)
    assert (record.model.name, record.model.num_layers, record.model.vocab_size) == ("LlamaForCausalLM", 2, 100)
    assert record.model.described["config"]["num_key_value_heads"] == 2
    assert (record.precision, record.zero_grad) == ("32-true", "after_step")
    # lmbench's tokens, of the model's vocabulary.
    assert record.window.tokens == 3 * 4 * 16
    assert record.config["data"]["vocab_size"] == 100
    # q, k, v, o; gate, up, down; scores and values; the head: three passes of each.
    layer = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32) + 6 * 32 * 64 + 4 * 16 * 32
    assert record.flops.per_token_flops == 3 * (2 * layer + 2 * 32 * 100)
    # Embedding, two blocks, norm, rotary embedding and head.
    assert record.probe.marked_modules == 6
    assert record.probe.training.missing_gradients == record.probe.training.zero_gradients == []
    assert main(["fit", "--config", str(run.path / "config.yaml"), "--print_config"]) == 0
    assert "config: " + config in capsys.readouterr().out


def test_weights_are_float32_until_the_trainers_precision_converts_them():
    module = lmbench.HuggingFace(config=LLAMA)
    seen = []
    module.on_train_start = lambda: seen.append(module.network.dtype)
    module.configure_model()
    before = module.network.dtype
    assert measure(module, precision="bf16-true").outcome == "ok"
    assert (before, seen, module.network.dtype) == (torch.float32, [torch.bfloat16], torch.float32)


def test_attention_and_checkpoints_are_transformers_own_and_change_no_loss():
    losses = {}
    for name in ("sdpa", "eager", "block"):
        settings = {"checkpoint": "block"} if name == "block" else {"attention": name}
        run = measure(lmbench.HuggingFace(config=LLAMA, **settings))
        losses[name] = run.record.loss.first
        assert run.record.model.attention == settings.get("attention", "sdpa")
        assert run.record.data.context_length == 16
    assert losses["eager"] == pytest.approx(losses["sdpa"], abs=1e-4)
    assert losses["block"] == pytest.approx(losses["sdpa"], abs=1e-4)


def test_another_architecture_takes_batches_of_input_ids():
    batch = transformers.BatchEncoding({"input_ids": torch.randint(64, (2, 8)), "attention_mask": torch.ones(2, 8)})
    run = measure(lmbench.HuggingFace(config=GPT2), batch)
    assert run.record.model.name == "GPT2LMHeadModel"
    assert run.record.window.tokens == 3 * 16
    assert run.record.loss.first == pytest.approx(torch.tensor(64.0).log().item(), abs=0.3)


def test_a_batch_of_another_form_gets_one_line():
    with pytest.raises(lmbench.UsageError, match="or mappings with input_ids"):
        measure(lmbench.HuggingFace(config=GPT2), (torch.zeros(2, 8),) * 3)


class Stranger(LightningModule):
    """Somebody's module, which says nothing of tokens; its batches hold input_ids."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(50, 8), nn.Linear(8, 50))

    def training_step(self, batch, batch_idx):
        return nn.functional.cross_entropy(self.net(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", [dict, transformers.BatchEncoding])
def test_a_strangers_input_ids_are_counted_and_its_flops_on_a_fake_copy(kind):
    tokens = torch.randint(50, (2, 8))
    run = measure(Stranger(), kind({"input_ids": tokens, "labels": tokens})).record
    assert run.window.tokens == 3 * 16
    assert run.throughput.tokens_per_s > 0
    assert run.window.tokens_reason is None
    assert run.flops.per_token_flops == 3 * 2 * 8 * 50


MISTAKES = {
    "no file": ({"config": "nowhere.json"}, "'nowhere.json' is no file"),
    "no type": ({"config": {"hidden_size": 8}}, "has no model_type, such as llama"),
    "a type": ({"config": {"model_type": "lama"}}, "transformers refuses it: Unrecognized model identifier: lama"),
    "a value": ({"config": {**LLAMA, "num_attention_heads": "four"}}, "num_attention_heads"),
    "checkpoint": ({"config": LLAMA, "checkpoint": "blocks"}, "did you mean block?"),
    "attention": ({"config": LLAMA, "attention": "flash"}, "transformers refuses: Specified"),
    "no decoder": ({"config": {"model_type": "t5", "vocab_size": 50}}, "transformers refuses: Unrecognized"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_gets_one_line(mistake):
    settings, told = MISTAKES[mistake]
    with pytest.raises(lmbench.UsageError, match=told) as raised:
        lmbench.HuggingFace(**settings).configure_model()
    assert "\n" not in str(raised.value)


def test_a_context_beyond_the_positions_gets_one_line(config, capsys):
    words = ["--model", "lmbench.HuggingFace", "--model.config", config, "--trainer.accelerator", "cpu"]
    assert main(["fit", *words, "--data.context_length", "32"]) == 2
    assert "data.context_length is 32, beyond the config's max_position_embeddings of 16" in capsys.readouterr().err


def test_without_transformers_a_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(lmbench.UsageError, match="needs transformers, which is not installed: pip install"):
        lmbench.HuggingFace(config=LLAMA)
