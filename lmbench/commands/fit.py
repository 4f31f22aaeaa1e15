"""The part of `lmbench fit` and `validate` that runs before PyTorch is imported.

It prints the short help, reports misspelt options, and starts repeats in fresh processes.
"""

from __future__ import annotations

import re
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path
from textwrap import fill

from lmbench.commands.signatures import check_options
from lmbench.configs import shipped_configs
from lmbench.errors import ExitCode, UsageError
from lmbench.records.named import find_result
from lmbench.records.store import RESULTS
from lmbench.report.answer import Answer
from lmbench.sizes import SIZES

#: Options that have the configuration measured in fresh processes.
_REPEATING_OPTIONS = {"--repeats", "--compare", "--gate"}


def run(args: list[str]) -> int:
    """Run `lmbench fit|validate` with the given words; returns the exit code."""
    command, words = args[0], args[1:]
    if words == ["-h"]:
        print(help_text(command), end="")
        return ExitCode.OK
    check_options(words)
    if _REPEATING_OPTIONS & {word.partition("=")[0] for word in words} and "--print_config" not in words:
        from lmbench.commands.parser import run_typed

        if command == "validate":
            words = [*words, "--measure.mode=inference"]
        return run_typed(command, repeated, words)
    from lmbench.fit.run import run as measure

    return measure([command, *words])


def repeated(
    configuration: str | None = None,
    /,
    *,
    repeats: int = 3,
    compare: str | None = None,
    gate: str | None = None,
    quiet: bool = False,
    settings: list[str] | None = None,
) -> Answer | int:
    """Measures a configuration in fresh processes, as a sweep of one cell, and compares it with an earlier result.

    Args:
        configuration: a YAML file, or a shipped one by its name; or --config
        repeats: processes
        compare: an earlier result, such as last or baseline; exit codes are those of `lmbench compare`
        gate: changes up to this count as none (1%)
        quiet: only the result's folder on standard output
        settings: options of `lmbench fit`
    """
    # Imported here, since a single measurement does not need them.
    from lmbench.commands.compare import parse_gate
    from lmbench.commands.report import make_catalogue
    from lmbench.commands.sweep import carry_out, concluding, read_options
    from lmbench.compare.answer import comparison_answer
    from lmbench.compare.comparison import compare as compare_results
    from lmbench.compare.sides import read_side, split_usable
    from lmbench.records.statistics import MIN_REPEATS
    from lmbench.report.results import report_on
    from lmbench.standard_output import result_alone, write_result
    from lmbench.sweep.file import sweep_from
    from lmbench.sweep.plan import make_plan
    from lmbench.sweep.progress import Progress

    tolerance, earlier = parse_gate(gate or "1%"), find_result(compare or "")
    if compare is not None:
        counts = len(split_usable(read_side(earlier).runs)[0]), repeats
        if min(counts) < MIN_REPEATS:
            raise UsageError(
                f"--compare takes {MIN_REPEATS} processes on each side; {compare} has {counts[0]}, and --repeats is "
                f"{repeats}"
            )
    elif gate is not None:
        raise UsageError("--gate belongs to --compare")
    options = read_options(settings or [])
    config = options.setdefault("config", configuration)
    if config is None:
        raise UsageError("--repeats and --compare take a configuration, such as `lmbench fit smoke --repeats 3`")
    mode = options.pop("measure.mode", None)
    name = options.pop("measure.run_id", f"{Path(str(config)).stem}-{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    path = Path(options.pop("measure.results_dir", RESULTS), name)
    if path.exists():
        raise UsageError(f"{path} is there already; `lmbench sweep {path}` goes on with it, or give another run_id")
    grid = {"modes": [mode]} if mode else {"include": [{}]}
    plan = make_plan(path.name, sweep_from({"base": options, "repeats": repeats, **grid}))
    with ExitStack() as stack:
        stack.enter_context(result_alone())
        for redirect in (redirect_stdout, redirect_stderr) if quiet else ():
            stack.enter_context(redirect(StringIO()))
        progress = Progress(plan, title="repeats")
        stack.enter_context(concluding(path, progress))
        code = carry_out(plan, path, progress)
    if quiet:
        write_result(f"{path}\n")
    is_measured = code in (ExitCode.OK, ExitCode.GUARD_FAILED)
    if compare is None:
        return report_on([path], make_catalogue()) if is_measured and not quiet else code
    if not is_measured:
        return code
    answer = comparison_answer(compare_results(earlier, str(path), tolerance))
    return answer.exit_code if quiet else answer


_MEASURES = {
    "fit": "Measures training and leaves a result: forward, backward and optimizer times,\nmemory, throughput.",
    "validate": "Measures inference on the validation data and leaves a result.",
}


def help_text(command: str) -> str:
    """The short help of `fit` or `validate`, from fit.txt."""
    names = f"shipped: {', '.join(shipped_configs())}"
    shipped = fill(names, 78, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    text = Path(__file__).with_suffix(".txt").read_text("utf-8")
    return text.format(command=command, measures=_MEASURES[command], shipped=shipped, sizes=", ".join(SIZES))


def daily_options() -> dict[str, tuple[str, str]]:
    """The options in the short help, each with its placeholder (`N`, `NAME`) and its meaning."""
    lines = re.findall(r"^  (--\S+) ?(\S*)\s+(\S.*)$", help_text("fit"), re.MULTILINE)
    return {name: (value, meaning) for name, value, meaning in lines}
