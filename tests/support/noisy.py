"""A user's module and data that print, log and write wherever they are called, in every way there is."""

from __future__ import annotations

import argparse
import atexit
import ctypes
import logging
import os
import subprocess
import sys
from typing import Any

import jsonargparse
import torch
from strangers import Data, Regression
from torch.utils.data import DataLoader, Dataset

from lmbench.model.language_model import LanguageModel

WORD = "noise"


def make_noise(place):
    """Say the word by Python, logging, the file descriptor, C's own stream and another process."""
    line = f"{WORD} {place}"
    print(line)
    if not logging.getLogger().handlers:
        logging.basicConfig(stream=sys.stdout)
    logging.getLogger(WORD).warning(line)
    os.write(1, f"{line}\n".encode())
    # Stays in C's buffer, which is written at the end of the process.
    ctypes.CDLL(None).printf(f"{line}\n".encode())
    subprocess.run(["echo", line], check=True)


def make_noise_beside_any_command():
    """From now on words of a command line are not parsed silently, and the process ends with noise."""
    methods = ((argparse.ArgumentParser, "parse_known_args"), (jsonargparse.ArgumentParser, "parse_args"))
    for parser, method in methods:

        def noisily(*args, parse=getattr(parser, method), **keywords):  # noqa: B008
            make_noise("parsing")
            return parse(*args, **keywords)

        setattr(parser, method, noisily)
    atexit.register(make_noise, "exit")


class Rows(Dataset[Any]):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        make_noise("worker")
        return torch.randn(16)


class NoisyData(Data):
    """Its loader's rows come from a process of their own."""

    def train_dataloader(self):
        return DataLoader(Rows(), 4, num_workers=1, collate_fn=lambda rows: [torch.stack(rows)])


class NoisyStep:
    def training_step(self, batch, batch_idx):
        make_noise("step")
        return super().training_step(batch, batch_idx)


class Noisy(NoisyStep, Regression):
    def __init__(self):
        super().__init__()
        make_noise("constructor")
        atexit.register(make_noise, "exit")

    def on_train_end(self):
        make_noise("end")


class NoisyLanguageModel(NoisyStep, LanguageModel):
    """lmbench's own model, whose step is noisy."""
