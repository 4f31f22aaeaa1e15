"""What W&B costs, measured on this machine: `python tests/experiments/wandb_costs.py logging | steps [ROUNDS]`.

`logging`: a result's offline run, for 1, 100 and 10 000 steps, by the process that writes it; its start-up is in it.
`steps`: step times with and without W&B, also with a server that nobody can reach, interleaved in fresh processes.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from msgspec.structs import replace
from paths import SUPPORT
from scipy.stats import t as students_t
from wandb_loopback import PLANTED_KEY, SilentServer, closed_port_url

from lmbench.records.load import load_run
from lmbench.records.run import RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.store import RunFolder
from lmbench.records.vocabulary import BORDERS, PHASES
from lmbench.wandb.publish import write

SMOKE = ["-m", "lmbench", "fit", "--config", "smoke", "--model.num_layers", "1", "--data.context_length", "16"]
WINDOW = ["--measure.steps", "400", "--measure.min_window_s", "0", "--measure.probe_steps", "0", "--quiet"]
# Of a step: processor time and the fastest twentieth, which a busy machine disturbs least, and the median. Of the
# process: when it was about to fetch the first batch.
STATISTICS = ("cpu_s", "p5_s", "median_s", "ready_s")
UPLOAD = ["--wandb.mode", "online"]


def fit(folder: Path, *words: str, **variables: str) -> RunRecord:
    """One run in a process of its own; returns its record."""
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(SUPPORT), "WANDB_API_KEY": PLANTED_KEY}
    environment = {**os.environ, **own, **variables}
    environment.pop("WANDB_MODE", None)
    command = [sys.executable, *SMOKE, *WINDOW, "--measure.results_dir", str(folder), *words]
    subprocess.run(command, env=environment, check=True, capture_output=True)
    return load_run(next(folder.iterdir()), with_steps=False).record


def logging(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        run = fit(Path(scratch) / "run", "--wandb.mode", "disabled")
        step: dict[str, Any] = {"loss": 9.2103, "tokens": 16384}
        for phase in PHASES:
            step |= {f"{phase}_s": 0.0123456789, f"{phase}_host_s": 0.00123456789}
        step |= {f"lag_{border}_s": 0.00098765 for border in BORDERS}
        for steps in (1, 100, 10_000):
            times_s = []
            for index in range(rounds):
                folder = RunFolder.create(Path(scratch) / f"{steps}-{index}")
                folder.append_steps([StepRecord(step=i, step_s=0.1 + i * 1e-7, **step) for i in range(steps)])
                folder.close()
                folder.write_run(replace(run, run_id=folder.run_id))
                begun = time.perf_counter()
                write([folder.path], 600)
                times_s.append(time.perf_counter() - begun)
                (file,) = folder.path.glob("wandb/offline-run-*/*.wandb")
            spread = f"{min(times_s):.2f} to {max(times_s):.2f}"
            print(f"{steps:6} steps: {statistics.median(times_s):.2f} s ({spread}), {file.stat().st_size / 1e6:.2f} MB")


def steps(rounds: int) -> None:
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        silent = stack.enter_context(SilentServer())
        arms: dict[str, tuple[list[str], dict[str, str]]] = {
            "no W&B": (["--wandb.mode", "disabled"], {}),
            "offline": ([], {}),
            "upload, nobody there": (UPLOAD, {"WANDB_BASE_URL": closed_port_url()}),
            "upload, no answer": ([*UPLOAD, "--wandb.timeout_s", "2"], {"WANDB_BASE_URL": silent.url}),
        }
        found_s: dict[str, dict[str, list[float]]] = {name: {arm: [] for arm in arms} for name in STATISTICS}
        names = list(arms)
        for index in range(rounds):
            turn = index % len(names)
            for arm in (*names[turn:], *names[:turn]):
                words, variables = arms[arm]
                cpu = Path(scratch) / "cpu"
                clock = ["--trainer.callbacks+=wandb_modules.CpuTime", "--trainer.callbacks.path", str(cpu)]
                run = fit(Path(scratch) / f"{index}-{names.index(arm)}", *clock, *words, **variables)
                step = run.phases.step
                measured = {"cpu_s": float(cpu.read_text()), "p5_s": step.p5_s, "median_s": step.median_s}
                measured["ready_s"] = run.milestones.ready_s
                print(json.dumps({"round": index, "arm": arm, **measured}), flush=True)
                for name, value in measured.items():
                    found_s[name][arm].append(value)
        for name, of_arms in found_s.items():
            for arm in names[1:]:
                print(f"{name:9} {arm:22} {ratio(of_arms[arm], of_arms[names[0]])}")


def ratio(values: list[float], reference: list[float]) -> str:
    """The ratio of two arms with its 95 % interval: Student's t on the logarithms of paired rounds."""
    logarithms = [math.log(a / b) for a, b in zip(values, reference, strict=True)]
    mean = statistics.mean(logarithms)
    error = statistics.stdev(logarithms) / math.sqrt(len(logarithms))
    half = float(students_t.ppf(0.975, len(logarithms) - 1)) * error
    return f"{math.exp(mean):.4f} ({math.exp(mean - half):.4f} to {math.exp(mean + half):.4f}), n = {len(logarithms)}"


if __name__ == "__main__":
    what, count = sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 5
    {"logging": logging, "steps": steps}[what](count)
