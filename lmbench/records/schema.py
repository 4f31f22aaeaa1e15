"""Every field of a record by its dotted name, with its unit, title and meaning, read from the record classes."""

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
from lmbench.records.vocabulary import SPANS, Values

Kind = Literal["step", "run"]

#: Placeholders for a phase, a border or an end of the window in names, titles and meanings.
_PLACEHOLDER = re.compile("<(?:phase|border|end)>")

RECORDS: dict[Kind, type[Struct]] = {"step": StepRecord, "run": RunRecord}


@dataclass(frozen=True)
class SchemaField:
    """A field with its dotted name and its documentation.

    `group` is the first line of its class's docstring. `pattern` is the name with placeholders
    (`phases.<phase>.mean_s`); fields with the same pattern share a row in `lmbench fields`. In `title` the phase `span`
    of this field takes the placeholder's place.
    """

    name: str
    about: About
    group: str
    pattern: str
    span: str
    title: str

    @property
    def unit(self) -> str:
        return self.about.unit


@cache
def fields(kind: Kind) -> dict[str, SchemaField]:
    """Every field of a step's or a run's record by its dotted name, in the order of the classes."""
    return {field.name: field for field in _walk(RECORDS[kind])}


def _walk(record: Any, prefix: str = "", pattern: str = "", span: str = "") -> Iterator[SchemaField]:
    """Fields of a class, then those of its parts.

    Args:
        prefix: dotted name of the class's part in the record, `phases.forward.`.
        pattern: the prefix with placeholders, `phases.<phase>.`.
        span: the phase that the part belongs to, empty without one.
    """
    group = record.__doc__.partition("\n")[0].rstrip(".")
    documentation, parts = documented(record), list[tuple[str, Any, str, str]]()
    for name, hint in typing.get_type_hints(record, include_extras=True).items():
        kind, *notes = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint,)
        kinds = typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)
        part = next((kind for kind in kinds if hasattr(typing.get_origin(kind) or kind, "__struct_fields__")), None)
        about = next((note for note in notes if isinstance(note, About)), None)
        names = [(name, name, span)]
        for name_pattern, (title, meaning, better) in documentation.items():
            if match := re.fullmatch(_PLACEHOLDER.sub("(.+)", name_pattern), name):
                about = About(notes[0] if notes else UNITS.get(kinds[0], "tree"), title, meaning, better)
                names = [(name, name_pattern, match[1] if match.groups() else span)]
        # `PerPhase[T]` is a field, or a part of class T, for each phase.
        if phase_type := typing.get_args(part):
            names = [(f"{name}.{phase}", f"{name}.<phase>", phase) for phase in SPANS]
        for leaf, leaf_pattern, phase in names:
            if about is not None:
                title = _PLACEHOLDER.sub(phase, about.title)
                yield SchemaField(prefix + leaf, about, group, pattern + leaf_pattern, phase, title)
            elif part is not None:
                part_type = phase_type[0] if phase_type else part
                parts.append((leaf, part_type, notes[0] if notes else leaf_pattern, phase))
    for name, part_type, part_pattern, phase in parts:
        yield from _walk(part_type, f"{prefix}{name}.", f"{pattern}{part_pattern}.", phase)


def value_at(tree: Struct | Mapping[str, Any] | None, name: str, default: Any = None) -> Any:
    """The value with a dotted name in a record, or in nested mappings.

    None where a part on the way is off (None or False), `default` where one lacks the next name.
    """
    value: Any = tree
    for key in name.split("."):
        if value is None or value is False:
            return None
        if isinstance(value, Struct):
            value = getattr(value, key, default)
        else:
            value = value.get(key, default) if isinstance(value, Mapping) else default
    return value


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values of a tree's leaves; lists and empty mappings are leaves."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def recorded(tree: Struct | Mapping[str, Any], prefix: str = "") -> Values:
    """Every value of a record by its dotted name, including those inside mappings (`config.model.size`).

    Nulls and empty mappings are left out.
    """
    plain = tree if isinstance(tree, Mapping) else as_dict(tree)
    return {name: value for name, value in leaves(plain, prefix) if value is not None and value != {}}
