"""The registry of every field that a result holds: the one place that says what a number means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from lmbench.records.fields_environment import ENVIRONMENT_FIELDS
from lmbench.records.fields_kernels import KERNEL_FIELDS
from lmbench.records.fields_measured import MEASURED_FIELDS
from lmbench.records.fields_run import RUN_FACT_FIELDS
from lmbench.records.fields_step import STEP_FIELDS
from lmbench.records.old_field import Field, Kind
from lmbench.records.paths import leaves, lookup
from lmbench.records.vocabulary import Record

#: Version of the layout of run.json and steps.jsonl that these fields make up. A reader refuses any other.
SCHEMA_VERSION = 1

#: Every field, in the order of the README's table.
FIELDS: tuple[Field, ...] = (*STEP_FIELDS, *MEASURED_FIELDS, *KERNEL_FIELDS, *RUN_FACT_FIELDS, *ENVIRONMENT_FIELDS)


class _Registry(Mapping[str, Field]):
    """Fields by name; `phases.forward.mean_s` finds `phases.<phase>.mean_s`, filled in."""

    def __init__(self, fields: tuple[Field, ...]) -> None:
        self._exact = {field.name: field for field in fields if not field.is_pattern}
        self._patterns = [field for field in fields if field.is_pattern]

    def __getitem__(self, name: str) -> Field:
        if name in self._exact:
            return self._exact[name]
        for pattern in self._patterns:
            if (field := pattern.resolve(name)) is not None:
                return field
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._exact)

    def __len__(self) -> int:
        return len(self._exact)


def _belongs(field: Field, kind: Kind) -> bool:
    return field.record in (kind, "both")


_BY_KIND: dict[Kind, _Registry] = {
    "step": _Registry(tuple(field for field in FIELDS if _belongs(field, "step"))),
    "run": _Registry(tuple(field for field in FIELDS if _belongs(field, "run"))),
}

#: Field by name, of either kind of record. Iterates over the names without placeholders.
FIELD = _Registry(FIELDS)


def unregistered(record: Record, kind: Kind) -> list[str]:
    """Dotted names in a record that no field describes.

    What lies under a registered `tree` is fine; so is a null or empty part of which fields are registered
    (`error: null`).
    """
    return [path for path, value in leaves(record) if not _is_registered(path, value, kind)]


def _is_registered(path: str, value: object, kind: Kind) -> bool:
    registry = _BY_KIND[kind]
    if path in registry:
        return True
    parts = path.split(".")
    ancestors = (".".join(parts[:end]) for end in range(1, len(parts)))
    if any(name in registry and registry[name].unit == "tree" for name in ancestors):
        return True
    return value in (None, {}) and any(_is_part(path, field) for field in FIELDS if _belongs(field, kind))


def _is_part(path: str, field: Field) -> bool:
    """Whether the field lies somewhere under the path: `phases.clip` is a part of `phases.<phase>.mean_s`."""
    depth = path.count(".") + 1
    parts = field.name.split(".")
    if len(parts) <= depth:
        return False
    head = Field(".".join(parts[:depth]), "tree", "", None, field.record, "", "")
    return head.resolve(path) is not None


def absent(record: Record, kind: Kind) -> list[str]:
    """Registered names (no trees, no placeholders) for which the record has no key, not even a null.

    A null part (`error: null`) stands for all of its fields.
    """
    names = (name for name, field in _BY_KIND[kind].items() if field.unit != "tree")
    return [name for name in names if not _has(record, name)]


def _has(record: Record, name: str) -> bool:
    parent, _, key = name.rpartition(".")
    if not parent:
        return key in record
    holder = lookup(record, parent)
    return key in holder if isinstance(holder, dict) else _has(record, parent)
