"""Real `lmbench` processes for the tests of faults, forked from a server that has imported everything already."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from lightning.pytorch import Callback
from paths import ROOT
from warm_server import WarmProcess, warm_server

from lmbench.cli import main
from lmbench.records.load import load_run

SMOKE = str(ROOT / "configs" / "smoke.yaml")
QUICK = ["--measure.steps", "6", "--measure.min_window_s", "0", "--measure.probe_steps", "2"]

#: The least model there is a point in: a step of it takes 4 ms, one of the smoke configuration's own ten times as much.
SMALL = ("--model.num_layers", "1", "--model.d_model", "32", "--data.context_length", "8", "--data.batch_size", "1")

_TICK_BYTES = 21


class Ticker(Callback):
    """Writes the time of every batch's end, and of the run's begin, to a file: what really happened."""

    def __init__(self, path: str):
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def on_train_batch_end(self, *_):
        os.write(self._fd, b"%020d\n" % time.monotonic_ns())


@dataclass
class FitProcess:
    """One process: `folder` is its working directory, with its output in `out` and `err`."""

    process: WarmProcess
    folder: Path

    def signal_after(self, seconds, *signals):
        time.sleep(seconds)
        for signum in signals:
            self.process.send_signal(signum)

    def wait_until(self, happened):
        """Until it has happened, or the process has ended without it (which a test then finds out)."""
        while not happened() and self.process.poll() is None:
            time.sleep(0.005)

    def wait(self, timeout_s=240):
        """The exit code as a shell would see it."""
        code = self.process.wait(timeout_s)
        return code if code >= 0 else 128 - code

    @property
    def err(self):
        return _text(self.folder / "err")

    @property
    def out(self):
        return _text(self.folder / "out")

    def wait_for_step(self, count):
        """Until so many steps have ended."""
        path = self.folder / "ticks"
        self.wait_until(lambda: path.exists() and path.stat().st_size >= count * _TICK_BYTES)

    @property
    def ticks(self):
        return [int(line) for line in _text(self.folder / "ticks").split()]

    @property
    def results(self):
        return [load_run(path) for path in sorted((self.folder / "results").glob("*"))]


def _text(path):
    # A process that a signal met at its very beginning has not opened its files yet.
    return path.read_text() if path.exists() else ""


def plant(hook, deed, at=0):
    """Words that give the run a `planted_faults.Planted`."""
    words = ["--trainer.callbacks+=planted_faults.Planted", "--trainer.callbacks.hook", hook]
    return [*words, "--trainer.callbacks.deed", deed, "--trainer.callbacks.at", str(at)]


def start_fit(folder, *words, ticks=False, before=None):
    """Start `lmbench fit` of a small model without a least duration; results go to `folder`/results.

    W&B is off: it is not what is tested here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    given = ["fit", "--config", SMOKE, "--measure.results_dir", "results", "--measure.min_window_s", "0"]
    given += ["--wandb.mode", "disabled", *SMALL]
    if ticks:
        given += [f"--trainer.callbacks+={__name__}.Ticker", "--trainer.callbacks.path", str(folder / "ticks")]
    with (folder / "out").open("wb") as out, (folder / "err").open("wb") as err:
        streams = (None, out.fileno(), err.fileno())
        process = warm_server().start(*given, *words, folder=folder, streams=streams, before=before)
    return FitProcess(process, folder)


def fit_here(results, capsys, *words):
    """`lmbench fit` of one smoke layer in this process: its exit code, its result (None without one), and
    what it printed."""
    args = ["fit", "--config", "smoke", "--trainer.logger", "false", "--measure.min_window_s", "0"]
    code = main([*args, "--model.num_layers", "1", "--measure.results_dir", str(results), *words])
    folders = list(results.glob("*"))
    return code, load_run(folders[0]) if folders else None, capsys.readouterr()


def bench(tmp_path, *words, command="fit", code=0):
    """A run of the smoke configuration through the command, in this process."""
    results = tmp_path / "results"
    before = set(results.glob("*"))
    args = [command, "--config", SMOKE, *QUICK, "--measure.results_dir", str(results), *words]
    assert main(args) == code
    (new,) = set(results.glob("*")) - before
    return load_run(new)
