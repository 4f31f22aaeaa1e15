"""Modules of somebody's, for the tests of W&B around a run."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule


class Foreign(LightningModule):
    """A module of somebody's."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        return self.net(torch.randn(4, 8)).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Raising(Foreign):
    """Breaks in the window."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 5:
            raise ValueError("broken on purpose")
        return super().training_step(batch, batch_idx)


class Logging(Foreign):
    """Does what modules do with their logger."""

    def training_step(self, batch, batch_idx):
        self.log("square", float(batch_idx**2))
        if batch_idx == 0:
            assert "wandb" not in sys.modules or sys.modules["wandb"].run is None
            self.logger.watch(self)
            self.logger.experiment.log({"picture": object()})
            self.logger.experiment.config["tried"] = True
        return super().training_step(batch, batch_idx)


class CpuTime(Callback):
    """Writes the processor time of the whole process, all threads, for a step after the 50th, on average."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.ends_s: list[float] = []

    def on_train_batch_end(self, *_: Any) -> None:
        self.ends_s.append(time.process_time())

    def on_train_end(self, *_: Any) -> None:
        after = self.ends_s[50:]
        Path(self.path).write_text(str((after[-1] - after[0]) / (len(after) - 1)))


class Watching(Foreign):
    """Writes down what there is of this process in the middle of the window."""

    def training_step(self, batch, batch_idx):
        if batch_idx == 6:
            links = [str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
            state = {
                "threads": sorted(thread.name for thread in threading.enumerate()),
                "children": [path.read_text() for path in Path("/proc/self/task").glob("*/children")],
                "sockets": sum(link.startswith("socket:") for link in links),
                "variables": sorted(name for name in os.environ if name.startswith("WANDB")),
                "is_open": getattr(sys.modules.get("wandb"), "run", None) is not None,
            }
            Path(os.environ["STATE_FILE"]).write_text(json.dumps(state))
        return super().training_step(batch, batch_idx)
