"""Cells whose processes are simulated where they would be started: everything else of a sweep is real."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from comparison_runs import make_run

from lmbench.records.codec import decode_run
from lmbench.records.run import SCHEMA_VERSION
from lmbench.sweep.execute import Execution
from lmbench.sweep.file import sweep_from
from lmbench.sweep.outcome import End, Launch
from lmbench.sweep.plan import make_plan
from lmbench.sweep.progress import SweepProgress
from lmbench.sweep.rows import Rows


@dataclass
class SimulatedServers:
    """`script` is told the name of a run; it returns how its process ended (see `OUTCOMES`), or raises.

    `rounds` are the lists of runs that were started between two beginnings of a round, `launches` what was asked for by
    the names of runs.
    """

    script: Callable[[str], str] = lambda name: "ok"
    started: list[str] = field(default_factory=list)
    launches: dict[str, Launch] = field(default_factory=dict)
    rounds: list[list[str]] = field(default_factory=list)
    to_come: list[int] = field(default_factory=list)

    def begin_round(self, rounds_to_come, last_round_s=None):
        self.rounds.append([])
        self.to_come.append(rounds_to_come)

    def await_ready(self, environments):
        """They are."""

    def close(self):
        """Nothing runs."""

    def run(self, launches, timeout_s, tick):
        return [self.run_one(launch) for launch in launches]

    def run_one(self, launch):
        if launch.pipe:
            launch.pipe.close()
        if "--print_config" in launch.words:
            return End(0, "itself", 1.0)
        options = dict(word.removeprefix("--").partition("=")[::2] for word in launch.words[1:])
        name = options["measure.run_id"]
        self.started.append(name)
        self.rounds[-1].append(name)
        self.launches[name] = launch
        return self.end(self.script(name), launch, Path(options["measure.results_dir"], name), options)

    def end(self, ending, launch, folder, options):
        """A process leaves its record."""
        if ending == "no server":
            return End(-9, "itself", 1.0, lost="/x/python does not run: No such file or directory")
        code, record, said = OUTCOMES[ending]
        if said:
            launch.log.write_text(said)
        if record:
            folder.mkdir()
            compiled = {"is_enabled": True, "cache": "private"} if options.get("trainer.compile") == "true" else {}
            run = {
                "schema_version": SCHEMA_VERSION,
                "run_id": folder.name,
                "exit_code": code,
                "compile": compiled,
                **record,
            }
            (folder / "run.json").write_text(json.dumps(run))
        lost = "/x/python ended while it served: SIGKILL" if ending == "lost" else None
        evidence = "the kernel's count of such ends rose by 1" if ending == "memory kill" else None
        return End(code, "itself", 1.0, None, evidence, lost)


class MeasuredServers(SimulatedServers):
    """`script` returns the step time of a run, or the outcome of one that fails."""

    def end(self, step_s, launch, folder, options):
        failure = {"outcome": step_s, "exit_code": 1} if isinstance(step_s, str) else {}
        make_run(folder.parent, 1.0 if failure else step_s, run_id=folder.name, **failure)
        return End(failure.get("exit_code", 0), "itself", 1.0)


def _error(kind):
    return {"kind": kind, "message": f"{kind} came", "phase": "forward", "requested_bytes": None, "where": None}


#: How a process ended: its exit code, the record it left, what it said.
OUTCOMES = {
    "ok": (0, {"outcome": "ok", "error": None}, "fine\n"),
    "retries": (0, {"outcome": "ok", "error": None, "memory": {"run_alloc_retry_count": 2}}, ""),
    "oom": (3, {"outcome": "oom", "error": _error("OutOfMemoryError")}, ""),
    "error": (1, {"outcome": "error", "error": _error("RuntimeError")}, "Traceback\n"),
    "usage": (2, None, "lmbench: num_heads 5 does not divide d_model 64\n"),
    "early oom": (3, None, "lmbench: out of memory before anything was built: no room\n"),
    "segfault": (-signal.SIGSEGV, {"outcome": "running", "environment": {}}, "about to\n"),
    "kill": (-signal.SIGKILL, {"outcome": "running"}, ""),
    "memory kill": (-signal.SIGKILL, {"outcome": "running"}, ""),
    "silent": (-signal.SIGABRT, None, ""),
    "stopped": (143, {"outcome": "interrupted", "error": _error("SIGTERM")}, ""),
    "nothing": (0, None, ""),
    "odd": (77, None, "some\nwords\n"),
    "lost": (-signal.SIGKILL, {"outcome": "running", "environment": {}}, ""),
    "guard": (4, {"outcome": "ok", "error": None}, ""),
}


def sweep(
    where,
    servers,
    content,
    name="sim",
    predict=lambda cell, option: None,
):
    """Run a sweep's file with simulated processes."""
    plan = make_plan(name, sweep_from(content))
    rows = Rows(plan, where / name, SweepProgress(plan))
    with closing(rows):
        rows.open(plan.chosen)
        Execution(rows, servers, predict).run()
    return rows


def records(where):
    """The records of a sweep's runs, by their folders' names."""
    return {path.parent.name: decode_run(path.read_bytes()) for path in where.glob("sim/runs/*/run.json")}
