"""Published shares of matrix products in kernel time, and of softmax against the products of attention."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

#: lmbench's column for the whole of a pass, and the mode that has it; shares of single kernels are left out.
_PASSES = {
    "inference_forward": ("inference_matmul_fraction", "inference"),
    "train_step": ("step_matmul_fraction", "train_step"),
}
_RATIO = "forward_softmax_matmul_time_ratio"
#: Of a row whose products are of the scores alone: lmbench divides by those of scores and values.
_SCORES_ALONE = "scores matmul"


@dataclass(frozen=True)
class KernelShare:
    """One published figure. `column` is lmbench's name of what it is, `mode` None where the source does not tell.

    None stands for what the write-up does not state. No source states its precision here: they are compared with
    float32, eager, which their base tables are.
    """

    source: str
    gpu: str
    column: str
    size: str | None
    context: int | None
    mode: str | None
    value: float
    caveats: tuple[str, ...]

    @property
    def label(self) -> str:
        """Source and GPU, as a column's heading tells them."""
        return f"ref. {self.source}, {self.gpu}"


@cache
def load_kernel_shares() -> tuple[KernelShare, ...]:
    """Every published share of all matrix products in a pass, and every ratio of softmax to the matrix products of
    scores and values in time."""
    return (*_matmul_shares(), *_softmax_ratios())


def _matmul_shares() -> Iterator[KernelShare]:
    for row in _rows("kernels.csv"):
        if row["kernel_class"] != "gemm" or row["kernel_name"] or not row["share_pct"] or row["pass"] not in _PASSES:
            continue
        column, mode = _PASSES[row["pass"]]
        yield _share(row, column, mode, float(row["share_pct"]) / 100)


def _softmax_ratios() -> Iterator[KernelShare]:
    for row in _rows("softmax_vs_matmul.csv"):
        if row["softmax_ms"] and row["matmul_ms"] and _SCORES_ALONE not in row["note"]:
            ratio = float(row["softmax_ms"]) / float(row["matmul_ms"])
            yield _share(row, _RATIO, None, ratio, "the pass is unstated")


def _share(row: dict[str, str], column: str, mode: str | None, value: float, *caveats: str) -> KernelShare:
    blank = [word for name, word in (("size", "size"), ("context_length", "context")) if not row[name]]
    unstated = [", ".join([*blank, "batch", "precision"]) + " unstated"]
    context = int(row["context_length"]) if row["context_length"] else None
    own = (*unstated, *caveats, *([row["note"]] if row["note"] else []))
    return KernelShare(
        row["source"], row["gpu"] or "GPU unstated", column, row["size"] or None, context, mode, value, own
    )


def _rows(name: str) -> Iterator[dict[str, str]]:
    text = (files("lmbench.reference") / name).read_text(encoding="utf-8")
    return iter(csv.DictReader(text.splitlines()))
