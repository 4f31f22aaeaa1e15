"""Asks for a forecast. A process of its own makes it, since what it changes of PyTorch is changed for good."""

from __future__ import annotations

import subprocess
import sys

import msgspec
from msgspec import Struct

from lmbench.errors import ExitCode, UsageError
from lmbench.hardware import matmul_workspace_bytes, named_gpu
from lmbench.memory.forecast import OFFERED_FRACTION, Forecast, Gpu
from lmbench.records.run import RunRecord

_LAST_LINES = 3


class Request(Struct):
    """What the process is asked beside the words of `lmbench fit`."""

    gpu: Gpu | None
    finds_largest: bool


class PredictionFailed(Exception):
    """The process that predicts broke; its last lines."""


def gpu_for(named: str | None) -> Gpu | None:
    """The GPU that is named, else the first one of this machine; None without either.

    Raises:
        UsageError: no GPU is known by that name.
    """
    if named is not None:
        known = named_gpu(named)
        offered = int(known.memory_size_bytes * OFFERED_FRACTION)
        return Gpu(known.name, offered, matmul_workspace_bytes(known.name), is_here=False)
    return _gpu_here()


def _gpu_here() -> Gpu | None:
    import pynvml  # type: ignore[import-untyped]

    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        name, memory = pynvml.nvmlDeviceGetName(handle), pynvml.nvmlDeviceGetMemoryInfo(handle)
        major, _ = pynvml.nvmlDeviceGetCudaComputeCapability(handle)
    except pynvml.NVMLError:
        return None
    workspace = matmul_workspace_bytes(name, major)
    # What the driver keeps for itself is in NVML's total (torch sees 139.8 of an H200's 140.4 GiB).
    return Gpu(name, memory.total - getattr(memory, "reserved", 0), workspace, is_here=True)


def gpu_of(run: RunRecord) -> Gpu | None:
    """The GPU that a run had, by its record; None of a run on a CPU, and where its memory's size is not known."""
    facts, total = run.environment.gpu if run.environment else None, run.memory.device_total_bytes
    if run.device_type != "cuda" or facts is None or facts.name is None or total is None:
        return None
    major = facts.compute_capability and facts.compute_capability.partition(".")[0]
    workspace = matmul_workspace_bytes(facts.name, int(major) if major and major.isdecimal() else None)
    return Gpu(facts.name, total, workspace, is_here=True)


def ask_forecast(words: list[str], request: Request) -> Forecast:
    """The forecast for a configuration, given as the words after `lmbench fit`.

    Raises:
        UsageError: the words are wrong, or the module cannot be run on fake tensors.
        PredictionFailed: the process broke.
    """
    asked = [msgspec.json.encode(request).decode(), *words]
    # -P: the installed lmbench, as this process, whatever lies in the working directory.
    command = [sys.executable, "-P", "-m", "lmbench.fit.prediction", *asked]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode == ExitCode.OK:
        return msgspec.json.decode(done.stdout, type=Forecast)
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    if done.returncode == ExitCode.USAGE:
        # The user's own code may have said something before it, and after it.
        raise UsageError(done.stderr.rpartition("lmbench: ")[2].partition("\n")[0])
    raise PredictionFailed(" | ".join(lines[-_LAST_LINES:]) or f"it ended with {done.returncode}")
