"""`lmbench compare A B`: the ratio of two results with its interval, and a verdict with its reasons.

`lmbench noise RESULTS...`: the A/A noise floor that verdicts rely on, from repeats of one configuration.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from lmbench.campaign.sides import SideOptions, find_sides
from lmbench.commands.parser import Result
from lmbench.commands.words import read_budget_of_rounds, read_configuration, read_gate, read_options, refuse
from lmbench.errors import UsageError, tell
from lmbench.records.store import RESULTS
from lmbench.records.vocabulary import MIN_NOISE_REPEATS
from lmbench.report.answer import Answer
from lmbench.sweep.file import Options


def compare(
    *results: Result,
    gate: str | None = None,
    about: list[str] | None = None,
    kernels: bool = False,
    run: bool = False,
    sides: SideOptions,
    settings: list[str],
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
        settings: options of `lmbench fit` for both sides, with --run
    """
    if kernels:
        why = "is for verdicts on times; --kernels compares traces that are there, without one"
        refuse({"gate": gate, "about": about, "run": run or None}, why)
    if not run:
        refuse(vars(sides), "belongs to --run")
    tolerance = read_gate(gate)
    if run:
        return _measured(results, tolerance, about or [], sides, read_options(settings))
    if len(results) != 2:
        raise UsageError(f"compare takes two results, A and B; {len(results)} given")
    if kernels:
        from lmbench.kernels.difference import difference_answer

        return difference_answer(*results)
    from lmbench.compare.answer import comparison_answer
    from lmbench.compare.comparison import compare as compare_results

    return comparison_answer(compare_results(*results, tolerance, about or []))


def _measured(
    results: Sequence[str], tolerance: float, about: Sequence[str], sides: SideOptions, options: Options
) -> Answer:
    """The answer of --run, after a command that goes on where the verdict is open."""
    from lmbench.campaign.rounds import Rounds, budget_text
    from lmbench.compare.answer import comparison_answer
    from lmbench.compare.comparison import UNDECIDED
    from lmbench.sweep.tasks import make_engine

    engine = make_engine(sides.on or "local", options)
    path, file = find_sides(results, options, sides, is_elsewhere=engine is not None)
    rounds = Rounds(path, file, tolerance, read_budget_of_rounds(sides.budget), about, engine)
    again = ["lmbench", "compare", "--run", str(path), "--gate", f"{tolerance * 100:g}%"]
    again += [word for name in about for word in ("--about", name)]
    try:
        comparison = rounds.measure()
    except (KeyboardInterrupt, SystemExit):
        tell(f"compare: go on: {shlex.join(again)}")
        raise
    if comparison.verdict == UNDECIDED:
        if rounds.advice:
            tell(f"compare: {rounds.advice}")
        again += ["--budget", budget_text(rounds.more_s) if rounds.advice else sides.budget or "10m"]
        tell(f"compare: go on: {shlex.join(again)}")
    return comparison_answer(comparison)


def noise(
    *results: Result,
    run: bool = False,
    repeats: Annotated[int, Meta(ge=MIN_NOISE_REPEATS)] = 10,
    results_dir: Path = RESULTS,
    settings: list[str],
) -> Answer | int:
    """Measures how far a configuration is from itself when nothing was changed.

    The floor is stored as noise.json beside the results, by host, device and settings; `lmbench compare` finds
    it in the closest folder above a side's runs, or above those of both. It takes 6 repeats of a configuration or more,
    in any folder of runs or sweep. With --run it makes them as `lmbench fit --repeats` does, with its options.

    Args:
        results: results with repeats
        run: measure the repeats now
        repeats: processes to run
        results_dir: where --run puts the folder of its repeats
        settings: options of `lmbench fit`, with --run
    """
    if run:
        if len(results) > 1:
            raise UsageError(f"noise --run takes one configuration; {len(results)} given")
        from lmbench.campaign.repeats import measured_noise

        advice = "noise --run takes a configuration, such as `lmbench noise --run smoke`"
        options = read_configuration(results[0] if results else None, settings, advice)
        return measured_noise(options, repeats, results_dir)
    if not results:
        raise UsageError("noise takes results with repeats, or --run with options of `lmbench fit`")
    from lmbench.compare.noise import noise_floors

    return noise_floors(results)
