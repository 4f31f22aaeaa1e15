"""`--model lmbench.HuggingFace`: a model of transformers from its config, without downloads; batches of input_ids."""

from __future__ import annotations

import json
import socket
import sys

import pytest
import torch
from fit_process import bench, measure_here
from refusals import usage_error
from strangers import TokenModel
from tables import cases, stored

import lmbench

transformers = pytest.importorskip("transformers")

KNOWN = stored("hugging_face")
LLAMA, GPT2 = KNOWN["llama"], KNOWN["gpt2"]


@pytest.fixture(autouse=True)
def _offline(monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", None)


@pytest.fixture
def words(tmp_path):
    path = tmp_path / "llama_tiny.json"
    path.write_text(json.dumps(LLAMA))
    return ["--model=lmbench.HuggingFace", "--model.config", str(path), "--data.context_length"]


def test_a_llama_is_measured_from_its_config_with_a_shipped_configuration(words, tmp_path, capsys, printed):
    record = bench(tmp_path, *words, "16").record
    assert "llama_tiny, 24.99 k parameters, attention sdpa, AdamW fused" in capsys.readouterr().out
    assert (record.model.name, record.model.num_layers, record.model.vocab_size) == ("LlamaForCausalLM", 2, 100)
    assert record.model.described["config"]["num_key_value_heads"] == 2
    assert (record.precision, record.zero_grad) == ("32-true", "after_step")
    # lmbench's tokens have the model's vocabulary.
    assert record.window.tokens == 6 * 4 * 16
    assert record.config["data"]["vocab_size"] == 100
    # Products: q, k, v, o; gate, up, down; scores and values; the head. A step has three passes of each.
    layer = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32) + 6 * 32 * 64 + 4 * 16 * 32
    assert record.flops.per_token_flops == 3 * (2 * layer + 2 * 32 * 100)
    # The marked modules are the embedding, two blocks, the norm, the rotary embedding and the head.
    assert record.probe.marked_modules == 6
    assert record.probe.training.missing_gradients == record.probe.training.zero_gradients == []
    config = next(tmp_path.glob("results/*/config.yaml"))
    assert f"config: {words[2]}" in printed("fit", "--config", config, "--print_config")


def test_a_token_counts_the_experts_that_it_takes_in_fp32_too():
    """PyTorch's fake of their grouped products takes bf16 alone."""
    record = measure_here(lmbench.HuggingFace(config=KNOWN["mixtral"])).record
    attention, router, expert = 2 * (32 * 32 + 2 * 32 * 16 + 32 * 32) + 4 * 16 * 32, 2 * 32 * 4, 6 * 32 * 64
    assert record.flops.per_token_flops == 3 * (2 * (attention + router + 2 * expert) + 2 * 32 * 100)


@cases("name", "mixtral", "qwen3_moe")
def test_the_loss_that_balances_experts_is_part_of_the_loss_for_tokens_and_targets(name):
    """As in transformers' own loss for the same tokens."""
    tokens, targets = torch.randint(100, (2, 2, 8))
    losses = []
    for batch in ((tokens, targets), {"input_ids": tokens, "shift_labels": targets}):
        torch.manual_seed(0)
        settings = {**KNOWN["mixtral"], "output_router_logits": True, "router_aux_loss_coef": 0.5}
        module = lmbench.HuggingFace(config={**settings, "model_type": name})
        losses.append(measure_here(module, batch).record.loss.first)
    assert losses[0] == pytest.approx(losses[1], abs=1e-5)


def test_attention_goes_by_the_names_of_both_and_does_not_change_the_loss():
    losses = []
    names = ("sdpa", "eager", "naive", "sdpa_math")
    for name in names:
        record = measure_here(lmbench.HuggingFace(config=LLAMA, attention=name)).record
        losses.append(record.loss.first)
        assert record.model.attention == name
        assert record.data.context_length == 16
    assert losses == pytest.approx(losses[:1] * 4, abs=1e-4)


class Stranger(TokenModel):
    """A user's module that does not count its tokens, with batches of input_ids."""

    def training_step(self, batch):
        return super().training_step((batch["input_ids"], batch["input_ids"]))


@cases("kind", dict, transformers.BatchEncoding)
@cases("make", lambda: lmbench.HuggingFace(config=GPT2), lambda: Stranger(64))
def test_tokens_in_batches_of_input_ids_are_counted_for_every_module(make, kind):
    batch = kind({"input_ids": torch.randint(64, (2, 8)), "attention_mask": torch.ones(2, 8)})
    module = make()
    record = measure_here(module, batch).record
    assert (record.window.tokens, record.window.tokens_reason) == (3 * 16, None)
    assert record.loss.first == pytest.approx(torch.tensor(64.0).log().item(), abs=0.5)
    if isinstance(module, Stranger):
        assert record.flops.per_token_flops == 3 * 2 * 8 * 64


@cases("settings | line", *KNOWN["mistakes"], ids=str)
def test_a_mistake_gets_one_line(settings, line):
    with usage_error(line) as raised:
        measure_here(lmbench.HuggingFace(**settings), (torch.zeros(2, 8),) * 3)
    assert "\n" not in str(raised.value)


def test_a_context_beyond_the_positions_gets_one_line(words, refused):
    err = refused("fit", *words, 32, "--trainer.accelerator=cpu")
    assert "data.context_length is 32, beyond the config's max_position_embeddings of 16" in err


def test_without_transformers_a_line_says_so(monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with usage_error("needs transformers, which is not installed: pip install"):
        lmbench.HuggingFace(config=LLAMA)
