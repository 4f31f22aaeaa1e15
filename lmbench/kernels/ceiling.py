"""What a device attains at best, as `lmbench ceiling` stores it, and what a run's matrix products, optimizer and norms
attain of that and of the datasheet.

A run's work is the least that the mathematics needs: model FLOPs, and every tensor read and written once. Kernels that
compute again, or read a tensor twice, attain less of it; tensors of a few MB may stay in the device's cache and attain
more.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Literal

import pandas as pd
from msgspec import Meta, Struct

from lmbench.errors import UsageError
from lmbench.kernels.findings import Findings
from lmbench.kernels.names import MATMUL
from lmbench.kernels.tables import records, table
from lmbench.precision import find_gpu, find_precision, peak_flops
from lmbench.records.codec import DamagedRecord, as_dict, read_packed
from lmbench.records.run import Environment, Gpu, RunRecord
from lmbench.records.store import write_whole
from lmbench.records.vocabulary import Phase
from lmbench.report.answer import Answer, Line
from lmbench.report.units import milliseconds, whole

#: A run of a sweep lies three folders below the results.
_LEVELS = 3
#: Bytes per parameter of one step of AdamW, in multiples of a parameter's size: it reads the parameter, its gradient
#: and both moments (torch.optim.AdamW keeps them in the parameter's type) and writes all but the gradient.
ADAMW_READS, ADAMW_WRITES = 4, 3
#: Tensors of the residual stream's shape that a norm needs. Forward reads its input and writes its output; backward
#: reads input and output's gradient and writes the input's. Weights and row sums are less than a thousandth of it.
NORM_TENSORS: dict[Phase, int] = {"forward": 2, "backward": 3}


class Rate(Struct, kw_only=True):
    """What one kind of work attains, in FLOP/s, `copy` in byte/s.

    `burst_per_s` is the best of `bursts` stretches of about `burst_s`; `sustained_per_s` the mean of a stretch of
    `seconds`, with that stretch's mean power, the share of it that was power-capped, and the clock at its end.
    """

    name: str
    burst_per_s: float
    bursts: int | None = None
    burst_s: float | None = None
    sustained_per_s: float
    seconds: float
    sm_clock_hz: float | None = None
    mean_power_w: float | None = None
    power_capped_fraction: float | None = None


class CeilingRecord(Struct):
    """A device's rates, and where and when they were measured."""

    schema_version: Literal[1]
    measured_at: str
    environment: Environment
    rates: Annotated[list[Rate], Meta(min_length=1)]


def store_ceiling(record: CeilingRecord, folder: Path) -> Path:
    """Write the record where `lmbench kernels` looks for it. Raises UsageError where it cannot be written."""
    name = record.environment.gpu.name or record.environment.host.cpu_model or "cpu"
    path = folder / f"ceiling_{re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_')}.json"
    text = json.dumps(as_dict(record), allow_nan=False)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, f"{text}\n")
    except OSError as error:
        # What was measured is not lost with the disk.
        print(text, file=sys.stderr)
        raise UsageError(f"{path} cannot be written: {error.strerror}; the record is above") from error
    return path


def find_ceiling(folder: Path, run: RunRecord | None, path: Path | None = None) -> tuple[Path, CeilingRecord] | None:
    """The ceiling of a run's GPU: the file that is named, else the newest of that GPU above the run's folder.

    Raises UsageError for a named file that is no record of a ceiling.
    """
    if path is not None:
        try:
            return path, read_packed(path.resolve(), CeilingRecord)
        except DamagedRecord as error:
            reason = f"is no record of `lmbench ceiling`: {error}; measure one with it"
            raise UsageError(f"--ceiling {str(path)!r} {reason}") from error
    gpu = run.environment.gpu.name if run and run.environment else None
    for level in folder.absolute().parents[:_LEVELS] if gpu else ():
        records = list[tuple[Path, CeilingRecord]]()
        for file in sorted(level.glob("ceiling_*.json")):
            with suppress(DamagedRecord):
                records.append((file, read_packed(file, CeilingRecord)))
        if of_gpu := [entry for entry in records if entry[1].environment.gpu.name == gpu]:
            return max(of_gpu, key=lambda entry: entry[1].measured_at)
    return None


