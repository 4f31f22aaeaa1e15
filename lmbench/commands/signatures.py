"""Names of options, read from the source code of classes and functions: importing it loads PyTorch, for seconds."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import zip_longest
from pathlib import Path

from lmbench.configs import placed, shipped_configs
from lmbench.errors import UsageError, suggest

_OPTIONS = tomllib.loads(Path(__file__).with_name("options.toml").read_text("utf-8"))
#: The groups of `lmbench fit`'s options, with the classes whose arguments they are, as `module:name`.
GROUPS: Mapping[str, Sequence[str]] = _OPTIONS["groups"]


@cache
def arguments(module: str, name: str) -> tuple[str, ...]:
    """The arguments of a class's constructor, or the options of a command's function; empty without source code."""
    package, _, rest = module.partition(".")
    spec = find_spec(package)
    folders = (spec and spec.submodule_search_locations) or ()
    paths = [Path(folder, *rest.split(".")).with_suffix(".py") for folder in folders]
    for node in [node for path in paths if path.is_file() for node in ast.parse(path.read_text("utf-8")).body]:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            is_answer = node.returns is not None and "Answer" in ast.unparse(node.returns)
            output = arguments("lmbench.report.render", "Output") if is_answer else ()
            return (*(argument.arg for argument in node.args.kwonlyargs), *output)
        if isinstance(node, ast.ClassDef) and node.name == name:
            for part in node.body:
                if isinstance(part, ast.FunctionDef) and part.name == "__init__":
                    return tuple(argument.arg for argument in (*part.args.args[1:], *part.args.kwonlyargs))
            return tuple(ast.unparse(part.target) for part in node.body if isinstance(part, ast.AnnAssign))
    return ()


def group_options(group: str) -> list[str]:
    """All options of a group by their full names: `trainer.precision`."""
    names = [name for source in GROUPS[group] for name in arguments(*source.split(":"))]
    # A class may redefine an argument of its base class.
    return [f"{group}.{name}" for name in dict.fromkeys(names)]


def check_options(words: Sequence[str], places: Mapping[str, str] = {}, problems: Sequence[str] = ()) -> None:
    """Check the words of `lmbench fit` for misspelt options. Options of a user's class are not checked.

    `places` says where options stand in a file. `problems` are other mistakes in that file.

    Raises:
        UsageError: there are problems, or unknown options. Each of these is named with its place and the most similar
            option.
    """
    options = dict.fromkeys(_options(words))
    shipped = {name: path.read_text("utf-8") for name, path in shipped_configs().items()}
    class_groups = {"optimizer", "lr_scheduler"}
    for name, value in options:
        if name in ("model", "data") or (name == "config" and "class_path" in shipped.get(value, "class_path")):
            class_groups |= {"model", "data"}
    known = [*_OPTIONS["alone"], *GROUPS, *(option for group in GROUPS for option in group_options(group))]
    lines = []
    for name, _ in options:
        group, *rest = name.split(".")
        belongs_to_class = group in class_groups or rest[:1] == ["init_args"]
        if not belongs_to_class and ".".join([group, *rest[:1]]) not in known:
            lines.append(placed(f"unknown option --{name}{suggest(name, known, '--{}')}", places))
    if lines:
        lines[-1] += " (`lmbench fit --help` lists them all)"
    if lines or problems:
        raise UsageError("; ".join([*lines, *problems]))


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options with their values. A first word without an option names a configuration."""
    if words and not words[0].startswith("-"):
        yield "config", words[0]
    for word, next_word in zip_longest(words, words[1:], fillvalue=""):
        # A word such as -1 is a value.
        if match := re.match(r"-+([A-Za-z][^=]*)(=.*)?", word):
            name = "config" if match[1] == "c" else match[1].removesuffix("+")
            yield name, next_word if match[2] is None else match[2][1:]
