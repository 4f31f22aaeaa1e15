"""A shipped configuration is of lmbench's own model and data. What of it is left out where others are measured."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule

from lmbench.configs import parse_yaml, read_yaml, shipped_configs
from lmbench.errors import UsageError
from lmbench.fit.choice import BASES, LOADERS, class_options, import_class, untaken
from lmbench.model.language_model import LanguageModel

_CONFIG = ("--config", "-c")


def leave_out(words: list[str]) -> tuple[list[str], str | None]:
    """The words of a command line with its shipped configurations cut to what the named classes can use, and a line
    that says what was cut; None where nothing was.

    Of a named module nothing that was set for lmbench's own model is kept, and of its data what a named class takes, or
    all unless the module brings its own. What stands in the words themselves, or in a configuration of the user's own,
    is never left out.

    Raises:
        UsageError: the words set something that the named class does not take.
    """
    configs = [(word, _content(word.value)) for word in _options(words) if word.option in _CONFIG]
    named = named_classes(words)
    _refuse_untaken(words, named)
    model, data = named["model"], named["data"]
    is_foreign = model is not None and not issubclass(model, LanguageModel)
    shipped = [parse_yaml(path.read_text(), path.name) for path in shipped_configs().values()] if configs else []
    keeps_data = data is not None or not is_foreign or not _brings_data(words, model)
    if any("data" in _mapping(content) for _, content in configs if content not in shipped):
        keeps_data = True
    cut, left = list(words), {"model": list[str](), "data": list[str]()}
    for word, content in configs:
        if content not in shipped:
            continue
        rest = dict(content)
        if is_foreign and not _names(rest.get("model"), model):
            left["model"] += _cut(rest, "model", frozenset())
        if not keeps_data:
            left["data"] += _cut(rest, "data", frozenset())
        elif data is not None:
            left["data"] += _cut(rest, "data", frozenset(class_options("data", data)))
        if rest != content:
            cut[word.place] = json.dumps(rest) if word.is_apart else f"{word.option}={json.dumps(rest)}"
    return cut, _told(named, left, keeps_data)


def _told(named: Mapping[str, type | None], left: Mapping[str, list[str]], keeps_data: bool) -> str | None:
    parts = []
    if left["model"]:
        parts.append(f"{', '.join(dict.fromkeys(left['model']))} (of lmbench's own model)")
    if left["data"]:
        owner = named["data"] if keeps_data else named["model"]
        why = "has no such option" if keeps_data else "brings its data"
        parts.append(f"{', '.join(dict.fromkeys(left['data']))} ({owner.__name__ if owner else ''} {why})")
    return f"left out of the shipped configuration: {'; '.join(parts)}" if parts else None


def _cut(content: dict[str, Any], key: str, kept: frozenset[str]) -> list[str]:
    """Cut a part of a configuration to some of its settings; returns those that are gone."""
    part = _mapping(content).get(key)
    if not isinstance(part, dict):
        return []
    rest = {name: value for name, value in part.items() if f"{key}.{name}" in kept}
    gone = [f"{key}.{name}" for name in part if name not in rest]
    content.pop(key)
    if rest:
        content[key] = rest
    return gone


def _brings_data(words: list[str], model: type | None) -> bool:
    """Whether the module has the loader that this command needs, and the words ask for no others."""
    if model is None or any(word.option.startswith(("--data.", "--data")) for word in _options(words)):
        return False
    loader = LOADERS.get(words[0], LOADERS["fit"])
    return getattr(model, loader) is not getattr(LightningModule, loader)


def _refuse_untaken(words: list[str], named: Mapping[str, type | None]) -> None:
    """What is set before the class is named, the parser would drop without a word."""
    for word in _options(words):
        key, _, name = word.option.removeprefix("--").partition(".")
        used = named.get(key)
        if not name or used is None or name in ("class_path", "help") or name.startswith(("init_args", "dict_kwargs")):
            continue
        taken = class_options(key, used)
        option = f"{key}.{name}"
        if taken and not any(f"{option}.".startswith(f"{each}.") or each.startswith(f"{option}.") for each in taken):
            raise UsageError(untaken(key, f"{used.__module__}.{used.__qualname__}", name, taken))


class _Word:
    """An option with its value: in one word, or in the next one, at `place`."""

    def __init__(self, words: list[str], place: int) -> None:
        self.option, equals, value = words[place].partition("=")
        self.is_apart = not equals and place + 1 < len(words)
        self.place = place + self.is_apart
        self.value = words[place + 1] if self.is_apart else value


def _options(words: list[str]) -> Iterator[_Word]:
    for place, word in enumerate(words):
        if word.startswith("-"):
            yield _Word(words, place)


def named_classes(words: list[str]) -> dict[str, type | None]:
    """The classes that a command line names for model and data."""
    return {key: _named(words, key) for key in BASES}


def _named(words: list[str], key: str) -> type | None:
    """The class that is named for the model or the data, None where it is lmbench's or cannot be told."""
    path = None
    for word in _options(words):
        if word.option == f"--{key}":
            is_file = word.value.endswith((".yaml", ".yml")) and Path(word.value).is_file()
            path = _class_path(_content(word.value)) if is_file else word.value
        elif word.option in _CONFIG:
            path = _class_path(_mapping(_content(word.value)).get(key)) or path
    try:
        return None if path is None or path.startswith("{") else import_class(key, path)
    except UsageError:
        # Told by the parser, in its place.
        return None


def _class_path(part: Any) -> str | None:
    found = part.get("class_path") if isinstance(part, dict) else part
    return found if isinstance(found, str) else None


def _names(part: Any, used: type | None) -> bool:
    """Whether a part of a configuration names the class that is used: its settings are of that class."""
    return used is not None and _class_path(part) == f"{used.__module__}.{used.__qualname__}"


def _content(given: str) -> Any:
    """What is in a configuration: a file's name or a text, which was read before."""
    return read_yaml(Path(given), f"config {given!r}")[1] if Path(given).exists() else parse_yaml(given, "--config")


def _mapping(content: Any) -> Mapping[str, Any]:
    return content if isinstance(content, dict) else {}
