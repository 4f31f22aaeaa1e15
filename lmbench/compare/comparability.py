"""Are two groups of runs comparable? must_match.toml says what has to be the same and what chooses it; `notes` says
what a reader should know and no rule decides."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

import msgspec

from lmbench.errors import UsageError, suggest
from lmbench.records.load import Run
from lmbench.records.measured import BUSY_MACHINE, Status
from lmbench.records.schema import fields, value_at
from lmbench.records.settings import (
    CHOSEN,
    as_text,
    brief,
    chosen_differences,
    is_named,
    settings,
    values_at,
)
from lmbench.records.statistics import Ratio

#: Facts that have to be the same, with the settings that choose them: always, and where the host counts.
MUST_MATCH, HOST_MUST_MATCH = msgspec.toml.decode(
    Path(__file__).with_name("must_match.toml").read_bytes(), type=dict[str, dict[str, list[str]]]
).values()

#: Environment variables that name a place or repeat a setting; any other one that differs invalidates.
_PLACES = ("_DIR", "_HOME", "_PATH", "_FILE", "_VISIBLE_DEVICES", "_RUN_ID", "_CACHE")
_REPEATED = ("TORCHELASTIC_",)
_VARIABLES = "environment.variables"


def check_about(about: Iterable[str], runs: Sequence[Run]) -> None:
    """Raises UsageError for a name of `--about` that is nothing in these runs."""
    known = {*MUST_MATCH, *HOST_MUST_MATCH, *CHOSEN, _VARIABLES}
    known.update(*((*settings(run.record), *values_at(run.record, "environment")) for run in runs))
    for name in about:
        if not any(is_named(candidate, (name,)) for candidate in known):
            raise UsageError(f"--about {name}: these runs record nothing of that name{suggest(name, known)}")


def invalid_reasons(
    a: Sequence[Run], b: Sequence[Run], about: Sequence[str] = (), by_rounds: bool = False
) -> list[str]:
    """Why runs of A and B are not comparable, a line each; none if they are.

    Args:
        about: names of what is compared. Without any, every setting may differ; with some, only these may.
        by_rounds: both runs of a round had one host, which may be another one in the next.
    """
    first_a, first_b, runs = a[0].record, b[0].record, [*a, *b]
    changed = chosen_differences(first_a, first_b)
    reasons = []

    def compare(title: str, name: str, setters: Sequence[str], default: object = None) -> None:
        is_chosen = any(is_named(difference.name, setters) for difference in changed)
        texts = [_texts(side, name, default) for side in (a, b)]
        is_meant = any(is_named(alias, about) for alias in (name, *setters))
        if all(texts) and texts[0] != texts[1] and not is_chosen and not is_meant:
            hint = f"--about {name.removeprefix('environment.')}, if that is what you compare"
            reasons.append(f"{title} differs: A {_listed(texts[0])}, B {_listed(texts[1])} ({hint})")

    facts = MUST_MATCH if by_rounds else facts_of(runs)
    for name, setters in facts.items():
        # A script of the user's own records no settings: what could be chosen was.
        if not setters or first_a.config is not None:
            compare(fields("run")[name].title, name, setters)
    variables = [value_at(run.record, _VARIABLES) for run in runs]
    # Unlike other facts, a variable that is not there is known: it is unset.
    for variable in sorted({*chain(*variables)}) if None not in variables else ():
        if not variable.endswith(_PLACES) and not variable.startswith(_REPEATED):
            name = f"{_VARIABLES}.{variable}"
            compare(f"environment variable {variable}", name, ("sweep.environment",), default="unset")
    for name, side in (("A", a), ("B", b)):
        reasons += [f"runs of {name} are not repeats of one thing: {line}" for line in mixture(side, facts)]
        reasons += failed_guards(name, side)
    # A setting that only one side knows is no difference of value.
    reasons += [
        f"{difference}; the comparison is about {', '.join(about)}"
        for difference in (changed if about else ())
        if not is_named(difference.name, about)
        and (difference.name == "sweep.environment" or None not in (difference.a, difference.b))
    ]
    return reasons


def _texts(runs: Iterable[Run], name: str, default: object = None) -> set[str]:
    """What runs have recorded of a fact."""
    values = (value_at(run.record, name) for run in runs)
    known = (default if value is None else value for value in values)
    return {as_text(value) for value in known if value is not None}


def facts_of(runs: Sequence[Run]) -> dict[str, list[str]]:
    """The facts that have to be the same: GPU and flags, and the host where that is part of what was measured."""
    return MUST_MATCH | (HOST_MUST_MATCH if counts_host(runs) else {})


def mixture(runs: Sequence[Run], facts: Iterable[str]) -> list[str]:
    """Why runs are not repeats of one thing, a line each: they differ in code, versions, or one of these facts."""
    names = dict.fromkeys(name for run in runs for name in values_at(run.record, *CHOSEN, *facts))
    texts = {name: _texts(runs, name) for name in names}
    return [f"{name} is {_listed(known)}" for name, known in texts.items() if len(known) > 1]


def counts_host(runs: Sequence[Run]) -> bool:
    """Whether the host is part of what was measured, as it is on a CPU, and where not every phase had work queued."""
    probed = [run.record.probe.verdicts for run in runs if run.record.probe.verdicts]
    verdicts = {lag.verdict for lags in probed for _, lag in lags.items()}
    return verdicts != {"queued"} or any(run.record.device_type != "cuda" for run in runs)


def _listed(texts: Iterable[str]) -> str:
    return " or ".join(map(brief, sorted(texts)))


def _messages(runs: Sequence[Run], status: Status) -> dict[str, list[str]]:
    """Messages of the guards of this status, by the guard's name."""
    messages: dict[str, list[str]] = {}
    for guard in (guard for run in runs for guard in run.record.guards if guard.status == status):
        messages.setdefault(guard.name, []).append(guard.message)
    return messages


