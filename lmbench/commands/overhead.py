"""`lmbench overhead`: what the harness costs, against a bare PyTorch loop and a plain Lightning Trainer."""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from lmbench.commands.parser import CommandParser, command
from lmbench.errors import ExitCode, UsageError
from lmbench.fit.words import expand_configs
from lmbench.interruption import received
from lmbench.overhead.arms import ArmFailed, measure_arm, run_fit
from lmbench.overhead.statistics import ARMS, bottleneck, difference, hook_cost, summarize_arms
from lmbench.overhead.table import print_overhead
from lmbench.records.vocabulary import Record
from lmbench.report.screen import make_console

DESCRIPTION = """\
Measures the same model, data and optimizer, in fresh processes and rotating
order: in a plain PyTorch loop, in Lightning's Trainer with everything off, in
`lmbench fit`, and in `lmbench fit` with its own hooks clocked. Takes every option
of `lmbench fit`; a first run settles how many steps each window has."""

# More than rounding and the order of sums makes: the arms did not do the same work.
LOSS_TOLERANCE_FRACTION = 1e-3
# What the result says of the run, from the first run's record.
COPIED = ("environment", "config", "model", "data", "mode", "precision", "matmul_precision", "device_type")


@command
def run(args: list[str]) -> int:
    """Measure, print the table and the answers; returns the exit code."""
    options, fit_options = _parse(args[1:])
    try:
        with tempfile.TemporaryDirectory(prefix="lmbench-overhead-") as folder:
            result = measure(fit_options, options.rounds, Path(folder))
    except ArmFailed as error:
        print(f"lmbench: overhead: {error}", file=sys.stderr)
        return error.exit_code
    result["command"] = shlex.join(["lmbench", *args])
    print_overhead(result, make_console())
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return ExitCode.OK


def _parse(words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """This command's own options, and those for `lmbench fit`."""
    parser = CommandParser("overhead", DESCRIPTION)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each arm, at least 2 (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write everything measured to FILE")
    options, fit_options = parser.parse_known_args(words)
    if options.rounds < 2:
        raise UsageError(f"--rounds is {options.rounds}; an interval needs at least 2")
    if options.json and (options.json.is_dir() or not options.json.parent.is_dir()):
        raise UsageError(f"--json {options.json} cannot be written; name a file in a folder that exists")
    return options, expand_configs(fit_options)


def measure(fit_options: list[str], rounds: int, folder: Path) -> Record:
    """Run every arm `rounds` times, one round after the other, each round beginning with another arm."""
    pilot = run_fit(fit_options, folder / "pilot")
    _progress(f"a first run of lmbench fit settled on {pilot['window']['steps']} steps a window")
    fixed = ["--measure.steps", str(pilot["window"]["steps"]), "--measure.min_window_s", "0"]
    options = [*fit_options, *fixed, "--measure.probe_steps", "0", "--measure.strict", "false"]
    measurements: list[Record] = []
    try:
        _measure_rounds(measurements, options, rounds, folder)
    except BaseException:
        complete = len(measurements) // len(ARMS)
        # An interval needs two rounds; with them, what was measured before a signal is shown.
        if received() is None or complete < 2:
            raise
        measurements, rounds = measurements[: complete * len(ARMS)], complete
        _progress(f"stopped; below is what {complete} complete rounds say")
    return _result(pilot, measurements, rounds)


def _measure_rounds(measurements: list[Record], options: list[str], rounds: int, folder: Path) -> None:
    for index in range(rounds):
        turn = index % len(ARMS)
        for arm in (*ARMS[turn:], *ARMS[:turn]):
            found = measure_arm(arm, options, folder / f"{arm}-{index}")
            measurements.append({"arm": arm, "round": index, **found})
            check_same_work(measurements)
            step_ms = found["wall_s"] / found["steps"] * 1e3
            _progress(f"round {index + 1} of {rounds}, {arm}: {step_ms:.3f} ms/step")


def check_same_work(measurements: list[Record]) -> None:
    """Refuse to compare arms that took another number of steps, or began with another loss.

    Raises:
        ArmFailed: one did.
    """
    reference = measurements[0]
    for record in measurements[1:]:
        if record["steps"] != reference["steps"]:
            why = f"took {record['steps']} steps where {reference['arm']} took {reference['steps']}"
            raise ArmFailed(record["arm"], why)
        losses = record["first_loss"], reference["first_loss"]
        if not math.isclose(*losses, rel_tol=LOSS_TOLERANCE_FRACTION):
            why = f"its first loss is {losses[0]}, that of {reference['arm']} {losses[1]}"
            raise ArmFailed(record["arm"], why)


def _result(pilot: Record, measurements: list[Record], rounds: int) -> Record:
    verdicts = {name: found["verdict"] for name, found in pilot.get("probe", {}).get("verdicts", {}).items()}
    harness = [record for record in measurements if record["arm"] == "harness"]
    return {
        "schema_version": 1,
        **{name: pilot[name] for name in COPIED},
        "rounds": rounds,
        "steps": harness[0]["steps"],
        "warmup_steps": pilot["window"]["warmup_steps"],
        "bottleneck": bottleneck(pilot["device_type"], verdicts),
        "verdicts": verdicts,
        "arms": summarize_arms(measurements),
        "hooks": hook_cost(measurements),
        "harness_over_trainer_s": asdict(difference(measurements, "harness", "trainer")),
        "pause_s": sum(record["excluded_s"] / record["steps"] for record in harness) / rounds,
        "first_loss": harness[0]["first_loss"],
        "last_loss": harness[0]["last_loss"],
        "measurements": measurements,
    }


def _progress(text: str) -> None:
    print(f"lmbench: overhead: {text}", file=sys.stderr, flush=True)
