"""Real `lmbench` processes for the tests of faults, forked from a server that has imported everything already."""

from __future__ import annotations

import os
import time

import warm_server
from lightning.pytorch import Callback
from paths import ROOT
from strangers import OwnLoaders

import lmbench
from lmbench.cli import main
from lmbench.records.load import load_run
from lmbench.records.store import RUN_FILE

SMOKE = str(ROOT / "configs" / "smoke.yaml")
QUICK = ["--measure.steps=6", "--measure.min_window_s=0", "--measure.probe_steps=2"]

#: The least model there is a point in: a step of it takes 4 ms, one of the smoke configuration's own ten times as much.
SMALL = ["--model.num_layers=1", "--model.d_model=32", "--data.context_length=8", "--data.batch_size=1"]


class Ticker(Callback):
    """Writes the time of every batch's end to a file: what really happened."""

    def __init__(self, path: str):
        self._fd = os.open(path, os.O_WRONLY | os.O_APPEND)

    def on_train_batch_end(self, *_):
        os.write(self._fd, b"%d\n" % time.monotonic_ns())


def plant(hook, deed, at=0):
    """Words that give the run a `planted_faults.Planted`."""
    settings = [f"--trainer.callbacks.{name}={value}" for name, value in (("hook", hook), ("deed", deed), ("at", at))]
    return ["--trainer.callbacks+=planted_faults.Planted", *settings]


def start_fit(folder, *words, ticks=False, stdout=None, **settings):
    """Start `lmbench fit` of a small model without a least duration; results go to `folder`/results.

    W&B is off: it is not what is tested here. `settings` are those of `warm_server.start`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    fit = ["fit", f"--config={SMOKE}", "--measure.results_dir=results", "--measure.min_window_s=0"]
    fit += ["--wandb.mode=disabled", *SMALL]
    if ticks:
        (folder / "ticks").touch()
        fit += [f"--trainer.callbacks+={__name__}.Ticker", f"--trainer.callbacks.path={folder}/ticks"]
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        settings = {"streams": (None, stdout or out.fileno(), err.fileno()), **settings}
        return warm_server.start(*fit, *words, folder=folder, **settings)


def statuses(judged):
    """The status of each guard of a record, or of a trace's findings, by the guard's name."""
    return {guard.name: guard.status for guard in judged.guards}


def sound_result(fit):
    """The result that a process of `start_fit` has left, with all steps up to its last; None without a record."""
    if not list(fit.folder.glob(f"results/*/{RUN_FILE}")):
        return None
    (run,) = fit.results
    assert run.damage is None
    assert [step.step for step in run.steps] == list(range(len(run.steps)))
    return run


def run_here(results, command, *words, code=0):
    """Run a command in this process; returns the result that it leaves in a folder, None without one."""
    before = set(results.glob("*"))
    assert main([command, f"--measure.results_dir={results}", *words]) == code
    new = set(results.glob("*")) - before
    return load_run(new.pop()) if new else None


def bench(tmp_path, *words, command="fit", code=0):
    """A run of the smoke configuration; each of the words may hold several."""
    words = " ".join(words).split()
    return run_here(tmp_path / "results", command, f"--config={SMOKE}", *QUICK, *words, code=code)


def measure_here(module=None, data=None, /, trainer=None, **settings):
    """`lmbench.measure` of three steps on the CPU, without probes."""
    quick = {"steps": 3, "warmup_steps": 1, "min_window_s": 0.0, "probe_steps": 0, **settings}
    return lmbench.measure(module or OwnLoaders(), data, trainer={"accelerator": "cpu", **(trainer or {})}, **quick)
