"""`lmbench compare A B`: the ratio of two results with its interval, and a verdict with its reasons."""

from __future__ import annotations

import argparse
import json
import re

from lmbench.commands.parser import CommandParser, command
from lmbench.compare.comparison import compare
from lmbench.compare.shown import as_record, markdown, print_comparison
from lmbench.compare.verdict import DEFAULT_TOLERANCE_FRACTION
from lmbench.errors import ExitCode, UsageError, tell
from lmbench.report.chosen import add_options, chosen_of
from lmbench.report.screen import make_console
from lmbench.standard_output import write_result

DESCRIPTION = """\
Compares B with A, step time first, then phases and memory. A side is a run, a folder
of runs (repeats), a sweep, a sweep's cell (SWEEP/CELL), or some cells of a sweep
(SWEEP@AXIS=VALUE,AXIS=VALUE). Cells of both sides meet by their axes; what is constant
on each side and differs between them is what is compared.

One process is one sample, so a verdict takes 3 repeats a side: `same` if the 90 %
interval of the ratio lies within the gate, `faster` or `slower` if the 95 % interval
excludes 1 and the change is above the A/A noise floor of `lmbench noise`, else
`undecided`. `invalid` if something else differs (GPU, flags, host where it counts) or a
guard failed.

With --run both sides are measured now, in turn, until the verdict stands or the budget
ends: `lmbench compare --run -h`.

With --kernels both sides are profiled runs or traces, and what is compared is kernel
time per step, by kind, part of the model and kernel: what appeared, vanished, grew
and shrank. It has no verdict, and exits with 0.

exit codes: 0 same or faster, 10 slower, 11 undecided, 12 invalid, 2 usage"""

USAGE = """\
lmbench compare A B [--gate 2%%] [--about NAME]... [--json | --format markdown]
       lmbench compare --run A [B] [--gate 2%%] [--budget 10m] [--revision A B] [OPTIONS]
       lmbench compare --kernels A B [--top N] [--phase NAME] [--format markdown]"""

_DEFAULT_TOP = 15
_DEFAULT_GATE = f"{DEFAULT_TOLERANCE_FRACTION:.0%}"
_PERCENTAGE = re.compile(r"\s*([0-9.]+)\s*%\s*")


@command
def run(args: list[str]) -> int:
    """Compare and print; the exit code is the verdict's."""
    if "--run" in args[1:]:
        # Here: what measures takes its time to import.
        from lmbench.commands.compare_run import measure
        from lmbench.sweep.execute import SweepHalted

        try:
            options, found = measure(args[1:])
        except SweepHalted as error:
            tell(f"compare: {error}")
            return ExitCode.INTERNAL
    else:
        options = _parse(args[1:])
        if options.kernels:
            return _compare_kernels(options)
        found = compare(options.a, options.b, options.tolerance, options.about)
    if options.json:
        write_result(json.dumps(as_record(found), indent=1) + "\n")
    elif options.format:
        print(markdown(found), end="")
    else:
        print_comparison(found, chosen_of(options), make_console())
    return found.exit_code


def _compare_kernels(options: argparse.Namespace) -> int:
    from lmbench.kernels.difference import difference, difference_markdown, difference_record, print_difference
    from lmbench.kernels.trace.findings import examine

    found = difference(examine(options.a), examine(options.b))
    phases = ["step", *(phase.phase for phase in found.phases)]
    if options.phase not in (None, *phases):
        raise UsageError(f"--phase is {options.phase!r}; these traces have {', '.join(phases)}")
    if options.json:
        write_result(json.dumps(difference_record(found), indent=1) + "\n")
    elif options.format:
        print(difference_markdown(found, options.top, options.phase), end="")
    else:
        print_difference(found, options.top, options.phase, chosen_of(options), make_console())
    return ExitCode.OK


def _parse(words: list[str]) -> argparse.Namespace:
    parser = CommandParser("compare", DESCRIPTION, USAGE)
    parser.add_argument("results", nargs="*", metavar="A B", help="before and after; ratios are B / A")
    add_output_options(parser)
    parser.add_argument("--kernels", action="store_true", help="compare the kernels of two profiled runs or traces")
    parser.add_argument("--top", type=int, metavar="N", help="kernels shown per table, with --kernels (default 15)")
    parser.add_argument("--phase", metavar="NAME", help="tables of this phase only, with --kernels")
    options = parser.parse_args(words)
    if len(options.results) != 2:
        raise UsageError(f"compare takes two results, A and B; {len(options.results)} given")
    check_output_options(options)
    if options.kernels and (options.about or options.gate != _DEFAULT_GATE):
        raise UsageError("--gate and --about are for verdicts on times; with --kernels there is none")
    if not options.kernels and (options.top is not None or options.phase is not None):
        raise UsageError("--top and --phase belong to --kernels")
    options.top = _DEFAULT_TOP if options.top is None else options.top
    if options.top < 1:
        raise UsageError(f"--top is {options.top}; give 1 or more kernels")
    options.a, options.b = options.results
    options.tolerance = parse_gate(options.gate)
    return options


def add_output_options(parser: CommandParser) -> None:
    """What `compare` takes with and without `--run`."""
    # argparse takes `%` in a help text for a format.
    parser.add_argument("--gate", default=_DEFAULT_GATE, help="changes up to this count as none (default 1%%)")
    parser.add_argument(
        "--about",
        action="append",
        default=[],
        metavar="NAME",
        help="what is compared, by its dotted name (code, versions, gpu, trainer.precision): it may differ, and "
        "nothing else may; may be given again",
    )
    parser.add_argument("--json", action="store_true", help="everything as JSON on standard output")
    parser.add_argument("--format", choices=("markdown",), help="tables to paste")
    add_options(parser)


def check_output_options(options: argparse.Namespace) -> None:
    """Raises UsageError for two forms of output at once."""
    if options.json and options.format:
        raise UsageError("--json and --format are two forms of one output; give one")
    chosen_of(options, options.json, options.format)


def parse_gate(text: str) -> float:
    """A percentage such as `2%` as a fraction. Raises UsageError for anything else, and outside 0 to 100 %."""
    match = _PERCENTAGE.fullmatch(text)
    try:
        value = float(match[1]) / 100 if match else 0.0
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise UsageError(f"--gate is {text!r}; give a percentage above 0% and below 100%, such as 2%")
    return value
