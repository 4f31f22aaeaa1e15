"""Shipped configurations and studies, which `fit --config NAME` and `sweep NAME` find by name, and reading of YAML."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from lmbench.errors import UsageError, suggest
from lmbench.files import Unreadable, names_file, read_file

T = TypeVar("T")


def shipped_configs() -> dict[str, Path]:
    """The configuration files of single runs, by name."""
    return _shipped("*.yaml")


def find_config(name: str) -> Path:
    """The configuration file that a command line names: a path, or a shipped configuration's name.

    Raises:
        UsageError: there is no such configuration.
    """
    complaint = f"config {name!r} is no file and no shipped configuration"
    if re.fullmatch(r"\w+(\.\w+)*\.[A-Z]\w*", name) and not names_file(Path(name)):
        raise UsageError(f"{complaint}; a class is --model {name}")
    return find_shipped(name, shipped_configs(), "configs", complaint)


def read_config(name: str) -> tuple[str, dict[str, Any]]:
    """The text and the settings of the configuration that a command line names.

    Raises:
        UsageError: there is no such configuration, it cannot be read, or it has no settings.
    """
    text, content = read_yaml(find_config(name), f"config {name!r}")
    if not isinstance(content, dict):
        example = "a configuration is YAML with a setting a line (`key: value`)"
        raise UsageError(f"config {name!r}: {example}; given: {text.strip()[:80]!r}")
    return text, content


def shipped_studies() -> dict[str, Path]:
    """The sweep files of studies, by name."""
    return _shipped("sweeps/*.yaml")


def find_shipped(name: str, shipped: Mapping[str, Path], folder: str, complaint: str) -> Path:
    """The path `name` if it is a file, else the shipped file with that name, which may stand below `folder`.

    Raises:
        UsageError: there is no such file; `complaint` with a suggestion.
    """
    path = Path(name).expanduser()
    if names_file(path):
        return path
    is_name = not path.is_absolute() and path.parent.name in ("", folder) and path.suffix in ("", ".yaml")
    if is_name and path.stem in shipped:
        return shipped[path.stem]
    raise UsageError(complaint + (suggest(path.stem, shipped) or f" ({', '.join(shipped)})"))


#: The largest YAML file that is read. The largest shipped study has 3 kB, a list of a thousand included cells 100 kB.
MAX_YAML_BYTES = 2**20
#: The most values of a YAML file, each counted as often as its aliases repeat it.
_MAX_VALUES = 100_000


def is_yaml(name: str | Path) -> bool:
    """Whether a name ends as that of a YAML file does."""
    return str(name).endswith((".yaml", ".yml"))


def read_yaml(path: Path, label: str) -> tuple[str, Any]:
    """The text of a user's YAML file, and its content. `label` names the file in errors.

    Raises:
        UsageError: the file cannot be read, is larger than `MAX_YAML_BYTES`, or is no YAML.
    """
    try:
        # utf-8-sig drops the byte order mark that some editors write.
        text = read_file(path, MAX_YAML_BYTES, follows_links=True).decode("utf-8-sig")
    except (Unreadable, UnicodeError) as error:
        raise UsageError(f"{label} cannot be read: {error}") from error
    return text, parse_yaml(text, label)


# Words, numbers, the mask of a secret, and lmbench's own classes.
_HARMLESS = re.compile(r"[\w*-]+|lmbench(?:\.\w+)+")


def may_run(value: Any, folder: Path) -> bool:
    """Whether a setting of a configuration in `folder` may make the command line import, run, read or write something.

    This is any text that is not a plain word, and a word that names a file, since the command line reads that file.
    """
    if not isinstance(value, str):
        return False
    return not _HARMLESS.fullmatch(value) or any(map(os.path.lexists, (Path(value), folder / value)))


# PyYAML's name for a text whose file it does not know.
_NO_FILE = ' in "<unicode string>",'


def parse_yaml(text: str, label: str) -> Any:
    """The content of a YAML text.

    Raises:
        UsageError: it is no YAML, a key stands twice in a mapping, or its aliases make it larger than `_MAX_VALUES`.
    """
    import yaml

    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

    class OnceLoader(loader):  # type: ignore[misc]
        """PyYAML's loader takes the last of several equal keys in silence, and aliases without end."""

        def construct_document(self, node: yaml.Node) -> Any:
            pending, count = [node], 0
            while pending:
                inner, count = pending.pop(), count + 1
                if count > _MAX_VALUES:
                    raise UsageError(
                        f"{label} has more than {_MAX_VALUES:,} values, or an alias within its own anchor; write fewer"
                    )
                if isinstance(inner, yaml.SequenceNode):
                    pending += inner.value
                elif isinstance(inner, yaml.MappingNode):
                    refuse_twice(inner)
                    pending += [part for pair in inner.value for part in pair]
            return super().construct_document(node)

    def refuse_twice(node: yaml.MappingNode) -> None:
        keys: dict[str, yaml.Node] = {}
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and (first := keys.setdefault(key.value, key)) is not key:
                lines = " and ".join(str(found.start_mark.line + 1) for found in (first, key))
                raise UsageError(f"{label} has {key.value!r} twice, in lines {lines}; keep one of them")

    try:
        return yaml.load(text, OnceLoader)
    # ValueError comes from an impossible date or number, such as 2026-99-99.
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UsageError(f"{label} is no YAML: {' '.join(str(error).split()).replace(_NO_FILE, ',')}") from error


