"""What a device attains at best, as `lmbench ceiling` stores it: the record, the one that belongs to a run, and the
table beside the datasheet."""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from lmbench.errors import UsageError
from lmbench.hardware import find_gpu
from lmbench.kernels.tables import SHARE, row, table_of
from lmbench.records.codec import DamagedRecord, as_dict, read_packed
from lmbench.records.environment import Environment, Gpu
from lmbench.records.run import RunRecord
from lmbench.records.store import write_whole
from lmbench.report.answer import Answer, Line
from lmbench.report.units import COUNT, WORDS, Unit, milliseconds, whole

#: A run of a sweep lies three folders below the results.
_LEVELS = 3


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


@dataclass(frozen=True)
class Ceiling:
    """A record of a device's ceiling, and how that device differs from the run's."""

    path: Path
    record: CeilingRecord
    note: str = ""

    def rates(self, name: str) -> tuple[float | None, float | None]:
        """Burst and sustained rate of one kind of work (`bf16`, `copy`, ...), None where it was not measured."""
        known = {rate.name: (rate.burst_per_s, rate.sustained_per_s) for rate in self.record.rates}
        return known.get(name, (None, None))


def find_ceiling(folder: Path, run: RunRecord | None, path: Path | None = None) -> Ceiling | None:
    """The ceiling of a run's GPU: the file that is named, else the newest of that GPU above the run's folder.

    Raises UsageError for a named file that is no record of a ceiling.
    """
    gpu = run.environment.gpu if run and run.environment else Gpu()
    if path is not None:
        try:
            record = read_packed(path.resolve(), CeilingRecord)
        except DamagedRecord as error:
            reason = f"is no record of `lmbench ceiling`: {error}; measure one with it"
            raise UsageError(f"--ceiling {str(path)!r} {reason}") from error
        return Ceiling(path, record, _note(record.environment.gpu, gpu))
    for level in folder.absolute().parents[:_LEVELS] if gpu.name else ():
        records = {}
        for file in sorted(level.glob("ceiling_*.json")):
            with suppress(DamagedRecord):
                records[file] = read_packed(file, CeilingRecord)
        of_gpu = [file for file, record in records.items() if record.environment.gpu.name == gpu.name]
        if of_gpu:
            newest = max(of_gpu, key=lambda file: records[file].measured_at)
            return Ceiling(newest, records[newest], _note(records[newest].environment.gpu, gpu))
    return None


def _note(measured: Gpu, gpu: Gpu) -> str:
    """How the device that was measured differs from the run's."""
    if measured.name != gpu.name:
        return f"measured on {measured.name or 'a CPU'}, the run was on {gpu.name or 'a CPU'}"
    if None not in (limits := (measured.power_limit_w, gpu.power_limit_w)) and limits[0] != limits[1]:
        return f"measured at a power limit of {limits[0]:.0f} W, the run had {limits[1]:.0f} W"
    return ""


def ceiling_answer(record: CeilingRecord, path: Path) -> Answer:
    """A row for each kind of work beside the datasheet, and where the record lies."""
    gpu, host, rates = record.environment.gpu, record.environment.host, record.rates
    limit = f", power limit {gpu.power_limit_w:.0f} W" if gpu.power_limit_w else ""
    caption = (
        f"burst: best of {whole(rates[0].bursts)} stretches of {milliseconds(rates[0].burst_s)} ms; sustained: "
        f"{max(rate.seconds for rate in rates):.1f} s without a pause; share: sustained of the datasheet's; MHz, W, "
        "capped: while sustained"
    )
    items = []
    for rate in rates:
        peak = datasheet_rate(gpu.name, rate.name)
        label = f"{rate.name} {'TB/s' if rate.name == 'copy' else 'TFLOP/s'}"
        items.append(row(rate, label=label, sheet=peak, share_fraction=rate.sustained_per_s / peak if peak else None))
    tera = Unit("", 1e-12, lambda value: f"{value / 1e12:.3g}")
    table = table_of(
        "ceiling", "Ceiling", caption, items, ("work", WORDS, "label"), ("datasheet", tera, "sheet"),
        ("burst", tera, "burst_per_s"), ("sustained", tera, "sustained_per_s"), ("share", SHARE, "share_fraction"),
        ("MHz", Unit("", 1e-6, lambda value: f"{value / 1e6:.0f}"), "sm_clock_hz"), ("W", COUNT, "mean_power_w"),
        ("capped", SHARE, "power_capped_fraction"),
    )  # fmt: skip
    device = f"{gpu.name or host.cpu_model}{limit}, torch {record.environment.versions.torch}"
    return Answer(
        [Line("device", device)], [table], [Line("result", str(path), is_whole=True)], figures=as_dict(record)
    )


def datasheet_rate(gpu_name: str | None, name: str) -> float | None:
    """The datasheet's rate for one kind of work, FLOP/s or byte/s; None for a device that is not in the table."""
    gpu = find_gpu(gpu_name or "")
    if gpu is None:
        return None
    return gpu.memory_bytes_per_s if name == "copy" else gpu.flops_per_s(name)
