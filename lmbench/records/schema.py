"""Every field of a record by its dotted name, read off the classes: the one place that says what a number means."""

from __future__ import annotations

import re
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from msgspec import Struct

from lmbench.records.codec import as_dict
from lmbench.records.field import About, Part, PerPhase
from lmbench.records.run import RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.vocabulary import SPANS

Kind = Literal["step", "run"]

#: What stands for a phase or a border in titles and meanings.
_PLACEHOLDER = re.compile("<(?:phase|border|end)>")

RECORDS: dict[Kind, type[Struct]] = {"step": StepRecord, "run": RunRecord}


@dataclass(frozen=True)
class SchemaField:
    """One field: its dotted name, what it says about itself, and the heading of its group in the table of fields.

    `pattern` is its name with placeholders (`phases.<phase>.mean_s`), the same for all that one row tells; `span` is
    what `<phase>` stands for in this one.
    """

    name: str
    about: About
    group: str
    pattern: str
    span: str = ""

    @property
    def unit(self) -> str:
        return self.about.unit

    @property
    def title(self) -> str:
        return _PLACEHOLDER.sub(self.span, self.about.title)

    @property
    def meaning(self) -> str:
        return _PLACEHOLDER.sub(self.span, self.about.meaning)


@cache
def fields(kind: Kind) -> dict[str, SchemaField]:
    """Every field of a kind of record by its dotted name, in the order of the classes."""
    return {found.name: found for found in _walk(RECORDS[kind], "", "", "")}


def _walk(owner: Any, prefix: str, pattern: str, span: str) -> Iterator[SchemaField]:
    """Fields of a class, then those of its parts."""
    group = str(owner.__doc__).partition(":")[0].strip()
    parts: list[tuple[str, Any, str, str]] = []
    for name, hint in _hints(owner).items():
        kinds, notes = _taken_apart(hint)
        about = next((note for note in notes if isinstance(note, About)), None)
        part = next((kind for kind in kinds if _is_record(kind)), None)
        is_per_phase = typing.get_origin(part) is PerPhase
        if about is not None and is_per_phase:
            # One number of each phase: the field tells of all of them.
            for each in SPANS:
                yield SchemaField(f"{prefix}{name}.{each}", about, group, f"{pattern}{name}.<phase>", each)
        elif about is not None:
            before, found, after = _PLACEHOLDER.sub("\0", about.pattern or "").partition("\0")
            own = name.removeprefix(before).removesuffix(after) if found else span
            yield SchemaField(f"{prefix}{name}", about, group, pattern + (about.pattern or name), own)
        elif is_per_phase:
            (inner,) = typing.get_args(part)
            parts += [(f"{name}.{each}", inner, f"{name}.<phase>", each) for each in SPANS]
        elif part is not None:
            placeholder = next((note.placeholder for note in notes if isinstance(note, Part)), name)
            parts.append((name, part, placeholder, span))
    for name, part, placeholder, own in parts:
        yield from _walk(part, f"{prefix}{name}.", f"{pattern}{placeholder}.", own)


@cache
def _hints(owner: Any) -> dict[str, Any]:
    return typing.get_type_hints(owner, include_extras=True)


def _taken_apart(hint: Any) -> tuple[Sequence[Any], Sequence[Any]]:
    """The types of a union (or the only one), and the notes beside them."""
    notes: Sequence[Any] = ()
    if typing.get_origin(hint) is typing.Annotated:
        hint, *notes = typing.get_args(hint)
    kinds = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return kinds, notes


def _is_record(kind: Any) -> bool:
    kind = typing.get_origin(kind) or kind
    return isinstance(kind, type) and issubclass(kind, Struct)


def value_at(record: Struct, name: str) -> Any:
    """The value of a field by its dotted name; None where a part of the record is not there."""
    value: Any = record
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else getattr(value, key, None)
        if value is None:
            return None
    return value


def leaves(record: Struct) -> dict[str, Any]:
    """Every value of a record by its dotted name, also of what is inside a mapping (`config.model.size`); lists are
    values. What is null or empty is left out."""
    return dict(_leaves(as_dict(record), ""))


def _leaves(plain: dict[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in plain.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        elif value is not None:
            yield f"{prefix}{key}", value
