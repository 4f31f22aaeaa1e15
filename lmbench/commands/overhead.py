"""`lmbench overhead`: what the harness costs, against a bare PyTorch loop and a plain Lightning Trainer."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path

from lmbench.commands.parser import CommandParser, command
from lmbench.errors import UsageError, tell
from lmbench.fit.command_line import expand_configs, named_first
from lmbench.masking import masked_words
from lmbench.overhead.arms import ArmFailed, measure_overhead
from lmbench.report.render import Output, give

DESCRIPTION = """\
Measures the same model, data and optimizer, in fresh processes and rotating
order: in a plain PyTorch loop, in Lightning's Trainer with everything off, and in
`lmbench fit`. Takes every option of `lmbench fit`; a first run settles how many
steps each window has."""


@command
def run(args: list[str]) -> int:
    """Measure, and give the arms and the answers in any format; returns the exit code."""
    parser = CommandParser("overhead", DESCRIPTION)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each arm, at least 2 (default 5)")
    parser.add_argument("--format", help="terminal, markdown, csv, json, latex or html")
    parser.add_argument("--json", action="store_const", const="json", dest="format", help="as --format json")
    parser.add_argument("--output", type=Path, help="write to this file instead of the screen")
    parser.add_argument("--table", default="", help="only these tables: arms, answers")
    options, fit_options = parser.parse_known_args(args[1:])
    if options.rounds < 2:
        raise UsageError(f"--rounds is {options.rounds}; an interval needs at least 2")
    output = Output(options.format, options.output, options.table)
    fit_options = expand_configs(named_first(["fit", *fit_options]))[1:]
    try:
        with tempfile.TemporaryDirectory(prefix="lmbench-overhead-") as folder:
            repeat = shlex.join(["lmbench", *masked_words(args)])
            answer = measure_overhead(fit_options, options.rounds, Path(folder), repeat)
    except ArmFailed as error:
        tell(f"overhead: {error}")
        return error.exit_code
    return give(answer, output)
