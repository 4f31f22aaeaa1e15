"""What a device attains at best, as `lmbench ceiling` stores it: the record, the one that belongs to a run, and the
table beside the datasheet."""

from __future__ import annotations

import json
import re
import sys
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct

from lmbench.errors import UsageError
from lmbench.files import Unreadable, read_file
from lmbench.hardware import find_gpu
from lmbench.kernels.tables import SHARE, row, table_of
from lmbench.records.codec import DamagedRecord, as_dict, decode
from lmbench.records.environment import Environment, Gpu
from lmbench.records.run import RunRecord
from lmbench.records.store import write_whole
from lmbench.report.answer import Answer, Line
from lmbench.report.units import WORDS, Unit

#: A run of a sweep lies three folders below the results.
_LEVELS = 3
#: A record has 4 kB.
_MAX_BYTES = 2**20


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

    def as_json(self, indent: int | None = 1) -> str:
        return json.dumps(as_dict(self), indent=indent, allow_nan=False)


def store_ceiling(record: CeilingRecord, folder: Path) -> Path:
    """Write the record where `lmbench kernels` looks for it. Raises UsageError where it cannot be written."""
    name = record.environment.gpu.name or record.environment.host.cpu_model or "cpu"
    path = folder / f"ceiling_{re.sub(r'[^A-Za-z0-9]+', '_', name).strip('_')}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, record.as_json() + "\n")
    except OSError as error:
        # What was measured is not lost with the disk.
        print(record.as_json(indent=None), file=sys.stderr)
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
            record = _read(path, follows_links=True)
        except DamagedRecord as error:
            reason = f"is no record of `lmbench ceiling`: {error}; measure one with it"
            raise UsageError(f"--ceiling {str(path)!r} {reason}") from error
        return Ceiling(path, record, _note(record.environment.gpu, gpu))
    for level in list(folder.absolute().parents)[:_LEVELS] if gpu.name else []:
        ceilings = []
        for file in sorted(level.glob("ceiling_*.json")):
            with suppress(DamagedRecord):
                ceilings.append(Ceiling(file, _read(file), ""))
        of_gpu = [each for each in ceilings if each.record.environment.gpu.name == gpu.name]
        if of_gpu:
            newest = max(of_gpu, key=lambda each: each.record.measured_at)
            return replace(newest, note=_note(newest.record.environment.gpu, gpu))
    return None


def _read(path: Path, follows_links: bool = False) -> CeilingRecord:
    try:
        return decode(read_file(path, _MAX_BYTES, follows_links), CeilingRecord)
    except Unreadable as error:
        raise DamagedRecord(str(error)) from error


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
    stretches = "the best of some short stretches"
    if rates[0].bursts is not None and rates[0].burst_s is not None:
        stretches = f"best of {rates[0].bursts} stretches of {rates[0].burst_s * 1e3:.0f} ms"
    caption = (
        f"burst: {stretches}; sustained: {max(rate.seconds for rate in rates):.1f} s without a pause; share: "
        "sustained of the datasheet's; MHz, W, capped: while sustained"
    )
    items = []
    for rate in rates:
        peak = datasheet_rate(gpu.name, rate.name)
        label = f"{rate.name} {'TB/s' if rate.name == 'copy' else 'TFLOP/s'}"
        items.append(row(rate, label=label, sheet=peak, share_fraction=rate.sustained_per_s / peak if peak else None))
    tera, whole = Unit("", 1e-12, lambda value: f"{value / 1e12:.3g}"), Unit("", 1.0, "{:.0f}".format)
    table = table_of(
        "ceiling", "Ceiling", caption, items, ("work", WORDS, "label"), ("datasheet", tera, "sheet"),
        ("burst", tera, "burst_per_s"), ("sustained", tera, "sustained_per_s"), ("share", SHARE, "share_fraction"),
        ("MHz", Unit("", 1e-6, lambda value: f"{value / 1e6:.0f}"), "sm_clock_hz"), ("W", whole, "mean_power_w"),
        ("capped", SHARE, "power_capped_fraction"),
    )  # fmt: skip
    device = f"{gpu.name or host.cpu_model}{limit}, torch {record.environment.versions.torch}"
    result = Line("result", str(path), is_whole=True)
    return Answer([Line("device", device)], [table], [result], figures=as_dict(record))


def datasheet_rate(gpu_name: str | None, name: str) -> float | None:
    """The datasheet's rate for one kind of work, FLOP/s or byte/s; None for a device that is not in the table."""
    gpu = find_gpu(gpu_name or "")
    if gpu is None:
        return None
    return gpu.memory_bytes_per_s if name == "copy" else gpu.flops_per_s(name)
