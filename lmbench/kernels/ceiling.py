"""The best rates of a device, as `lmbench ceiling` stores them; and the roofline: how much of these rates, and of the
datasheet's, a run's matrix products and optimizer attain.

The roofline counts the least work that the mathematics needs: model FLOPs, and every tensor read and written once.
Kernels that recompute, or read a tensor twice, attain less. Tensors of a few MB may stay in the device's cache, and
their kernels attain more.
"""

from __future__ import annotations

import re
import sys
from itertools import chain
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import pandas as pd
from msgspec import Meta, Struct
from msgspec.structs import replace

from lmbench.errors import UsageError
from lmbench.kernels.findings import KernelFindings
from lmbench.kernels.names import MATMUL
from lmbench.precision import find_gpu, find_precision, peak_flops
from lmbench.records.codec import as_dict, find_packed, indented_json
from lmbench.records.run import RunEnvironment, RunRecord
from lmbench.records.store import write_or_refuse
from lmbench.report.answer import Answer, Line
from lmbench.report.described import table
from lmbench.report.units import whole

#: How many folders above a run `find_ceiling` searches: a sweep's run lies three folders below the results.
_LEVELS = 3
#: Tensors of the parameters' size that one AdamW step reads (parameters, gradients, both moments) and writes (all but
#: the gradients). torch.optim.AdamW keeps the moments in the parameters' type.
ADAMW_READS, ADAMW_WRITES = 4, 3
#: The bytes of measured messages: the larger of what a rank sends and receives.
MESSAGES_BYTES = (10**6, 10**7, 10**8, 10**9)


class Rate(Struct, kw_only=True):
    """The rate of one kind of work: in byte/s for `copy`, in FLOP/s for matrix products.

    `burst_per_s` is the best of several short stretches. `sustained_per_s` is the mean over one stretch of `seconds`;
    mean power, power-capped share and the clock at the end are those of this stretch.
    """

    name: str
    burst_per_s: float
    sustained_per_s: float
    seconds: float
    sm_clock_hz: float | None = None
    mean_power_w: float | None = None
    power_capped_fraction: float | None = None


class CollectiveRate(Struct, kw_only=True):
    """How fast ranks of one machine communicate: the best of three stretches of collectives, on the slowest rank.

    Attributes:
        collective: its kind, such as `all-reduce`.
        ranks: processes that take part, each with a GPU or on the CPU.
        message_bytes: the larger of what a rank sends and receives, as nccl-tests count sizes.
        seconds: one collective.
        bus_bytes_per_s: as `communication.CommunicationKernel` defines it, after nccl-tests.
        compute_s: matrix products that take about as long as the collective.
        together_s: the collective and these products beside it, until both have ended.
    """

    collective: str
    ranks: int
    message_bytes: int
    seconds: float
    bus_bytes_per_s: float
    compute_s: float
    together_s: float


class CeilingRecord(Struct):
    """A device's rates, where and when they were measured, and the collectives of ranks on this machine."""

    schema_version: Literal[1]
    measured_at: str
    environment: RunEnvironment
    rates: Annotated[list[Rate], Meta(min_length=1)]
    collectives: list[CollectiveRate] = []

    def bus_bytes_per_s(self, collective: str, ranks: int, message_bytes: float) -> float | None:
        """The bus bandwidth measured for a collective, interpolated between sizes; None if none was measured.

        It is that of the nearest number of ranks, since bus bandwidth is comparable between them.
        """
        alike = [rate for rate in self.collectives if rate.collective == collective]
        if not alike:
            return None
        nearest = min((rate.ranks for rate in alike), key=lambda count: abs(count - ranks))
        sizes, rates = zip(
            *[(rate.message_bytes, rate.bus_bytes_per_s) for rate in alike if rate.ranks == nearest], strict=True
        )
        return float(np.interp(np.log(message_bytes), np.log(sizes), rates))


def store_ceiling(record: CeilingRecord, folder: Path) -> Path:
    """Write the record where `lmbench kernels` looks for it. Raises UsageError where it cannot be written.

    A record without collectives keeps those of the file and the same versions: `lmbench ceiling RUN` needs them.
    """
    path = folder / f"ceiling_{re.sub(r'[^A-Za-z0-9]+', '_', _device(record.environment)).strip('_')}.json"
    before = find_packed(path, CeilingRecord)
    if before and not record.collectives and before.environment.versions == record.environment.versions:
        record = replace(record, collectives=before.collectives)
    text = indented_json(record)
    try:
        write_or_refuse(path, text, "the record is above")
    except UsageError:
        # Print the record, so that a full or read-only disk does not lose the measurement.
        print(text, file=sys.stderr)
        raise
    return path


