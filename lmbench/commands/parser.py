"""Commands as typed functions: the signature and the docstring make the parser, and an Answer is printed in any format.

Parameters are the command's arguments (`*results: Result` takes several), keyword-only parameters its options: a
`tuple[str, str]` takes two words, a `list` may be repeated, a `bool` is a flag. msgspec converts a word to any other
type. A parameter whose type is a dataclass stands for the options that the dataclass describes. A parameter called
`settings` collects options of `fit`, which the signature does not have. The docstring's text is the help, and its Args
section describes each option. A function that returns an `Answer` also has the options of `report.render.Output`.
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
from typing import Annotated, Any, NewType, NoReturn

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
#: The path of a result, for which a command line may have a name such as `last`.
Result = NewType("Result", str)


def run_typed(name: str, function: Callable[..., Any], words: Sequence[str], more_help: str = "") -> int:
    """Run a command's function with the words of a command line, and return the exit code.

    `more_help` follows the docstring's text in the help.
    """
    try:
        parser = CommandParser(f"lmbench {name}", function, more_help)
        values = parser.parse(words)
        output = values.pop("output", None)
        answer = function(*values.pop(parser.several, ()), **values)
        return give(answer, output) if isinstance(answer, Answer) else int(answer)
    except Failure as failure:
        tell(f"{name}: {failure}")
        return failure.exit_code
    except SystemExit as end:
        # `--help` ends in a SystemExit without a code, a signal in one with a code.
        if end.code or received() is not None:
            raise
        return ExitCode.OK


class _Help(argparse.HelpFormatter):
    """Wraps every paragraph to the terminal's width, and keeps indented lines as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = re.sub(r"(?<!\n)\n(?=\S)", " ", text).split("\n")
        return "\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in lines)


class CommandParser(argparse.ArgumentParser):
    """A parser of a function's parameters, which raises UsageError for a mistake."""

    def __init__(self, prog: str, function: Callable[..., Any], more_help: str = "") -> None:
        super().__init__(prog, formatter_class=_Help, allow_abbrev=False)
        #: The dataclasses of options, by the names of their parameters.
        self._groups: dict[str, type[Any]] = {}
        #: The parameter that takes several arguments, and whether there are `settings`.
        self.several, self.takes_settings = "", False
        self.description = f"{self._add(function)}\n\n{more_help}".strip()
        returned = inspect.signature(function, eval_str=True).return_annotation
        if Answer in (returned, *typing.get_args(returned)):
            self._groups["output"] = Output
            self._add(Output)
            self.add_argument("--json", dest="format", action="store_const", const="json", help=argparse.SUPPRESS)

    @property
    def options(self) -> list[str]:
        """All options, with their dashes."""
        return [*self._option_string_actions]

    def _add(self, function: Callable[..., Any]) -> str:
        """Add the parameters of a function, or the fields of a dataclass; returns the text of its docstring."""
        text = parse_docstring(inspect.getdoc(function) or "")
        meanings = {meaning.arg_name.lstrip("*"): str(meaning.description) for meaning in text.params}
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
            kind = parameter.annotation
            if isinstance(kind, type) and dataclasses.is_dataclass(kind):
                self._groups[name] = kind
                self._add(kind)
            elif name == "settings":
                self.takes_settings = True
            else:
                is_option = parameter.kind is parameter.KEYWORD_ONLY or isinstance(function, type)
                self._add_one(parameter, is_option, meanings.get(name, ""))
        return f"{text.short_description}\n\n{text.long_description or ''}"

    def _add_one(self, parameter: inspect.Parameter, is_option: bool, meaning: str) -> None:
        """Add a parameter as an option or as an argument."""
        kind, default = _without_none(parameter.annotation), parameter.default
        shown = "" if default in (None, False, "", parameter.empty) else f" (default: {default})"
        # argparse takes a percent sign for the start of a format.
        words: Values = {"help": f"{meaning}{shown}".replace("%", "%%")}
        if kind is bool:
            words["action"] = "store_true"
        elif typing.get_origin(kind) is typing.Literal:
            words["choices"] = typing.get_args(kind)
        else:
            if typing.get_origin(kind) is list:
                words["action"] = "append"
                (kind,) = typing.get_args(kind)
            if typing.get_origin(kind) is tuple:
                words["nargs"] = len(typing.get_args(kind))
            else:
                words["type"] = find_result if kind is Result else partial(_converted, kind)
            if is_option:
                words["metavar"] = "VALUE"
        if is_option:
            # `for_` is --for, since `for` is a keyword of Python.
            self.add_argument(f"--{parameter.name.rstrip('_')}", dest=parameter.name, default=default, **words)
            return
        if parameter.kind is parameter.VAR_POSITIONAL:
            words["nargs"], self.several = "*", parameter.name
        elif default is not parameter.empty:
            words["nargs"] = "?"
        self.add_argument(parameter.name, **words)

    def parse(self, words: Sequence[str]) -> Values:
        """Values by the parameters' names. Options that the signature lacks go to its `settings`."""
        parsed, settings = list[str](), list[str]()
        is_value = False
        for word in words:
            is_option = word.startswith("--")
            is_setting = word.partition("=")[0] not in self.options if is_option else is_value
            (settings if is_setting and self.takes_settings else parsed).append(word)
            is_value = is_option and is_setting and "=" not in word
        values = vars(self.parse_args(parsed))
        if settings and values.get("run") is False:
            setting = settings[0].partition("=")[0]
            self.error(f"unrecognized arguments: {setting} (options of `lmbench fit` go with --run)")
        for group, kind in self._groups.items():
            values[group] = kind(**{field.name: values.pop(field.name) for field in dataclasses.fields(kind)})
        return {**values, "settings": settings} if self.takes_settings else values

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: --(\w+)", message)
        hint = suggest(f"--{unknown[1]}", self.options) if unknown else ""
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
        # `Expected `int` >= 1`, or `Expected `int`, got `str``.
        wanted = re.sub(r", got `\w+`", "", str(error)).replace("Expected ", "give ")
        wanted = wanted.replace("`int`", "a whole number").replace("`float`", "a number")
        raise argparse.ArgumentTypeError(f"{word!r} does not fit: {wanted}") from None
