"""Whether two groups of runs are comparable. must_match.toml lists the facts that must be equal on both sides.

`notes` adds what a reader should know although no rule depends on it.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import fmean

from lmbench.compare.sides import Runs
from lmbench.errors import UsageError, suggest
from lmbench.records.load import guards_by_name
from lmbench.records.measured import BUSY_MACHINE
from lmbench.records.schema import fields, value_at
from lmbench.records.settings import (
    CHOSEN,
    as_text,
    brief,
    chosen_differences,
    is_named,
    settings,
    values_at,
    variables_of,
)
from lmbench.records.statistics import Ratio
from lmbench.records.vocabulary import GATE_FRACTION, WAIT_POLICY

_FACTS = tomllib.loads(Path(__file__).with_name("must_match.toml").read_text("utf-8"))
#: Facts that must be equal on both sides, always and where the host counts, each with the settings that choose it.
ALWAYS: dict[str, list[str]] = _FACTS["always"]
WITH_HOST: dict[str, list[str]] = ALWAYS | _FACTS["host"]
_VARIABLES = "environment.variables"


def check_about(about: Iterable[str], runs: Runs) -> None:
    """Raises UsageError for a name of `--about` that these runs do not record."""
    recorded = {*WITH_HOST, *CHOSEN, _VARIABLES}
    recorded.update(*((*settings(run.record), *values_at(run.record, "environment")) for run in runs))
    for name in about:
        if not any(is_named(candidate, (name,)) for candidate in recorded):
            raise UsageError(f"--about {name}: these runs record nothing of that name{suggest(name, recorded)}")


def invalid_reasons(a: Runs, b: Runs, about: Sequence[str], by_rounds: bool) -> list[str]:
    """The reasons why runs of A and B are not comparable, a line each; empty if they are.

    Args:
        about: names of what is compared. With names, only these settings may differ; without names, every setting may.
        by_rounds: both runs of each round had the same host, so that hosts may differ between rounds.
    """
    first_a, first_b, runs = a[0].record, b[0].record, [*a, *b]
    changed = chosen_differences(first_a, first_b)
    reasons = []

    def compare(title: str, name: str, setters: Sequence[str], default: object = None) -> None:
        is_chosen = any(is_named(difference.name, setters) for difference in changed)
        is_meant = any(is_named(alias, about) for alias in (name, *setters))
        texts_a, texts_b = _texts(a, name, default), _texts(b, name, default)
        if texts_a and texts_b and texts_a != texts_b and not is_chosen and not is_meant:
            hint = f"give both the same, or --about {name.removeprefix('environment.')}, if that is what you compare"
            reasons.append(f"{title} differs: A {_alternatives(texts_a)}, B {_alternatives(texts_b)} ({hint})")

    facts = ALWAYS if by_rounds else facts_of(runs)
    for name, setters in facts.items():
        # A user's own script records no settings. There a fact that settings can choose counts as chosen.
        if not setters or first_a.config is not None:
            compare(fields("run")[name].title, name, setters)
    # A variable missing from the record was unset, whereas another fact missing from it is unknown.
    known = [variables for run in runs if (variables := variables_of(run.record)) is not None]
    names = {*chain(*known)} if len(known) == len(runs) else set()
    if not counts_host(runs):
        # lmbench sets it where the machine is busy, which does not matter to a step that never waits for the host.
        names.discard(WAIT_POLICY)
    for variable in sorted(names):
        name = f"{_VARIABLES}.{variable}"
        compare(f"environment variable {variable}", name, ("sweep.environment",), default="unset")
    for name, side in (("A", a), ("B", b)):
        reasons += [f"runs of {name} are not repeats of one thing: {line}" for line in differences_within(side, facts)]
        reasons += failed_guards(name, side)
    # A setting that only one side has is no reason; the environment of a sweep is one.
    reasons += [
        f"{difference}; the comparison is about {', '.join(about)}"
        for difference in (changed if about else ())
        if not is_named(difference.name, about)
        and (difference.name == "sweep.environment" or None not in (difference.a, difference.b))
    ]
    return reasons


def _texts(runs: Runs, name: str, default: object = None) -> set[str]:
    """The distinct values of a fact in the records, as text. `default` replaces missing values; None drops them."""
    values = (value_at(run.record, name) for run in runs)
    recorded = (default if value is None else value for value in values)
    return {as_text(value) for value in recorded if value is not None}


def facts_of(runs: Runs) -> dict[str, list[str]]:
    """The facts that must be equal: GPU and flags, and the host where its speed is part of the measurement."""
    return WITH_HOST if counts_host(runs) else ALWAYS


def differences_within(runs: Runs, facts: Iterable[str]) -> list[str]:
    """The differences between runs that should be repeats, a line each: in code, in versions or in one of `facts`."""
    names = dict.fromkeys(name for run in runs for name in values_at(run.record, *CHOSEN, *facts))
    texts_by_name = {name: _texts(runs, name) for name in names}
    return [f"{name} is {_alternatives(texts)}" for name, texts in texts_by_name.items() if len(texts) > 1]


def counts_host(runs: Runs) -> bool:
    """Whether the host's speed is part of the measurement: on a CPU, and on a GPU unless the probe of every phase found
    work queued at its end."""
    verdicts = {lag.verdict for run in runs for lag in run.record.probe.lags.values()}
    return verdicts != {"queued"} or not all(run.record.is_on_gpu for run in runs)


def _alternatives(texts: Iterable[str]) -> str:
    return " or ".join(map(brief, sorted(texts)))


def failed_guards(side: str, runs: Runs) -> list[str]:
    """The guards that failed in runs of a side, a line each."""
    return [
        f"guard {name} failed in {len(guards)} of {len(runs)} runs of {side}: {guards[0].message}"
        for name, guards in guards_by_name(runs, "fail").items()
    ]


def busy_reason(sides: Mapping[str, Runs]) -> str | None:
    """Why the load of the machine may explain a difference, or None. The sides go by their names (`runs of A`).

    Load is an explanation if most runs of a side shared the machine, and the host's speed is part of the measurement.
    """
    for side, runs in sides.items() if counts_host([*chain(*sides.values())]) else ():
        guards = guards_by_name(runs, "warn").get(BUSY_MACHINE, [])
        if 2 * len(guards) > len(runs):
            signs = guards[0].message.partition(": ")[2]
            advice = "measure again when it is quiet, or both sides in turn (lmbench compare --run)"
            return f"busy machine in {len(guards)} of {len(runs)} {side} ({signs}): {advice}"
    return None


def are_apart(a: Runs, b: Runs) -> bool:
    """Whether all runs of one side started before all runs of the other.

    False where the sides took turns, where start times are unknown, and for a single run on each side.
    """
    starts_a, starts_b = ([run.record.started_at or "" for run in side] for side in (a, b))
    is_apart = "" < max(starts_a) <= min(starts_b) or "" < max(starts_b) < min(starts_a)
    return is_apart and len(a) + len(b) > 2


def notes(a: Runs, b: Runs, step: Ratio) -> list[str]:
    """Notes on a cell: the time per token, where the mean tokens of a step differ by 1 % or more, and the guards that
    warned. `step` is the ratio of the step times."""
    lines = []
    counts_a, counts_b = ([run.record.window.step_tokens or 0.0 for run in side] for side in (a, b))
    tokens_a, tokens_b = fmean(counts_a), fmean(counts_b)
    # Sequences of many lengths leave the means of windows that end in different places a little apart.
    if min(*counts_a, *counts_b) and abs(tokens_b / tokens_a - 1) >= GATE_FRACTION:
        per_token = step.point * tokens_a / tokens_b
        counts = f"a step has {tokens_a:,.0f} tokens in A, {tokens_b:,.0f} in B"
        lines.append(f"{counts}: the time per token of B is {per_token:.4g} times A's")
    if warned := sorted(guards_by_name([*a, *b], "warn")):
        lines.append(f"guards that warned: {', '.join(warned)}")
    return lines
