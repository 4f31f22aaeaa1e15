"""The views of the studies, by name."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches

from lmbench.errors import UsageError
from lmbench.report.views import (
    attention_parts,
    batch,
    compile,
    context,
    custom,
    kernels,
    precision,
    step_times,
    sweep,
    warmup,
)
from lmbench.report.views.view import View

#: For a sweep that names no view, and for runs that belong to none.
GENERIC = sweep.VIEW
#: For profiled runs that belong to none.
KERNELS = kernels.VIEW

VIEWS: Mapping[str, View] = {
    module.VIEW.name: module.VIEW
    for module in (
        step_times, warmup, context, precision, compile, batch, custom, kernels, attention_parts, sweep,
    )
}  # fmt: skip


def find_view(name: str) -> View:
    """The view of that name.

    Raises:
        UsageError: there is none.
    """
    if name in VIEWS:
        return VIEWS[name]
    near = get_close_matches(name, VIEWS, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UsageError(f"view {name!r} is unknown; choose among {', '.join(VIEWS)}{hint}")