def failed_guards(side: str, runs: Sequence[Run]) -> list[str]:
    """Guards that failed in runs of a side, a line each."""
    return [
        f"guard {name} failed in {len(messages)} of {len(runs)} runs of {side}: {messages[0]}"
        for name, messages in _messages(runs, "fail").items()
    ]


def busy_reason(a: Sequence[Run], b: Sequence[Run]) -> str | None:
    """Why a difference may be one of the machine's load, None where it may not: most runs of a side had to share the
    machine, and the host is part of what was measured."""
    for side, runs in (("A", a), ("B", b)) if counts_host([*a, *b]) else ():
        messages = _messages(runs, "warn").get(BUSY_MACHINE, [])
        if 2 * len(messages) > len(runs):
            signs = messages[0].partition(": ")[2]
            advice = "measure again when it is quiet, or both sides in turn (lmbench compare --run)"
            return f"busy machine in {len(messages)} of {len(runs)} runs of {side} ({signs}): {advice}"
    return None


def are_apart(a: Sequence[Run], b: Sequence[Run]) -> bool:
    """Whether all runs of one side came before the other's; not where the sides took turns or nobody knows."""
    starts_a, starts_b = ([run.record.started_at or "" for run in side] for side in (a, b))
    is_apart = "" < max(starts_a) <= min(starts_b) or "" < max(starts_b) < min(starts_a)
    return is_apart and len(a) + len(b) > 2


def notes(a: Sequence[Run], b: Sequence[Run], step: Ratio) -> list[str]:
    """Lines on what differs between runs of one cell, `step` the ratio of their step times."""
    lines = []
    tokens = [count for side in (a, b) if (count := side[0].record.window.step_tokens)]
    if len(set(tokens)) == 2:
        per_token = step.point * tokens[0] / tokens[1]
        counts = f"a step has {tokens[0]:,.0f} tokens in A, {tokens[1]:,.0f} in B"
        lines.append(f"{counts}: the time per token of B is {per_token:.4g} times A's")
    if warned := sorted({*_messages(a, "warn"), *_messages(b, "warn")}):
        lines.append(f"guards that warned: {', '.join(warned)}")
    return lines
