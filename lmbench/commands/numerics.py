"""`lmbench numerics`: how wrong sums are in 16 bit, and from which input on norms, softmax and cross entropy fail."""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from lmbench.commands.parser import CommandParser, command
from lmbench.errors import ExitCode, UsageError
from lmbench.standard_output import write_result

if TYPE_CHECKING:
    from lmbench.numerics.formats import Format
    from lmbench.numerics.record import Numerics

DESCRIPTION = """\
Adds one number up again and again, by a loop as write-ups have published it and by
torch.sum, in 16 and 32 bit, and tells how wrong the sums are; and searches the inputs
from which on LayerNorm, RMSNorm, softmax and cross entropy overflow or underflow in
float16 and bfloat16: written out, as PyTorch fuses them, and lmbench's own."""

#: torch.sum needs its addends in memory; the loop needs no time, being worked out.
MOST_ADDENDS = 100_000_000
#: The longest vocabularies in use.
MOST_WIDTH = 2**18
#: What is added up unless somebody names formats: accumulator and addends.
PAIRS = (
    ("float16", "float16"),
    ("bfloat16", "bfloat16"),
    ("float32", "float16"),
    ("float32", "bfloat16"),
    ("float32", "float32"),
)


@command
def run(args: list[str]) -> int:
    """Measure and print.

    Raises:
        UsageError: an option is wrong, or a file cannot be written.
    """
    options = _parser().parse_args(args[1:])
    _check(options)
    pairs = _pairs(options.accumulator, options.addend_dtype)
    # Help and mistakes do not wait for these.
    from lmbench.numerics.experiment.measured import find_device, measure_numerics

    device = find_device(options.device)
    found = measure_numerics(options.n, options.addend, pairs, options.width, options.eps, device)
    _draw(found, options.html, options.svg)
    if options.json:
        write_result(found.as_json() + "\n")
    else:
        from lmbench.numerics.tables import print_numerics
        from lmbench.report.screen import make_console

        print_numerics(found, make_console())
    return ExitCode.OK


def _parser() -> CommandParser:
    parser = CommandParser("numerics", DESCRIPTION)
    parser.add_argument("--n", type=_whole, default=1000, metavar="N", help="how many addends (default 1000)")
    parser.add_argument("--addend", type=float, default=0.01, metavar="X", help="the number added (default 0.01)")
    parser.add_argument("--accumulator", metavar="DTYPE", help="format of the total (default: float16 .. float32)")
    parser.add_argument("--addend_dtype", metavar="DTYPE", help="format of the addends (default: as the total or less)")
    parser.add_argument("--width", type=_whole, default=1024, metavar="N", help="of norms' rows, logits (default 1024)")
    parser.add_argument("--eps", type=float, default=1e-5, metavar="X", help="of norms (default 1e-05)")
    parser.add_argument("--device", metavar="DEVICE", help="cuda or cpu (default cuda where there is one)")
    parser.add_argument("--json", action="store_true", help="everything as JSON on standard output")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write one self-contained page with a chart")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the chart, error against n, as a picture")
    return parser


def _check(options: argparse.Namespace) -> None:
    if not 1 <= options.n <= MOST_ADDENDS:
        raise UsageError(f"--n is {options.n:,}; it must be from 1 to {MOST_ADDENDS:,}, which torch.sum has in memory")
    if not math.isfinite(options.addend) or options.addend == 0:
        raise UsageError(f"--addend is {options.addend:g}; it must be a finite number other than 0, such as 0.01")
    if not 2 <= options.width <= MOST_WIDTH or options.width % 2:
        raise UsageError(f"--width is {options.width:,}; it must be an even number from 2 to {MOST_WIDTH:,}")
    if not 0 <= options.eps <= 1:
        raise UsageError(f"--eps is {options.eps:g}; it must be from 0 to 1, such as 1e-05")
    for target in (options.html, options.svg):
        if target is not None and (target.is_dir() or not target.absolute().parent.is_dir()):
            raise UsageError(f"{str(target)!r} cannot be written; name a file in a folder that exists")


def _pairs(accumulator: str | None, addend: str | None) -> list[tuple[Format, Format]]:
    """Accumulators and addends: the usual ones, else every pair that has what was named."""
    from lmbench.numerics.formats import FORMATS, find_format

    if accumulator is None and addend is None:
        return [(FORMATS[one], FORMATS[other]) for one, other in PAIRS]
    accumulators = FORMATS.values() if accumulator is None else [find_format(accumulator, "--accumulator")]
    addends = FORMATS.values() if addend is None else [find_format(addend, "--addend_dtype")]
    return [(one, other) for one in accumulators for other in addends]


def _draw(found: Numerics, page: Path | None, svg: Path | None) -> None:
    """Write the page and the picture where they were asked for."""
    if page is None and svg is None:
        return
    from lmbench.numerics.picture import own_page, own_svg

    for target, drawn in ((page, own_page), (svg, own_svg)):
        if target is None:
            continue
        try:
            target.write_text(drawn(found), encoding="utf-8")
        except OSError as error:
            raise UsageError(f"{str(target)!r} cannot be written: {error.strerror}; choose another file") from error
        print(f"lmbench: written to {target}", file=sys.stderr)


def _whole(text: str) -> int:
    """A whole number, also as `1e6`."""
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not number.is_integer():
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number; give one such as 1000 or 1e6")
    return int(number)
