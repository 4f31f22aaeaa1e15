"""One run as a report needs it: its facts, its record without the bulk, and how it ended."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmbench.kernels.shown.summary import sound_kernels
from lmbench.records.encoding import decode
from lmbench.records.load import Run
from lmbench.records.paths import lookup, number
from lmbench.records.store import STEPS_FILE
from lmbench.records.vocabulary import Record
from lmbench.report.facts import Value, other_axes, other_settings, planned, read_facts

#: Parts of run.json that no table shows; left out, so that thousands of runs fit into memory.
_BULK = ("argv", "repairs", "device_state")
_STATISTICS = ("n", "mean_s", "std_s", "median_s", "min_s", "max_s", "p5_s", "p95_s", "cv_fraction", "share_fraction")


@dataclass(frozen=True)
class Sample:
    """One run.

    `record` is run.json without its bulk, {} where it is damaged. `facts` tell its cell, `settings` are the options
    that no fact stands for. `cell` and `repeat` say its place in a sweep, None for a run of its own.
    """

    path: Path
    outcome: str
    record: Record
    facts: Mapping[str, Value]
    settings: Mapping[str, Value]
    gpu: str | None
    cell: str | None = None
    repeat: int | None = None
    damage: str | None = None
    guards: tuple[Record, ...] = field(default=())

    @property
    def run_id(self) -> str:
        return self.path.name

    @property
    def is_timing(self) -> bool:
        """Whether its step times are the step's own: not profiled, not taken apart by synchronizes."""
        is_pass = lookup(self.record, "sweep.axes.pass") not in (None, "timing")
        return not (is_pass or self.record.get("is_profiled") or self.record.get("clock") == "sync")

    @property
    def is_profiled(self) -> bool:
        """Whether it is a profiled run, or was to be one where it ended before it could say so."""
        return bool(self.record.get("is_profiled") or planned(self.record, "trainer.profiler"))

    @property
    def phase(self) -> str | None:
        """The phase in which it ended, where it did not end well."""
        phase = lookup(self.record, "error.phase")
        return str(phase) if phase else None

    def number(self, path: str) -> float | None:
        """A number of its record by its dotted path."""
        return number(self.record, path)

    def first_steps(self, count: int) -> list[Record]:
        """Its first step records, warm-up included; read from the disk now, and no further than asked."""
        records: list[Record] = []
        try:
            with (self.path / STEPS_FILE).open("rb") as file:
                for line in file:
                    if len(records) == count:
                        break
                    records.append(decode(line))
        except (OSError, ValueError):
            # What a torn or missing file still tells is before this.
            pass
        return records


def make_sample(loaded: Run, place: Mapping[str, Any] | None) -> Sample:
    """A run as it was read.

    `place` is its place in a sweep by the plan (`cell`, `repeat`, `axes`, `options`), {} if unknown, None if it belongs
    to no sweep.
    """
    run = loaded.run
    own = {key: value for key, value in (run.get("sweep") or {}).items() if value is not None}
    sweep = {**(place or {}), **own}
    if sweep:
        run["sweep"] = sweep
    facts = read_facts(run)
    if place is not None:
        facts.update(other_axes(run))
    return Sample(
        path=loaded.path,
        outcome=loaded.outcome,
        facts=facts,
        settings=other_settings(run) if place is None else {},
        gpu=_device(run),
        cell=str(sweep["cell"]) if place is not None and "cell" in sweep else None,
        repeat=sweep.get("repeat"),
        damage=loaded.damage,
        guards=tuple(guard for guard in run.get("guards") or () if guard.get("status") in ("fail", "warn")),
        record=_slim(run),
    )


def _device(run: Record) -> str | None:
    """The GPU's name, or the processor's where the run was on it; None where it ended before it could look."""
    gpu = lookup(run, "environment.gpu.name")
    if gpu:
        return str(gpu)
    if run.get("device_type") == "cpu" and run.get("environment"):
        model = lookup(run, "environment.host.cpu_model")
        return f"CPU ({re.sub(' +', ' ', str(model))})" if model else "CPU"
    return None


def _slim(run: Record) -> Record:
    kept = {key: value for key, value in run.items() if key not in (*_BULK, "guards", "config", "environment")}
    kept["seeds"] = (lookup(run, "config.seed_everything"), lookup(run, "config.data.seed"))
    environment = run.get("environment") or {}
    kept["environment"] = {key: environment.get(key) for key in ("versions", "gpu", "code")}
    kept["environment"]["host"] = {"hostname": lookup(run, "environment.host.hostname")}
    if run.get("kernels") is not None:
        kept["kernels"] = sound_kernels(run["kernels"])
    for phase, summary in (run.get("phases") or {}).items():
        kept["phases"][phase] = {name: summary.get(name) for name in _STATISTICS}
    return kept
