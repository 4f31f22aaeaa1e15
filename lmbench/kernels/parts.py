"""Parts of a model by the names of its modules, their classes and its operators."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from lmbench.records.vocabulary import MODULE

UNCLASSIFIED = "unclassified"
#: Kernels of a compiled model that do the work of several parts at once.
FUSED = "several"
#: The parts in the model's order. Scores, mask, softmax and values exist apart only in naive attention; a fused kernel
#: does all four, and its part is `attention`. The last three are no parts of a model.
PARTS = (
    "embedding", "norm", "qkv", "rope", "scores", "mask", "softmax", "values", "attention", "output", "ffn", "residual",
    "head", "loss", "optimizer", "data", "comm", UNCLASSIFIED,
)  # fmt: skip
_ORDER = {part: place for place, part in enumerate(PARTS)}

# The last component of a module's path that stands here decides: lmbench's own names first, then the usual names of
# other models (Hugging Face's Llama, GPT-2, NeoX and BERT families, torchtitan).
_NAMES: dict[str, str] = {
    "embedding": "embedding token_embedding embed_tokens tok_embeddings word_embeddings position_embeddings "
    "token_type_embeddings embeddings wte wpe embed_in embed_positions",
    "norm": "attention_norm ffn_norm norm norm1 norm2 layernorm layer_norm input_layernorm post_attention_layernorm "
    "pre_feedforward_layernorm post_feedforward_layernorm final_layernorm final_layer_norm ln_1 ln_2 ln_f ln1 ln2 "
    "q_norm k_norm LayerNorm layernorm_before layernorm_after self_attn_layer_norm",
    "qkv": "q k v q_proj k_proj v_proj qkv qkv_proj c_attn query key value query_key_value in_proj Wqkv wq wk wv wqkv",
    "rope": "rope rotary rotary_emb rotary_embedding rotary_pos_emb pos_emb",
    "scores": "scores",
    "mask": "mask",
    "softmax": "softmax",
    "values": "values",
    "attention": "core attention attn self_attn self_attention self_attn_fn inner_attention sdpa",
    "output": "o_proj out_proj wo",
    "ffn": "ffn mlp feed_forward feedforward gate_proj up_proj down_proj gate_up_proj fc1 fc2 linear1 linear2 c_fc "
    "w1 w2 w3 intermediate dense_h_to_4h dense_4h_to_h block_sparse_moe experts",
    "residual": "attention_residual ffn_residual residual",
    "head": "head lm_head embed_out output_projection unembed",
    "loss": "loss criterion loss_fn loss_function",
}
PART_BY_NAME: dict[str, str] = {name: part for part, names in _NAMES.items() for name in names.split()}

_ATTENTION_NAMES = frozenset(_NAMES["attention"].split())
# Where the name says nothing, the module's class may.
_CLASSES = {
    "norm": re.compile(r"(RMS|Layer|Group|Batch)_?Norm"),
    "rope": re.compile(r"Rotary|RoPE", re.IGNORECASE),
    "attention": re.compile(r"Attention"),
    "ffn": re.compile(r"MLP|FeedForward|SwiGLU|MoE"),
    "embedding": re.compile(r"Embedding"),
    "loss": re.compile(r"Loss$"),
    "softmax": re.compile(r"^Softmax"),
}
# What an operator by itself says: backward nodes and `_backward` operators carry the forward operator's name.
_OPERATORS = {
    "embedding": re.compile(r"^(aten::embedding|EmbeddingBackward)"),
    "loss": re.compile(r"cross_entropy|nll_loss|NllLoss|CrossEntropy", re.IGNORECASE),
    "attention": re.compile(r"scaled_dot_product|ScaledDotProduct|flash_attention|efficient_attention|FlashAttn"),
    "softmax": re.compile(r"^(aten::_?softmax|aten::_softmax_backward|SoftmaxBackward)"),
    "norm": re.compile(r"layer_norm|rms_norm|LayerNorm|RmsNorm|RMSNorm|batch_norm|group_norm", re.IGNORECASE),
}
# Lightning's PyTorchProfiler names the type before the path.
_MODULE = re.compile(rf"{re.escape(MODULE)}(.*)$|\[pl\]\[module\][^:]*: (.+)$")


def _first(patterns: Mapping[str, re.Pattern[str]], text: str) -> str | None:
    return next((part for part, pattern in patterns.items() if pattern.search(text)), None)


def part_of(module_path: str, classes: Mapping[str, str] | None = None) -> str | None:
    """Part of a module by its path in `named_modules`, e.g. `blocks.3.attention.q` -> `qkv`; None if nothing tells.

    Args:
        module_path: the path; a prefix in front of it makes no difference.
        classes: class name by path, for modules whose own name says nothing.
    """
    names = module_path.split(".")
    for place in reversed(range(len(names))):
        part = _by_place(names[place], names[:place]) or PART_BY_NAME.get(names[place])
        if part := part or _first(_CLASSES, (classes or {}).get(".".join(names[: place + 1]), "")):
            return part
    return None


def _by_place(name: str, above: list[str]) -> str | None:
    """Names that different models give to different things: where the module sits decides."""
    if name not in ("output", "c_proj", "dense", "proj"):
        return None
    if not _ATTENTION_NAMES.isdisjoint(above):
        return "output"
    if name != "output":
        return None
    # BERT's second feed-forward matrix; the others lie inside a module named `mlp`, which decides.
    return "ffn" if any(component.isdecimal() for component in above) else "head"


def joined(parts: Iterable[str]) -> str:
    """Several parts of one kernel as `residual+norm`, in the model's order; `unclassified` if there is none."""
    return "+".join(sorted(set(parts), key=part_order)) or UNCLASSIFIED


def part_order(part: str) -> tuple[int, str]:
    """A sorting key: the model's order, a joined part after the first of its parts."""
    return _ORDER.get(part.partition("+")[0], len(PARTS)), part


@lru_cache(maxsize=4096)
def operator_part(name: str) -> str | None:
    """Part by the operator's name alone, None for operators that any part uses."""
    return _first(_OPERATORS, name)


@lru_cache(maxsize=4096)
def module_path(name: str) -> str | None:
    """The module that a range is around, None for other ranges and operators."""
    match = _MODULE.match(name)
    return match[1] or match[2] or "" if match else None
