"""A command is a typed function: its signature and docstring make the parser, its Answer is given in any format.

Positional parameters are the command's arguments (`*results: str` takes several), keyword parameters its options. The
docstring's text is the help, its Args section tells each option. A function that returns an `Answer` has the options of
`report.render.Output` beside its own.
"""

from __future__ import annotations

import argparse
import functools
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from lmbench.errors import ExitCode, UsageError, suggest, tell
from lmbench.interruption import received

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


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


def run_typed(name: str, function: Callable[..., Any], words: Sequence[str]) -> int:
    """Run a command's function with the words of a command line; returns the exit code."""
    # Here: `lmbench -h` does without them.
    from lmbench.report.answer import Answer
    from lmbench.report.render import Output, give

    try:
        parser = _typed_parser(name, function)
        options = _parsed(name, parser, words)
        output = {key: options.pop(key) for key in Output.__dataclass_fields__ if key in options}
        given = Output(**output)
        arguments = []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                arguments += options.pop(parameter.name)
            elif parameter.kind is not parameter.KEYWORD_ONLY:
                arguments.append(options.pop(parameter.name))
        answer = function(*arguments, **options)
        return give(answer, given) if isinstance(answer, Answer) else int(answer)
    except UsageError as error:
        tell(str(error))
        return ExitCode.USAGE
    except SystemExit as ended:
        # The parser ends this way after `--help`; a signal does too, with a code.
        if ended.code or received() is not None:
            raise
        return ExitCode.OK


def _typed_parser(name: str, function: Callable[..., Any]) -> ArgumentParser:
    from docstring_parser import parse
    from jsonargparse import ArgumentParser, DefaultHelpFormatter

    from lmbench.report.render import Output

    class Help(_Paragraphs, DefaultHelpFormatter):
        pass

    text = parse(inspect.getdoc(function) or "")
    description = "\n\n".join(filter(None, [text.short_description, text.long_description]))
    parser = ArgumentParser(
        prog=f"lmbench {name}", description=description, formatter_class=Help, exit_on_error=False, allow_abbrev=False
    )
    parser.add_function_arguments(function, as_group=False, as_positional=True, fail_untyped=True)
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.VAR_POSITIONAL:
            told = next((each.description for each in text.params if each.arg_name.lstrip("*") == parameter.name), None)
            parser.add_argument(parameter.name, nargs="+", type=str, help=told)
    if "Answer" in str(inspect.signature(function).return_annotation):
        parser.add_class_arguments(Output, as_group=False)
    return parser


def _parsed(name: str, parser: ArgumentParser, words: Sequence[str]) -> dict[str, Any]:
    """The options by name; a mistake is told in one line, with the option that was probably meant."""
    flags = {f"--{action.dest}" for action in parser._actions if action.default is False}
    words = ["--format=json" if word == "--json" else f"{word}=true" if word in flags else word for word in words]
    try:
        return vars(parser.parse_args(words))
    except argparse.ArgumentError as error:
        message = re.sub(r'Parser key "(\w+)":\s*', r"--\1: ", str(error))
        message = re.sub(r"<class '(\w+)'>", r"\1", message)
        unknown = re.fullmatch(r"unrecognized arguments: (\S+).*", message, re.DOTALL)
        if unknown and unknown[1].startswith("-"):
            option = unknown[1].partition("=")[0]
            known = [each.removeprefix("--") for each in parser._option_string_actions if each.startswith("--")]
            message = f"unknown option {option}{suggest(option.removeprefix('--'), known, '--{}')}"
        raise UsageError(f"{name}: {message}; `lmbench {name} -h` tells the options") from None
