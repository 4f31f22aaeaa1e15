"""`lmbench noise RESULTS...`: the A/A noise floor that `compare` relies on, from repeats of one configuration."""

from __future__ import annotations

import argparse
from datetime import UTC, datetime
from pathlib import Path

from lmbench.commands.parser import CommandParser, command
from lmbench.compare.metrics import STEP
from lmbench.compare.noise import MIN_NOISE_REPEATS, Survey, noise_json, print_noise, store_noise, survey
from lmbench.configs import shipped_configs
from lmbench.errors import ExitCode, UsageError, tell
from lmbench.overhead.arms import ArmFailed, run_fit
from lmbench.report.screen import make_console
from lmbench.standard_output import write_result
from lmbench.text import shown_json

DESCRIPTION = f"""\
Measures how far a configuration is from itself when nothing was changed, and stores
it as noise.json beside the results, by host, device and settings; `lmbench compare`
finds it there. Takes {MIN_NOISE_REPEATS} repeats of a configuration or more, in any folder of runs
or sweep. With --run it makes them: every option of `lmbench fit`, such as --config,
goes to fresh processes, one after the other."""


@command
def run(args: list[str]) -> int:
    """Measure, store and print; returns the exit code: 2 if no configuration has repeats enough."""
    options = _parse(args[1:])
    try:
        results = [str(_repeat(options))] if options.run else options.results
        found = survey(results)
        _store(found, Path(options.results_dir).resolve() if options.run else found.folder)
    except ArmFailed as failure:
        tell(f"noise: {failure}")
        return failure.exit_code
    if options.json:
        write_result(shown_json(noise_json(found.entries)))
    else:
        print_noise(found, make_console())
    return ExitCode.OK


def _parse(words: list[str]) -> argparse.Namespace:
    parser = CommandParser(
        "noise",
        DESCRIPTION,
        usage="lmbench noise RESULTS... [--json]\n       lmbench noise --run --config CONFIG [--repeats N] [OPTIONS]",
    )
    parser.add_argument("--run", action="store_true", help="measure the repeats now")
    parser.add_argument("--repeats", type=int, default=10, metavar="N", help="processes to run (default 10)")
    parser.add_argument(
        "--results_dir", default="results", metavar="DIR", help="with --run: where their folder goes (results)"
    )
    parser.add_argument("--json", action="store_true", help="the floors as JSON on standard output")
    options, rest = parser.parse_known_args(words)
    if options.run:
        if options.repeats < MIN_NOISE_REPEATS:
            raise UsageError(f"--repeats is {options.repeats}; a noise floor takes {MIN_NOISE_REPEATS}")
        if any(word.partition("=")[0] == "--measure.results_dir" for word in rest):
            raise UsageError("noise puts its repeats in a folder of its own; say where with --results_dir")
        options.fit = rest
        return options
    unknown = [word for word in rest if word.startswith("-")]
    if unknown:
        raise UsageError(f"unknown option {unknown[0]}; options of `lmbench fit` go with --run")
    if not rest:
        raise UsageError("noise takes results with repeats, or --run with options of `lmbench fit`")
    if rest[0] in shipped_configs() and not Path(rest[0]).exists():
        raise UsageError(f"{rest[0]!r} is a configuration, and no result; `lmbench noise --run {rest[0]}` measures it")
    options.results = rest
    return options


def _repeat(options: argparse.Namespace) -> Path:
    """Measure the repeats, each in a fresh process; returns their folder."""
    folder = Path(options.results_dir) / f"noise-{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    for index in range(options.repeats):
        record = run_fit(options.fit, folder / f"r{index}")
        step_ms = (STEP.of(record) or 0.0) * 1e3
        tell(f"noise: {index + 1} of {options.repeats}: {step_ms:.3f} ms/step")
    return folder


def _store(found: Survey, folder: Path) -> None:
    if not found.entries:
        raise UsageError("; ".join(f"{cell.name}: {cell.problem}".removeprefix(": ") for cell in found.cells[:3]))
    tell(f"noise: stored in {store_noise(folder, found.entries)}")
