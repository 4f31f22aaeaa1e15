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
from lmbench.hardware import find_gpu, peak_flops
from lmbench.kernels.findings import Findings
from lmbench.kernels.kinds import MATMUL
from lmbench.kernels.tables import Row, table
from lmbench.precision import find_precision
from lmbench.records.codec import DamagedRecord, as_dict, read_packed
from lmbench.records.environment import Environment, Gpu
from lmbench.records.run import RunRecord
from lmbench.records.store import write_whole
from lmbench.records.vocabulary import Phase
from lmbench.report.answer import Answer, Line
from lmbench.report.units import Unit, milliseconds, whole

#: A run of a sweep lies three folders below the results.
_LEVELS = 3
#: Bytes per parameter of one step of AdamW, in multiples of a parameter's size: it reads the parameter, its gradient
#: and both moments (torch.optim.AdamW keeps them in the parameter's type) and writes all but the gradient.
ADAMW_READS, ADAMW_WRITES = 4, 3
#: Tensors of the residual stream's shape that a norm needs. Forward reads its input and writes its output; backward
#: reads input and output's gradient and writes the input's. Weights and row sums are less than a thousandth of it.
NORM_TENSORS: dict[Phase, int] = {"forward": 2, "backward": 3}
_WORDS = {
    "fp32": "fp32: precision 32-true with float32 matmul highest, no TF32",
    "tf32": "tf32: precision 32-true with float32 matmul {matmul}",
    "bf16": "bf16: {precision} runs matrix products in it",
    "fp16": "fp16: {precision} runs matrix products in it",
}
#: TFLOP/s or TB/s, as the row says.
_TERA = Unit("", 1e-12, lambda value: f"{value / 1e12:.3g}")


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
        records = {}
        for file in sorted(level.glob("ceiling_*.json")):
            with suppress(DamagedRecord):
                records[file] = read_packed(file, CeilingRecord)
        of_gpu = [(file, record) for file, record in records.items() if record.environment.gpu.name == gpu]
        if of_gpu:
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
    if gpu is None:
        return None
    return gpu.memory_bytes_per_s if name == "copy" else gpu.flops_per_s(name)


def roofline(findings: Findings, ceiling: tuple[Path, CeilingRecord] | None = None) -> Answer:
    """What the trace's kernels attain: a table, and whose peak and which record of `lmbench ceiling` it is held
    against; nothing of a trace without kernels or without its run."""
    run = findings.run
    if findings.why_no_kernels or run is None:
        return Answer()
    gpu, matmul = (run.environment.gpu if run.environment else Gpu()), str(run.matmul_precision)
    peak = peak_flops(gpu.name or "", str(run.precision), matmul)
    dtype = f"unknown: the datasheet of {gpu.name or 'this device'} in {run.precision} is not known"
    dtype = _WORDS[peak.dtype].format(precision=run.precision, matmul=matmul) if peak else dtype
    rates, measured = {}, "none of this GPU beside the results: `lmbench ceiling` measures it"
    if ceiling is not None:
        path, record = ceiling
        rates = {rate.name: rate for rate in record.rates}
        device = record.environment.gpu
        measured = f"{path}: {device.name or 'a CPU'}, power limit {whole(device.power_limit_w)} W"
    rows = _attained(findings, run)
    for each in rows:
        kind = "copy" if each["unit"] == "TB" else peak.dtype if peak else ""
        rate, per_s = rates.get(kind), each["work"] / each["seconds"] if each["work"] and each["seconds"] else None
        ceilings = {
            "datasheet": datasheet_rate(gpu.name, kind) if kind else None,
            "burst": rate and rate.burst_per_s,
            "sustained": rate and rate.sustained_per_s,
        }
        each |= {"per_s": per_s, **{f"{name}_per_s": value for name, value in ceilings.items()}}
        each |= {f"{name}_fraction": per_s / value if per_s and value else None for name, value in ceilings.items()}
    shown = table("roofline", pd.DataFrame(rows))
    unknown = [Line("", f"no figure for {each['name']}: {each['reason']}") for each in rows if each["reason"]]
    figures = {"matmul_dtype": dtype, "ceiling": measured, "rows": rows}
    notes = [Line("peak", dtype), *unknown, Line("ceiling", measured)]
    return Answer(tables=[shown], notes=notes, figures={"roofline": figures})


