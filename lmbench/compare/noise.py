"""The A/A noise floor: the change that a configuration shows against itself when its repeats are split in two.

`noise_floors` works floors out of results and keeps them beside these; `read_floors` reads them for a comparison.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from msgspec import Meta, Struct
from msgspec.structs import astuple

from lmbench.compare.comparability import busy_reason, differences_within, facts_of
from lmbench.compare.sides import (
    METRICS,
    STEP,
    home_of,
    join_cells,
    read_side,
    split_usable,
)
from lmbench.errors import UsageError, tell
from lmbench.records.codec import DamagedRecord, indented_json, read_packed
from lmbench.records.load import StoredRun
from lmbench.records.run import RunRecord
from lmbench.records.settings import as_text, settings
from lmbench.records.statistics import (
    detectable_fraction,
    logs_of,
    ratio_from,
    std_of_logs,
)
from lmbench.records.store import write_or_refuse
from lmbench.records.vocabulary import MIN_NOISE_REPEATS, MIN_REPEATS
from lmbench.report.answer import Answer, Column, Line, Table
from lmbench.report.facts import describe, is_notable
from lmbench.report.frame import frame_of
from lmbench.report.units import COUNT, Unit, percent_short

NOISE_FILE = "noise.json"


class Noise(Struct, frozen=True):
    """The noise of one figure of one configuration over its repeats.

    `std_fraction` is the standard deviation between processes, of logarithms. `drift_fraction` is the change from the
    earlier half of the repeats to the later half. `floor_fraction` is the larger of the drift's size and the change
    that two random halves stay below in 95 of 100 cases, 1.96 standard errors.
    """

    n: int
    std_fraction: float
    drift_fraction: float
    floor_fraction: Annotated[float, Meta(ge=0)]


class NoiseEntry(Struct, frozen=True):
    """The floors of one configuration in noise.json, by the name of the metric, with the `noise_facts` of its runs.

    `days` is on how many days the repeats were measured: from day to day machines drift.
    """

    facts: dict[str, str]
    metrics: dict[str, Noise]
    days: int = 1


class NoiseFile(Struct, frozen=True):
    """The content of noise.json."""

    schema_version: Literal[2]
    entries: list[NoiseEntry]


def measure_noise(values: Sequence[float]) -> Noise:
    """The noise of the values of at least six processes, in the order of measurement."""
    logs, half = logs_of(values), len(values) // 2
    std, drift = std_of_logs(logs) or 0.0, float(logs[-half:].mean() - logs[:half].mean())
    floor = max(1.96 * std * math.sqrt(2 / half), abs(drift))
    return Noise(len(values), std, ratio_from(drift) - 1, ratio_from(floor) - 1)


def noise_facts(record: RunRecord) -> dict[str, str]:
    """The host, device and settings of a run, to which its floor belongs. Not its code, since comparisons change it."""
    environment = record.environment
    known = {"host": environment.host.hostname, "device": environment.device_name}
    facts = known | dict(sorted(settings(record).items()))
    return {name: as_text(value) for name, value in facts.items()}


def noise_floors(results: Sequence[str], home: Path | None = None) -> Answer:
    """The floors of results with repeats, stored in `home`, or else in the closest folder above the results.

    Raises:
        UsageError: one of `results` names no result, no configuration has enough repeats, or the file of floors cannot
            be read or written.
    """
    runs = list({run.path: run for name in results for run in read_side(name).runs}.values())
    groups: dict[tuple[str, str], list[StoredRun]] = {}
    for name, (repeats, _) in join_cells(runs, []).items():
        for run in repeats:
            groups.setdefault((name, as_text(noise_facts(run.record))), []).append(run)
    entries, problems, firsts = list[tuple[str, NoiseEntry]](), list[Line](), list[StoredRun]()
    for (name, _), group in groups.items():
        usable, left_out = split_usable(group, takes_failed=False)
        if len(usable) < MIN_NOISE_REPEATS:
            problem = f"repeats that count: {len(usable)}; a noise floor takes {MIN_NOISE_REPEATS}"
            problem += "".join(f"; one does not: {run.reason}" for run in left_out[:1])
        elif mixed := differences_within(usable, facts_of(usable)):
            problem = f"not repeats of one thing: {mixed[0]}"
        else:
            noises = {metric.name: measure_noise(values) for metric in METRICS if (values := metric.of_all(usable))}
            days = {(run.record.started_at or "")[:10] for run in usable}
            entries.append((name, NoiseEntry(noise_facts(usable[0].record), noises, len(days))))
            firsts.append(usable[0])
            if reason := busy_reason({"repeats": usable}):
                problems.append(Line("WARN", f"{name}: {reason}".removeprefix(": ")))
            continue
        problems.append(Line("no floor", f"{name or 'the configuration'}: {problem}"))
    if not entries:
        raise UsageError("; ".join(line.text for line in problems[:3]))
    path = store_noise(home or home_of(runs), [entry for _, entry in entries])
    tell(f"noise: stored in {path}")
    shared = frame_of(firsts, None).shared()
    names = [name for name, value in shared.items() if name in ("gpu", "host") or is_notable(name, value)]
    return _answer(entries, [Line("holds for", f"{describe(shared, names)}; not for other settings"), *problems])


def store_noise(folder: Path, entries: Sequence[NoiseEntry]) -> Path:
    """Add entries to noise.json in a folder, replacing entries with the same facts; returns the file's path.

    Entries of two commits have the same facts, for example. Of several such entries, the one with the largest floor of
    the step time is stored.

    Raises UsageError where the file cannot be read or written.
    """
    path = folder / NOISE_FILE
    ordered = sorted(entries, key=lambda entry: entry.metrics[STEP.name].floor_fraction)
    kept = {as_text(entry.facts): entry for entry in [*read_floors(folder), *ordered]}
    write_or_refuse(path, indented_json(NoiseFile(2, list(kept.values()))), "--json prints the floors")
    return path


def read_floors(folder: Path) -> list[NoiseEntry]:
    """The entries of a folder's noise.json. Raises UsageError where the file cannot be read."""
    path = folder / NOISE_FILE
    if not path.exists():
        return []
    try:
        return read_packed(path, NoiseFile).entries
    except DamagedRecord as error:
        raise UsageError(f"{str(path)!r} cannot be read ({error}); remove it and run `lmbench noise` again") from None


