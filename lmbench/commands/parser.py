"""A command is a typed function: its signature and docstring make the parser, its Answer is given in any format.

Positional parameters are the command's arguments (`*results: str` takes several, `device: str | None = None, /` is
optional), keyword parameters its options: a `tuple[str, str]` takes two words, a `list` may be given again, a `bool` is
a flag. Options that the signature does not have are collected for a parameter called `settings`, if there is one: they
belong to `fit`. The docstring's text is the help, its Args section tells each option. A function that returns an
`Answer` has the options of `report.render.Output` beside its own.
"""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

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


def run_typed(name: str, function: Callable[..., Any], words: Sequence[str]) -> int:
    """Run a command's function with the words of a command line; returns the exit code."""
    # Here: `lmbench -h` does without them.
    from lmbench.report.answer import Answer
    from lmbench.report.render import Output, give

    try:
        parser = _typed_parser(name, function)
        options = _parsed(name, parser, words, takes_settings="settings" in inspect.signature(function).parameters)
        given = [key for key in Output.__dataclass_fields__ if key in options] if _has_output(function) else []
        output = Output(**{key: options.pop(key) for key in given})
        arguments: list[Any] = []
        for parameter in inspect.signature(function).parameters.values():
            if parameter.kind is parameter.VAR_POSITIONAL:
                arguments += options.pop(parameter.name)
            elif parameter.kind is not parameter.KEYWORD_ONLY:
                arguments.append(options.pop(parameter.name))
        answer = function(*arguments, **options)
        return give(answer, output) if isinstance(answer, Answer) else int(answer)
    except UsageError as error:
        tell(str(error))
        return ExitCode.USAGE
    except SystemExit as ended:
        # The parser ends this way after `--help`; a signal does too, with a code.
        if ended.code or received() is not None:
            raise
        return ExitCode.OK


def _has_output(function: Callable[..., Any]) -> bool:
    """Whether a command's answer may be given in several formats."""
    return "Answer" in str(inspect.signature(function).return_annotation)


def _typed_parser(name: str, function: Callable[..., Any]) -> ArgumentParser:
    from docstring_parser import parse
    from jsonargparse import ArgumentParser, DefaultHelpFormatter

    from lmbench.report.render import Output

    class Help(_Paragraphs, DefaultHelpFormatter):
        """Leaves out what says nothing: types, empty defaults, and the values of a flag."""

        def _expand_help(self, action: argparse.Action) -> str:
            told = str(super()._expand_help(action))
            note = re.search(r"\s*\((?:required, )?type: ([^()]*)\)$", told)
            default = note[1].partition(", default: ")[2] if note else ""
            told = told[: note.start()] if note else told
            return told if default in ("", "null", "False") else f"{told} (default: {default})"

        def _format_action_invocation(self, action: argparse.Action) -> str:
            return str(super()._format_action_invocation(action)).replace(" {true,false}", "")

        def _format_usage(self, *given: Any) -> str:
            return str(super()._format_usage(*given)).replace(" {true,false}", "")

    text = parse(inspect.getdoc(function) or "")
    description = "\n\n".join(filter(None, [text.short_description, text.long_description]))
    parser = ArgumentParser(
        prog=f"lmbench {name}", description=description, formatter_class=Help, exit_on_error=False, allow_abbrev=False
    )
    meanings = {each.arg_name.lstrip("*"): each.description for each in text.params}
    parameters = inspect.signature(function, eval_str=True).parameters.values()
    several = {each.name: numbers for each in parameters if (numbers := _numbers_of_words(each))}
    skipped: set[str | int] = {"settings", *several}
    parser.add_function_arguments(function, as_group=False, as_positional=True, fail_untyped=True, skip=skipped)
    for each in parameters:
        if each.name in several:
            dashes = "--" if each.kind is each.KEYWORD_ONLY else ""
            parser.add_argument(f"{dashes}{each.name}", type=str, help=meanings.get(each.name), **several[each.name])
    if _has_output(function):
        parser.add_class_arguments(Output, as_group=False)
    return parser


def _numbers_of_words(parameter: inspect.Parameter) -> dict[str, Any]:
    """How argparse takes a parameter of several words; nothing for one that jsonargparse knows by itself."""
    if parameter.kind is parameter.VAR_POSITIONAL:
        return {"nargs": "*"}
    if parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is not parameter.empty:
        return {"nargs": "?", "default": parameter.default}
    annotation = str(parameter.annotation).removesuffix(" | None")
    is_list = annotation.startswith("list[")
    count = annotation.count("str") if "tuple[" in annotation else 0
    if parameter.name == "settings" or not (is_list or count):
        return {}
    return (
        {"default": parameter.default} | ({"nargs": count} if count else {}) | ({"action": "append"} if is_list else {})
    )


def _parsed(name: str, parser: ArgumentParser, words: Sequence[str], takes_settings: bool) -> dict[str, Any]:
    """The options by name; a mistake is told in one line, with the option that was probably meant."""
    known = [each.removeprefix("--") for each in parser._option_string_actions if each.startswith("--")]
    flags = {f"--{action.dest}" for action in parser._actions if action.default is False}
    rest, taken, settings = list(words), list[str](), list[str]()
    while rest:
        word = rest.pop(0)
        option, has_value, _ = word.removeprefix("--").partition("=")
        if takes_settings and word.startswith("--") and option not in (*known, "json"):
            is_flag = has_value or not rest or rest[0].startswith("--")
            settings += [word] if is_flag else [word, rest.pop(0)]
        else:
            taken.append("--format=json" if word == "--json" else f"{word}=true" if word in flags else word)
    try:
        options = vars(parser.parse_args(taken))
    except argparse.ArgumentError as error:
        message = re.sub(r'Parser key "(\w+)":\s*', r"--\1: ", str(error))
        message = re.sub(r"<class '(\w+)'>", r"\1", message)
        unknown = re.fullmatch(r"unrecognized arguments: (\S+).*", message, re.DOTALL)
        if unknown and unknown[1].startswith("-"):
            option = unknown[1].partition("=")[0]
            message = f"unknown option {option}{suggest(option.removeprefix('--'), known, '--{}')}"
        raise UsageError(f"{name}: {message}; `lmbench {name} -h` tells the options") from None
    return options | ({"settings": settings} if takes_settings else {})
