"""Commands as typed functions: the signature and the docstring make the parser, and an Answer is printed in any format.

Positional parameters are the command's arguments: `*results: str` takes several, `device: str | None = None, /` is
optional. Keyword parameters are its options: a `tuple[str, str]` takes two words, a `list` may be repeated, a `bool` is
a flag. msgspec converts a word to any other type. A parameter called `settings` collects options of `fit`, which the
signature does not have. Results may be given by their names, such as `last`. The docstring's text is the help, and its
Args section describes each option. A function that returns an `Answer` also has the options of `report.render.Output`.
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
from lmbench.records.vocabulary import Values

PositiveInt = Annotated[int, msgspec.Meta(ge=1)]
PositiveFloat = Annotated[float, msgspec.Meta(gt=0)]

#: Parameters that may name results.
_RESULTS = {"results", "source", "study"}


def run_typed(name: str, function: Callable[..., Any], words: Sequence[str]) -> int:
    """Run a command's function with the words of a command line, and return the exit code."""
    # Imported here, since `lmbench -h` needs none of them.
    from lmbench.records.named import find_result
    from lmbench.report.answer import Answer
    from lmbench.report.render import Output, give

    parser = _Parser(f"lmbench {name}", function)
    output_options = Output.__dataclass_fields__ if "Answer" in str(function.__annotations__["return"]) else ()
    if output_options:
        parser.add_options(Output)
        parser.add_argument("--json", dest="format", action="store_const", const="json", help=argparse.SUPPRESS)
    try:
        options = parser.parse(words, "settings" in function.__annotations__)
        if options.get("run") is False and options.get("settings"):
            setting = options["settings"][0].partition("=")[0]
            parser.error(f"unrecognized arguments: {setting} (options of `lmbench fit` go with --run)")
        output = Output(**{option: options.pop(option) for option in output_options})
        for option in _RESULTS & options.keys():
            value = options[option]
            options[option] = [*map(find_result, value)] if isinstance(value, list) else value and find_result(value)
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


class _Help(argparse.HelpFormatter):
    """Wraps every paragraph to the terminal's width, and keeps indented lines as they are."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = re.sub(r"(?<!\n)\n(?=\S)", " ", text).split("\n")
        return "\n".join(textwrap.fill(line, width, break_on_hyphens=False) for line in lines)


class _Parser(argparse.ArgumentParser):
    """A parser of a function's parameters, which raises UsageError for a mistake."""

    def __init__(self, prog: str, function: Callable[..., Any]) -> None:
        super().__init__(prog, formatter_class=_Help, allow_abbrev=False)
        self.add_options(function)

    def add_options(self, function: Callable[..., Any]) -> None:
        """Add the parameters of a function, or those of a class as options, described as in the docstring."""
        from docstring_parser import parse

        text = parse(inspect.getdoc(function) or "")
        self.description = self.description or f"{text.short_description}\n\n{text.long_description or ''}".strip()
        meanings = {meaning.arg_name.lstrip("*"): meaning.description for meaning in text.params}
        for name, parameter in inspect.signature(function, eval_str=True).parameters.items():
            kind, default = str(parameter.annotation), parameter.default
            is_option = parameter.kind is parameter.KEYWORD_ONLY or isinstance(function, type)
            shown = "" if default in (None, False, "", parameter.empty) else f" (default: {default})"
            # argparse takes a percent sign for the start of a format.
            settings: Values = {"help": f"{meanings.get(name)}{shown}".replace("%", "%%")}
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
                # `for_` is --for, since `for` is a keyword of Python.
                settings |= {"dest": name} if is_option else {}
                self.add_argument(f"--{name.rstrip('_')}" if is_option else name, **settings)

    def parse(self, words: Sequence[str], has_settings: bool) -> Values:
        """Values by the parameters' names. Options that the signature lacks go to `settings`."""
        parsed, settings = list[str](), list[str]()
        is_value = False
        for word in words:
            is_option = word.startswith("--")
            is_setting = word.partition("=")[0] not in self._option_string_actions if is_option else is_value
            (settings if is_setting and has_settings else parsed).append(word)
            is_value = is_option and is_setting and "=" not in word
        return vars(self.parse_args(parsed)) | ({"settings": settings} if has_settings else {})

    def error(self, message: str) -> NoReturn:
        unknown = re.search(r"unrecognized arguments: --(\w+)", message)
        known = [option.removeprefix("--") for option in self._option_string_actions]
        hint = suggest(unknown[1], known, "--{}") if unknown else ""
        raise UsageError(f"{self.prog.partition(' ')[2]}: {message}{hint}; `{self.prog} -h` tells the options")


def _converted(kind: Any, word: str) -> Any:
    try:
        return msgspec.convert(word, kind, strict=False, dec_hook=lambda custom_type, text: custom_type(text))
    except msgspec.ValidationError as error:
        raise argparse.ArgumentTypeError(f"{word!r} does not fit: {error}") from None
