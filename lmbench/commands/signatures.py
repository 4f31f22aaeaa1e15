"""Names of options, read off the source of what takes them: to import it would take PyTorch, and seconds."""

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
    """The arguments of a class's constructor, or the options of a command's function; none where there is no source."""
    package, _, rest = module.partition(".")
    spec = find_spec(package)
    paths = [Path(folder, *rest.split(".")) for folder in (spec and spec.submodule_search_locations) or ()]
    sources = [path.with_suffix(".py") for path in paths if path.with_suffix(".py").is_file()]
    for node in [node for path in sources for node in ast.parse(path.read_text("utf-8")).body]:
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
    # A class may take an argument of its base class's in another way.
    return [f"{group}.{name}" for name in dict.fromkeys(names)]


def check_options(words: Sequence[str], places: Mapping[str, str] = {}, others: Sequence[str] = ()) -> None:
    """Look for misspelt options of `lmbench fit` among its words; those of a class of the user's are left alone.

    Raises:
        UsageError: options that there are not, each with the nearest that there is, and where in a file it stands by
            `places`; with them what is wrong with the file otherwise.
    """
    options = dict.fromkeys(_options(words))
    shipped = {name: path.read_text("utf-8") for name, path in shipped_configs().items()}
    of_classes = {"optimizer", "lr_scheduler"}
    for name, value in options:
        if name in ("model", "data") or (name == "config" and "class_path" in shipped.get(value, "class_path")):
            of_classes |= {"model", "data"}
    known = [*_OPTIONS["alone"], *GROUPS, *(option for group in GROUPS for option in group_options(group))]
    lines = []
    for name, _ in options:
        group, *rest = name.split(".")
        is_free = group in of_classes or rest[:1] == ["init_args"]
        if not is_free and ".".join([group, *rest[:1]]) not in known:
            lines.append(placed(f"unknown option --{name}{suggest(name, known, '--{}')}", places))
    if lines:
        lines[-1] += " (`lmbench fit --help` lists them all)"
    if lines or others:
        raise UsageError("; ".join([*lines, *others]))


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options with their values; a first word without one names a configuration."""
    if words and not words[0].startswith("-"):
        yield "config", words[0]
    for word, after in zip_longest(words, words[1:], fillvalue=""):
        # A negative number is a value.
        if match := re.match(r"-+([A-Za-z][^=]*)(=.*)?", word):
            name = "config" if match[1] == "c" else match[1].removesuffix("+")
            yield name, after if match[2] is None else match[2][1:]
