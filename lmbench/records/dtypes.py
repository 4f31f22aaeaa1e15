# ruff: noqa: E501 (tables, one field a line)
# fmt: off
"""What a run has from a recording of dtypes: those of the tensors that every training has."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct, field

from lmbench.records.field import About


class NotedTensors(Struct):
    """Tensors of one kind: how many there are of each dtype (`float32`), and why they have it."""

    name: str
    dtypes: dict[str, int]
    reason: str


class DtypeRecord(Struct):
    """Dtypes: what a probe step showed."""

    reason: Annotated[str | None, About("text", "no dtypes because", "Why no dtypes were noted; null where they were.")] = None
    notes_file: Annotated[str | None, About("text", "dtypes", "Modules and operators with their dtypes, in the result folder.")] = None
    autocast_dtype: Annotated[str | None, About("text", "autocast", "Autocast's lower precision, null where it was off.")] = None
    was_compiled: Annotated[bool | None, About("flag", "noted eagerly", "The run is compiled, and the step whose dtypes were noted was not: no hook sees into a compiled graph.")] = None
    loss_scale: Annotated[float | None, About("1", "loss scale", "What the loss, and so the gradients until the optimizer's step, were multiplied by; null without a scaler.")] = None
    tensors: Annotated[list[NotedTensors], About("tree", "dtypes of tensors", "Parameters, buffers, batch, logits, loss, gradients, optimizer state: name, count by dtype, reason.")] = field(default_factory=list)
    unused_modules: Annotated[list[str], About("tree", "unused modules", "Paths of modules that the step never called, but for those whose parameters another module uses.")] = field(default_factory=list)
