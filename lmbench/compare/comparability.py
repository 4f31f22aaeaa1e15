"""Are two groups of runs comparable, and what differs between them? By the table of `comparability_table`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from lmbench.compare.comparability_table import CHECKS, COMPARED, CONSEQUENCES, Check, variable_matters
from lmbench.compare.identity import as_text, settings
from lmbench.records.load import Run
from lmbench.records.paths import leaves, lookup
from lmbench.records.vocabulary import Record

_VARIABLES = "environment.variables"
_SHORT = 60


@dataclass(frozen=True)
class Difference:
    """A setting or fact by its dotted name, with its values on both sides (None where one does not have it)."""

    name: str
    a: str | None
    b: str | None

    def __str__(self) -> str:
        return f"{self.name}: {_shown(self.a)} -> {_shown(self.b)}"


def invalid_reasons(a: Sequence[Run], b: Sequence[Run], about: Sequence[str] = ()) -> list[str]:
    """Why runs of A and B are not comparable, a line each; none if they are.

    Args:
        about: names of what is compared. Without any, every setting may differ; with some, only these may.
    """
    changed = {difference.name for difference in setting_differences(a[0].run, b[0].run)}
    device_bound = host_reason([*a, *b]) is None
    reasons = []
    for check in CHECKS:
        asked = any(_is_named(name, about) for name in (check.path, *check.set_by))
        if asked or (check.rule == "host" and device_bound) or _is_chosen(check, changed, a[0].run):
            continue
        mine, theirs = ([_known(run, check.path) for run in side] for side in (a, b))
        reasons += _differing(check.what, check.path, mine, theirs)
    if "sweep.environment" not in changed and not _is_named(_VARIABLES, about):
        reasons += _variables(a, b, about)
    for name, runs in (("A", a), ("B", b)):
        reasons += _mixed(name, runs)
        reasons += _failed_guards(name, runs)
    return reasons + (_not_asked(a[0].run, b[0].run, about) if about else [])


def mixture(runs: Sequence[Run]) -> list[str]:
    """Why runs are not repeats of one thing, a line each: they differ in code, versions, GPU or flags, or in the host
    where that is part of what was measured."""
    found = []
    rules = ("always",) if host_reason(runs) is None else ("always", "host")
    for path in (*COMPARED, *(check.path for check in CHECKS if check.rule in rules)):
        for name in sorted({leaf for run in runs for leaf, _ in _leaves_at(run.run, path)}):
            values = {as_text(v) for run in runs if (v := lookup(run.run, name)) is not None}
            if len(values) > 1:
                found.append(f"{name} is {_listed(values)}")
    return found


def differences(a: Record, b: Record) -> list[Difference]:
    """What is compared: settings, code, versions, the sweep's environment; then facts of the model that no setting of
    it explains, such as those of another class."""
    chosen = _chosen_differences(a, b)
    if any(_is_named(difference.name, ("model", "data.context_length")) for difference in chosen):
        return chosen
    return list(dict.fromkeys([*chosen, *_fact_differences(a, b, CONSEQUENCES)]))


def _chosen_differences(a: Record, b: Record) -> list[Difference]:
    return list(dict.fromkeys([*setting_differences(a, b), *_fact_differences(a, b, COMPARED)]))


def _fact_differences(a: Record, b: Record, paths: Iterable[str]) -> list[Difference]:
    names = dict.fromkeys(name for path in paths for record in (a, b) for name, _ in _leaves_at(record, path))
    return [d for name in names if (d := _difference(name, lookup(a, name), lookup(b, name))) is not None]


def setting_differences(a: Record, b: Record) -> list[Difference]:
    mine, theirs = settings(a), settings(b)
    environments = {"sweep.environment": (lookup(a, "sweep.environment"), lookup(b, "sweep.environment"))}
    pairs = {name: (mine.get(name), theirs.get(name)) for name in dict.fromkeys((*mine, *theirs))} | environments
    return [d for name, pair in pairs.items() if (d := _difference(name, *pair)) is not None]


def host_reason(runs: Iterable[Run]) -> str | None:
    """Why the host is part of what was measured, None where the device had work queued in every phase."""
    for run in runs:
        if run.run.get("device_type") != "cuda":
            return "on a CPU the host is what was measured"
        verdicts = lookup(run.run, "probe.verdicts") or {}
        if not verdicts:
            return f"no probe step of {run.run_id} looked whether the device waits for the host"
        for phase, verdict in verdicts.items():
            if verdict.get("verdict") != "queued":
                return f"{phase} of {run.run_id} is {verdict.get('verdict')}: the host is part of what was measured"
    return None


def known_names(runs: Iterable[Run]) -> set[str]:
    """Every dotted name that these runs have, for a check of what was asked for."""
    names = {check.path for check in CHECKS} | {*COMPARED, _VARIABLES}
    for run in runs:
        names.update(settings(run.run))
        names.update(path for path, _ in leaves(run.run.get("environment") or {}, "environment."))
    return names


def names_something(name: str, known: Iterable[str]) -> bool:
    return any(_is_named(path, (name,)) for path in known)


def _difference(name: str, a: Any, b: Any) -> Difference | None:
    if a == b:
        return None
    return Difference(name, None if a is None else as_text(a), None if b is None else as_text(b))


def _leaves_at(record: Record, path: str) -> list[tuple[str, Any]]:
    value = lookup(record, path)
    if isinstance(value, dict):
        return list(leaves(value, f"{path}."))
    return [] if value is None else [(path, value)]


def _known(run: Run, path: str) -> str | None:
    value = lookup(run.run, path)
    return None if value is None else as_text(value)


def _is_chosen(check: Check, changed: set[str], record: Record) -> bool:
    """Whether the user set it apart: by a setting that differs, or in a script of their own, which records none."""
    if any(_is_named(name, check.set_by) for name in changed):
        return True
    return bool(check.set_by) and not isinstance(record.get("config"), dict)


def _is_named(path: str, names: Iterable[str]) -> bool:
    """Whether a dotted name is one of these or lies under one; `gpu` stands for `environment.gpu`."""
    short = path.removeprefix("environment.")
    return any(each == name or each.startswith(f"{name}.") for name in names for each in (path, short))


def _differing(what: str, path: str, mine: Sequence[str | None], theirs: Sequence[str | None]) -> list[str]:
    a, b = {value for value in mine if value is not None}, {value for value in theirs if value is not None}
    if not a or not b or a == b:
        return []
    hint = f"--about {path.removeprefix('environment.')}, if that is what you compare"
    return [f"{what} differs: A {_listed(a)}, B {_listed(b)} ({hint})"]


def _variables(a: Sequence[Run], b: Sequence[Run], about: Sequence[str]) -> list[str]:
    """Unlike other facts, a variable that is not there is known: it is unset."""
    sides = [[lookup(run.run, _VARIABLES) for run in side] for side in (a, b)]
    if not all(isinstance(variables, dict) for side in sides for variables in side):
        return []
    names = sorted({name for side in sides for variables in side for name in variables if variable_matters(name)})
    reasons = []
    for name in names:
        if not _is_named(f"{_VARIABLES}.{name}", about):
            mine, theirs = ([str(variables.get(name, "unset")) for variables in side] for side in sides)
            reasons += _differing(f"environment variable {name}", f"{_VARIABLES}.{name}", mine, theirs)
    return reasons


def _mixed(side: str, runs: Sequence[Run]) -> list[str]:
    return [f"runs of {side} are not repeats of one thing: {line}" for line in mixture(runs)]


def _failed_guards(side: str, runs: Sequence[Run]) -> list[str]:
    failed: dict[str, list[str]] = {}
    for run in runs:
        for guard in run.run.get("guards") or ():
            if guard.get("status") == "fail":
                failed.setdefault(str(guard.get("name")), []).append(str(guard.get("message")))
    return [
        f"guard {name} failed in {len(messages)} of {len(runs)} runs of {side}: {messages[0]}"
        for name, messages in failed.items()
    ]


def _not_asked(a: Record, b: Record, about: Sequence[str]) -> list[str]:
    """Differences other than those asked for; a setting that only one side knows is no difference of value."""
    others = [
        difference
        for difference in _chosen_differences(a, b)
        if not _is_named(difference.name, about)
        and (difference.name == "sweep.environment" or None not in (difference.a, difference.b))
    ]
    return [f"{difference}; the comparison is about {', '.join(about)}" for difference in others]


def _listed(values: Iterable[str]) -> str:
    return " or ".join(_shown(value) for value in sorted(values))


def _shown(value: str | None) -> str:
    if value is None:
        return "none"
    return value if len(value) <= _SHORT else f"{value[: _SHORT - 3]}..."