def ceiling_answer(record: CeilingRecord, path: Path) -> Answer:
    """A row for each kind of work beside the datasheet, and where the record lies."""
    gpu, host, rates = record.environment.gpu, record.environment.host, record.rates
    limit = f", power limit {gpu.power_limit_w:.0f} W" if gpu.power_limit_w else ""
    rows = pd.DataFrame(map(as_dict, rates)).astype(object)
    rows["sheet"] = [datasheet_rate(gpu.name, rate.name) for rate in rates]
    rows["label"] = [f"{rate.name} {'TB/s' if rate.name == 'copy' else 'TFLOP/s'}" for rate in rates]
    rows["share_fraction"] = rows.sustained_per_s / rows.sheet.astype(float)
    seconds = f"{max(rate.seconds for rate in rates):.1f}"
    bursts, burst = whole(rates[0].bursts), milliseconds(rates[0].burst_s)
    result = table("ceiling", rows, seconds=seconds, bursts=bursts, burst=burst)
    device = f"{gpu.name or host.cpu_model}{limit}, torch {record.environment.versions.torch}"
    return Answer(
        [Line("device", device)], [result], [Line("result", str(path), is_whole=True)], figures=as_dict(record)
    )


def datasheet_rate(gpu_name: str | None, name: str) -> float | None:
    """The datasheet's rate for one kind of work, FLOP/s or byte/s; None for a device that is not in the table."""
    gpu = find_gpu(gpu_name or "")
    if gpu is None or not name:
        return None
    return gpu.memory * 1e9 if name == "copy" else gpu.flops_per_s(name)


def roofline(findings: Findings, ceiling: tuple[Path, CeilingRecord] | None = None) -> Answer:
    """What the trace's kernels attain: a table, and whose peak and which record of `lmbench ceiling` it is held
    against; nothing of a trace without kernels or without its run."""
    run = findings.run
    if findings.why_no_kernels or run is None:
        return Answer()
    gpu, matmul = (run.environment.gpu if run.environment else Gpu()), str(run.matmul_precision)
    peak = peak_flops(gpu.name or "", str(run.precision), matmul)
    dtype = f"unknown: the datasheet of {gpu.name or 'this device'} in {run.precision} is not known"
    if peak:
        dtype = f"{peak.dtype}: precision {run.precision} with float32 matmul {matmul} runs matrix products in it"
    rates, measured = list[Rate](), "none of this GPU beside the results: `lmbench ceiling` measures it"
    if ceiling is not None:
        path, record = ceiling
        rates, device = record.rates, record.environment.gpu
        measured = f"{path}: {device.name or 'a CPU'}, power limit {whole(device.power_limit_w)} W"
    columns = ["name", "seconds", "work", "unit", "reason"]
    rows = pd.DataFrame(_attained(findings, run), columns=columns).astype({"seconds": float, "work": float})
    kinds = ["copy" if unit == "TB" else peak.dtype if peak else "" for unit in rows.unit]
    limits: dict[str, dict[str, float | None]] = {
        "datasheet": {kind: datasheet_rate(gpu.name, kind) for kind in kinds},
        "burst": {rate.name: rate.burst_per_s for rate in rates},
        "sustained": {rate.name: rate.sustained_per_s for rate in rates},
    }
    rows["per_s"] = rows.work / rows.seconds
    for name, limit in limits.items():
        rows[f"{name}_per_s"] = pd.Series([limit.get(kind) for kind in kinds], dtype=float)
        rows[f"{name}_fraction"] = rows.per_s / rows[f"{name}_per_s"]
    shown = records(rows)
    unknown = [Line("", f"no figure for {row['name']}: {row['reason']}") for row in shown if row["reason"]]
    notes = [Line("peak", dtype), *unknown, Line("ceiling", measured)]
    figures = {"roofline": {"matmul_dtype": dtype, "ceiling": measured, "rows": shown}}
    return Answer(tables=[table("roofline", rows)], notes=notes, figures=figures)


