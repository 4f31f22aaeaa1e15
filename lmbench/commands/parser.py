"""What the commands share that measure nothing themselves: how they parse, and how they tell a mistake."""

from __future__ import annotations

import argparse
import functools
import re
import textwrap
from collections.abc import Callable
from typing import Any, NoReturn

from lmbench.errors import ExitCode, UsageError, suggest, tell
from lmbench.interruption import received


class _Paragraphs(argparse.HelpFormatter):
    """Folds every paragraph of a description to the screen; a list's lines, which are indented, stay lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        parts: list[str] = []
        for line in text.splitlines():
            goes_on = parts and parts[-1] and line and not line.startswith(" ") and not parts[-1].startswith(" ")
            if goes_on:
                parts[-1] += f" {line}"
            else:
                parts.append(line)
        return "\n".join(self._folded(part, width) for part in parts)

    @staticmethod
    def _folded(line: str, width: int) -> str:
        # Of a list's line what follows its first word stands under itself.
        hanging = " " * len("".join(re.findall(r"^\s+\S+\s+", line)))
        return textwrap.fill(line, width, subsequent_indent=hanging, break_long_words=False, break_on_hyphens=False)


class CommandParser(argparse.ArgumentParser):
    """Takes no abbreviations, folds the description's paragraphs, and tells a mistake in one line.

    Raises:
        UsageError: (in `parse_args`) an option is unknown, has a wrong value, or is missing.
    """

    def __init__(self, command: str, description: str, usage: str | None = None) -> None:
        super().__init__(
            prog=f"lmbench {command}",
            usage=usage,
            description=description,
            formatter_class=_Paragraphs,
            allow_abbrev=False,
        )
        self._command = command

    def add_argument(self, *names: Any, **settings: Any) -> argparse.Action:
        if any("-" in name.removeprefix("--") for name in names if name.startswith("--")):
            raise ValueError(f"{names[0]}: options are spelt with _, as all are (`-` is taken for it)")
        return super().add_argument(*names, **settings)

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ")
        if unknown != message:
            message = f"{unknown!r} is one too many"
            if unknown.startswith("-"):
                given = unknown.split()[0].partition("=")[0]
                known = [name.removeprefix("--") for name in self._option_string_actions if name.startswith("--")]
                hint = suggest(given.removeprefix("--"), known, "--{}")
                message = f"unknown option {given}{hint}"
        raise UsageError(f"{self._command}: {message}; `lmbench {self._command} -h` tells the options")


def command(run: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
    """A command's `run`, which prints a user's mistake in one line and returns an exit code for it."""

    @functools.wraps(run)
    def guarded(args: list[str]) -> int:
        try:
            return run(args)
        except UsageError as error:
            tell(str(error))
            return ExitCode.USAGE
        except SystemExit as ended:
            # argparse ends this way after `--help`; a signal does too, with a code.
            if ended.code or received() is not None:
                raise
            return ExitCode.OK

    return guarded
