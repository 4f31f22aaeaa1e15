"""Which part of the model an event works for (the model axis of the kernel tables): by its module, its operators, and
the forward operator behind a node of the backward pass."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from lmbench.kernels.trace.events import NONE, HostEvents
from lmbench.kernels.trace.kinds import PARTS, UNCLASSIFIED
from lmbench.kernels.trace.scopes import ACCUMULATE, ENGINE, Scopes
from lmbench.records.vocabulary import MODULE

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
_CLASSES = (
    (re.compile(r"(RMS|Layer|Group|Batch)_?Norm"), "norm"),
    (re.compile(r"Rotary|RoPE", re.IGNORECASE), "rope"),
    (re.compile(r"Attention"), "attention"),
    (re.compile(r"MLP|FeedForward|SwiGLU|MoE"), "ffn"),
    (re.compile(r"Embedding"), "embedding"),
    (re.compile(r"Loss$"), "loss"),
    (re.compile(r"^Softmax"), "softmax"),
)


def part_of(module_path: str, classes: Mapping[str, str] | None = None) -> str | None:
    """Part of a module by its path in `named_modules`, e.g. `blocks.3.attention.q` -> `qkv`; None if nothing tells.

    Args:
        module_path: the path; a prefix in front of it makes no difference.
        classes: class name by path, for modules whose own name says nothing.
    """
    names = module_path.split(".")
    for place in range(len(names) - 1, -1, -1):
        part = _part_by_place(names, place) or PART_BY_NAME.get(names[place])
        if part is None and classes:
            name = classes.get(".".join(names[: place + 1]), "")
            part = next((part for pattern, part in _CLASSES if pattern.search(name)), None)
        if part is not None:
            return part
    return None


def _part_by_place(names: list[str], place: int) -> str | None:
    """Names that different models give to different things: where the module sits decides."""
    name, around = names[place], names[:place]
    if name not in ("output", "c_proj", "dense", "proj"):
        return None
    if not _ATTENTION_NAMES.isdisjoint(around):
        return "output"
    if any(component.isdecimal() for component in around):
        # BERT's second feed-forward matrix; the others lie inside a module named `mlp`, which decides.
        return "ffn" if name == "output" else None
    return "head" if name == "output" else None


def joined(parts: Iterable[str]) -> str:
    """Several parts of one kernel as `residual+norm`, in the model's order; `unclassified` if there is none."""
    return "+".join(sorted(set(parts), key=lambda part: _ORDER.get(part, len(PARTS)))) or UNCLASSIFIED


def part_order(part: str) -> tuple[int, str]:
    """A sorting key: the model's order, a joined part after the first of its parts."""
    return _ORDER.get(part.partition("+")[0], len(PARTS)), part


# Lightning's PyTorchProfiler names the type before the path.
_LIGHTNING_MODULE = re.compile(r"^\[pl\]\[module\][^:]*: (.+)$")

# What an operator by itself says: backward nodes and `_backward` operators carry the forward operator's name.
_OPERATORS = (
    ("embedding", re.compile(r"^(aten::embedding|EmbeddingBackward)")),
    ("loss", re.compile(r"cross_entropy|nll_loss|NllLoss|CrossEntropy", re.IGNORECASE)),
    ("attention", re.compile(r"scaled_dot_product|ScaledDotProduct|flash_attention|efficient_attention|FlashAttn")),
    ("softmax", re.compile(r"^(aten::_?softmax|aten::_softmax_backward|SoftmaxBackward)")),
    ("norm", re.compile(r"layer_norm|rms_norm|LayerNorm|RmsNorm|RMSNorm|batch_norm|group_norm", re.IGNORECASE)),
)
# A matrix product as attention uses for scores and values.
_PRODUCT = re.compile(r"^aten::(matmul|bmm|baddbmm|einsum)$")
# Directly in a block an addition is the residual's.
_SUM = re.compile(r"^aten::(add|add_)$")


@lru_cache(maxsize=4096)
def operator_part(name: str) -> str | None:
    """Part by the operator's name alone, None for operators that any part uses."""
    return next((part for part, pattern in _OPERATORS if pattern.search(name)), None)


def module_path(name: str) -> str | None:
    """The module that a range is around, None for other ranges."""
    if name.startswith(MODULE):
        return name[len(MODULE) :]
    match = _LIGHTNING_MODULE.match(name)
    return match[1] if match else None


