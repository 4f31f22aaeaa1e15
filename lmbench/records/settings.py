"""What a run was set to, by dotted names, and in what two runs differ by choice."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec import Struct

from lmbench.masking import masked
from lmbench.records.run import RunRecord
from lmbench.records.schema import leaves, recorded, value_at

#: settings.toml, which says what each list is.
_NOT_MEASURED, FACTS, CHOSEN, CONSEQUENCES = tomllib.loads(
    Path(__file__).with_name("settings.toml").read_text("utf-8")
).values()
_SHORT = 60


@dataclass(frozen=True)
class Difference:
    """A setting or fact by its dotted name, with its values on both sides (None where one does not have it)."""

    name: str
    a: str | None
    b: str | None

    def __str__(self) -> str:
        return f"{self.name}: {brief(self.a)} -> {brief(self.b)}"


def settings(record: RunRecord) -> dict[str, Any]:
    """The run's settings by dotted name: the mode and the configuration, or facts where no configuration is known."""
    if record.config is None:
        return {"mode": record.mode, **values_at(record, *FACTS)}
    known = {name: masked(value, name) for name, value in leaves(record.config) if not is_named(name, _NOT_MEASURED)}
    # A logger costs time, whatever the names that its run goes by.
    return {"mode": record.mode, **known, "trainer.logger": bool(value_at(record, "config.trainer.logger"))}


def chosen_differences(a: RunRecord, b: RunRecord) -> list[Difference]:
    """What somebody chose: settings, code, versions, the sweep's environment."""
    return _differing(a, b, lambda run: settings(run) | values_at(run, *CHOSEN))


def differences(a: RunRecord, b: RunRecord) -> list[Difference]:
    """What was chosen; then facts of the model that no setting of it explains, such as those of another class."""
    chosen = chosen_differences(a, b)
    is_explained = any(is_named(difference.name, ("model", "data.context_length")) for difference in chosen)
    return chosen + ([] if is_explained else _differing(a, b, lambda run: values_at(run, *CONSEQUENCES)))


def _differing(a: RunRecord, b: RunRecord, known: Callable[[RunRecord], Mapping[str, Any]]) -> list[Difference]:
    """What differs of that which is known of both. An option that is not set on one side (`model.num_layers`, where the
    size tells it) has the value that the record has under its name."""
    sides = known(a), known(b)
    found = []
    for name in {**sides[0], **sides[1]}:
        values = [side.get(name) for side in sides]
        if values[0] != values[1]:
            values = [
                value_at(run, name) if value is None else value for run, value in zip((a, b), values, strict=True)
            ]
        if values[0] != values[1]:
            found.append(Difference(name, *(None if value is None else as_text(value) for value in values)))
    return found


def values_at(record: RunRecord, *names: str) -> dict[str, Any]:
    """What the record has at dotted names, field by field where a name is that of a part; nothing that was not
    recorded."""
    known: dict[str, Any] = {}
    for name in names:
        value = value_at(record, name)
        if isinstance(value, Struct | dict):
            known |= recorded(value, f"{name}.")
        elif value is not None:
            known[name] = value
    return known


def is_named(name: str, names: Iterable[str]) -> bool:
    """Whether a dotted name is one of these or lies under one; `gpu` stands for `environment.gpu`."""
    short = name.removeprefix("environment.")
    return any(f"{alias}.".startswith(f"{known}.") for known in names for alias in (name, short))


def as_text(value: Any) -> str:
    """A setting as it is compared and shown."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def brief(text: str | None) -> str:
    """A setting's text as a line has room for it."""
    if text is None:
        return "none"
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 3]}..."
