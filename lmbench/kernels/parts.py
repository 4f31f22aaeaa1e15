"""Parts of a model by the names of its modules, their classes and its operators."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import lru_cache

from lmbench.kernels.names import reader
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

_by_name, _by_class, _by_operator = map(reader, ("module_names", "module_classes", "operator_parts"))
# Lightning's PyTorchProfiler names the type before the path.
_MODULE = re.compile(rf"{re.escape(MODULE)}(.*)$|\[pl\]\[module\][^:]*: (.+)$")


def part_of(module_path: str, classes: Mapping[str, str] | None = None) -> str | None:
    """Part of a module by its path in `named_modules`, e.g. `blocks.3.attention.q` -> `qkv`; None if nothing tells.

    Args:
        module_path: the path; a prefix in front of it makes no difference.
        classes: class name by path, for modules whose own name says nothing.
    """
    names = module_path.split(".")
    for place in reversed(range(len(names))):
        name, above = names[place], names[:place]
        part = _by_name(name)
        # Names that different models give to different things: where the module sits decides.
        if name in ("output", "c_proj", "dense", "proj") and "attention" in map(_by_name, above):
            part = "output"
        elif name == "output":
            # BERT's second feed-forward matrix; the others lie inside a module named `mlp`, which decides.
            part = "ffn" if any(map(str.isdecimal, above)) else "head"
        if part := part or _by_class((classes or {}).get(".".join(names[: place + 1]), "")):
            return part
    return None


def joined(parts: Iterable[str]) -> str:
    """Several parts of one kernel as `residual+norm`, in the model's order; `unclassified` if there is none."""
    return "+".join(sorted(set(parts), key=part_order)) or UNCLASSIFIED


def part_order(part: str) -> tuple[int, str]:
    """A sorting key: the model's order, a joined part after the first of its parts."""
    return _ORDER.get(part.partition("+")[0], len(PARTS)), part


def operator_part(name: str) -> str | None:
    """Part by the operator's name alone, None for operators that any part uses."""
    return _by_operator(name) or None


@lru_cache(maxsize=4096)
def module_path(name: str) -> str | None:
    """The module that a range is around, None for other ranges and operators."""
    match = _MODULE.match(name)
    return match[1] or match[2] or "" if match else None
