"""Words of a command line as values: settings, a gate, a time, a size."""

from __future__ import annotations

import re
from collections.abc import Sequence

from lmbench.errors import UsageError
from lmbench.records.statistics import GATE_FRACTION
from lmbench.sweep.file import CONFIG, Options

_PERCENTAGE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*%\s*")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)")
_UNIT_S = {"s": 1, "m": 60, "h": 3600}
_SIZE = re.compile(r"(\d+\.?\d*)\s*(GiB|MiB)")
_UNIT_BYTES = {"GiB": 2**30, "MiB": 2**20}


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
        raise UsageError(advice)
    return options


def read_gate(text: str | None) -> float:
    """A percentage such as `2%` as a fraction, 1 % for None.

    Raises UsageError for any other text, and outside 0 to 100 %.
    """
    if text is None:
        return GATE_FRACTION
    match = _PERCENTAGE.fullmatch(text)
    if match is None or not 0 < float(match[1]) < 100:
        raise UsageError(f"--gate is {text!r}; give a percentage above 0% and below 100%, such as 2%")
    return float(match[1]) / 100


def read_budget(text: str) -> float:
    """A duration such as `10m` in seconds. Raises UsageError for anything else."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise UsageError(f"--budget is {text!r}; give a duration above 0, such as 90s, 10m or 1h")
    return float(match[1]) * _UNIT_S[match[2]]


def read_size(text: str | None) -> int | None:
    """A size such as `40GiB` in bytes, None for None. Raises UsageError for any other text."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--at_most is {text!r}; give a size such as 40GiB or 900MiB")
    return int(float(match[1]) * _UNIT_BYTES[match[2]])
