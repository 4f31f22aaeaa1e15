"""What a command line says about the model and the data, before a parser for them exists.

LightningCLI takes either one fixed class or any subclass of a base. Which of the two a parser must be built for, only
the words, the configuration files and the environment tell.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lmbench.fit.words import PREFIX

_FILES = (".yaml", ".yml", ".json")


@dataclass
class Given:
    """What was given for one part (`model` or `data`).

    `class_path` is the class that was named last, None without one; `names` are the arguments that were set; `is_null`
    says that the part was set to null.
    """

    class_path: str | None = None
    names: set[str] = field(default_factory=set)
    is_null: bool = False

    def add(self, value: Any) -> None:
        """Take in what a file, a word or a variable gives for the whole part: a mapping, a class, a file, null."""
        if isinstance(value, str):
            value = _parsed(value)
        self.is_null = value is None
        if isinstance(value, str):
            self.class_path = value
        elif isinstance(value, Mapping):
            # A class with its arguments, or the arguments of the fixed class.
            arguments = value.get("init_args") if "class_path" in value or "init_args" in value else value
            self.class_path = value.get("class_path", self.class_path)
            self.names |= set(arguments) if isinstance(arguments, Mapping) else set()

    def add_argument(self, name: str, value: str) -> None:
        """Take in one argument, as from `--model.width 4` (or `--model.class_path X`, `--model.help X`)."""
        self.is_null = False
        if name in ("class_path", "help"):
            self.class_path = value
        else:
            self.names.add(name.removeprefix("init_args.").partition(".")[0])


def what_is_given(part: str, args: list[str], environment: Mapping[str, str]) -> Given:
    """What the words after `lmbench` (a command first), their files and the environment give for a part.

    Files that cannot be read are left to the parser, which complains about them.
    """
    given = Given()
    for option, value in _settings(args, environment):
        if option == "config":
            content = _content(value)
            if isinstance(content, Mapping) and part in content:
                given.add(content[part])
        elif option == part:
            given.add(value)
        elif option.startswith(part + "."):
            given.add_argument(option.removeprefix(part + "."), value)
    return given


def _settings(args: list[str], environment: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Options with their values, weakest first: LMBENCH_FIT__MODEL and its like, then the words."""
    command, *words = args
    prefix = f"{PREFIX}{command}__".upper()
    variables = {
        name.removeprefix(prefix).lower(): text for name, text in environment.items() if name.startswith(prefix)
    }
    # A configuration file from a variable is weaker than any other variable.
    for name in sorted(variables, key=lambda name: name != "config"):
        yield name.replace("__", "."), variables[name]
    for word, following in zip(words, [*words, ""][1:], strict=True):
        option, equals, value = word.partition("=")
        if option == "-c" or option.startswith("--"):
            name = "config" if option == "-c" else option.removeprefix("--")
            yield name, value if equals else following


def _parsed(value: str) -> Any:
    """The value of `--model`: a class's name as it is, else what the YAML or JSON in it, or in a file, says."""
    if value.lstrip().startswith("{") or value in ("null", "None"):
        return _load(value)
    return _content(value) if value.endswith(_FILES) else value


def _content(value: str) -> Any:
    """A configuration by its path, or as it is."""
    path = Path(value)
    try:
        return _load(path.read_text() if path.is_file() else value)
    except (OSError, UnicodeDecodeError):
        return None


def _load(text: str) -> Any:
    try:
        return yaml.safe_load(text if text != "None" else "null")
    except yaml.YAMLError:
        return None
