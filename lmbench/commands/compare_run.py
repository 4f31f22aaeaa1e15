"""`lmbench compare --run A B`: both sides measured in turn until the verdict stands."""

from __future__ import annotations

import argparse
import re
import shlex
import time
from datetime import UTC, datetime
from pathlib import Path

from lmbench.commands.compare import add_output_options, check_output_options, parse_gate
from lmbench.commands.parser import CommandParser
from lmbench.commands.sweep import carry_out, read_options
from lmbench.compare.comparison import Comparison, compare
from lmbench.compare.verdict import INVALID, UNDECIDED
from lmbench.errors import UsageError
from lmbench.records.load import is_run_folder
from lmbench.records.statistics import MIN_REPEATS
from lmbench.records.store import RUNS_FOLDER, SWEEP_FILE
from lmbench.records.vocabulary import SIDE
from lmbench.report.units import duration
from lmbench.standard_output import result_alone
from lmbench.sweep.file import SweepFile
from lmbench.sweep.folder import read_sweep_folder
from lmbench.sweep.plan import Plan, make_plan
from lmbench.sweep.progress import Progress
from lmbench.sweep.sides import two_sides

DESCRIPTION = """\
Measures A and B in rounds, one process of each in a round and the first one turned each
time, and stops as soon as the verdict stands or the budget ends (undecided, with what it
would take). A false `faster` or `slower` comes in at most 5 % of comparisons, all looks
taken together. A and B are configurations with options of their own
(small_bf16@model.attention=naive,data.batch_size=8), or one of them and two revisions,
Pythons or values of a variable. Further options (--data.batch_size 2) are for both.
The folder of such a comparison goes on with it, also where it had ended undecided.

exit codes: 0 same or faster, 10 slower, 11 undecided, 12 invalid, 2 usage"""

USAGE = """\
lmbench compare --run A [B] [--gate 2%%] [--budget 10m] [--revision A B] [OPTIONS]
       lmbench compare --run FOLDER [--budget 10m]"""

_DURATION = re.compile(r"(\d+(?:\.\d+)?)(s|m|h)")
_UNIT_S = {"s": 1, "m": 60, "h": 3600}


def measure(words: list[str]) -> tuple[argparse.Namespace, Comparison]:
    """Measure what `compare` was given until the verdict stands; returns its options too.

    Raises:
        UsageError: something is not there, or not understood.
        SweepHalted: the disk is full, or a process cannot be started.
    """
    options, rest = _parse(words)
    check_output_options(options)
    tolerance = parse_gate(options.gate)
    path, file = _find(options, rest)
    plan = make_plan(path.name, file)
    progress = Progress(plan)
    looks = _Looks(plan, path, progress, tolerance, options.about, parse_budget(options.budget))
    # What is printed there is the verdict alone, in whatever form.
    with result_alone():
        carry_out(plan, path, progress, lambda path, progress: None, looks)
    found = looks.look()
    progress.said(f"the runs are in {path}")
    if found.verdict == UNDECIDED:
        again = ["lmbench", "compare", "--run", str(path), "--gate", options.gate, "--budget", options.budget]
        progress.said(f"go on: {shlex.join(again)}")
    return options, found


