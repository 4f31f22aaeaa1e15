"""What a colour means, the same in every chart, timeline and legend of every page.

A colour is a place among the page's `--series-N` (page.css); 0 is the muted one, of what is no class of its own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from lmbench.precision import short_label
from lmbench.report.facts import EAGER, Value

COLOURS = 19
MUTED = 0

PHASES: Mapping[str, int] = {
    "forward": 1, "backward": 2, "optimizer": 3, "clip": 4, "zero_grad": 5, "data": 19, "transfer": 8, "outside": 7,
}  # fmt: skip
#: What is a kind and a part (softmax, norm, ...) has one colour as both.
KINDS: Mapping[str, int] = {
    "gemm": 1, "elementwise": 2, "optimizer": 3, "softmax": 4, "norm": 5, "attention": 6, "reduction": 7, "index": 8,
    "memcpy": 9, "pooling": 10, "comm": 18, "unclassified": 17,
}  # fmt: skip
#: Kernels of a compiled model that do the work of several parts at once.
FUSED = "several"
PARTS: Mapping[str, int] = {
    "ffn": 1, "qkv": 2, "optimizer": 3, "softmax": 4, "norm": 5, "attention": 6, "scores": 7, "rope": 8, "head": 16,
    "values": 10, "loss": 11, "mask": 13, "output": 12, "residual": 14, "embedding": 15, FUSED: 9, "unclassified": 17,
    "comm": 18, "data": 19,
}  # fmt: skip
CATEGORIES: Mapping[str, int] = {
    "parameters": 1, "optimizer_state": 3, "gradients": 2, "inputs": 19, "workspaces": 18, "unknown": 17,
    "activations": 6, "logits": 4, "temporaries": 10,
}  # fmt: skip
#: What series of a chart are of, by the fact and its value. A mode has the colour of the last phase that it adds.
_SERIES: Mapping[str, Mapping[str, int]] = {
    "precision": {"fp32": 9, "TF32": 14, "bf16-mixed": 10, "bf16-true": 11, "16-mixed": 12, "16-true": 16},
    "attention": {
        "naive": 15, "sdpa": 6, "sdpa_flash": 13, "sdpa_efficient": 14, "sdpa_math": 9, "sdpa_cudnn": 16, "flex": 12,
    },
    "mode": {"inference": 18, "forward": 1, "forward_backward": 2, "train_step": 3},
    "compile": {EAGER: 17, "default": 13, "reduce-overhead": 16, "max-autotune": 14},
    "checkpoint": {"none": 17, "block": 6, "every_2": 13, "selective": 12},
    "size": {"tiny": 19, "small": 14, "medium": 6, "large": 9, "xl": 16, "2.7B": 12},
}  # fmt: skip


def part_colour(part: str) -> int:
    """A part's colour; what a fused kernel joins has that of `several`."""
    return PARTS[FUSED] if "+" in part else PARTS.get(part, MUTED)


def series_looks(names: Sequence[str], cells: Iterable[Mapping[str, Value]]) -> list[tuple[int, bool]]:
    """For the facts of each cell the colour of its series, and whether it is the compiled one of two, which is the same
    colour paler or dashed.

    A series has the colour of the first of the facts `names` that tells the cells apart and has colours; another series
    of the same value, and a value without a colour, has the next that is free.
    """
    cells = list(cells)
    varying = [name for name in names if len({str(facts.get(name)) for facts in cells}) > 1]
    others = [name for name in varying if name != "compile"]
    fact = next((name for name in (*others, *varying) if name in _SERIES), "")
    colours, looks = dict[tuple[Value, ...], int](), []
    for facts in cells:
        value = str(facts.get(fact))
        word = short_label(value, str(facts.get("matmul"))) if fact == "precision" else value
        places = (_SERIES.get(fact, {}).get(word, 1), *range(1, COLOURS + 1))
        key = tuple(facts.get(name) for name in others or [fact])
        colours.setdefault(key, next((place for place in places if place not in colours.values()), MUTED))
        looks.append((colours[key], bool(others) and facts.get("compile") not in (None, EAGER)))
    return looks