def _attained(findings: Findings, run: RunRecord) -> list[tuple[str, float | None, float | None, str, str]]:
    """Matrix products of forward, backward and both, fused attention apart; the optimizer; norms. Each with the time of
    its kernels, its work in FLOPs or bytes, None where a reason says why, their unit and that reason."""
    work, flops, window, model = findings.work, run.flops, run.window, run.model
    rows = list[tuple[str, float | None, float | None, str, str]]()

    def add(name: str, seconds: float, amount: float, unit: str, *unknown: tuple[object, str]) -> None:
        """A kind of work, which is not known for the first of the reasons that holds."""
        reason = next((text for holds, text in unknown if holds), "")
        rows.append((name, seconds or None, None if reason else amount, unit, reason))

    tokens = window.tokens / window.steps / (run.world_size or 1) if window.tokens and window.steps else 0.0
    full, causal = flops.per_token_flops or 0.0, flops.causal_per_token_flops or 0.0
    # Parameters and the residual stream have one type: under mixed precisions autocast converts at each product.
    precision = find_precision(str(run.precision))
    weight_bytes = precision.weight_bytes if precision is not None else 4
    phases: tuple[Phase, ...] = ("forward", "backward")
    present = [phase for phase in phases if phase in work.phases]
    for phase in present:
        kinds_s = work.seconds("kind", phase)
        seconds, fused_s = kinds_s.get(MATMUL, 0.0), kinds_s.get("attention", 0.0)
        # Backward has twice forward's products; fused attention leaves the masked half out.
        count = (2 if phase == "backward" else 1) * tokens / (flops.multiplier or 1)
        attention = 2 * (full - causal) * count if fused_s else 0.0
        unknown = [
            (not full or not flops.multiplier, flops.reason or "the module does not tell its FLOPs"),
            (not causal, "its operators' FLOPs are not those of matrix products alone"),
            (not tokens, window.tokens_reason or "the number of tokens is not known"),
            (phase == "backward" and flops.recomputed_per_token_flops,
             "activation checkpointing computes a part of the forward again in it"),
        ]  # fmt: skip
        no_kernels = (not seconds, "no kernel is a matrix product")
        add(f"matmul {phase}", seconds, full * count - attention, "TFLOP", *unknown, no_kernels)
        if fused_s:
            add(f"attention {phase}", fused_s, attention / 2, "TFLOP", *unknown)
    products = [(seconds, amount) for name, seconds, amount, *_ in rows if name.startswith("matmul") and amount]
    if len(products) > 1:
        seconds, amount = (sum(filter(None, column)) for column in zip(*products, strict=True))
        add("matmul step", seconds, amount, "TFLOP")
    if "optimizer" in work.phases:
        optimizer = model.optimizer or "this optimizer"
        moved = (model.trainable_parameter_count or 0) * (ADAMW_READS + ADAMW_WRITES) * weight_bytes
        foreign = (not optimizer.startswith("AdamW") or not moved, f"reads and writes of {optimizer} are unknown")
        add("optimizer", work.total_s("optimizer"), moved, "TB", foreign)
    for phase in present:
        parts_s = work.seconds("part", phase)
        is_fused = any("norm" in part.split("+") for part in parts_s if part != "norm")
        seconds = 0.0 if is_fused else parts_s.get("norm", 0.0)
        # Two in each block and one before the head.
        amount = NORM_TENSORS[phase] * (2 * (model.num_layers or 0) + 1) * tokens * (model.d_model or 0) * weight_bytes
        unknown = [
            (None in (model.num_layers, model.d_model), "the model's norms are not known"),
            (not seconds or not tokens, "no kernel does norms alone: they are fused with other parts, or none ran"),
        ]
        add(f"norm {phase}", seconds, amount, "TB", *unknown)
    return rows
