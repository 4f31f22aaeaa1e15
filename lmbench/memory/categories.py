"""What a byte on the device is for: one vocabulary for predictions and for recorded histories."""

from __future__ import annotations

from typing import Literal, get_args

#: parameters count buffers with them (tables, masks); inputs are the batches; activations are what the forward leaves
#: for the backward, without the logits; logits are what the loss is computed from, and what has their size: their
#: float32 copy, log-softmax and gradient; temporaries are gone when the phase that made them is over; workspaces are
#: the matrix libraries' own, kept from one call to the next.
Category = Literal[
    "parameters",
    "gradients",
    "optimizer_state",
    "activations",
    "logits",
    "inputs",
    "temporaries",
    "workspaces",
    "unknown",
]

#: In the order of a table.
CATEGORIES: tuple[Category, ...] = get_args(Category)

#: As a table says it.
CATEGORY_LABELS: dict[Category, str] = {name: name.replace("_", " ") for name in CATEGORIES}
