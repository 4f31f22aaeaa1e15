"""`lmbench nsys`: a run under Nsight Systems, which captures the profiled steps only."""

from __future__ import annotations

import argparse
import os
import shutil
import sys

from lmbench.commands.parser import CommandParser, command
from lmbench.errors import UsageError

COMMANDS = ("fit", "validate")
DESCRIPTION = """\
Runs `lmbench fit ...` (or validate) under `nsys profile`. Nsight captures the
profiled steps only (--trainer.profiler.steps N, 3 by default) and sees NVTX ranges
for steps, phases and modules."""


def command_line(nsys: str, output: str, words: list[str]) -> list[str]:
    """The command that replaces this process: Nsight Systems around lmbench, with ranges and without torch.profiler.

    Nsight's `--capture-range=cudaProfilerApi` waits for the `cudaProfilerStart` that the KernelProfiler calls when the
    window opens (Nsight Systems user guide, CLI profile options).
    """
    capture = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--trace=cuda,nvtx", "--sample=none"]
    profiler = ["--trainer.profiler", "kernels", "--trainer.profiler.tool", "nsys"]
    # In front of the run's own words: its `--trainer.profiler.steps` is an option of the profiler's, and comes after.
    run = [sys.executable, "-P", "-m", "lmbench", words[0], *profiler, *words[1:]]
    return [nsys, "profile", *capture, "--output", output, *run]


@command
def run(args: list[str]) -> int:
    """Become the run under Nsight Systems.

    Raises:
        UsageError: no command to run, or no nsys on this machine.
    """
    options = _parser().parse_args(args[1:])
    if not options.command or options.command[0] not in COMMANDS:
        given = repr(options.command[0]) if options.command else "nothing"
        raise UsageError(f"nsys was given {given} to run; it runs one of {', '.join(COMMANDS)} with its options")
    if any(word.split("=")[0] == "--trainer.profiler" for word in options.command):
        raise UsageError("nsys was given --trainer.profiler; it sets its own, whose options such as .steps are allowed")
    nsys = shutil.which("nsys")
    if nsys is None:
        raise UsageError(
            "nsys is not on this machine's PATH; install Nsight Systems, or use --trainer.profiler kernels, which "
            "needs nothing but PyTorch"
        )
    words = command_line(nsys, options.output, options.command)
    sys.stdout.flush()
    os.execv(words[0], words)


def _parser() -> CommandParser:
    parser = CommandParser("nsys", DESCRIPTION)
    parser.add_argument("--output", default="lmbench-%p", metavar="FILE", help="Nsight's report; %%p: the process id")
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="fit ...", help="the run, as without nsys")
    return parser
