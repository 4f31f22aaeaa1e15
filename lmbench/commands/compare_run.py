"""`lmbench compare --run A B`: measures both sides in turn until the verdict stands."""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import psutil

from lmbench.commands.sweep import carry_out, read_options
from lmbench.compare.comparison import INVALID, UNDECIDED, Comparison, compare
from lmbench.errors import UsageError, tell
from lmbench.masking import is_secret
from lmbench.records.load import is_run_folder
from lmbench.records.statistics import MIN_REPEATS
from lmbench.records.store import RUNS_FOLDER, SWEEP_FILE, check_name
from lmbench.records.vocabulary import SIDE, Values
from lmbench.report.units import duration
from lmbench.standard_output import result_alone
from lmbench.sweep.environments import resolve_revision
from lmbench.sweep.execute import Pace
from lmbench.sweep.file import CONFIG, ENVIRONMENT, MOST_ROUNDS, Options, SweepFile, sweep_from
from lmbench.sweep.folder import read_sweep_folder
from lmbench.sweep.plan import make_plan
from lmbench.sweep.progress import Progress
from lmbench.sweep.tasks import Engine, make_engine

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)")
_UNIT_S = {"s": 1, "m": 60, "h": 3600}
_OPTION = re.compile(r",(?=[A-Za-z_][\w.]*\+?=)")
_WINDOW = ("measure.min_window_s", "measure.steps")
#: Seconds and steps of the first rounds' windows. Longer windows must leave the budget time for this many rounds.
_FIRST_WINDOW_S, _WINDOW_STEPS, _LEAST_ROUNDS = 0.5, 10, 12
#: Rounds and windows where each round is a task elsewhere.
_TASK_ROUNDS, _TASK_WINDOW = 32, (2.0, 10)
#: Threads of PyTorch that wait for each other hold their cores, by default, and on a busy machine wait for whole time
#: slices of other processes: a step of 25 ms took 70 to 2,000 ms beside two spinning processes on two cores.
WAITING = "OMP_WAIT_POLICY"
_BUSY_PERCENT, _BUSY_INTERVAL_S = 25.0, 0.3


def find_sweep(
    sides: Sequence[str],
    settings: list[str],
    revision: tuple[str, str] | None,
    python: tuple[str, str] | None,
    variable: list[tuple[str, str, str]] | None,
    results_dir: Path | None,
    name: str | None,
    timeout_s: float | None,
    on: str | None,
) -> tuple[Path, SweepFile, Engine | None]:
    """The folder, the sweep that is done in it, and where, of what `compare --run` was given.

    Args:
        sides: configurations, or the folder to go on with.
        settings: options of both sides.
        revision, python, variable: what differs.

    Raises:
        UsageError: something is not there, or not understood.
    """
    options = read_options(settings)
    engine = make_engine(on or "local", options)
    first = Path(sides[0]) if len(sides) == 1 else None
    variables = {key: (a, b) for key, a, b in variable or ()}
    if first is not None and (first / SWEEP_FILE).is_file():
        if options or variables or revision or python or name:
            raise UsageError(f"{first} is a comparison to go on with; it has its options already")
        file = read_sweep_folder(first)
        if not file.sides:
            raise UsageError(f"{first} is a sweep without sides; `lmbench compare` compares it, without --run")
        return first, file.changed({}, None, timeout_s), engine
    folder = name or f"compare-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    check_name("--name", folder)
    if gives_way({*os.environ, *variables}):
        variables[WAITING] = ("passive", "passive")
    file = two_sides(list(sides), options, revision, python, variables)
    path = (results_dir or Path("results")) / folder
    if (path / SWEEP_FILE).is_file():
        raise UsageError(f"{path} is there already; `lmbench compare --run {path}` goes on with it")
    if engine is not None:
        # Tasks begin beside each other, and none knows of the others' noise.
        has_window = {*_WINDOW} & {*options}.union(*file.sides.values())
        file = file.changed({} if has_window else dict(zip(_WINDOW, _TASK_WINDOW, strict=True)), _TASK_ROUNDS)
    return path, file.changed({}, None, timeout_s), engine


def two_sides(
    configs: Sequence[str],
    options: Options,
    revisions: Sequence[str] | None,
    pythons: Sequence[str] | None,
    variables: Mapping[str, Sequence[str]],
) -> SweepFile:
    """The sweep that measures two sides.

    Args:
        configs: A and B, each `CONFIG[@NAME=VALUE,NAME=VALUE...]`; a single one stands for both.
        options: the options of both sides.
        revisions: the revisions of A and B, "." for the working tree. The sweep stores the commit of a name, because
            the name may move.
        pythons: the interpreters of A and B.
        variables: environment variables by name, with the values of A and B.

    Raises:
        UsageError: a configuration, an option or a revision does not exist or cannot be understood.
    """
    if len(configs) not in (1, 2):
        raise UsageError(f"compare --run takes one or two configurations, A and B; {len(configs)} given")
    for variable in filter(is_secret, variables):
        raise UsageError(f"{variable} looks like a secret, and sides go by their variables; export it instead")
    environments: Values = {}
    sides: dict[str, Options] = {}
    for index, (side, text) in enumerate((("A", configs[0]), ("B", configs[-1]))):
        config, _, own_options = (text, "", "") if Path(text).is_file() else text.partition("@")
        pairs = [pair.partition("=") for pair in _OPTION.split(own_options)] if config != text else []
        if not config or not all(name and equals for name, equals, _ in pairs):
            raise UsageError(f"{text!r}: give a configuration, and its options as CONFIG@NAME=VALUE,NAME=VALUE")
        sides[side] = {CONFIG: config, **{name: value for name, _, value in pairs}}
        if repeated := sides[side].keys() & options:
            raise UsageError(f"--{repeated.pop()} is for both sides, and one has its own; give it once")
        revision = revisions[index] if revisions else None
        python = pythons[index] if pythons else None
        values = {variable: pair[index] for variable, pair in variables.items()}
        parts = ["here" if revision == "." else revision, python, *map("=".join, values.items())]
        if environment := " ".join(filter(None, parts)):
            commit = None if revision in (None, ".") else resolve_revision(str(revision))[1]
            environments[environment] = {"revision": commit, "python": python, "variables": values}
            sides[side][ENVIRONMENT] = environment
    content = {"base": options, "sides": sides, "environments": environments, "repeats": MOST_ROUNDS}
    return sweep_from(content)


