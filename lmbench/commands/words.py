"""Words of a command line as values: settings, a gate, a time, a size."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Mapping, Sequence

from lmbench.errors import UsageError
from lmbench.records.vocabulary import GATE_FRACTION
from lmbench.sweep.file import CONFIG, Options

_QUANTITY = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*([A-Za-z]+|%)\s*")


def read_options(words: Sequence[str]) -> Options:
    """Options for every cell, from `--name value` or `--name=value`. Raises UsageError where a value is missing."""
    options: Options = {}
    remaining = iter(words)
    for word in remaining:
        name, equals, value = word.removeprefix("--").partition("=")
        options[name] = value if equals else next(remaining, None)
        if not word.startswith("--") or options[name] is None:
            raise UsageError(f"{word} has no value, or is no option; options for every cell are --name value")
    return options


def read_configuration(configuration: str | None, words: Sequence[str], advice: str) -> Options:
    """Options with the configuration, which is the command's argument unless --config names it.

    Raises UsageError, with `advice`, where there is no configuration.
    """
    options = {CONFIG: configuration, **read_options(words)}
    if options[CONFIG] is None:
        command = shlex.join(["lmbench", "fit", *words, "--print_config"])
        raise UsageError(f"{advice}; `{command} > own.yaml` writes one")
    return options


def refuse(options: Mapping[str, object], why: str) -> None:
    """Raises UsageError for the first of these options that was given."""
    for option, value in options.items():
        if value is not None:
            raise UsageError(f"--{option} {why}")


def read_gate(text: str | None) -> float:
    """A percentage such as `2%` as a fraction, 1 % for None. Raises UsageError for anything else."""
    if text is None:
        return GATE_FRACTION
    return _read_quantity("gate", text, {"%": 1}, "a percentage above 0% and below 100%, such as 2%", below=100) / 100


def read_budget(text: str) -> float:
    """A duration such as `10m` in seconds. Raises UsageError for anything else."""
    return _read_quantity("budget", text, {"s": 1, "m": 60, "h": 3600}, "a duration above 0, such as 90s, 10m or 1h")


def read_budget_of_rounds(text: str | None) -> float:
    """A duration in seconds, by default 10 minutes; infinite for `auto`. Raises UsageError for anything else."""
    return math.inf if text == "auto" else read_budget(text or "10m")


def read_size(text: str | None, option: str = "at_most") -> int | None:
    """A size such as `40GiB` in bytes, None for None. Raises UsageError for anything else."""
    units = {"GiB": 2**30, "MiB": 2**20}
    return None if text is None else int(_read_quantity(option, text, units, "a size such as 40GiB or 900MiB"))


def _read_quantity(option: str, text: str, units: Mapping[str, int], advice: str, below: float = math.inf) -> float:
    match = _QUANTITY.fullmatch(text)
    if match is None or match[2] not in units or not 0 < float(match[1]) < below:
        raise UsageError(f"--{option} is {text!r}; give {advice}")
    return float(match[1]) * units[match[2]]
