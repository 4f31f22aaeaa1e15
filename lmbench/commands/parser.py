"""The argument parser of the commands that measure nothing themselves."""

from __future__ import annotations

import argparse
from typing import NoReturn

from lmbench.errors import UsageError


class CommandParser(argparse.ArgumentParser):
    """Takes no abbreviations, keeps the description's lines, and tells a mistake in one line.

    Raises:
        UsageError: (in `parse_args`) an option is unknown, has a wrong value, or is missing.
    """

    def __init__(self, command: str, description: str) -> None:
        super().__init__(
            prog=f"lmbench {command}",
            description=description,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self._command = command

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{self._command}: {message}; `lmbench {self._command} -h` tells the options")
