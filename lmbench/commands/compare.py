"""`lmbench compare A B`: the ratio of two results with its interval, and a verdict with its reasons.

`lmbench noise RESULTS...`: the A/A noise floor that verdicts rely on, from repeats of one configuration.
"""

from __future__ import annotations

import re
import shlex
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from lmbench.compare.answer import comparison_answer
from lmbench.compare.comparison import UNDECIDED
from lmbench.compare.comparison import compare as compare_results
from lmbench.compare.noise import MIN_NOISE_REPEATS, noise_answer, store_noise, survey
from lmbench.errors import UsageError, tell
from lmbench.records.vocabulary import Values
from lmbench.report.answer import Answer

_PERCENTAGE = re.compile(r"\s*(\d+\.?\d*|\.\d+)\s*%\s*")


def compare(
    *results: str,
    gate: str | None = None,
    about: list[str] | None = None,
    kernels: bool = False,
    run: bool = False,
    budget: str | None = None,
    revision: tuple[str, str] | None = None,
    python: tuple[str, str] | None = None,
    variable: list[tuple[str, str, str]] | None = None,
    results_dir: Path | None = None,
    name: str | None = None,
    timeout_s: float | None = None,
    on: str | None = None,
    settings: list[str] | None = None,
) -> Answer:
    """Compares B with A, step time first, then phases and memory.

    A side is a run, a folder of runs (repeats), a sweep, or cells of a sweep (SWEEP@AXIS=VALUE). Cells meet by their
    axes; what differs between the sides is compared.

    One process is one sample; a verdict takes 3 on each side: `same` if the 90 % interval of the ratio lies within the
    gate, `faster` or `slower` if the 95 % interval excludes 1 and the change is above the A/A noise floor of `lmbench
    noise`, else `undecided`; `invalid` if GPU or flags differ or a guard failed.

    With --run both sides are measured now, in rounds, until the verdict stands or the budget ends; at most 5 % of
    verdicts are false. A and B are configurations with options (small_bf16@model.attention=naive), or one configuration
    with two revisions, Pythons or values of a variable.

    exit codes: 0 same or faster, 10 slower, 11 undecided, 12 invalid, 2 usage

    Args:
        results: before and after, A and B; ratios are B / A
        gate: changes up to this count as none (1%)
        about: dotted name of what is compared: nothing else may differ
        kernels: compare kernel times of two traces, no verdict
        run: measure both sides now
        budget: time for --run: 90s, 10m, 1h (10m)
        revision: A and B of the code; `.` is the tree as it is
        python: interpreters of A and B
        variable: an environment variable and its two values
        results_dir: where --run puts its folder (results)
        name: name of that folder
        timeout_s: seconds a run may take (600)
        on: where --run measures its rounds, as in `lmbench sweep` (local)
        settings: options of `lmbench fit` for both sides, with --run
    """
    sides: Values = {"revision": revision, "python": python, "variable": variable, "results_dir": results_dir,
                     "name": name, "timeout_s": timeout_s, "on": on}  # fmt: skip
    misplaced = (
        ({"gate": gate, "about": about}, kernels, "is for verdicts on times; with --kernels there is none"),
        ({**sides, "budget": budget}, not run, "belongs to --run"),
    )
    for options, is_wrong, why in misplaced:
        if is_wrong and (named := [option for option, value in options.items() if value is not None]):
            raise UsageError(f"--{named[0]} {why}")
    if run and kernels:
        raise UsageError("--kernels compares traces that are there; give it without --run")
    tolerance = parse_gate(gate or "1%")
    if run:
        # Imported here because modules that measure take long to import.
        from lmbench.commands.compare_run import find_sweep, measure, parse_budget

        budget = budget or "10m"
        path, file, engine = find_sweep(results, settings or [], **sides)
        comparison = measure(path, file, tolerance, about or [], parse_budget(budget), engine)
        tell(f"compare: the runs are in {path}")
        if comparison.verdict == UNDECIDED:
            again = ["lmbench", "compare", "--run", str(path), "--gate", f"{tolerance * 100:g}%", "--budget", budget]
            tell(f"compare: go on: {shlex.join(again)}")
        return comparison_answer(comparison)
    if len(results) != 2:
        raise UsageError(f"compare takes two results, A and B; {len(results)} given")
    if kernels:
        # Imported here because verdicts on times do not need it.
        from lmbench.kernels.difference import difference_answer

        return difference_answer(*results)
    return comparison_answer(compare_results(*results, tolerance, about or []))


def parse_gate(text: str) -> float:
    """A percentage such as `2%` as a fraction. Raises UsageError for anything else, and outside 0 to 100 %."""
    match = _PERCENTAGE.fullmatch(text)
    if match is None or not 0 < float(match[1]) < 100:
        raise UsageError(f"--gate is {text!r}; give a percentage above 0% and below 100%, such as 2%")
    return float(match[1]) / 100


def noise(
    *results: str,
    run: bool = False,
    repeats: Annotated[int, Meta(ge=MIN_NOISE_REPEATS)] = 10,
    results_dir: Path = Path("results"),
    settings: list[str] | None = None,
) -> Answer | int:
    """Measures how far a configuration is from itself when nothing was changed.

    The floor is stored as noise.json beside the results, by host, device and settings; `lmbench compare` finds
    it in the closest folder above all runs that it compares. It takes 6 repeats of a configuration or more, in any
    folder of runs or sweep. With --run it makes them as `lmbench fit --repeats` does, with its options.

    Args:
        results: results with repeats
        run: measure the repeats now
        repeats: processes to run
        results_dir: where --run puts the folder of its repeats
        settings: options of `lmbench fit`, with --run
    """
    if not run and not results:
        raise UsageError("noise takes results with repeats, or --run with options of `lmbench fit`")
    if run:
        # Imported here because floors of earlier results need no module that measures.
        from lmbench.commands.fit import repeated

        folder = results_dir / f"noise-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
        words = [*(settings or []), f"--measure.results_dir={results_dir}", f"--measure.run_id={folder.name}"]
        answer = repeated(*results, repeats=repeats, settings=words)
        if isinstance(answer, int):
            return answer
        results = (str(folder),)
    surveyed = survey(results)
    if not surveyed.entries:
        raise UsageError("; ".join(line.text for line in surveyed.problems[:3]))
    home = results_dir.resolve() if run else surveyed.folder
    path = store_noise(home, [entry for _, entry in surveyed.entries])
    tell(f"noise: stored in {path}")
    return noise_answer(surveyed)
