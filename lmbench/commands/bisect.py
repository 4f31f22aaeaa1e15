"""`lmbench bisect GOOD BAD`: which commit, version or option made it slower."""

from __future__ import annotations

from pathlib import Path

from lmbench.commands.words import read_budget, read_gate, read_options
from lmbench.errors import UsageError
from lmbench.records.store import RESULTS
from lmbench.report.answer import Answer
from lmbench.sweep.file import CONFIG


def bisect(
    good: str,
    bad: str,
    *,
    gate: str = "2%",
    budget: str = "30m",
    results_dir: Path = RESULTS,
    settings: list[str],
) -> Answer:
    """Finds which commit, version of a package or option made a step slower, or faster.

    The ends are compared first: if they are the same, or do not differ for certain, no other is measured. Then rounds
    of suspects against the good end are bets on where the change is. A suspect near it is measured again until the
    rounds decide; one that does not run is left out. At the end the first bad one is compared with the one before it.
    The same command goes on after any end.

    GOOD and BAD are revisions of the git repository here (main~20 main --config smoke), versions of a package
    (torch==2.9.0 torch==2.11.0 --config smoke), or two YAML files. Versions are installed by pip, which reads
    PIP_CONSTRAINT.

    exit codes: 0 found, or the ends are the same, 11 undecided, 12 invalid, 2 usage

    Args:
        good: the good end
        bad: the bad end
        gate: changes between the ends up to this are not searched
        budget: time for it: 90s, 10m, 1h
        results_dir: where its folder goes
        settings: options of `lmbench fit` for all of them
    """
    from lmbench.campaign.bisection import Bisection
    from lmbench.campaign.suspects import find_suspects
    from lmbench.sweep.plan import digest

    options = read_options(settings)
    path = results_dir / f"bisect-{digest([good, bad, options])}"
    what, row = find_suspects(good, bad, path / "options")
    if what != "option" and CONFIG not in options:
        raise UsageError(f"a {what} is measured by a configuration; add one, such as --config smoke")
    return Bisection(path, what, row, options, read_gate(gate), read_budget(budget)).search()
