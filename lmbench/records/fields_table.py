"""The field registry as Markdown, for the README."""

from __future__ import annotations

from itertools import groupby

from lmbench.records.fields import FIELDS
from lmbench.records.old_field import Field

_HEAD = "| field | unit | better | meaning |\n|---|---|---|---|"


def field_table() -> str:
    """One Markdown table per group of fields, under headings of level 4, in the registry's order."""
    parts = []
    for name, fields in groupby(_in_groups(), key=lambda field: field.group):
        rows = "\n".join(_row(field) for field in fields)
        parts.append(f"#### {name}\n\n{_HEAD}\n{rows}\n")
    return "\n".join(parts)


def _in_groups() -> list[Field]:
    order = {name: index for index, name in reversed(list(enumerate(field.group for field in FIELDS)))}
    return sorted(FIELDS, key=lambda field: order[field.group])


def _row(field: Field) -> str:
    # Outside backticks a placeholder would be read as an HTML tag.
    meaning = field.meaning.replace("<", "&lt;").replace("|", "\\|")
    return f"| `{field.name}` | {field.unit} | {field.better or ''} | {meaning} |"
