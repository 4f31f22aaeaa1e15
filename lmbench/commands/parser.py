"""Commands as typed functions: the signature and the docstring make the parser, and an Answer is printed in any format.

Positional parameters are the command's arguments: `*results: str` takes several, `device: str | None = None, /` is
optional. Keyword parameters are its options: a `tuple[str, str]` takes two words, a `list` may be repeated, a `bool` is
a flag. msgspec converts a word to any other type. A parameter whose type is a dataclass stands for the options that the
dataclass describes. A parameter called `settings` collects options of `fit`, which the signature does not have. Results
may be given by their names, such as `last`. The docstring's text is the help, and its Args section describes each
option. A function that returns an `Answer` also has the options of `report.render.Output`.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, NoReturn

import msgspec
from docstring_parser import parse as parse_docstring

from lmbench.errors import ExitCode, Failure, UsageError, suggest, tell
from lmbench.interruption import received
from lmbench.records.named import find_result
from lmbench.records.vocabulary import Values
from lmbench.report.answer import Answer
from lmbench.report.render import Output, give

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]

#: Parameters that may name results.
_RESULTS = {"results", "source", "study"}


def run_typed(
    name: str, function: Callable[..., Any], words: Sequence[str], more_help: Callable[[], str] | None = None
) -> int:
    """Run a command's function with the words of a command line, and return the exit code.

    `more_help` gives text that follows the docstring's own in the help.
    """
    parser = _Parser(f"lmbench {name}", function, more_help)
    try:
        options = parser.parse(words)
        if options.get("run") is False and options.get("settings"):
            setting = options["settings"][0].partition("=")[0]
            parser.error(f"unrecognized arguments: {setting} (options of `lmbench fit` go with --run)")
        for option in _RESULTS & options.keys():
            value = options[option]
            options[option] = [*map(find_result, value)] if isinstance(value, list) else value and find_result(value)
        groups = {
            group: kind(**{field.name: options.pop(field.name) for field in dataclasses.fields(kind)})
            for group, kind in _groups(function).items()
        }
        output, options = groups.pop("output", None), options | groups
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
    except Failure as failure:
        tell(f"{name}: {failure}")
        return failure.exit_code
    except SystemExit as end:
        # `--help` ends in a SystemExit without a code, a signal in one with a code.
        if end.code or received() is not None:
            raise
        return ExitCode.OK


def options_of(function: Callable[..., Any]) -> list[str]:
    """The options of a command's function, with their dashes."""
    return [option for option in _Parser("", function, None).known if option != "--help"]


def _groups(function: Callable[..., Any]) -> dict[str, Any]:
    """The dataclasses of options by the parameters' names; `output` for a command that gives an Answer."""
    signature = inspect.signature(function, eval_str=True)
    kinds = {name: parameter.annotation for name, parameter in signature.parameters.items()}
    groups = {name: kind for name, kind in kinds.items() if dataclasses.is_dataclass(kind)}
    answers = (signature.return_annotation, *typing.get_args(signature.return_annotation))
    return {**groups, "output": Output} if Answer in answers else groups


class _Help(argparse.HelpFormatter):
    """Wraps every paragraph to the terminal's width, and keeps indented lines as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = re.sub(r"(?<!\n)\n(?=\S)", " ", text).split("\n")
        return "\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in lines)


class _Parser(argparse.ArgumentParser):
    """A parser of a function's parameters, which raises UsageError for a mistake."""

    def __init__(self, prog: str, function: Callable[..., Any], more_help: Callable[[], str] | None) -> None:
        super().__init__(prog, formatter_class=_Help, allow_abbrev=False)
        self._more_help, self._has_settings = more_help, "settings" in inspect.signature(function).parameters
        self._add_options(function)
        text = parse_docstring(inspect.getdoc(function) or "")
        self.description = f"{text.short_description}\n\n{text.long_description or ''}".strip()
        if "output" in _groups(function):
            self._add_options(Output)
            self.add_argument("--json", dest="format", action="store_const", const="json", help=argparse.SUPPRESS)

    def format_help(self) -> str:
        if self._more_help is not None:
            self.description, self._more_help = f"{self.description}\n\n{self._more_help()}", None
        return super().format_help()

    @property
    def known(self) -> list[str]:
        """The options that begin with two dashes."""
        return [option for option in self._option_string_actions if option.startswith("--")]

    def _add_options(self, function: Callable[..., Any]) -> None:
        """Add the parameters of a function, or those of a dataclass as options, described as in the docstring."""
        text = parse_docstring(inspect.getdoc(function) or "")
        meanings = {meaning.arg_name.lstrip("*"): meaning.description for meaning in text.params}
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
            if isinstance(parameter.annotation, type) and dataclasses.is_dataclass(parameter.annotation):
                self._add_options(parameter.annotation)
            elif name != "settings":
                is_option = parameter.kind is parameter.KEYWORD_ONLY or isinstance(function, type)
                self._add_option(parameter, is_option, str(meanings.get(name)))

    def _add_option(self, parameter: inspect.Parameter, is_option: bool, meaning: str) -> None:
        """Add a parameter as an option or as an argument, with what its type says about its words."""
        name, default = parameter.name, parameter.default
        shown = "" if default in (None, False, "", parameter.empty) else f" (default: {default})"
        # argparse takes a percent sign for the start of a format.
        settings: Values = {"help": f"{meaning}{shown}".replace("%", "%%")}
        if parameter.annotation is bool:
            settings["action"] = "store_true"
        elif parameter.kind is parameter.VAR_POSITIONAL:
            settings["nargs"] = "*"
        else:
            if is_option:
                settings["metavar"] = "VALUE"
            if default is not parameter.empty:
                settings |= {"default": default} if is_option else {"nargs": "?"}
            kind = _without_none(parameter.annotation)
            if typing.get_origin(kind) is list:
                settings["action"] = "append"
                (kind,) = typing.get_args(kind)
            if typing.get_origin(kind) is tuple:
                settings["nargs"] = len(typing.get_args(kind))
            elif "action" not in settings:
                settings["type"] = partial(_converted, parameter.annotation)
        if is_option:
            # `for_` is --for, since `for` is a keyword of Python.
            self.add_argument(f"--{name.rstrip('_')}", dest=name, **settings)
        else:
            self.add_argument(name, **settings)

    def parse(self, words: Sequence[str]) -> Values:
        """Values by the parameters' names. Options that the signature lacks go to its `settings`."""
        if not self._has_settings:
            return vars(self.parse_args(words))
        parsed, settings = list[str](), list[str]()
        is_value = False
        for word in words:
            is_option = word.startswith("--")
            is_setting = word.partition("=")[0] not in self.known if is_option else is_value
            (settings if is_setting else parsed).append(word)
            is_value = is_option and is_setting and "=" not in word
        return {**vars(self.parse_args(parsed)), "settings": settings}

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: --(\w+)", message)
        hint = suggest(unknown[1], [option.removeprefix("--") for option in self.known], "--{}") if unknown else ""
        raise UsageError(f"{self.prog.partition(' ')[2]}: {message}{hint}; `{self.prog} -h` tells the options")


def _without_none(kind: Any) -> Any:
    """The type in an optional type; any other type as it is."""
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return next(part for part in typing.get_args(kind) if part is not types.NoneType)
    return kind


def _converted(kind: Any, word: str) -> Any:
    try:
        return msgspec.convert(word, kind, strict=False, dec_hook=lambda custom_type, text: custom_type(text))
    except msgspec.ValidationError as error:
        raise argparse.ArgumentTypeError(f"{word!r} does not fit: {error}") from None
