"""A command is a typed function: its signature and docstring make the parser, its Answer is given in any format.

Positional parameters are the command's arguments (`*results: str` takes several, `device: str | None = None, /` is
optional), keyword parameters its options: a `tuple[str, str]` takes two words, a `list` may be given again, a `bool` is
a flag. Options that the signature does not have are collected for a parameter called `settings`, if there is one: they
belong to `fit`. Results may be given by their names, such as `last`. The docstring's text is the help, its Args section
tells each option. A function that returns an `Answer` has the options of `report.render.Output` beside its own.
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

#: Parameters that are results, or may be.
_RESULTS = {"results", "runs", "source", "study"}

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser


def run_typed(name: str, function: Callable[..., Any], words: Sequence[str]) -> int:
    """Run a command's function with the words of a command line; returns the exit code."""
    # Here: `lmbench -h` does without them.
    from lmbench.records.named import find_result
    from lmbench.report.answer import Answer
    from lmbench.report.render import Output, give

    signature = inspect.signature(function)
    try:
        parser = _typed_parser(name, function)
        taken, settings = _sorted(parser, words, takes_settings="settings" in signature.parameters)
        try:
            options = vars(parser.parse_args(taken)) | settings
        except argparse.ArgumentError as error:
            unknown = re.search(r"unrecognized arguments: --(\w+)", str(error))
            known = [option.removeprefix("--") for option in parser._option_string_actions]
            hint = suggest(unknown[1], known, "--{}") if unknown else ""
            raise UsageError(f"{name}: {error}{hint}; `lmbench {name} -h` tells the options") from None
        keys = Output.__dataclass_fields__ if "Answer" in str(signature.return_annotation) else ()
        output = Output(**{key: options.pop(key) for key in keys})
        for key in _RESULTS & options.keys():
            given = options[key]
            options[key] = [*map(find_result, given)] if isinstance(given, list) else given and find_result(given)
        arguments: list[Any] = []
        for parameter in signature.parameters.values():
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


def _typed_parser(name: str, function: Callable[..., Any]) -> ArgumentParser:
    from docstring_parser import parse
    from jsonargparse import ArgumentParser, DefaultHelpFormatter

    from lmbench.report.render import Output

    class Help(DefaultHelpFormatter):
        """Leaves out what says nothing: types, empty defaults, and the values of a flag."""

        def _expand_help(self, action: argparse.Action) -> str:
            has_default = action.default not in (None, False, "", argparse.SUPPRESS)
            return f"{action.help} (default: {action.default})" if has_default else str(action.help)

        def _format_action_invocation(self, action: argparse.Action) -> str:
            return str(super()._format_action_invocation(action)).replace(" {true,false}", "")

        def _format_usage(self, *arguments: Any) -> str:
            return str(super()._format_usage(*arguments)).replace(" {true,false}", "")

        def _fill_text(self, text: str, width: int, indent: str) -> str:
            """Fold every paragraph to the screen; a list's lines, which are indented, stay lines."""
            lines = []
            for line in re.sub(r"(?<!\n)\n(?=\S)", " ", text).split("\n"):
                # Of a list's line what follows its first word stands under itself.
                hanging = " " * len("".join(re.findall(r"^\s+\S+\s+", line)))
                lines.append(textwrap.fill(line, width, subsequent_indent=hanging, break_on_hyphens=False))
            return "\n".join(lines)

    text = parse(inspect.getdoc(function) or "")
    description = "\n\n".join(filter(None, [text.short_description, text.long_description]))
    parser = ArgumentParser(
        prog=f"lmbench {name}", description=description, formatter_class=Help, exit_on_error=False, allow_abbrev=False
    )
    meanings = {parameter.arg_name.lstrip("*"): parameter.description for parameter in text.params}
    signature = inspect.signature(function, eval_str=True)
    # How argparse takes a parameter of several words; jsonargparse knows the others by itself.
    several: dict[str, dict[str, Any]] = {}
    for parameter in signature.parameters.values():
        annotation = str(parameter.annotation).removesuffix(" | None")
        words = {"default": parameter.default}
        if parameter.kind is parameter.VAR_POSITIONAL:
            several[parameter.name] = {"nargs": "*"}
        elif parameter.kind is parameter.POSITIONAL_ONLY and parameter.default is not parameter.empty:
            several[parameter.name] = {"nargs": "?"} | words
        elif parameter.name != "settings" and annotation.startswith(("list[", "tuple[")):
            nargs = {"nargs": annotation.count("str")} if "tuple[" in annotation else {}
            several[f"--{parameter.name}"] = words | nargs | ({"action": "append"} if annotation[0] == "l" else {})
    skipped: set[str | int] = {"settings", *(option.removeprefix("--") for option in several)}
    parser.add_function_arguments(function, as_group=False, as_positional=True, fail_untyped=True, skip=skipped)
    for option, numbers in several.items():
        parser.add_argument(option, type=str, help=meanings.get(option.removeprefix("--")), **numbers)
    if "Answer" in str(signature.return_annotation):
        parser.add_class_arguments(Output, as_group=False)
    return parser


def _sorted(
    parser: ArgumentParser, words: Sequence[str], takes_settings: bool
) -> tuple[list[str], dict[str, list[str]]]:
    """The words for the parser, and those that it does not know, as `settings` where the command takes such."""
    flags = {f"--{action.dest}" for action in parser._actions if action.default is False}
    rest, taken, settings = list(words), list[str](), list[str]()
    while rest:
        word = rest.pop(0)
        option = word.partition("=")[0]
        if word == "--json":
            taken.append("--format=json")
        elif takes_settings and option.startswith("--") and option not in parser._option_string_actions:
            has_value = option == word and rest and not rest[0].startswith("--")
            settings += [word, rest.pop(0)] if has_value else [word]
        else:
            taken.append(f"{word}=true" if word in flags else word)
    return taken, {"settings": settings} if takes_settings else {}
