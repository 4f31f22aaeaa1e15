"""What a device attains at best, as `lmbench ceiling` stores it: the record, the one that belongs to a run, and the
table beside the datasheet."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from lmbench.errors import UsageError
from lmbench.files import Unreadable, read_file
from lmbench.hardware import find_gpu
from lmbench.records.codec import DamagedRecord, as_dict, decode
from lmbench.records.environment import Environment, Gpu
from lmbench.records.run import RunRecord
from lmbench.records.store import write_whole
from lmbench.report.screen import make_console, print_line, print_table
from lmbench.report.table import Entry, Table, fact, numbers, words
from lmbench.report.units import MISSING, percent

_PATTERN = "ceiling_*.json"
#: A run of a sweep lies three folders below the results.
_LEVELS = 3
#: A record has 4 kB.
_MAX_BYTES = 2**20
_TERA = 1e12


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
    """A record of a device's ceiling, and what to know of it."""

    path: Path
    record: CeilingRecord
    note: str = ""

    def rates(self, name: str) -> tuple[float | None, float | None]:
        """Burst and sustained rate of one kind of work (`bf16`, `copy`, ...), None where it was not measured."""
        for rate in self.record.rates:
            if rate.name == name:
                return rate.burst_per_s, rate.sustained_per_s
        return None, None

    def as_dict(self) -> dict[str, Any]:
        return {"path": str(self.path), "measured_at": self.record.measured_at, "note": self.note}


def find_ceiling(folder: Path, run: RunRecord | None, given: Path | None = None) -> Ceiling | None:
    """The ceiling of a run's GPU: the file that is given, else the newest of that GPU above the run's folder.

    Raises UsageError for a given file that is no record of a ceiling.
    """
    gpu = run.environment.gpu if run and run.environment else Gpu()
    if given is not None:
        try:
            record = _read(given, follows_links=True)
        except DamagedRecord as error:
            raise UsageError(
                f"--ceiling {str(given)!r} is no record of `lmbench ceiling`: {error}; measure one with it"
            ) from error
        return Ceiling(given, record, _note(record.environment.gpu, gpu))
    if gpu.name is None:
        return None
    found = []
    for level in list(folder.absolute().parents)[:_LEVELS]:
        for path in sorted(level.glob(_PATTERN)):
            try:
                record = _read(path)
            except DamagedRecord:
                continue
            if record.environment.gpu.name == gpu.name:
                found.append(Ceiling(path, record, _note(record.environment.gpu, gpu)))
        if found:
            break
    return max(found, key=lambda one: one.record.measured_at, default=None)


def _read(path: Path, follows_links: bool = False) -> CeilingRecord:
    try:
        return decode(read_file(path, _MAX_BYTES, follows_links), CeilingRecord)
    except Unreadable as error:
        raise DamagedRecord(str(error)) from error


def _note(measured: Gpu, of_run: Gpu) -> str:
    """How the device that was measured differs from the run's."""
    if measured.name != of_run.name:
        return f"measured on {measured.name or 'a CPU'}, the run was on {of_run.name or 'a CPU'}"
    mine, theirs = of_run.power_limit_w, measured.power_limit_w
    if mine is not None and theirs is not None and mine != theirs:
        return f"measured at a power limit of {theirs:.0f} W, the run had {mine:.0f} W"
    return ""


def print_ceiling(record: CeilingRecord, path: Path) -> None:
    """Print the table and where the record lies."""
    console = make_console()
    gpu, host = record.environment.gpu, record.environment.host
    limit = f", power limit {gpu.power_limit_w:.0f} W" if gpu.power_limit_w else ""
    print_line("device", f"{gpu.name or host.cpu_model}{limit}, torch {record.environment.versions.torch}", console)
    print_table(ceiling_table(record), console)
    print_line("result", str(path), console, is_whole=True)


def ceiling_table(record: CeilingRecord) -> Table:
    """A row for each kind of work."""
    gpu = record.environment.gpu.name
    headings = [*words("work"), *numbers("datasheet", "burst", "sustained", "share", "MHz", "W", "capped")]
    first, held_s = record.rates[0], max(rate.seconds for rate in record.rates)
    stretches = "the best of some short stretches"
    if first.bursts is not None and first.burst_s is not None:
        stretches = f"best of {first.bursts} stretches of {first.burst_s * 1e3:.0f} ms"
    caption = (
        f"burst: {stretches}; sustained: {held_s:.1f} s without a pause; share: sustained of the datasheet's; "
        "MHz, W, capped: while sustained"
    )
    return Table("Ceiling", caption, headings, [_row(rate, gpu) for rate in record.rates])


def _row(rate: Rate, gpu: str | None) -> list[Entry]:
    peak = datasheet_rate(gpu, rate.name)
    rates = (peak, rate.burst_per_s, rate.sustained_per_s)
    figures = (
        *(MISSING if value is None else f"{value / _TERA:.3g}" for value in rates),
        percent(rate.sustained_per_s / peak if peak else None),
        MISSING if rate.sm_clock_hz is None else f"{rate.sm_clock_hz / 1e6:.0f}",
        MISSING if rate.mean_power_w is None else f"{rate.mean_power_w:.0f}",
        percent(rate.power_capped_fraction),
    )
    return [fact(f"{rate.name} {'TB/s' if rate.name == 'copy' else 'TFLOP/s'}"), *map(Entry, figures)]


def datasheet_rate(gpu_name: str | None, name: str) -> float | None:
    """The datasheet's rate for one kind of work, FLOP/s or byte/s; None for a device that is not in the table."""
    gpu = find_gpu(gpu_name or "")
    if gpu is None:
        return None
    rate: float | None = gpu.memory_bytes_per_s if name == "copy" else getattr(gpu, f"{name}_flops_per_s")
    return rate
