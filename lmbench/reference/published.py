"""Published figures: step times with the precision they really had, shares of matrix products in kernel time, softmax
against the products of attention, attention by itself; each with what must be known of it."""

from __future__ import annotations

import csv
from collections.abc import Iterator
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

#: Figures that cannot be right.
_IMPLAUSIBLE = {
    # Faster than xl, which has fewer FLOPs.
    ("001", "2.7B", "forward_backward", "bf16", "365.09"),
    # Faster than the same source's forward and backward alone (121.24 ms).
    ("001", "small", "train_step", "", "120.33"),
}

#: Columns that must be known for a figure to be comparable; what is blank becomes a caveat.
_STATED = {"batch_size": "batch", "context_length": "context", "precision": "precision", "warmup_steps": "warm-up"}

#: lmbench's column for the whole of a pass, and the mode that has it; shares of single kernels are left out.
_PASSES = {
    "inference_forward": ("inference_matmul_fraction", "inference"),
    "train_step": ("step_matmul_fraction", "train_step"),
}
_RATIO = "forward_softmax_matmul_time_ratio"
#: Of a row whose products are of the scores alone: lmbench divides by those of scores and values.
_SCORES_ALONE = "scores matmul"

#: lmbench's column for a published figure of memory, by quantity and phase (blank: the whole pass).
_PEAKS = {
    ("peak", ""): "peak_bytes",
    ("peak", "forward"): "memory.phase_peak_allocated_bytes.forward",
    ("peak", "backward"): "memory.phase_peak_allocated_bytes.backward",
    ("reserved", ""): "memory.run_peak_reserved_bytes",
}


#: lmbench's column for a published figure of attention by itself, and what its unit is multiplied by for SI.
_ATTENTION = {
    "forward_ms": ("forward_s", 1e-3),
    "backward_ms": ("backward_s", 1e-3),
    "memory_before_backward_gb": ("memory.phase_begin_allocated_bytes.backward", 2.0**30),
}
#: A first measurement that is four times the next one of the same table, and 1.6 times the same of the other table.
_COLD = ("first table", "256", "16", "forward_ms")
#: Up to this length the source's two tables tell of the same backward times that differ 1.5 to 2.9 times.
_CONTRADICTED_CONTEXT = 1024
#: Of the memory of all 20 figures.
_HELD = "two batch x context x context tensors of float32, seven of the queries' size and 64 MiB fit it"


@dataclass(frozen=True)
class StepTime:
    """One published time of a whole step of `mode`.

    None stands for what the write-up does not state. `precision` and `matmul` are what was really used, as far as the
    figures tell. `is_implausible` says that the figure cannot be right.
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
    is_implausible: bool

    @property
    def label(self) -> str:
        """Source and GPU, as a column's heading tells them."""
        return f"ref. {self.source}, {self.gpu}"


@cache
def load_step_times() -> tuple[StepTime, ...]:
    """Every published time of a whole step by a host clock, implausible ones marked.

    Spans of single phases and of profilers (which slow the host) are left out: they are no step times.
    """
    rows = [row for row in _rows("step_times.csv") if row["size"] and row["timer"] != "nsys"]
    return tuple(_step_time(row) for row in rows if _is_whole_step(row))


def _is_whole_step(row: dict[str, str]) -> bool:
    return row["phase"] == "step" or (row["mode"], row["phase"]) == ("forward", "forward")


def _step_time(row: dict[str, str]) -> StepTime:
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
        is_implausible=_is_implausible(row),
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


def _is_implausible(row: dict[str, str]) -> bool:
    """Whether a figure cannot be right (the README's section on contradictions)."""
    # 003's medians lie 65-79 ms above the warm means of the same source.
    is_003_median = row["source"] == "003" and not row["mean_ms"] and bool(row["median_ms"])
    return is_003_median or (row["source"], row["size"], row["mode"], row["precision"], row["mean_ms"]) in _IMPLAUSIBLE


def _whole(text: str) -> int | None:
    return int(text) if text else None


def _seconds(text: str) -> float | None:
    return float(text) / 1e3 if text else None


@dataclass(frozen=True)
class Figure:
    """One published figure. `column` is lmbench's name of what it is, `value` in SI.

    None stands for what the write-up does not state; a precision that it does not state is taken for float32, which the
    base tables of the write-ups are. `head_dim` is that of attention by itself, None of a whole model; `table` tells
    tables of one source apart.
    """

    source: str
    gpu: str
    column: str
    value: float
    size: str | None
    context: int | None
    batch: int | None
    mode: str | None
    precision: str
    caveats: tuple[str, ...]
    is_compiled: bool = False
    head_dim: int | None = None
    table: str = ""

    @property
    def label(self) -> str:
        """Source and GPU, as a column's heading tells them."""
        return f"ref. {' '.join(filter(None, [self.source, self.table]))}, {self.gpu}"


@cache
def load_figures() -> tuple[Figure, ...]:
    """Every published share of all matrix products in a pass, every ratio of softmax to the matrix products of scores
    and values in time, every peak of memory, and times and memory of attention by itself but for a cold one."""
    return (*_matmul_shares(), *_softmax_ratios(), *_peaks(), *_attention())


