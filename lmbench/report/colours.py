"""One colour for each phase, kind of kernel and part of the model, everywhere on a page.

A colour is a place among the page's `--series-N`; 0 is the muted one, of what is no class of its own. What is a kind
and a part (softmax, norm, ...) has one colour as both.
"""

from __future__ import annotations

from collections.abc import Mapping

from lmbench.kernels.shown.columns import FUSED

#: Colours of the page.
COUNT = 19
MUTED = 0
PHASE_COLOURS: Mapping[str, int] = {
    "forward": 1, "backward": 2, "optimizer": 3, "clip": 4, "zero_grad": 5, "data": 19, "transfer": 8, "outside": 7,
}  # fmt: skip
KIND_COLOURS: Mapping[str, int] = {
    "gemm": 1, "elementwise": 2, "optimizer": 3, "softmax": 4, "norm": 5, "attention": 6, "reduction": 7, "index": 8,
    "memcpy": 9, "comm": 18, "unclassified": 17,
}  # fmt: skip
PART_COLOURS: Mapping[str, int] = {
    "ffn": 1, "qkv": 2, "optimizer": 3, "softmax": 4, "norm": 5, "attention": 6, "scores": 7, "rope": 8, "head": 16,
    "values": 10, "loss": 11, "mask": 13, "output": 12, "residual": 14, "embedding": 15, FUSED: 9, "unclassified": 17,
    "comm": 18, "data": 19,
}  # fmt: skip


def part_colour(part: str) -> int:
    """A part's colour; what a fused kernel joins has that of `several`."""
    return PART_COLOURS[FUSED] if "+" in part else PART_COLOURS.get(part, MUTED)


def variable(colour: int) -> str:
    """A colour as CSS says it."""
    return f"var(--series-{colour})" if colour else "var(--muted)"