def _device(environment: RunEnvironment) -> str:
    return environment.device_name or "cpu"


def find_ceiling(folder: Path, environment: RunEnvironment) -> tuple[Path, CeilingRecord] | None:
    """The newest ceiling of a run's device in the folders above the run's, and its file; None without such a record."""
    ceilings = []
    for file in chain.from_iterable(level.glob("ceiling_*.json") for level in folder.absolute().parents[:_LEVELS]):
        record = find_packed(file, CeilingRecord)
        if record and _device(record.environment) == _device(environment):
            ceilings.append((file, record))
    return max(ceilings, key=lambda entry: entry[1].measured_at, default=None)


def attained_bus(findings: KernelFindings, rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of collectives with the share `bus_fraction` of the bus bandwidth that this machine's ceiling has for them.

    Without a ceiling of collectives beside the run, the rows stay as they are.

    Args:
        findings: those of one rank.
        rows: `collective`, `calls`, `message_bytes` of all calls, and `bus_bytes_per_s`.
    """
    trace = findings.trace
    found, ranks = find_ceiling(trace.path.parent, trace.record.environment), trace.events.distributed.world_size or 1
    if found is None or not found[1].collectives:
        return rows
    attainable = [
        found[1].bus_bytes_per_s(row.collective, ranks, row.message_bytes / row.calls) for row in rows.itertuples()
    ]
    return rows.assign(bus_fraction=rows.bus_bytes_per_s / pd.Series(attainable, rows.index, dtype=float))


def ceiling_answer(record: CeilingRecord, path: Path) -> Answer:
    """The answer of `lmbench ceiling`: each kind of work beside its datasheet rate, and the path of the record."""
    gpu, rates = record.environment.gpu, record.rates
    limit = f", power limit {gpu.power_limit_w:.0f} W" if gpu.power_limit_w else ""
    rows = pd.DataFrame(map(as_dict, rates)).astype(object)
    rows["sheet"] = [datasheet_rate(gpu.name, rate.name) for rate in rates]
    rows["label"] = [f"{rate.name} {'TB/s' if rate.name == 'copy' else 'TFLOP/s'}" for rate in rates]
    rows["share_fraction"] = rows.sustained_per_s / rows.sheet.astype(float)
    seconds = f"{max(rate.seconds for rate in rates):.1f}"
    tables, notes = [table("kernels/ceiling", rows, seconds=seconds)], [Line("result", str(path), is_whole=True)]
    if record.collectives:
        collectives = pd.DataFrame(map(as_dict, record.collectives))
        collectives["algorithm_bytes_per_s"] = collectives.message_bytes / collectives.seconds
        hidden_s = collectives.seconds + collectives.compute_s - collectives.together_s
        # Below 0 they slow each other down. On a busy machine both together may have had the better moment.
        shorter_s = collectives[["seconds", "compute_s"]].min(axis=1)
        collectives["hidden_fraction"] = (hidden_s / shorter_s).clip(upper=1.0)
        tables.append(table("kernels/measured_collectives", collectives))
        largest_bytes = collectives.groupby(["collective", "ranks"]).message_bytes.max()
        if largest_bytes.min() < 0.9 * MESSAGES_BYTES[-1]:
            notes.append(Line("left out", "larger messages, which would take longer than --budget allows"))
    device = f"{record.environment.device_name}{limit}, torch {record.environment.versions.torch}"
    return Answer([Line("device", device)], tables, notes, figures=as_dict(record))


def datasheet_rate(gpu_name: str | None, name: str) -> float | None:
    """The datasheet's rate for one kind of work, in FLOP/s or byte/s; None for a device without a known datasheet."""
    gpu = find_gpu(gpu_name or "")
    if gpu is None:
        return None
    return gpu.memory * 1e9 if name == "copy" else gpu.flops_per_s(name)


def roofline(findings: KernelFindings) -> Answer:
    """The roofline table of a trace, with notes on the peak and the ceiling record that it compares with.

    Empty for a trace without kernels or without a run.
    """
    run = findings.run
    if findings.why_no_kernels or run is None:
        return Answer()
    gpu = run.environment.gpu.name
    matmul = str(run.matmul_precision)
    fp8_fraction = (run.flops.fp8_per_token_flops or 0) / (run.flops.per_token_flops or 1)
    peak = peak_flops(gpu or "", str(run.precision), matmul, fp8_fraction)
    sheet, product = {"copy": datasheet_rate(gpu, "copy")}, ""
    peak_text = f"unknown: the datasheet of {gpu or 'this device'} in {run.precision} is not known"
    if peak:
        product, sheet[peak.dtype] = peak.dtype, peak.flops_per_s
        peak_text = f"{product}: precision {run.precision} with float32 matmul {matmul} runs matrix products in it"
    rates, ceiling_text = list[Rate](), "none of this GPU beside the results: `lmbench ceiling` measures it"
    if ceiling := find_ceiling(findings.trace.path.parent, run.environment):
        path, record = ceiling
        rates = record.rates
        ceiling_text = f"{path}: power limit {whole(record.environment.gpu.power_limit_w)} W"
    rows, reasons = _roofline_rows(findings, run)
    rows["per_s"] = rows.work / rows.seconds
    limits: dict[str, dict[str, float | None]] = {
        "datasheet": sheet,
        "burst": {rate.name: rate.burst_per_s for rate in rates},
        "sustained": {rate.name: rate.sustained_per_s for rate in rates},
    }
    for name, limit in limits.items():
        of_row = [limit.get("copy" if unit == "TB" else product) for unit in rows.unit]
        rows[f"{name}_fraction"] = rows.per_s / pd.Series(of_row, dtype=float)
    unknown = [Line("", f"no figure for {name}: {reason}") for name, reason in reasons.items()]
    notes = [Line("peak", peak_text), *unknown, Line("ceiling", ceiling_text)]
    return Answer(tables=[table("kernels/roofline", rows)], notes=notes)


def _roofline_rows(findings: KernelFindings, run: RunRecord) -> tuple[pd.DataFrame, dict[str, str]]:
    """A row for each kind of work, and the reasons why some work is unknown, by `products`, `backward`, `optimizer`.

    Rows are the matrix products and fused attention of forward and backward, and the optimizer. Each has the `seconds`
    of its kernels, the `work` in FLOPs or bytes (missing where it is unknown), and the `unit` that tables show.
    """
    work, flops, window, model = findings.work, run.flops, run.window, run.model
    tokens = (window.step_tokens or 0.0) / run.rank_count
    full = flops.per_token_flops or np.nan
    causal = flops.causal_per_token_flops or np.nan
    # FLOPs per token times this are the FLOPs of one forward pass.
    count = tokens / (flops.multiplier or np.nan) or np.nan
    # Under mixed precision the parameters keep their type: autocast converts them at each product.
    precision = find_precision(str(run.precision))
    weight_bytes = precision.weight_bytes if precision is not None else 4
    moved = (model.trainable_parameter_count or np.nan) * (ADAMW_READS + ADAMW_WRITES) * weight_bytes
    reasons = {}
    # Backward has twice forward's products.
    backward_passes = 2.0
    if not full * causal * count > 0:
        reasons["products"] = flops.reason or window.tokens_reason or "FLOPs of matrix products or tokens are not known"
    if flops.recomputed_per_token_flops:
        reasons["backward"] = "activation checkpointing computes a part of the forward again in it"
        backward_passes = np.nan
    if not (model.optimizer or "").startswith("AdamW") or not moved > 0:
        reasons["optimizer"] = f"reads and writes of {model.optimizer or 'this optimizer'} are unknown"
        moved = np.nan
    rows: list[tuple[str, float | None, float, str]] = []
    for phase, passes in (("forward", 1.0), ("backward", backward_passes)):
        kinds_s = work.seconds("kind", phase)
        # FLOPs of full attention are twice those of the causal half, the only half that fused attention computes.
        fused = 2 * (full - causal) * count * passes if "attention" in kinds_s else 0.0
        rows.append((f"matmul {phase}", kinds_s.get(MATMUL), full * count * passes - fused, "TFLOP"))
        rows.append((f"attention {phase}", kinds_s.get("attention"), fused / 2, "TFLOP"))
    rows.append(("optimizer", work.total_s("optimizer") or None, moved, "TB"))
    frame = pd.DataFrame(rows, columns=["name", "seconds", "work", "unit"]).astype({"seconds": float, "work": float})
    return frame.dropna(subset="seconds").reset_index(drop=True), reasons