def gives_way(variables: Container[str]) -> bool:
    """Whether threads are to give their cores away while they wait, since other processes take some, and none of these
    variables says how they wait; that is told."""
    busy_percent = psutil.cpu_percent(_BUSY_INTERVAL_S)
    if busy_percent <= _BUSY_PERCENT or WAITING in variables:
        return False
    tell(
        f"other processes take {busy_percent:.0f} % of the cores: threads of all runs give theirs away while they wait "
        f"({WAITING}=passive)"
    )
    return True


def measure(
    path: Path,
    file: SweepFile,
    tolerance: float,
    about: Sequence[str],
    budget_s: float,
    engine: Engine | None = None,
    limits: Pace | None = None,
) -> Comparison:
    """Measure both sides in rounds until the verdict stands, on this machine or as tasks of an engine.

    Args:
        path: the folder of the sweep of both sides.
        file: that sweep.
        tolerance: changes up to this fraction count as none.
        about: dotted names of what is compared.
        budget_s: the time after which no further round starts.
        engine: runs the rounds elsewhere; None measures them here.
        limits: a pace with limits of single runs and a compile cache; its rounds and windows are set here.

    Raises:
        SweepHalted: the disk is full, or a process cannot be started.
    """
    plan = make_plan(path.name, file)
    progress, began_s = Progress(plan), time.monotonic()
    missing = [job.repeat for job in plan.jobs() if not is_run_folder(path / RUNS_FOLDER / job.name)]
    kept_rounds = min(missing, default=file.repeats)
    window_s, options = _FIRST_WINDOW_S, {*file.base}.union(*file.sides.values())

    def look() -> Comparison:
        return compare(f"{path}@{SIDE}=A", f"{path}@{SIDE}=B", tolerance, about)

    def is_enough(rounds: int) -> bool:
        """Whether measuring ends after this many rounds: the verdict stands, or the budget is spent.

        Else, where the noise needs longer windows and the budget has time for them, their length doubles.
        """
        nonlocal window_s
        if rounds < kept_rounds:
            return False
        comparison, elapsed_s = look(), time.monotonic() - began_s
        cell = comparison.cells[0] if comparison.cells else None
        reason = cell.reasons[0] if cell else "no run counts"
        progress.keep(f"round {rounds}, {duration(elapsed_s)}: {comparison.verdict}: {reason}")
        if cell is None or comparison.verdict == INVALID:
            return True
        if not cell.metrics:
            # A run with outcome ok was left out for a failed guard. That may be an accident, so measure again.
            left_out = (*cell.left_out_a, *cell.left_out_b)
            return rounds >= MIN_REPEATS or any(run.outcome != "ok" for run in left_out)
        round_s = elapsed_s / max(1, rounds - kept_rounds)
        # A slow process in the last round delays the verdict by a further round.
        is_slow = any(process.round == rounds for process in cell.slow)
        is_late, is_decided = elapsed_s + round_s > budget_s, comparison.verdict != UNDECIDED and not is_slow
        has_time = budget_s - elapsed_s > _LEAST_ROUNDS * (round_s + 2 * window_s)
        # The standard deviation of a single round is 0, so that it never lengthens windows.
        if pace.window_options and has_time and statistics.pstdev(cell.metrics[0].ratio.differences) > tolerance:
            window_s *= 2
            pace.window_options[:] = window_words(window_s)
        return is_late or is_decided

    window_options = [] if options & {*_WINDOW} else window_words(window_s)
    pace = replace(limits or Pace(), is_enough=is_enough, window_options=window_options)
    # Standard output has the verdict alone, in every output format.
    with result_alone():
        carry_out(plan, path, progress, pace, engine=engine)
    return look()


def window_words(window_s: float) -> list[str]:
    """The options of `lmbench fit` for a window of at least this many seconds."""
    return [f"--{name}={value:g}" for name, value in zip(_WINDOW, (window_s, _WINDOW_STEPS), strict=True)]


def parse_budget(text: str) -> float:
    """A duration such as `10m` in seconds. Raises UsageError for anything else."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise UsageError(f"--budget is {text!r}; give a duration above 0, such as 90s, 10m or 1h")
    return float(match[1]) * _UNIT_S[match[2]]