def lines_of(text: str, source: str) -> dict[str, str]:
    """The line of each setting and value in a YAML text, such as `mine.yaml:3`.

    Keys are a setting's dotted name without `init_args`, and for a value that name with the value:
    `view.tables.columns.step_s`.
    """
    import yaml

    places, visited = dict[str, str](), set[int]()

    def walk(node: yaml.Node | None, name: str) -> None:
        # An anchor may be used many times, and is visited once.
        if id(node) in visited:
            return
        visited.add(id(node))
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                path = ".".join(part for part in (name, str(key.value)) if part not in ("", "init_args"))
                places.setdefault(path, f"{source}:{key.start_mark.line + 1}")
                walk(value, path)
        elif isinstance(node, yaml.SequenceNode):
            for item in node.value:
                walk(item, name)
        elif node is not None and node.value:
            places.setdefault(f"{name}.{node.value}", f"{source}:{node.start_mark.line + 1}")

    with suppress(RecursionError):
        walk(yaml.compose(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)), "")
    return places


def placed(line: str, places: Mapping[str, str], part: str = "") -> str:
    """Put the place in a file before a message about it, if the place is known.

    It is the place of the first word or option that the message quotes, within `part` of the file, else that of `part`.
    """
    word = re.search(r"(?:['`]|--)([^'`;\s]*)", line)
    paths = [path for path in places if word and path.startswith(part) and path.endswith(f".{word[1]}")]
    return next((f"{places[path]}: {line}" for path in [*paths, part] if path in places), line)


_PLAIN_WORDS = {
    "Expected": "expected", "Object contains ": "", "Object missing required": "there is no",
    "Invalid enum value": "unknown value",
    "`array`": "a list such as [a, b]", "`object`": "a mapping such as {a: 1}", "`str`": "text",
    "`bool`": "true or false", "`int`": "a whole number", "`float`": "a number",
}  # fmt: skip


def converted(content: Any, kind: type[T], label: str = "") -> T:
    """The content of a YAML file as an instance of a class. `label` names the file in errors.

    Raises:
        UsageError: the content does not fit; `charts[0]: unknown field 'colour'; allowed: title, kind, ...`.
    """
    try:
        return msgspec.convert(content, kind)
    except msgspec.ValidationError as error:
        message, _, place = str(error).partition(" - at `")
    # The place of a value is `$.charts[0].kind`, the place of a mapping's key is `key` in `$.sides`.
    place = place.rpartition("$")[2].strip(".`")
    info: Any = inspect.type_info(kind)
    for step in re.findall(r"\[|[a-z_]+", place):
        if step == "[":
            info = getattr(info, "item_type", None) or info.value_type
        else:
            info = next(field.type for field in info.fields if field.name == step)
        # An optional setting has its type first, then null.
        info = getattr(info, "types", [info])[0]
    names = [field.name for field in getattr(info, "fields", ())]
    allowed = names or getattr(getattr(info, "key_type", info), "values", [])
    for phrase, plain in _PLAIN_WORDS.items():
        message = message.replace(phrase, plain)
    if allowed:
        misspelt = {*re.findall("[`'](.*?)[`']", message)} - {*allowed}
        message += f"; allowed: {', '.join(allowed)}" + "".join(suggest(word, allowed) for word in misspelt)
    raise UsageError(": ".join(filter(None, (label, place, message.replace("`", "'")))))


def _shipped(pattern: str) -> dict[str, Path]:
    return {path.stem: path for path in sorted(Path(__file__).parent.glob(pattern))}
