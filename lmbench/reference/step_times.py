"""Published step times, with the precision they really had and what must be known of them."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

#: Compute and float32 matmul precision by the word of the write-up. For half precision it says nothing of the latter.
_PRECISION: dict[str, tuple[str, str | None]] = {
    "": ("32-true", "highest"),
    "fp32": ("32-true", "highest"),
    "bf16": ("bf16-mixed", None),
    "fp16": ("16-mixed", None),
}

#: 002's "fp32" runs reach 35-47 TFLOP/s on a card whose fp32 peak is 19.5.
_WAS_TF32 = ("002", "fp32")

#: Columns that must be known for a figure to be comparable; what is blank becomes a caveat.
_STATED = {"batch_size": "batch", "context_length": "context", "precision": "precision", "warmup_steps": "warm-up"}


@dataclass(frozen=True)
class StepTime:
    """One published time of a whole step of `mode`.

    None stands for what the write-up does not state. `precision` and `matmul` are what was really used, as far as the
    figures tell. `implausible` says why the figure cannot be right, None where it can.
    """

    source: str
    gpu: str
    size: str
    shape: str | None
    mode: str
    batch: int | None
    context: int | None
    precision: str
    matmul: str | None
    is_precision_stated: bool
    is_compiled: bool
    warmup: int | None
    is_oom: bool
    mean_s: float | None
    std_s: float | None
    caveats: tuple[str, ...]
    implausible: str | None

    @property
    def label(self) -> str:
        """Source and GPU, as a column's heading tells them."""
        return f"ref. {self.source}, {self.gpu}"


@cache
def load_step_times() -> tuple[StepTime, ...]:
    """Every published time of a whole step by a host clock, implausible ones marked.

    Spans of single phases and of profilers (which slow the host) are left out: they are no step times.
    """
    text = (files("lmbench.reference") / "step_times.csv").read_text(encoding="utf-8")
    rows = csv.DictReader(text.splitlines())
    return tuple(_row(row) for row in rows if _is_whole_step(row) and row["size"] and row["timer"] != "nsys")


def _is_whole_step(row: dict[str, str]) -> bool:
    return row["phase"] == "step" or (row["mode"], row["phase"]) == ("forward", "forward")


def _row(row: dict[str, str]) -> StepTime:
    precision, matmul = _PRECISION.get(row["precision"], (row["precision"], None))
    if (row["source"], row["precision"]) == _WAS_TF32:
        matmul = "high"
    is_custom = row["size"] == "custom"
    return StepTime(
        source=row["source"],
        gpu=row["gpu"] or "GPU unstated",
        size=row["size"],
        shape=f"{row['num_layers']} x {row['d_model']}" if is_custom else None,
        mode=row["mode"],
        batch=_whole(row["batch_size"]),
        context=_whole(row["context_length"]),
        precision=precision,
        matmul=matmul,
        is_precision_stated=bool(row["precision"]),
        is_compiled=row["compile"] == "true",
        warmup=_whole(row["warmup_steps"]),
        is_oom=row["status"] == "oom",
        mean_s=_seconds(row["mean_ms"] or row["median_ms"]),
        std_s=_seconds(row["std_ms"]),
        caveats=tuple(_caveats(row)),
        implausible=_implausible(row),
    )


def _caveats(row: dict[str, str]) -> list[str]:
    blank = [word for name, word in _STATED.items() if not row[name]]
    found = [f"{', '.join(blank)} unstated"] if blank else []
    if not row["mean_ms"] and row["median_ms"]:
        found.append("a median")
    if (row["source"], row["precision"]) == _WAS_TF32:
        found.append("called fp32; its 35-47 TFLOP/s show that it was TF32")
    if row["source"] in ("002", "003") and row["mode"] == "forward":
        found.append("the memory it took shows that the graph was kept")
    return [*found, *([row["note"]] if row["note"] else [])]


def _implausible(row: dict[str, str]) -> str | None:
    """Why a figure cannot be right (the README's section on contradictions)."""
    key = (row["source"], row["size"], row["mode"], row["precision"], row["mean_ms"])
    if row["source"] == "003" and not row["mean_ms"] and row["median_ms"]:
        return "65-79 ms above the warm means of the same source"
    if key == ("001", "2.7B", "forward_backward", "bf16", "365.09"):
        return "faster than xl, which has fewer FLOPs"
    if key == ("001", "small", "train_step", "", "120.33"):
        return "faster than the same source's forward and backward alone (121.24 ms)"
    return None


def _whole(text: str) -> int | None:
    return int(text) if text else None


def _seconds(text: str) -> float | None:
    return float(text) / 1e3 if text else None
