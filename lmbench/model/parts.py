"""Which part of the model a module belongs to (the model axis of the kernel tables)."""

from __future__ import annotations

# The last component of a module's path that stands here decides. Scores, mask, softmax and values exist
# apart only in naive attention; a fused kernel does all four, and its part is "attention".
PART_BY_NAME: dict[str, str] = {
    "embedding": "embedding",
    "attention_norm": "norm",
    "ffn_norm": "norm",
    "norm": "norm",
    "q": "qkv",
    "k": "qkv",
    "v": "qkv",
    "rope": "rope",
    "core": "attention",
    "scores": "scores",
    "mask": "mask",
    "softmax": "softmax",
    "values": "values",
    "output": "output",
    "ffn": "ffn",
    "attention_residual": "residual",
    "ffn_residual": "residual",
    "head": "head",
    "loss": "loss",
}


def part_of(module_path: str) -> str | None:
    """Part of a module by its path in ``named_modules``, e.g. ``blocks.3.attention.q`` -> ``qkv``."""
    names = reversed(module_path.split("."))
    return next((PART_BY_NAME[name] for name in names if name in PART_BY_NAME), None)
