"""What a run was set to, by dotted names, and in what two runs differ by choice."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from msgspec import Struct

from lmbench.masking import masked
from lmbench.records.codec import as_dict
from lmbench.records.run import RunRecord
from lmbench.records.schema import value_at

#: Settings that say where a result goes or which random numbers it sees, not what is measured.
_NOT_MEASURED = (
    "measure.results_dir", "measure.run_id", "measure.strict", "seed_everything", "data.seed", "data.cache_dir",
    "trainer.default_root_dir", "trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.logger",
    "trainer.compile.cache", "wandb",
)  # fmt: skip

#: What stands for the configuration of a run that a user's own script made, where none is recorded.
FACTS = (
    "precision", "matmul_precision", "zero_grad", "clock", "gc_policy", "world_size", "model", "data",
    "compile.is_enabled", "compile.mode", "compile.backend", "compile.fullgraph", "compile.dynamic", "compile.regional",
    "window.warmup_steps", "window.micro_batches",
)  # fmt: skip

#: Parts of a record that somebody chose although no setting tells it.
CHOSEN = ("environment.code", "environment.versions", "sweep.environment")

#: What follows from settings or code, said where it differs: the work of a step may not be the same.
CONSEQUENCES = (
    "model.parameter_count",
    "model.optimizer",
    "model.attention",
    "model.checkpoint",
    "flops.per_token_flops",
)

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
        return {"mode": record.mode, **{name: v for fact in FACTS for name, v in leaves_at(record, fact).items()}}
    found = {name: masked(value, name) for name, value in leaves(record.config) if not is_named(name, _NOT_MEASURED)}
    # A logger costs time, whatever the names that its run goes by.
    return {"mode": record.mode, **found, "trainer.logger": bool(value_at(record, "config.trainer.logger"))}


def setting_differences(a: RunRecord, b: RunRecord) -> list[Difference]:
    """Settings in which two runs differ, and the environments of their sweeps."""
    mine, theirs = settings(a), settings(b)
    pairs = {name: (mine.get(name), theirs.get(name)) for name in dict.fromkeys((*mine, *theirs))}
    environment = "sweep.environment"
    return _differing({**pairs, environment: (value_at(a, environment), value_at(b, environment))})


def chosen_differences(a: RunRecord, b: RunRecord) -> list[Difference]:
    """What somebody chose: settings, code, versions, the sweep's environment."""
    return list(dict.fromkeys([*setting_differences(a, b), *_fact_differences(a, b, CHOSEN)]))


def differences(a: RunRecord, b: RunRecord) -> list[Difference]:
    """What was chosen; then facts of the model that no setting of it explains, such as those of another class."""
    chosen = chosen_differences(a, b)
    if any(is_named(difference.name, ("model", "data.context_length")) for difference in chosen):
        return chosen
    return list(dict.fromkeys([*chosen, *_fact_differences(a, b, CONSEQUENCES)]))


def _fact_differences(a: RunRecord, b: RunRecord, names: Iterable[str]) -> list[Difference]:
    mine, theirs = ({leaf: v for name in names for leaf, v in leaves_at(one, name).items()} for one in (a, b))
    return _differing({name: (mine.get(name), theirs.get(name)) for name in dict.fromkeys((*mine, *theirs))})


def _differing(pairs: dict[str, tuple[Any, Any]]) -> list[Difference]:
    return [
        Difference(name, *(None if value is None else as_text(value) for value in (a, b)))
        for name, (a, b) in pairs.items()
        if a != b
    ]


def leaves_at(record: RunRecord, name: str) -> dict[str, Any]:
    """What the record has at a dotted name, field by field where it is a part; nothing that was not recorded."""
    value = value_at(record, name)
    if isinstance(value, Struct):
        value = as_dict(value)
    if isinstance(value, dict):
        return {leaf: each for leaf, each in leaves(value, f"{name}.") if each is not None and each != {}}
    return {} if value is None else {name: value}


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every (dotted name, value) whose value is not a filled mapping; lists count as values."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def is_named(name: str, names: Iterable[str]) -> bool:
    """Whether a dotted name is one of these or lies under one; `gpu` stands for `environment.gpu`."""
    short = name.removeprefix("environment.")
    return any(each == known or each.startswith(f"{known}.") for known in names for each in (name, short))


def as_text(value: Any) -> str:
    """A setting as it is compared and shown."""
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def brief(text: str | None) -> str:
    """A setting's text as a line has room for it."""
    if text is None:
        return "none"
    return text if len(text) <= _SHORT else f"{text[: _SHORT - 3]}..."
