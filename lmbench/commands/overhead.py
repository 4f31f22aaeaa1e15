"""`lmbench overhead`: what the harness costs, against a bare PyTorch loop and a plain Lightning Trainer."""

from __future__ import annotations

import argparse
import shlex
import tempfile
from pathlib import Path

from lmbench.commands.parser import CommandParser, command
from lmbench.errors import ExitCode, UsageError, tell
from lmbench.fit.command_line import expand_configs, named_first
from lmbench.masking import masked_words
from lmbench.overhead.arms import ArmFailed, measure_overhead
from lmbench.overhead.table import print_overhead
from lmbench.records.codec import indented_json
from lmbench.report.screen import make_console
from lmbench.standard_output import write_result

DESCRIPTION = """\
Measures the same model, data and optimizer, in fresh processes and rotating
order: in a plain PyTorch loop, in Lightning's Trainer with everything off, in
`lmbench fit`, and in `lmbench fit` with its own hooks clocked. Takes every option
of `lmbench fit`; a first run settles how many steps each window has."""


@command
def run(args: list[str]) -> int:
    """Measure, print the table and the answers; returns the exit code."""
    options, fit_options = _parse(args[1:])
    try:
        with tempfile.TemporaryDirectory(prefix="lmbench-overhead-") as folder:
            found = measure_overhead(
                fit_options, options.rounds, Path(folder), shlex.join(["lmbench", *masked_words(args)])
            )
    except ArmFailed as error:
        tell(f"overhead: {error}")
        return error.exit_code
    if options.json:
        write_result(indented_json(found))
    else:
        print_overhead(found, make_console())
    return ExitCode.OK


def _parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """This command's own options, and those for `lmbench fit`."""
    parser = CommandParser("overhead", DESCRIPTION)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each arm, at least 2 (default 5)")
    parser.add_argument("--json", action="store_true", help="everything measured as JSON on standard output")
    options, fit_options = parser.parse_known_args(words)
    if options.rounds < 2:
        raise UsageError(f"--rounds is {options.rounds}; an interval needs at least 2")
    return options, expand_configs(named_first(["fit", *fit_options]))[1:]
