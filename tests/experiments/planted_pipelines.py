"""Six pipelines with a planted fault, or none: is the cause named, and is the step with the fix the predicted one?

    python tests/experiments/planted_pipelines.py FOLDER [WIDTH [CASE...]]

Prints a line for each: the step, the model alone, the loader alone, who is slow, the fix, the predicted and the
measured step with it. WIDTH is the model's: 256 tries this file on a CPU, 8192 takes about 15 ms a step on an H200.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import zlib
from pathlib import Path

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

from lmbench.runs import read_run

SAMPLES, FEATURES, BATCH = 32, 256, 64


class Rows(Dataset):
    """Rows of numbers: read with a pause, unpacked with work, or neither; `copies` makes a row larger."""

    def __init__(self, pause_s=0.0, unpackings=0, copies=1):
        self.pause_s, self.unpackings, self.copies = pause_s, unpackings, copies
        self.packed = zlib.compress(torch.randn(20_000).numpy().tobytes())

    def __len__(self):
        return 1_000_000

    def __getitem__(self, index):
        if self.pause_s:
            time.sleep(self.pause_s)
        for _ in range(self.unpackings):
            self.unpack()
        return torch.full((SAMPLES * self.copies, FEATURES), float(index % 7))

    def unpack(self):
        return zlib.decompress(self.packed)


def slow_collate(rows):
    end_s = time.monotonic() + 0.04
    while time.monotonic() < end_s:
        sum(range(1000))
    return torch.stack(rows)


CASES = {
    "slow disk": (Rows(pause_s=0.0005), {"num_workers": 1, "pin_memory": True}),
    "slow decode": (Rows(unpackings=3), {"num_workers": 1, "pin_memory": True}),
    "no workers": (Rows(unpackings=1), {"num_workers": 0, "pin_memory": True}),
    "unpinned": (Rows(copies=16), {"num_workers": 8, "pin_memory": False}),
    "slow collate": (Rows(), {"num_workers": 1, "pin_memory": True, "collate_fn": slow_collate}),
    "fine": (Rows(), {"num_workers": 4, "pin_memory": True}),
}


class Piped(pl.LightningModule):
    def __init__(self, width=256, case="fine"):
        super().__init__()
        hidden = [layer for _ in range(8) for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())]
        self.model = torch.nn.Sequential(torch.nn.Linear(FEATURES, width), *hidden, torch.nn.Linear(width, 1))
        self.rows, self.settings = CASES[case]

    def training_step(self, batch):
        return self.model(batch[:, :SAMPLES]).square().mean()

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=BATCH, **self.settings)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-6)


def main(folder, width, cases):
    env = {**os.environ, "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{Path(__file__).parent}"}
    precision = "bf16-mixed" if torch.cuda.is_available() else "32-true"
    for number, case in enumerate(cases):
        words = ["fit", "--model", "planted_pipelines.Piped", "--model.width", str(width), "--model.case", case]
        words += ["--trainer.precision", precision, "--measure.loader", "true", "--measure.steps", "40"]
        words += ["--measure.probe_steps", "1", "--measure.results_dir", str(folder), "--measure.run_id", str(number)]
        command = [sys.executable, "-m", "lmbench", *words, "--wandb.mode", "disabled"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False, env=env)
        if ended.returncode:
            print(f"{case}: exit code {ended.returncode}: {ended.stderr[-300:]}")
            continue
        run = read_run(folder / str(number)).record
        facts, step_s = run.input_pipeline, run.phases.step.mean_s
        ms = " ".join(
            f"{name} {1e3 * value:.2f}"
            for name, value in (("step", step_s), ("model", facts.resident_step_s), ("loader", facts.loader_step_s),
                                ("reader", facts.reader_s), ("collate", facts.collate_s),
                                ("predicted", facts.predicted_step_s), ("fixed", facts.fixed_step_s))
            if value is not None
        )  # fmt: skip
        error = facts.fixed_step_s / facts.predicted_step_s - 1 if facts.fix and facts.fixed_step_s else None
        print(f"{case}: ms {ms}; fix {facts.fix}; error {'-' if error is None else f'{error:+.1%}'}; "
              f"lines {list(facts.slowest_lines)[:2]}; {facts.reason or ''}", flush=True)  # fmt: skip
        print("   ", *[line for line in ended.stdout.splitlines() if "bound" in line or "fine:" in line][:3])


if __name__ == "__main__":
    main(Path(sys.argv[1]), int((sys.argv[2:] or [256])[0]), sys.argv[3:] or CASES)
