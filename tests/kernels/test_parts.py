"""Parts by module path: lmbench's own names, those of other models, and their classes."""

from __future__ import annotations

import pytest
from tables import rows

from lmbench.kernels.names import joined, part_of, part_order

LLAMA = dict(
    rows("""
model.embed_tokens | embedding
model.rotary_emb | rope
model.layers.0.input_layernorm | norm
model.layers.0.self_attn | attention
model.layers.0.self_attn.q_proj | qkv
model.layers.0.self_attn.k_proj | qkv
model.layers.0.self_attn.v_proj | qkv
model.layers.0.self_attn.q_norm | norm
model.layers.0.self_attn.o_proj | output
model.layers.0.post_attention_layernorm | norm
model.layers.0.mlp | ffn
model.layers.0.mlp.gate_proj | ffn
model.layers.0.mlp.act_fn | ffn
model.layers.0 | -
model.norm | norm
lm_head | head
""")
)
GPT2 = dict(
    rows("""
transformer.wte | embedding
transformer.wpe | embedding
transformer.h.0.ln_1 | norm
transformer.h.0.attn.c_attn | qkv
transformer.h.0.attn.c_proj | output
transformer.h.0.attn.attn_dropout | attention
transformer.h.0.mlp.c_fc | ffn
transformer.h.0.mlp.c_proj | ffn
transformer.ln_f | norm
""")
)
TORCHTITAN = dict(
    rows("""
tok_embeddings | embedding
layers.0.attention.wq | qkv
layers.0.attention.wo | output
layers.0.attention.sdpa | attention
layers.0.feed_forward.w1 | ffn
layers.0.ffn_norm | norm
output | head
""")
)


@pytest.mark.parametrize("model", [LLAMA, GPT2, TORCHTITAN], ids=["llama", "gpt2", "titan"])
def test_the_usual_names_of_other_models_have_parts(model):
    assert {path: part_of(path) or "" for path in model} == model
    assert {path: part_of(f"net._orig_mod.{path}") or "" for path in model} == model


def test_classes_tell_where_names_do_not():
    classes = {"a.0": "LlamaRMSNorm", "a.1": "GPT2MLP", "a.1.x": "Linear", "b": "CrossEntropyLoss", "c": "Linear"}
    expected = {"a.0": "norm", "a.1.x": "ffn", "b": "loss", "c": None}
    # A range may have the class alone.
    expected |= {"ViTSelfOutput": "output", "BertOutput": "ffn", "BertIntermediate": "ffn", "GPTAttention": "attention"}
    assert {path: part_of(path, classes) for path in expected} == expected


def test_fused_parts_stand_in_the_models_order():
    assert joined(["residual", "norm", "norm"]) == "norm+residual"
    assert joined([]) == "unclassified"
    assert sorted(["unclassified", "norm+qkv", "qkv", "norm", "embedding"], key=part_order) == [
        "embedding", "norm", "norm+qkv", "qkv", "unclassified",
    ]  # fmt: skip
