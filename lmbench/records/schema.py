"""Every field of a record by its dotted name, with its unit, title and meaning, read from the record classes."""

from __future__ import annotations

import dataclasses
import re
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal

from lmbench.errors import UsageError
from lmbench.masking import leaves
from lmbench.records.codec import as_dict
from lmbench.records.field import ABOUT, UNITS, About, PerPhase
from lmbench.records.run import RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.vocabulary import SPANS, Values
from lmbench.rooms import INSTALLED

Kind = Literal["step", "run"]

#: Placeholders for a phase, a border or an end of the window in names, titles and meanings.
_PLACEHOLDER = re.compile("<(?:phase|border|end|memory)>")

#: What a name says beside its subject: that it is a flag, or its unit.
_BESIDE_SUBJECT = re.compile("^is_|_(per_s|s|w|c|j|hz|bytes|fraction|count)$")

RECORDS: dict[Kind, type] = {"step": StepRecord, "run": RunRecord}


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
    """Every field of a step's or a run's record by its dotted name, in the order of the classes; last those of a run
    that rooms of installed packages describe."""
    rooms = INSTALLED if kind == "run" else ()
    parts = [("", RECORDS[kind]), *(("scalars.", room.load("scalars")) for room in rooms if room.scalars)]
    parts += [(f"rooms.{room.name}.", room.load("record")) for room in rooms if room.record]
    return {field.name: field for prefix, part in parts for field in _walk(part, prefix, prefix)}


def _walk(record: Any, prefix: str, pattern: str, span: str = "") -> Iterator[SchemaField]:
    """Fields of a class, then those of its parts; a field without documentation is a part.

    Args:
        prefix: dotted name of the class's part in the record, `phases.forward.`.
        pattern: the prefix with placeholders, `phases.<phase>.`.
        span: the phase that the part belongs to, empty without one.

    Raises:
        UsageError: an installed room's class has a number without documentation.
    """
    group = record.__doc__.partition("\n")[0].rstrip(".")
    hints = typing.get_type_hints(record, include_extras=True)
    # The record's own fields come before those of its parts.
    for entry in sorted(dataclasses.fields(record), key=lambda entry: ABOUT not in entry.metadata):
        name, about = entry.name, entry.metadata.get(ABOUT)
        hint = hints[name]
        # The notes of a type are its unit, or a part's placeholder.
        kind, *notes = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint,)
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            # The other type of every union is None.
            kind = typing.get_args(kind)[0]
        names = [(name, notes[0] if notes and about is None else name, span)]
        if typing.get_origin(kind) is PerPhase:
            names = [(f"{name}.{phase}", f"{name}.<phase>", phase) for phase in SPANS]
            kind = typing.get_args(kind)[0]
        elif about is not None and about.pattern:
            names = [(name, about.pattern, part) for part in SPANS if _PLACEHOLDER.sub(part, about.pattern) == name]
        if about is None and not dataclasses.is_dataclass(kind):
            raise UsageError(
                f"{record.__name__}.{name} has no description; lmbench.records.field has what gives it one"
            )
        for leaf, leaf_pattern, phase in names:
            if about is None:
                yield from _walk(kind, f"{prefix}{leaf}.", f"{pattern}{leaf_pattern}.", phase)
            else:
                title = _PLACEHOLDER.sub(phase, about.title) or _BESIDE_SUBJECT.sub("", name).replace("_", " ")
                documented = dataclasses.replace(about, unit=notes[0] if notes else UNITS.get(kind, "tree"))
                yield SchemaField(prefix + leaf, documented, group, pattern + leaf_pattern, phase, title)


def value_at(tree: object, name: str, default: Any = None) -> Any:
    """The value with a dotted name in a record, or in nested mappings.

    None where a part on the way is off (None or False), `default` where one lacks the next name.
    """
    value: Any = tree
    for key in name.split("."):
        if value is None or value is False:
            return None
        value = value.get(key, default) if isinstance(value, Mapping) else getattr(value, key, default)
    return value


def recorded(tree: object, name: str = "") -> Values:
    """Every value of a record by its dotted name, including those inside mappings (`config.model.size`).

    Nulls and empty mappings are left out. `name` is the dotted name of the tree itself.
    """
    plain = tree if isinstance(tree, Mapping) else as_dict(tree)
    return {path: value for path, value in leaves(plain, name) if value is not None and value != {}}
