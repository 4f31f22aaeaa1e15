"""Labelled lines about a record, as lines.toml words them: what is unknown of it is not said."""

from __future__ import annotations

import string
import tomllib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from msgspec import Struct

from lmbench.records.schema import value_at
from lmbench.report import units
from lmbench.report.answer import Line
from lmbench.report.shipped import shipped


class _Wording(string.Formatter):
    """Takes a field of the record where there is no word of that name."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value = kwargs[field_name] if field_name in kwargs else value_at(args[0], field_name)
        if value is None or value is False or value == "":
            raise LookupError(field_name)
        return value, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is True:
            return ""
        of_unit = getattr(units, format_spec, None)
        return of_unit(value) if of_unit else format(value, format_spec)


_SECTIONS: dict[str, list[list[str]]] = tomllib.loads(shipped("lines.toml"))


def lines(section: str, record: Struct, **words: Any) -> list[Line]:
    """The lines of a section of lines.toml, without those that the record and the words know nothing for."""
    told, wording = [], _Wording()
    for label, *pieces in _SECTIONS[section]:
        texts = [""] * len(pieces)
        for place, piece in enumerate(pieces):
            with suppress(LookupError):
                texts[place] = wording.vformat(piece, (record,), words)
        if texts[0]:
            told.append(Line(label, "".join(texts)))
    return told
