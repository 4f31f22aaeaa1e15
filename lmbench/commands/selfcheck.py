"""`lmbench selfcheck`: show that the numbers are true on this machine."""

from __future__ import annotations

from lmbench.commands.parser import CommandParser, command
from lmbench.errors import UsageError
from lmbench.report.screen import make_console


@command
def run(args: list[str]) -> int:
    """Run every check and print a table; exits with 1 when one fails, and 11 where the machine is too busy to tell."""
    parser = CommandParser("selfcheck", "Plants known truths and checks that they come back.")
    parser.add_argument("device", nargs="?", metavar="cpu|cuda", help="where (default cuda, where there is one)")
    wanted = parser.parse_args(args[1:]).device
    if wanted not in (None, "cpu", "cuda"):
        raise UsageError(f"selfcheck takes cpu or cuda, not {wanted!r}")
    from lmbench.selfcheck.checks import selfcheck

    return selfcheck(wanted, make_console())
