"""What precisions mean: the only place that reads Lightning's precision strings and PyTorch's float32 matmul precision.

A precision is a pair: the compute precision (`--trainer.precision`) and how float32 matrix products are computed
(`--measure.matmul_precision`). Another one is an entry here. Works without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from msgspec import Struct

from lmbench.reference.published import load_rows

if TYPE_CHECKING:
    import torch


class Precision(Struct, frozen=True):
    """One of Lightning's precisions (reference/precisions.csv), and the short form that it still takes.

    compute and weights are PyTorch's names of dtypes: that of matrix products (under a mixed precision the lower one),
    and that of parameters and optimizer state. peak is the datasheet's column for the products, None without one:
    float64 and fp8 are not in lmbench's table. With a loss scaler the gradients of a step may be dropped.
    """

    name: str
    compute: str
    weights: str
    short: str | None = None
    peak: str | None = None
    has_scaler: bool = False
    runs_on_cpu: bool = True

    @property
    def is_mixed(self) -> bool:
        """Products in a lower precision than the weights have."""
        return self.compute != self.weights

    @property
    def weight_bytes(self) -> int:
        return {"float64": 8, "float32": 4}.get(self.weights, 2)

    def compute_dtype(self) -> torch.dtype:
        import torch

        return cast("torch.dtype", getattr(torch, self.compute))

    def weight_dtype(self) -> torch.dtype:
        import torch

        return cast("torch.dtype", getattr(torch, self.weights))


#: By Lightning's name, in the order of tables.
PRECISIONS = {precision.name: precision for precision in load_rows("precisions.csv", Precision)}

#: float32 matrix products by PyTorch's name, and as tables say it.
FP32_MATMUL, TF32_MATMUL = "highest (fp32)", "high (TF32)"
MATMUL_LABELS = {"highest": FP32_MATMUL, "high": TF32_MATMUL, "medium": "medium (bf16)"}


def find_precision(name: str) -> Precision | None:
    """The meaning of Lightning's name, None for one that a plugin made up."""
    return next((meaning for meaning in PRECISIONS.values() if name in (meaning.name, meaning.short)), None)


def matmul_label(matmul_precision: str | None) -> str | None:
    """How float32 matrix products are computed, as a table says it: `high (TF32)`; None where nobody knows."""
    return None if matmul_precision is None else MATMUL_LABELS.get(matmul_precision, matmul_precision)


def peak_column(precision: str, matmul_precision: str = "highest") -> str | None:
    """The datasheet's column for a run's matrix products: `fp32`, `tf32`, `bf16` or `fp16`; None without one.

    On CUDA any float32 matmul precision but `highest` means TF32 (in cuBLAS `medium` acts like `high`).
    """
    meaning = find_precision(precision)
    if meaning is None:
        return None
    return "tf32" if meaning.peak == "fp32" and matmul_precision != "highest" else meaning.peak


def short_label(precision: str, matmul: str | None) -> str:
    """One word for precision and `matmul_label`: `fp32` and `TF32` for the two ways of `32-true`, else its own name."""
    is_fp32 = find_precision(precision) == PRECISIONS["32-true"]
    return {FP32_MATMUL: "fp32", TF32_MATMUL: "TF32"}.get(matmul or "", precision) if is_fp32 else precision