_PERCENT = Unit(lambda fraction: f"{fraction * 100:.2f}", "%", 100.0)
_COLUMNS = (
    Column("cell"),
    Column("repeats", COUNT),
    Column("spread", _PERCENT, "std_fraction"),
    Column("drift", _PERCENT, "drift_fraction"),
    Column("floor", _PERCENT, "floor_fraction"),
)
_MEANINGS = (
    Line("spread", "standard deviation between processes"),
    Line("drift", "later half of the repeats against the earlier one"),
    Line("floor", "two random halves differ by less in 95 of 100 cases; the drift where that is more"),
    Line("", "compare calls nothing below it faster or slower"),
)


def _answer(entries: Sequence[tuple[str, NoiseEntry]], notes: Sequence[Line]) -> Answer:
    """One table of all floors by the name of the cell, what they hold for, and the reasons why some cells have none."""
    noises = [entry.metrics[STEP.name] for _, entry in entries]
    rows = [[name or "(one)", *astuple(noise)] for (name, _), noise in zip(entries, noises, strict=True)]
    limits = [max(noise.floor_fraction, detectable_fraction(noise.std_fraction, MIN_REPEATS)) for noise in noises]
    ends = dict.fromkeys(map(percent_short, (min(limits), max(limits))))
    conclusion = f"changes under {' to '.join(ends)} cannot be detected here with {MIN_REPEATS} repeats"
    return Answer(
        tables=[Table("noise", "Step time against itself", _COLUMNS, rows)],
        notes=[*_MEANINGS, *notes, Line("so", conclusion)],
        figures={"schema_version": 2, "entries": [entry for _, entry in entries]},
    )
