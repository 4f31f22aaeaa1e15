"""`lmbench nsys`: a run under Nsight Systems, which captures the profiled steps only."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

from lmbench.errors import UsageError

COMMANDS = ("fit", "validate")


def nsys(*words: str, output: str = "lmbench-%p", settings: Sequence[str] = ()) -> int:
    """Runs `lmbench fit ...` (or validate) under `nsys profile`.

    Nsight captures the profiled steps only (`--trainer.profiler.steps N`, 3 by default) and sees NVTX ranges for steps,
    phases and modules.

    Args:
        words: the run, as without nsys
        output: Nsight's report; %p is the process id
        settings: the run's options

    Raises:
        UsageError: no command to run, or no nsys on this machine.
    """
    run = [*words, *settings]
    if not words or words[0] not in COMMANDS:
        raise UsageError(f"nsys was given {' '.join(run[:1])!r} to run; it runs one of {', '.join(COMMANDS)}")
    if any(word.split("=")[0] == "--trainer.profiler" for word in run):
        raise UsageError("nsys was given --trainer.profiler; it sets its own, whose options such as .steps are allowed")
    program = shutil.which("nsys")
    if program is None:
        advice = "install Nsight Systems, or use --trainer.profiler kernels, which needs nothing but PyTorch"
        raise UsageError(f"nsys is not on this machine's PATH; {advice}")
    # Nsight waits for the `cudaProfilerStart` that the KernelProfiler calls when the window opens, and records ranges
    # without torch.profiler (Nsight Systems user guide, CLI profile options).
    capture = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--trace=cuda,nvtx", "--sample=none"]
    profiler = ["--trainer.profiler", "kernels", "--trainer.profiler.tool", "nsys"]
    # In front of the run's own words: its `--trainer.profiler.steps` is an option of the profiler's, and comes after.
    command = [sys.executable, "-P", "-m", "lmbench", words[0], *profiler, *run[1:]]
    sys.stdout.flush()
    os.execv(program, [program, "profile", *capture, "--output", output, *command])
