"""The settings of a run by dotted names, and the differences between the settings of two runs."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any

from lmbench.masking import masked
from lmbench.records.run import RunRecord
from lmbench.records.schema import leaves, recorded, value_at
from lmbench.records.vocabulary import Values

#: The lists of settings.toml, which describes each.
_NOT_MEASURED, FACTS, CHOSEN, CONSEQUENCES = tomllib.loads(
    Path(__file__).with_name("settings.toml").read_text("utf-8")
).values()
_BRIEF_LENGTH = 60


@dataclass(frozen=True)
class Difference:
    """A setting or fact with different values in two runs; None for a run that lacks it. `name` is dotted."""

    name: str
    a: str | None
    b: str | None

    def __str__(self) -> str:
        return f"{self.name}: {brief(self.a)} -> {brief(self.b)}"


def settings(record: RunRecord) -> Values:
    """The run's settings by dotted name: its mode and configuration, or facts where no configuration is recorded."""
    if record.config is None:
        return {"mode": record.mode, **values_at(record, *FACTS)}
    options = {name: masked(value, name) for name, value in leaves(record.config) if not is_named(name, _NOT_MEASURED)}
    # Whether there is a logger matters, since it costs time; its options do not.
    return {"mode": record.mode, **options, "trainer.logger": bool(value_at(record, "config.trainer.logger"))}


def chosen_differences(a: RunRecord, b: RunRecord) -> list[Difference]:
    """Differences that somebody chose: in settings, code, versions and the sweep's environment."""
    return _differing(a, b, lambda run: settings(run) | values_at(run, *CHOSEN))


def differences(a: RunRecord, b: RunRecord) -> list[Difference]:
    """The chosen differences; then, if no setting of the model differs, differences in the model's facts."""
    chosen = chosen_differences(a, b)
    is_explained = any(is_named(difference.name, ("model", "data.context_length")) for difference in chosen)
    return chosen + ([] if is_explained else _differing(a, b, lambda run: values_at(run, *CONSEQUENCES)))


def _differing(a: RunRecord, b: RunRecord, facts_of: Callable[[RunRecord], Values]) -> list[Difference]:
    """Differences between the facts of two runs.

    Where one run does not set an option (`model.num_layers`, which follows from the size), its record's field of that
    name is compared.
    """
    sides = facts_of(a), facts_of(b)
    result = []
    for name in {**sides[0], **sides[1]}:
        values = [side.get(name) for side in sides]
        if values[0] != values[1]:
            values = [
                value_at(run, name) if value is None else value for run, value in zip((a, b), values, strict=True)
            ]
        if values[0] != values[1]:
            result.append(Difference(name, *(None if value is None else as_text(value) for value in values)))
    return result


def values_at(record: RunRecord, *names: str) -> Values:
    """Values of a record by dotted names; a part (`model`) gives all of its fields. Nulls are left out."""
    values: Values = {}
    for name in names:
        value = value_at(record, name)
        if is_dataclass(value) or isinstance(value, dict):
            values |= recorded(value, f"{name}.")
        elif value is not None:
            values[name] = value
    return values


def is_named(name: str, names: Iterable[str]) -> bool:
    """Whether a dotted name is one of `names` or lies under one; `gpu` stands for `environment.gpu`."""
    short = name.removeprefix("environment.")
    return any(f"{alias}.".startswith(f"{part}.") for part in names for alias in (name, short))


def as_text(value: Any) -> str:
    """A setting's value as text, for comparing and showing."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def brief(text: str | None) -> str:
    """A setting's text, cut to 60 characters; `none` for None."""
    if text is None:
        return "none"
    return text if len(text) <= _BRIEF_LENGTH else f"{text[: _BRIEF_LENGTH - 3]}..."
