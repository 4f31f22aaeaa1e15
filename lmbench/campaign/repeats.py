"""One configuration measured again and again in fresh processes, as a sweep of one cell."""

from __future__ import annotations

import platform
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path

from lmbench.campaign.sweep import Sweep
from lmbench.catalogue import make_catalogue
from lmbench.compare.answer import comparison_answer
from lmbench.compare.comparability import counts_host
from lmbench.compare.comparison import DRIFT_FRACTION, compare, smallest_change
from lmbench.compare.noise import noise_floors
from lmbench.compare.sides import STEP, join_cells, read_side, split_usable
from lmbench.errors import ExitCode, UsageError, tell
from lmbench.records.named import find_result
from lmbench.records.statistics import logs_of, std_of_logs
from lmbench.records.store import RESULTS, check_name, file_name, time_stamp
from lmbench.records.vocabulary import MIN_REPEATS
from lmbench.report.answer import Answer
from lmbench.report.results import read_sections, report_on
from lmbench.report.units import percent_short
from lmbench.standard_output import result_alone, write_result
from lmbench.sweep.file import CONFIG, Options, sweep_from
from lmbench.sweep.plan import make_plan


def measure_repeats(options: Options, repeats: int, *, quiet: bool = False) -> tuple[Path, ExitCode]:
    """Measure a configuration in fresh processes.

    Args:
        options: options of `lmbench fit`, the configuration among them.
        repeats: processes.
        quiet: print nothing.

    Returns:
        The folder of the sweep and the sweep's exit code.

    Raises:
        UsageError: the folder is there already, or an option is not understood.
    """
    base = dict(options)
    mode = base.pop("measure.mode", None)
    name = base.pop("measure.run_id", file_name(f"{Path(str(base[CONFIG])).stem}-{time_stamp()}"))
    check_name("--measure.run_id", name)
    path = Path(base.pop("measure.results_dir", RESULTS), name)
    if path.exists():
        raise UsageError(f"{path} is there already; `lmbench sweep {path}` goes on with it, or give another run_id")
    grid = {"modes": [mode]} if mode else {"include": [{}]}
    plan = make_plan(path.name, sweep_from({"base": base, "repeats": repeats, **grid}))
    (cell,) = plan.cells
    plan = replace(plan, command=["lmbench", *cell.words(), "--repeats", str(repeats)])
    told = StringIO() if quiet else sys.stderr
    with result_alone(), redirect_stdout(told), redirect_stderr(told):
        sweep = Sweep(plan, path, "repeats")
        try:
            return path, sweep.carry_out()
        finally:
            sweep.conclude()


def repeats_answer(
    options: Options, repeats: int, earlier_name: str | None, tolerance: float, *, quiet: bool
) -> Answer | int:
    """The report on new repeats, or the verdict on them against an earlier result.

    Args:
        options: options of `lmbench fit`, the configuration among them.
        repeats: processes.
        earlier_name: the result to compare with, by name or path; None for a report.
        tolerance: changes up to this fraction count as none.
        quiet: print only the folder, and return the exit code.

    Raises:
        UsageError: one of the sides has too few processes for a verdict, A is of several configurations, or of another
            host whose speed counts.
    """
    # Looked up now, since `last` is another result after the measurement.
    earlier = None if earlier_name is None else find_result(earlier_name)
    if earlier is not None:
        runs = split_usable(read_side(earlier).runs)[0]
        counts = len(runs), repeats
        if min(counts) < MIN_REPEATS:
            raise UsageError(
                f"--compare takes {MIN_REPEATS} processes on each side; {earlier_name} has {counts[0]}, and --repeats "
                f"is {repeats}"
            )
        if (cells := len(join_cells(runs, []))) > 1:
            raise UsageError(
                f"--compare takes one configuration; {earlier_name} has {cells}: name one, as {earlier_name}@AXIS=VALUE"
            )
        hosts = {run.record.environment.host.hostname for run in runs} - {None, platform.node()}
        if hosts and counts_host(runs):
            raise UsageError(
                f"{earlier_name} was measured on {hosts.pop()}, and this is {platform.node()}, whose speed counts; "
                "`lmbench compare --run` measures both sides here"
            )
        least = smallest_change(std_of_logs(logs_of(STEP.of_all(runs))) or 0.0, min(counts))
        reach = f"{counts[0]} and {repeats} processes can tell a change {least} or more"
        drift = f"one side after the other, up to {percent_short(DRIFT_FRACTION)} may be a drift"
        if not quiet:
            tell(f"compare: {reach}; {drift}: `lmbench compare --run` takes turns")
    path, code = measure_repeats(options, repeats, quiet=quiet)
    if quiet:
        write_result(f"{path}\n")
    if code not in (ExitCode.OK, ExitCode.GUARD_FAILED):
        return code
    if earlier is not None:
        answer = comparison_answer(compare(earlier, str(path), tolerance))
        return answer.exit_code if quiet else answer
    return code if quiet else report_on(read_sections([path], make_catalogue()))


def measured_noise(options: Options, repeats: int, results_dir: Path) -> Answer | int:
    """The A/A noise floor of a configuration, from repeats that are measured now."""
    settings = {"measure.results_dir": str(results_dir), "measure.run_id": f"noise-{time_stamp()}"}
    path, code = measure_repeats({**options, **settings}, repeats)
    if code not in (ExitCode.OK, ExitCode.GUARD_FAILED):
        return code
    return noise_floors([str(path)], results_dir.resolve())
