"""A command is a typed function: its signature and docstring make the parser, its Answer is given in any format.

Positional parameters are the command's arguments (`*results: str` takes several, `device: str | None = None, /` is
optional), keyword parameters its options: a `tuple[str, str]` takes two words, a `list` may be given again, a `bool` is
a flag; msgspec turns a word into any other type. Options that the signature does not have are collected for a parameter
called `settings`, if there is one: they belong to `fit`. Results may be given by their names, such as `last`. The
docstring's text is the help, its Args section tells each option. A function that returns an `Answer` has the options of
`report.render.Output` beside its own.
"""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, NoReturn

import msgspec

from lmbench.errors import ExitCode, Failure, UsageError, suggest, tell
from lmbench.interruption import received

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]

#: Parameters that are results, or may be.
_RESULTS = {"results", "source", "study"}


def run_typed(name: str, function: Callable[..., Any], words: Sequence[str]) -> int:
    """Run a command's function with the words of a command line; returns the exit code."""
    # Here: `lmbench -h` does without them.
    from lmbench.records.named import find_result
    from lmbench.report.answer import Answer
    from lmbench.report.render import Output, give

    parser = _Parser(f"lmbench {name}", function)
    keys = Output.__dataclass_fields__ if "Answer" in str(function.__annotations__["return"]) else ()
    if keys:
        parser.add_options(Output)
        parser.add_argument("--json", dest="format", action="store_const", const="json", help=argparse.SUPPRESS)
    try:
        options = parser.parse(words, "settings" in function.__annotations__)
        if options.get("run") is False and options.get("settings"):
            given = options["settings"][0].partition("=")[0]
            parser.error(f"unrecognized arguments: {given} (options of `lmbench fit` go with --run)")
        output = Output(**{key: options.pop(key) for key in keys})
        for key in _RESULTS & options.keys():
            given = options[key]
            options[key] = [*map(find_result, given)] if isinstance(given, list) else given and find_result(given)
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
    except SystemExit as ended:
        # The parser ends this way after `--help`; a signal does too, with a code.
        if ended.code or received() is not None:
            raise
        return ExitCode.OK


class _Help(argparse.HelpFormatter):
    """Folds every paragraph to the screen; a list's lines, which are indented, stay lines."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = re.sub(r"(?<!\n)\n(?=\S)", " ", text).split("\n")
        return "\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in lines)


class _Parser(argparse.ArgumentParser):
    """A parser of what functions take; a mistake is a UsageError."""

    def __init__(self, prog: str, function: Callable[..., Any]) -> None:
        super().__init__(prog, formatter_class=_Help, allow_abbrev=False)
        self.add_options(function)

    def add_options(self, function: Callable[..., Any]) -> None:
        """Add a function's parameters, or those of a class as options, with what the docstring says of each."""
        from docstring_parser import parse

        text = parse(inspect.getdoc(function) or "")
        self.description = self.description or f"{text.short_description}\n\n{text.long_description or ''}".strip()
        meanings = {meaning.arg_name.lstrip("*"): meaning.description for meaning in text.params}
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
            kind, default = str(parameter.annotation), parameter.default
            is_option = parameter.kind is parameter.KEYWORD_ONLY or isinstance(function, type)
            shown = "" if default in (None, False, "", parameter.empty) else f" (default: {default})"
            # argparse fills in what follows a percent sign.
            settings: dict[str, Any] = {"help": f"{meanings.get(name)}{shown}".replace("%", "%%")}
            if parameter.annotation is bool:
                settings["action"] = "store_true"
            elif parameter.kind is parameter.VAR_POSITIONAL:
                settings["nargs"] = "*"
            else:
                if is_option:
                    settings["metavar"] = "VALUE"
                if default is not parameter.empty:
                    settings |= {"default": default} if is_option else {"nargs": "?"}
                if "tuple[" in kind:
                    settings["nargs"] = kind.count("str")
                if kind.startswith("list["):
                    settings["action"] = "append"
                elif "tuple[" not in kind:
                    settings["type"] = partial(_converted, parameter.annotation)
            if name != "settings":
                # `for_` is --for, which is Python's own word.
                settings |= {"dest": name} if is_option else {}
                self.add_argument(f"--{name.rstrip('_')}" if is_option else name, **settings)

    def parse(self, words: Sequence[str], has_settings: bool) -> dict[str, Any]:
        """Values by the parameters' names; options that the signature does not have are `settings`."""
        own, settings = list[str](), list[str]()
        is_value = False
        for word in words:
            is_option = word.startswith("--")
            is_setting = word.partition("=")[0] not in self._option_string_actions if is_option else is_value
            (settings if is_setting and has_settings else own).append(word)
            is_value = is_option and is_setting and "=" not in word
        return vars(self.parse_args(own)) | ({"settings": settings} if has_settings else {})

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: --(\w+)", message)
        known = [option.removeprefix("--") for option in self._option_string_actions]
        hint = suggest(unknown[1], known, "--{}") if unknown else ""
        raise UsageError(f"{self.prog.partition(' ')[2]}: {message}{hint}; `{self.prog} -h` tells the options")


def _converted(kind: Any, word: str) -> Any:
    try:
        return msgspec.convert(word, kind, strict=False, dec_hook=lambda other, text: other(text))
    except msgspec.ValidationError as error:
        raise argparse.ArgumentTypeError(f"{word!r} does not fit: {error}") from None
