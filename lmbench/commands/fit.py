"""`lmbench fit` and `validate` before PyTorch is imported: short help, and repeats in fresh processes."""

from __future__ import annotations

import re
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path

from lmbench.commands.signatures import check_options
from lmbench.errors import ExitCode, UsageError, tell
from lmbench.records.named import RESULTS

#: Options of the command itself, which no single measurement has.
_OF_REPEATS = re.compile(r"--(repeats|compare|gate)(?:=(.*))?", re.DOTALL)
#: What is printed, which the processes of a sweep are not asked for.
_FORMATS = ("--json", "--quiet")


def run(args: list[str]) -> int:
    """Run `lmbench fit|validate` with the given words; returns the exit code."""
    command, words = args[0], args[1:]
    if words == ["-h"]:
        from lmbench.commands.fit_help import run as print_help

        return print_help(args)
    try:
        settings = _taken(words)
        check_options(words)
        if settings and "--print_config" not in words:
            return _repeat(command, words, **settings)
    except UsageError as error:
        tell(str(error))
        return ExitCode.USAGE
    from lmbench.fit.run import run as measure

    return measure([command, *words])


def _taken(words: list[str]) -> dict[str, str]:
    """The options of repeats by their names, which are taken out of the words."""
    settings: dict[str, str] = {}
    for place in reversed(range(len(words))):
        if match := _OF_REPEATS.fullmatch(words[place]):
            following = words[place + 1 : place + 2]
            value = match[2] if match[2] is not None else "".join(following)
            if not value or (match[2] is None and value.startswith("--")):
                raise UsageError(f"--{match[1]} needs a value, such as --repeats 3 or --compare baseline")
            settings[match[1]] = value
            del words[place : place + (1 if match[2] is not None else 2)]
    return settings


def _repeat(command: str, words: list[str], repeats: str = "3", compare: str = "", gate: str = "") -> int:
    """Measure in fresh processes, as a sweep of one cell, and compare with an earlier result where one is named."""
    # Here: a single measurement does without these.
    from lmbench.commands.compare import parse_gate
    from lmbench.commands.report import make_catalogue
    from lmbench.commands.sweep import carry_out, read_options
    from lmbench.compare.answer import comparison_answer
    from lmbench.compare.comparison import compare as compare_results
    from lmbench.compare.sides import read_side
    from lmbench.records.named import find_result
    from lmbench.report.render import Output, give
    from lmbench.report.results import report_on
    from lmbench.standard_output import result_alone, write_result
    from lmbench.sweep.execute import SweepHalted
    from lmbench.sweep.file import sweep_from
    from lmbench.sweep.plan import make_plan
    from lmbench.sweep.progress import Progress

    if not repeats.isdecimal():
        raise UsageError(f"--repeats is {repeats!r}; give how many processes measure, such as 3")
    if gate and not compare:
        raise UsageError("--gate belongs to --compare")
    tolerance, earlier = parse_gate(gate or "1%"), find_result(compare)
    if compare:
        read_side(earlier)
    formats = [word for word in words if word in _FORMATS]
    words = [re.sub("^-c(?==|$)", "--config", word) for word in words if word not in formats]
    words = ["--config", *words] if words and not words[0].startswith("-") else words
    counts = Counter(word.partition("=")[0] for word in words if word.startswith("--"))
    if twice := [word for word, count in counts.items() if count > 1]:
        raise UsageError(f"{twice[0]} is given twice; with --repeats an option is given once")
    options = read_options(words)
    if "config" not in options:
        raise UsageError("--repeats and --compare take a configuration, such as `lmbench fit smoke --repeats 3`")
    mode = "inference" if command == "validate" else options.pop("measure.mode", None)
    name = options.pop("measure.run_id", f"{Path(str(options['config'])).stem}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    path = Path(options.pop("measure.results_dir", RESULTS)) / str(name)
    if path.exists():
        raise UsageError(f"{path} is there already; `lmbench sweep {path}` goes on with it, or give another run_id")
    grid = {"modes": [mode]} if mode else {"include": [{}]}
    plan = make_plan(path.name, sweep_from({"base": options, "repeats": int(repeats), **grid}))
    try:
        with result_alone():
            code = carry_out(plan, path, Progress(plan))
    except SweepHalted as error:
        tell(f"fit: {error}")
        return ExitCode.INTERNAL
    if formats == ["--quiet"]:
        write_result(f"{path}\n")
    output = Output("json" if "--json" in formats else None)
    if not compare or code not in (ExitCode.OK, ExitCode.GUARD_FAILED):
        return code or (give(report_on([path], make_catalogue()), output) if formats != ["--quiet"] else ExitCode.OK)
    answer = comparison_answer(compare_results(earlier, str(path), tolerance))
    return answer.exit_code if formats == ["--quiet"] else give(answer, output)