class PartFinder:
    """Parts of events by their surroundings; what was found for an event is kept."""

    def __init__(self, host: HostEvents, scopes: Scopes, classes: Mapping[str, str]) -> None:
        self._host = host
        self._scopes = scopes
        self._classes = classes
        self._of_event: dict[int, str | None] = {}
        self._of_path: dict[str, str | None] = {}
        self._blocks = self._paths_of_blocks()
        self._softmax_ns = self._first_softmax()

    @property
    def has_modules(self) -> bool:
        """Whether the trace has ranges of modules: without them only operators tell a part."""
        return any(module_path(name) for name in set(self._host.names))

    def part(self, event: int) -> str | None:
        """Part of the work that an event launched, None where nothing tells."""
        if event == NONE:
            return None
        if event not in self._of_event:
            # Set before: a damaged trace may go round in circles.
            self._of_event[event] = None
            self._of_event[event] = self._find(event)
        return self._of_event[event]

    def is_first_gradient(self, event: int) -> bool:
        """Whether an event of the backward phase makes the gradient that it starts from: `loss.backward()` itself calls
        `ones_like`, outside of the engine and of every module."""
        if event == NONE or int(self._scopes.scope[event]) != NONE:
            return False
        while (above := int(self._scopes.parent[event])) != NONE:
            event = above
        return self._host.names[event] == "aten::ones_like"

    def _find(self, event: int) -> str | None:
        scope = int(self._scopes.scope[event])
        if scope == NONE:
            return self._by_operator(event, NONE)
        if not self._host.names[scope].startswith(ENGINE):
            return self._in_module(event, scope)
        if self._is_gradient_sum(event, scope) and self._ends_at_residual(scope):
            return "residual"
        return self._in_backward(event, scope)

    def _in_backward(self, event: int, engine: int) -> str | None:
        """A node has its forward operator's part; a gradient is stored on behalf of the node that made it."""
        while self._host.names[engine].endswith(ACCUMULATE) and engine in self._scopes.previous:
            engine = self._scopes.previous[engine]
        by_node = self._forward_part(engine) or operator_part(self._host.names[engine][len(ENGINE) :])
        return by_node or self._by_operator(event, engine)

    def _is_gradient_sum(self, event: int, engine: int) -> bool:
        """An addition in the engine's event but not in the node's own function: of two gradients of one tensor."""
        is_outside = int(self._scopes.node[event]) == NONE and not self._host.names[engine].endswith(ACCUMULATE)
        return is_outside and bool(_SUM.match(self._host.names[event]))

    def _ends_at_residual(self, engine: int) -> bool:
        """Whether the tensor is the residual stream's: its next node is of a residual addition or of the embedding, and
        the other gradient can have come through a residual addition behind it."""
        following = self._scopes.following.get(engine)
        if following is None or self._forward_part(following) not in ("residual", "embedding"):
            return False
        # Within one backward pass the engine goes down in sequence numbers.
        number, before = int(self._host.sequence[engine]), self._scopes.previous.get(engine)
        while before is not None and (
            int(self._host.sequence[before]) >= number or self._host.sequence[before] == NONE
        ):
            if self._forward_part(before) == "residual":
                return True
            number = max(number, int(self._host.sequence[before]))
            before = self._scopes.previous.get(before)
        return False

    def _forward_part(self, engine: int) -> str | None:
        forward = int(self._scopes.forward[engine])
        return self.part(forward) if forward != NONE else None

    def _in_module(self, event: int, scope: int) -> str | None:
        path = module_path(self._host.names[scope]) or ""
        if path not in self._of_path:
            self._of_path[path] = part_of(path, self._classes)
        part = self._of_path[path]
        if part is None:
            # An addition directly in a module that has norms below it is a residual's.
            is_residual = path in self._blocks and _SUM.match(self._host.names[event])
            return self._by_operator(event, scope) or ("residual" if is_residual else None)
        if part == "attention":
            return self._by_operator(event, scope) or self._product_in_attention(event, scope)
        return part

    def _by_operator(self, event: int, scope: int) -> str | None:
        """The innermost operator up to the scope that tells a part by its name."""
        while event not in (NONE, scope):
            if part := operator_part(self._host.names[event]):
                return part
            event = int(self._scopes.parent[event])
        return None

    def _product_in_attention(self, event: int, scope: int) -> str:
        """Products directly in an attention module: scores come before its softmax, values after."""
        softmax_ns = self._softmax_ns.get(scope)
        while softmax_ns is not None and event not in (NONE, scope):
            if _PRODUCT.match(self._host.names[event]):
                return "scores" if self._host.start_ns[event] < softmax_ns else "values"
            event = int(self._scopes.parent[event])
        return "attention"

    def _paths_of_blocks(self) -> set[str]:
        paths = {path for name in set(self._host.names) if (path := module_path(name))}
        norms = (path for path in paths if part_of(path, self._classes) == "norm")
        return {path.rpartition(".")[0] for path in norms if any(name.isdecimal() for name in path.split("."))}

    def _first_softmax(self) -> dict[int, int]:
        """By module range, when the first softmax directly in it began."""
        found: dict[int, int] = {}
        for index, name in enumerate(self._host.names):
            scope = int(self._scopes.scope[index])
            if scope != NONE and operator_part(name) == "softmax":
                found.setdefault(scope, int(self._host.start_ns[index]))
        return found