def _matmul_shares() -> Iterator[Figure]:
    for row in _rows("kernels.csv"):
        if row["kernel_class"] != "gemm" or row["kernel_name"] or not row["share_pct"] or row["pass"] not in _PASSES:
            continue
        column, mode = _PASSES[row["pass"]]
        yield _figure(row, column, float(row["share_pct"]) / 100, mode)


def _softmax_ratios() -> Iterator[Figure]:
    for row in _rows("softmax_vs_matmul.csv"):
        if row["softmax_ms"] and row["matmul_ms"] and _SCORES_ALONE not in row["note"]:
            ratio = float(row["softmax_ms"]) / float(row["matmul_ms"])
            yield _figure(row, _RATIO, ratio, None, "the pass is unstated")


def _peaks() -> Iterator[Figure]:
    for row in _rows("memory.csv"):
        column = _PEAKS.get((row["quantity"], row["phase"]))
        if column is not None and row["size"]:
            unit = () if row["gpu"] else ("GB or GiB unstated, taken as 10^9 bytes",)
            yield _figure(row, column, float(row["value_gb"]) * 1e9, row["mode"] or None, *unit)


def _attention() -> Iterator[Figure]:
    """Of whole passes: rows without a length are of the scores alone."""
    for row in _rows("attention.csv"):
        table = row["note"].partition(";")[0]
        for name, (column, unit) in _ATTENTION.items():
            if not row["seq_len"] or not row[name] or (table, row["seq_len"], row["d_head"], name) == _COLD:
                continue
            unstated = [word for field, word in (("batch_size", "batch"), ("precision", "precision")) if not row[field]]
            caveats = [f"{', '.join([*unstated, 'mask'])} unstated"]
            if name == "backward_ms" and int(row["seq_len"]) <= _CONTRADICTED_CONTEXT:
                caveats.append("its two tables differ 1.5 to 2.9 times here")
            yield Figure(
                source=row["source"],
                gpu=row["gpu"] or "GPU unstated",
                column=column,
                value=float(row[name]) * unit,
                size=None,
                context=int(row["seq_len"]),
                batch=_whole(row["batch_size"]),
                mode="forward_backward",
                precision=_PRECISION[row["precision"]][0],
                caveats=(*caveats, *([_HELD] if unit > 1 else [])),
                is_compiled=row["compile"] == "true",
                head_dim=int(row["d_head"]),
                table=table,
            )


def _figure(row: dict[str, str], column: str, value: float, mode: str | None, *caveats: str) -> Figure:
    stated = {"size": "size", "batch_size": "batch", "context_length": "context", "precision": "precision"}
    blank = [word for name, word in stated.items() if not row.get(name)]
    own = ([", ".join(blank) + " unstated"] if blank else []) + [*caveats, *([row["note"]] if row["note"] else [])]
    return Figure(
        source=row["source"],
        gpu=row["gpu"] or "GPU unstated",
        column=column,
        value=value,
        size=row["size"] or None,
        context=_whole(row["context_length"]),
        batch=_whole(row.get("batch_size", "")),
        mode=mode,
        precision=_PRECISION[row.get("precision", "")][0],
        caveats=tuple(own),
    )


@dataclass(frozen=True)
class Accumulation:
    """One published loop, `n` times `total += addend` from zero, and the sum that was printed, as it was printed.

    With `is_cast` the addend was converted to float32 before it was added.
    """

    source: str
    accumulator: str
    addend_dtype: str
    is_cast: bool
    n: int
    addend: float
    result: str


#: The `expected` 10 of every row (reference/README.md).
_ADDITIONS, _ADDEND = 1000, 0.01


@cache
def load_accumulations() -> tuple[Accumulation, ...]:
    """Every published sum by a loop, in the order of the file."""
    return tuple(_accumulation(row) for row in _rows("accumulation.csv"))


def _accumulation(row: dict[str, str]) -> Accumulation:
    dtype, _, cast = row["addend_dtype"].partition(" cast to ")
    return Accumulation(
        source=row["source"],
        accumulator=row["accumulator_dtype"],
        addend_dtype=dtype,
        is_cast=bool(cast),
        n=_ADDITIONS,
        addend=_ADDEND,
        result=row["result"],
    )


def _rows(name: str) -> Iterator[dict[str, str]]:
    text = (files("lmbench.reference") / name).read_text(encoding="utf-8")
    return iter(csv.DictReader(text.splitlines()))


@dataclass(frozen=True)
class PublishedDtype:
    """The dtype of one tensor of the published toy (linear, ReLU, LayerNorm, linear) under autocast."""

    source: str
    autocast_dtype: str
    tensor: str
    dtype: str


@cache
def load_dtypes() -> tuple[PublishedDtype, ...]:
    """Every published dtype; on which device is not said, but with LayerNorm in float32 it was CUDA's autocast."""
    return tuple(PublishedDtype(**row) for row in _rows("precision_dtypes.csv"))