def _parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Options of `compare --run`, and the words that are none of them: sides, and options of both."""
    parser = CommandParser("compare", DESCRIPTION, USAGE)
    parser.add_argument("--run", action="store_true", help="measure both sides now")
    add_output_options(parser)
    parser.add_argument("--budget", default="10m", metavar="TIME", help="such as 90s, 10m, 1h (default 10m)")
    parser.add_argument("--revision", nargs=2, metavar=("A", "B"), help="of the code; `.` is the working tree as it is")
    parser.add_argument("--python", nargs=2, metavar=("A", "B"), help="interpreters")
    parser.add_argument(
        "--variable", nargs=3, action="append", default=[], metavar=("NAME", "A", "B"), help="an environment variable"
    )
    parser.add_argument("--results_dir", default="results", metavar="DIR", help="where the folder goes (results)")
    parser.add_argument("--name", help="name of the folder (default: compare- and the time)")
    parser.add_argument("--timeout_s", type=float, metavar="S", help="seconds a run may take (default 600)")
    return parser.parse_known_args(words)


def _find(options: argparse.Namespace, rest: list[str]) -> tuple[Path, SweepFile]:
    """The folder, and the sweep that is done in it."""
    given, words = _split(rest)
    variables = {name: (a, b) for name, a, b in options.variable}
    if len(given) == 1 and (Path(given[0]) / SWEEP_FILE).is_file():
        if words or variables or options.revision or options.python or options.name:
            raise UsageError(f"{given[0]} is a comparison to go on with; it has its options already")
        file = read_sweep_folder(Path(given[0]))
        if not file.sides:
            raise UsageError(f"{given[0]} is a sweep without sides; `lmbench compare` compares it, without --run")
        return Path(given[0]), file.changed({}, None, options.timeout_s)
    name = options.name or f"compare-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    if not re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9_.-]*", name):
        raise UsageError(f"--name {name!r}: only letters, digits and '_.-' are allowed, and no '.' first")
    file = two_sides(given, read_options(words), options.revision, options.python, variables)
    path = Path(options.results_dir) / name
    if (path / SWEEP_FILE).is_file():
        raise UsageError(f"{path} is there already; `lmbench compare --run {path}` goes on with it")
    return path, file.changed({}, None, options.timeout_s)


def _split(words: list[str]) -> tuple[list[str], list[str]]:
    """Sides, and options with their values."""
    if "--kernels" in words:
        raise UsageError("--kernels compares traces that are there; give it without --run")
    given, options = [], []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            given.append(word)
            continue
        options.append(word)
        if "=" not in word and rest:
            options.append(rest.pop(0))
    return given, options


def parse_budget(text: str) -> float:
    """A duration such as `10m` in seconds. Raises UsageError for anything else."""
    match = _DURATION.fullmatch(text.strip())
    if match is None or not float(match[1]):
        raise UsageError(f"--budget is {text!r}; give a duration above 0, such as 90s, 10m or 1h")
    return float(match[1]) * _UNIT_S[match[2]]


class _Looks:
    """Looks at the comparison after each round, and says when it is enough."""

    def __init__(
        self, plan: Plan, path: Path, progress: Progress, tolerance: float, about: list[str], budget_s: float
    ) -> None:
        self._plan = plan
        self._path = path
        self._progress = progress
        self._tolerance = tolerance
        self._about = about
        self._budget_s = budget_s
        self._began_s = time.monotonic()
        jobs = list(plan.jobs())
        self._kept = min(
            (job.repeat for job in jobs if not is_run_folder(path / RUNS_FOLDER / job.name)), default=plan.file.repeats
        )

    def look(self) -> Comparison:
        """The comparison of what has been measured."""
        a, b = (f"{self._path}@{SIDE}={side}" for side in self._plan.file.sides)
        return compare(a, b, self._tolerance, self._about)

    def __call__(self, rounds: int) -> bool:
        later = (job for job in self._plan.jobs() if job.repeat >= rounds)
        if any(is_run_folder(self._path / RUNS_FOLDER / job.name) for job in later):
            return False
        found = self.look()
        (cell,) = found.cells or (None,)
        elapsed_s = time.monotonic() - self._began_s
        told = f"{found.verdict}: {cell.reasons[0]}" if cell is not None else f"{found.verdict}: no run counts"
        self._progress.said(f"round {rounds}, {duration(elapsed_s)}: {told}")
        latest = [process for process in (cell.slow if cell else ()) if process.round == rounds]
        for process in latest:
            self._progress.said(f"slow: {process}")
        if cell is None or found.verdict == INVALID:
            return True
        if not cell.metrics:
            left_out = (*cell.left_out_a, *cell.left_out_b)
            # One that ended well is left out for a guard, which may have been an accident.
            return rounds >= MIN_REPEATS or any(run.outcome != "ok" for run in left_out)
        if found.verdict != UNDECIDED and not latest:
            return True
        round_s = elapsed_s / max(1, rounds - self._kept)
        if elapsed_s + round_s > self._budget_s:
            self._progress.said(
                f"a round takes {duration(round_s)}: another is beyond the budget of {duration(self._budget_s)}"
            )
            return True
        return False
