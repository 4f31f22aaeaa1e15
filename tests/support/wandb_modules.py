"""Somebody's module and callback, for the tests of W&B around a run."""

from __future__ import annotations

import json
import os
import sys
import threading
from pathlib import Path

import torch
from lightning.pytorch import LightningModule


class Watching(LightningModule):
    """Writes down what there is of W&B in this process in the middle of the window and at the end of training."""

    def __init__(self):
        super().__init__()
        self.net = torch.nn.Linear(8, 8)

    def training_step(self, batch, batch_idx):
        if batch_idx == 6:
            self.note("window")
        return self.net(torch.randn(4, 8)).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def teardown(self, stage):
        self.note("end")

    def note(self, when):
        state = {
            "modules": [name for name in sys.modules if name.partition(".")[0] == "wandb"],
            "threads": [thread.name for thread in threading.enumerate() if thread.daemon],
            "children": "".join(path.read_text() for path in Path("/proc/self/task").glob("*/children")),
            "variables": [name for name in os.environ if name.startswith("WANDB")],
        }
        Path(f"{os.environ['STATE_FILE']}.{when}").write_text(json.dumps(state))