def _attained(findings: Findings, run: RunRecord) -> list[Row]:
    """Matrix products of forward, backward and both, fused attention apart; the optimizer; norms. Each with the time of
    its kernels, and its work in FLOPs or bytes, None where a `reason` says why."""
    work, flops, window, model, rows = findings.work, run.flops, run.window, run.model, list[Row]()

    def add(name: str, seconds: float, amount: float, *unknown: tuple[object, str], unit: str = "TFLOP") -> None:
        """A kind of work, which is not known for the first of the reasons that holds."""
        reason = next((text for holds, text in unknown if holds), "")
        known = {"seconds": seconds or None, "work": None if reason else amount}
        rows.append({"name": name, **known, "unit": unit, "reason": reason})

    tokens = window.tokens / window.steps / (run.world_size or 1) if window.tokens and window.steps else 0.0
    full, causal = flops.per_token_flops or 0.0, flops.causal_per_token_flops or 0.0
    no_flops = flops.per_token_flops is None or not flops.multiplier
    for phase in ("forward", "backward"):
        kinds_s = work.seconds("kind", phase)
        seconds, fused_s = kinds_s.get(MATMUL, 0.0), kinds_s.get("attention", 0.0)
        # Backward has twice forward's products; fused attention leaves the masked half out.
        count = (2 if phase == "backward" else 1) * tokens / (flops.multiplier or 1)
        attention = 2 * (full - causal) * count if fused_s else 0.0
        recomputed = phase == "backward" and flops.recomputed_per_token_flops
        unknown = [
            (no_flops, flops.reason or "the module does not tell its FLOPs"),
            (flops.causal_per_token_flops is None, "its operators' FLOPs are not those of matrix products alone"),
            (not tokens, window.tokens_reason or "the number of tokens is not known"),
            (recomputed, "activation checkpointing computes a part of the forward again in it"),
        ]
        if phase in work.phases:
            no_kernels = (not seconds, "no kernel is a matrix product")
            add(f"matmul {phase}", seconds, full * count - attention, *unknown, no_kernels)
        if fused_s:
            add(f"attention {phase}", fused_s, attention / 2, *unknown)
    products = [each for each in rows if each["name"].startswith("matmul") and each["work"]]
    if len(products) > 1:
        add("matmul step", *(sum(each[column] for each in products) for column in ("seconds", "work")))
    # Parameters and the residual stream have one type: under mixed precisions autocast converts at each product.
    precision = find_precision(str(run.precision))
    weight_bytes, optimizer = precision.weight_bytes if precision is not None else 4, model.optimizer or ""
    if "optimizer" in work.phases:
        moved = (model.trainable_parameter_count or 0) * (ADAMW_READS + ADAMW_WRITES) * weight_bytes
        is_foreign = not optimizer.startswith("AdamW") or not moved
        reason = f"reads and writes of {optimizer or 'this optimizer'} are unknown"
        add("optimizer", work.total_s("optimizer"), moved, (is_foreign, reason), unit="TB")
    # Two in each block and one before the head.
    norms = 2 * (model.num_layers or 0) + 1
    for name, tensors in NORM_TENSORS.items():
        seconds = work.seconds("part", name).get("norm", 0.0)
        is_fused = any("+" in part and "norm" in part.split("+") for part in work.seconds("part", name))
        unknown = [
            (None in (model.num_layers, model.d_model), "the model's norms are not known"),
            (is_fused, "fused with other parts: the time of norms alone is unknown"),
            (not seconds or not tokens, "no kernel of a norm alone"),
        ]
        if name in work.phases:
            amount = tensors * norms * tokens * (model.d_model or 0) * weight_bytes
            add(f"norm {name}", 0.0 if is_fused else seconds, amount, *unknown, unit="TB")
    return rows
