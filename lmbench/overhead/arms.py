"""The arms of `lmbench overhead`, each measured in a process of its own. Nothing here needs torch."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from lmbench.errors import ExitCode, UsageError
from lmbench.records.load import find_runs, load_run
from lmbench.records.vocabulary import Record

_PEAKS = ("steady_peak_allocated_bytes", "run_peak_allocated_bytes", "host_peak_rss_bytes")
_LAST_LINES = 3


class ArmFailed(Exception):
    """An arm did not measure, or not the same as the others; in one line, with the exit code to end with."""

    def __init__(self, arm: str, why: str, exit_code: ExitCode = ExitCode.INTERNAL) -> None:
        super().__init__(f"{arm}: {why}")
        self.exit_code = exit_code


def measure_arm(arm: str, options: list[str], folder: Path) -> Record:
    """Measure an arm once, with options of `lmbench fit`; `folder` is new and takes what it leaves.

    Returns `steps`, `wall_s`, peaks in bytes (null where the device has no such counter), `first_loss` and
    `last_loss`; of the harness also `excluded_s`, of the hooks also `hooks`.

    Raises:
        UsageError: the options are wrong.
        ArmFailed: the process did not end well.
    """
    if arm == "harness":
        return harness_record(run_fit(options, folder))
    file = folder.with_suffix(".json")
    results = ["--measure.results_dir", str(folder)]
    execute(arm, ["-m", "lmbench.overhead.control", arm, str(file), "fit", *options, *results])
    found: Record = json.loads(file.read_text(encoding="utf-8"))
    return {**harness_record(_load(folder)), "hooks": found} if arm == "hooks" else found


def run_fit(options: list[str], folder: Path) -> Record:
    """`lmbench fit` with its results in `folder`; returns its run.json. Raises like `measure_arm`."""
    try:
        execute("harness", ["-m", "lmbench", "fit", *options, "--measure.results_dir", str(folder)])
    except ArmFailed as failure:
        error = _load(folder).get("error") if folder.is_dir() else None
        if not error:
            raise
        # What the record says of it is shorter and clearer than the end of a traceback.
        raise ArmFailed("harness", f"{error['kind']}: {error['message']}", failure.exit_code) from None
    return _load(folder)


def harness_record(run: Record) -> Record:
    """The figures of a run.json in the form that the control arms give theirs.

    The wall time has the pauses in it that the run itself takes out of its steps: they too are the harness's cost.
    """
    window, memory, loss = run["window"], run["memory"], run["loss"]
    return {
        "steps": window["steps"],
        "wall_s": window["wall_s"] + window["excluded_s"],
        "excluded_s": window["excluded_s"],
        **{name: memory.get(name) for name in _PEAKS},
        "first_loss": loss["first"],
        "last_loss": loss["last"],
    }


def execute(arm: str, words: list[str]) -> None:
    """Run this Python with the given words, to its end. Raises like `measure_arm`."""
    # -P: the installed lmbench, as this process, whatever lies in the working directory.
    done = subprocess.run([sys.executable, "-P", *words], capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == ExitCode.OK:
        return
    if done.returncode == ExitCode.USAGE:
        raise UsageError(done.stderr.rpartition("lmbench: ")[2].strip())
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    why = " | ".join(lines[-_LAST_LINES:]) or "nothing on standard error"
    out_of_memory = done.returncode == ExitCode.OUT_OF_MEMORY
    exit_code = ExitCode.OUT_OF_MEMORY if out_of_memory else ExitCode.INTERNAL
    raise ArmFailed(arm, f"failed with exit code {done.returncode}: {why}", exit_code)


def _load(folder: Path) -> Record:
    return load_run(find_runs([folder])[0]).run
