"""Real `lmbench` processes for the tests of faults, forked from a server that has imported everything already."""

from __future__ import annotations

import multiprocessing
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback

from lmbench.records.load import Run, load_run

SMOKE = str(Path(__file__).parents[1] / "configs" / "smoke.yaml")


class Ticker(Callback):
    """Writes the time of every batch's end, and of the run's begin, to a file: what really happened."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)

    def on_train_batch_end(self, *_: Any) -> None:
        os.write(self._fd, b"%d\n" % time.monotonic_ns())


def _child(words: list[str], folder: str, before: Callable[[], None] | None) -> None:
    import torch

    from lmbench.cli import main

    os.chdir(folder)
    for descriptor, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT, 0o644), descriptor)
    torch.set_num_threads(1)
    if before is not None:
        before()
    sys.argv = ["lmbench", *words]
    sys.exit(main())


@dataclass
class FitProcess:
    """One process: `folder` is its working directory, with its output in `out` and `err`."""

    process: ForkServerProcess
    folder: Path

    def signal_after(self, seconds: float, *signals: int) -> None:
        time.sleep(seconds)
        for signum in signals:
            assert self.process.pid is not None
            if self.process.is_alive():
                os.kill(self.process.pid, signum)

    def wait_until(self, happened: Callable[[], object]) -> None:
        """Until it has happened, or the process has ended without it (which a test then finds out)."""
        while not happened() and self.process.is_alive():
            time.sleep(0.005)

    def wait(self, timeout_s: float = 240) -> int:
        """The exit code as a shell would see it."""
        self.process.join(timeout_s)
        code = self.process.exitcode
        assert code is not None, f"still running after {timeout_s} s"
        return code if code >= 0 else 128 - code

    @property
    def err(self) -> str:
        return _text(self.folder / "err")

    @property
    def out(self) -> str:
        return _text(self.folder / "out")

    @property
    def ticks(self) -> list[int]:
        return [int(line) for line in _text(self.folder / "ticks").split()]

    @property
    def results(self) -> list[Run]:
        return [load_run(path) for path in sorted((self.folder / "results").glob("*"))]


def _text(path: Path) -> str:
    # A process that a signal met at its very beginning has not opened its files yet.
    return path.read_text() if path.exists() else ""


def context() -> multiprocessing.context.ForkServerContext:
    server = multiprocessing.get_context("forkserver")
    server.set_forkserver_preload(["lmbench.fit.run", __name__])
    return server


def plant(hook: str, deed: str, at: int = 0) -> list[str]:
    """Words that give the run a `planted_faults.Planted`."""
    words = ["--trainer.callbacks+=planted_faults.Planted", "--trainer.callbacks.hook", hook]
    return [*words, "--trainer.callbacks.deed", deed, "--trainer.callbacks.at", str(at)]


def start_fit(folder: Path, *words: str, ticks: bool = False, before: Callable[[], None] | None = None) -> FitProcess:
    """Start `lmbench fit` of the smoke configuration without a least duration; results go to `folder`/results.

    W&B is off: it is not what is tested here.
    """
    folder.mkdir(parents=True, exist_ok=True)
    given = ["fit", "--config", SMOKE, "--measure.results_dir", "results", "--measure.min_window_s", "0"]
    given += ["--wandb.mode", "disabled"]
    if ticks:
        given += [f"--trainer.callbacks+={__name__}.Ticker", "--trainer.callbacks.path", str(folder / "ticks")]
    process = context().Process(target=_child, args=([*given, *words], str(folder), before))
    process.start()
    return FitProcess(process, folder)
