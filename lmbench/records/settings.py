"""The settings of a run by dotted names, and the differences between the settings of two runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, is_dataclass
from typing import Any

from lmbench.masking import leaves, masked
from lmbench.records.run import RunRecord
from lmbench.records.schema import recorded, value_at
from lmbench.records.vocabulary import Values

#: Settings of where a result is stored, of what is printed and of random seeds, which do not change what is measured.
NOT_MEASURED = (
    "measure.results_dir", "measure.run_id", "measure.strict", "measure.price_per_hour", "seed_everything", "data.seed",
    "data.cache_dir",
    "trainer.default_root_dir", "trainer.enable_progress_bar", "trainer.enable_model_summary", "trainer.logger",
    "trainer.compile.cache", "wandb", "measure.collective_timeout_s",
)  # fmt: skip
#: Facts that take the place of the configuration in a run of a user's own script, which records none.
FACTS = (
    "precision", "matmul_precision", "zero_grad", "clock", "gc_policy", "world_size", "model", "data",
    "compile.is_enabled", "compile.mode", "compile.backend", "compile.fullgraph", "compile.dynamic", "compile.regional",
    "window.warmup_steps", "window.micro_batches",
)  # fmt: skip
#: Parts of a record that somebody chose, although no setting has them.
CHOSEN = ("environment.code", "environment.versions", "sweep.environment")
#: Facts that follow from settings or code. Where they differ, the steps may not do the same work.
CONSEQUENCES = (
    "model.parameter_count", "model.optimizer", "model.attention", "model.checkpoint", "flops.per_token_flops",
    "flops.recomputed_per_token_flops",
)  # fmt: skip
#: The record's field that has the value of an option which a run leaves to its default.
_FIELD_OF = {
    "trainer.precision": "precision",
    "trainer.accumulate_grad_batches": "window.micro_batches",
    "trainer.devices": "world_size",
}
_BRIEF_LENGTH = 60
#: Environment variables that only name a path, or the version of a container's library, end in one of `_NAMES`; those
#: that only repeat a setting, or that lmbench and Lightning set themselves, begin with one of `_REPEATED`.
_NAMES = ("_DIR", "_HOME", "_PATH", "_FILE", "_VISIBLE_DEVICES", "_RUN_ID", "_CACHE", "_VERSION")
_REPEATED = ("TORCHELASTIC_", "TORCH_FR_", "TORCH_NCCL_DUMP_ON_", "TORCH_NCCL_WAIT_", "PYTORCH_NVML_")


@dataclass(frozen=True)
class SettingDifference:
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
    options = {
        name: masked(value, name)
        for name, value in leaves(record.config)
        # A class without arguments has an empty mapping of them.
        if value != {} and not is_named(name, NOT_MEASURED)
    }
    # Whether there is a logger matters, since it costs time; its options do not.
    return {"mode": record.mode, **options, "trainer.logger": bool(value_at(record, "config.trainer.logger"))}


def chosen_differences(a: RunRecord, b: RunRecord) -> list[SettingDifference]:
    """Differences that somebody chose: in settings, code, versions and the sweep's environment."""
    return _differing(a, b, lambda run: settings(run) | values_at(run, *CHOSEN))


def differences(a: RunRecord, b: RunRecord) -> list[SettingDifference]:
    """The chosen differences, then those of their consequences; a setting and its fact of the same name are one."""
    consequences = _differing(a, b, lambda run: values_at(run, *CONSEQUENCES))
    return [*dict.fromkeys([*chosen_differences(a, b), *consequences])]


def _differing(a: RunRecord, b: RunRecord, facts_of: Callable[[RunRecord], Values]) -> list[SettingDifference]:
    """Differences between the facts of two runs.

    Where one run does not set an option (`model.num_layers`, which follows from the size), its record's field is
    compared.
    """
    sides = facts_of(a), facts_of(b)
    result = []
    for name in {**sides[0], **sides[1]}:
        values = [side.get(name) for side in sides]
        if values[0] != values[1]:
            values = [
                value_at(run, _FIELD_OF.get(name, name)) if value is None else value
                for run, value in zip((a, b), values, strict=True)
            ]
        if values[0] != values[1]:
            result.append(SettingDifference(name, *(None if value is None else as_text(value) for value in values)))
    return result


def variables_of(record: RunRecord) -> dict[str, str] | None:
    """The recorded environment variables that may change times; None where they are unknown."""
    if (variables := record.environment.variables) is None:
        return None
    return {
        name: value for name, value in variables.items() if not name.endswith(_NAMES) and not name.startswith(_REPEATED)
    }


def values_at(record: RunRecord, *names: str) -> Values:
    """Values of a record by dotted names; a part (`model`) gives all of its fields. Nulls are left out."""
    values: Values = {}
    for name in names:
        value = value_at(record, name)
        if is_dataclass(value) or isinstance(value, dict):
            values |= recorded(value, name)
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
