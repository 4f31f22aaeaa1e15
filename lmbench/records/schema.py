"""Every field of a record by its dotted name, read off the classes: the one place that says what a number means."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from msgspec import Struct

from lmbench.records.codec import as_dict
from lmbench.records.field import UNITS, About, documented
from lmbench.records.run import RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.vocabulary import SPANS

Kind = Literal["step", "run"]

#: What stands for a phase or a border in names, titles and meanings.
_PLACEHOLDER = re.compile("<(?:phase|border|end)>")

RECORDS: dict[Kind, type[Struct]] = {"step": StepRecord, "run": RunRecord}


@dataclass(frozen=True)
class SchemaField:
    """A field: its dotted name, what it says about itself, and its group with the group's meaning.

    `pattern` is its name with placeholders (`phases.<phase>.mean_s`), the same for all that share a row of the table;
    `title` and `meaning` have `span`, the phase of this field, in their place.
    """

    name: str
    about: About
    group: str
    pattern: str
    span: str
    title: str
    meaning: str

    @property
    def unit(self) -> str:
        return self.about.unit


@cache
def fields(kind: Kind) -> dict[str, SchemaField]:
    """Every field of a kind of record by its dotted name, in the order of the classes."""
    return {field.name: field for field in _walk(RECORDS[kind])}


def _walk(record: Any, prefix: str = "", pattern: str = "", span: str = "") -> Iterator[SchemaField]:
    """Fields of a class, then those of its parts."""
    group = record.__doc__.partition("\n")[0].rstrip(".")
    texts, parts = documented(record), list[tuple[str, Any, str, str]]()
    for name, hint in typing.get_type_hints(record, include_extras=True).items():
        kind, *notes = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint,)
        kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
        part = next((kind for kind in kinds if hasattr(typing.get_origin(kind) or kind, "__struct_fields__")), None)
        about = next((note for note in notes if isinstance(note, About)), None)
        places = [(name, name, span)]
        for known, (title, meaning, better) in texts.items():
            if match := re.fullmatch(_PLACEHOLDER.sub("(.+)", known), name):
                about = About(notes[0] if notes else UNITS.get(kinds[0], "tree"), title, meaning, better)
                places = [(name, known, match[1] if match.groups() else span)]
        if inner := typing.get_args(part):
            places = [(f"{name}.{phase}", f"{name}.<phase>", phase) for phase in SPANS]
        for leaf, shared, phase in places:
            if about is not None:
                titled = (_PLACEHOLDER.sub(phase, text) for text in (about.title, about.meaning))
                yield SchemaField(prefix + leaf, about, group, pattern + shared, phase, *titled)
            elif part is not None:
                parts.append((leaf, inner[0] if inner else part, notes[0] if notes else shared, phase))
    for name, part, shared, phase in parts:
        yield from _walk(part, f"{prefix}{name}.", f"{pattern}{shared}.", phase)


def value_at(record: Struct, name: str) -> Any:
    """The value of a field by its dotted name; None where a part of the record is not there."""
    value: Any = record
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else getattr(value, key, None)
        if value is None:
            return None
    return value


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted name, value) of a tree whose value is not a filled mapping; lists count as values."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def recorded(tree: Struct | Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Every value of a record by its dotted name, also of what is inside a mapping (`config.model.size`), without what
    is null or an empty mapping."""
    plain = tree if isinstance(tree, Mapping) else as_dict(tree)
    return {name: value for name, value in leaves(plain, prefix) if value is not None and value != {}}
