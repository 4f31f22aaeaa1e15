"""The `lmbench` command. It imports a command's module only when that command runs: help and reports need no torch."""

from __future__ import annotations

import gc
import re
import signal
import sys
import traceback
from contextlib import nullcontext

from lmbench.commands import COMMANDS, MEASURING, function_of, module_of
from lmbench.configs import shipped_configs, shipped_studies
from lmbench.errors import ExitCode, UsageError, check_launcher, suggest, tell
from lmbench.interruption import exit_code, listening, received
from lmbench.masking import keep_words_secret, masked_message
from lmbench.python_process import leave_no_process
from lmbench.records.process import begin
from lmbench.standard_output import abandon_result, replace_unencodable, result_alone, result_stream
from lmbench.version import __version__

#: Commands that start runs. Other commands may start some with `--run` or `--config`.
_STARTS_RUNS = {*MEASURING, "sweep", "tune", "judge", "bisect", "overhead", "selfcheck"}
_COMPARES = {"compare", "judge", "bisect", "noise", "tune", "overhead"}
#: With one of these options a program reads standard output, so it holds the result alone.
_FOR_PROGRAMS = {"--json", "--quiet", "--print_config"}


def help_text() -> str:
    lines = "\n".join(f"  {name:<10}  {summary}" for name, summary in COMMANDS.items())
    return (
        "usage: lmbench COMMAND [OPTIONS]\n\n"
        f"Measure training loops of Transformer language models.\n\ncommands:\n{lines}\n\n"
        "options:\n  -h, --help   this text\n  --version    which lmbench this is\n\n"
        "`lmbench COMMAND -h` tells a command's options; exit codes: 0 fine, 1 internal\n"
        "error, 2 usage, 3 out of memory, 4 a guard failed under --measure.strict,\n"
        "5 error in your code, 6 W&B did not get it, 10 slower, 11 undecided, 12 invalid,\n"
        "130 interrupted, 143 terminated."
    )


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code. Ctrl-C ends it with 130, SIGTERM with 143, both without a traceback."""
    begin()
    replace_unencodable()
    if argv is None:
        sys.excepthook = lambda *error: print(
            masked_message("".join(traceback.format_exception(*error))), end="", file=sys.stderr
        )
    with listening(until_exit=argv is None):
        code, lost = 0, None
        try:
            code = _run(sys.argv[1:] if argv is None else argv, is_whole_process=argv is None)
        except BaseException as error:
            # The stream may have dropped the text that it failed to write: only further text shows that it still fails.
            lost = _lost_output("\n") if isinstance(error, OSError) else None
            if lost is None and received() is None:
                raise
        signum = received()
        # A command may have caught a signal's exception as argparse's SystemExit. The signal still ended it.
        if signum is not None and code == 0:
            tell(f"stopped by {signal.Signals(signum).name}")
            code = exit_code(signum)
        if argv is None:
            # Without this, Python's last garbage collection visits everything imported: most of a second.
            gc.freeze()
        lost = lost or _lost_output()
        if lost is not None:
            abandon_result()
            # A reader that closes the pipe (`| head`) is not a failure.
            if not isinstance(lost, BrokenPipeError):
                tell(f"standard output: {lost.strerror}")
                code = code or ExitCode.INTERNAL
        return code


def _lost_output(text: str = "") -> OSError | None:
    """Write `text` and flush standard output. Returns the error where that fails, else None."""
    try:
        if (stream := result_stream()) is not None:
            stream.write(text)
            stream.flush()
    except OSError as error:
        return error
    return None


def _run(args: list[str], is_whole_process: bool) -> int:
    if not args or args[0] in ("-h", "--help"):
        print(help_text())
        return 0
    if args[0] == "--version":
        print(__version__)
        return 0
    if args[0] not in COMMANDS:
        # The word may be a configuration or a study whose command was left out.
        shipped = [("fit", shipped_configs()), ("sweep", shipped_studies())]
        hints = [f"; did you mean `lmbench {command} {args[0]}`?" for command, names in shipped if args[0] in names]
        if args[0] in ("test", "predict"):
            hints = ["; lmbench measures training (fit) and validation without gradients (validate)"]
        hints += [suggest(args[0], [*COMMANDS, "--version"]), f" (commands: {', '.join(COMMANDS)})"]
        tell(f"unknown command {args[0]!r}{next(filter(None, hints))}")
        return ExitCode.USAGE
    # An option's name may have `-` for `_`.
    args = [re.sub(r"^--[^=]+", lambda option: f"--{option[0][2:].replace('-', '_')}", word) for word in args]
    keep_words_secret(args)
    options = {word.partition("=")[0] for word in args}
    wants_help = bool({"-h", "--help"} & options)
    # nsys passes its options on to another command.
    is_for_programs = args[0] != "nsys" and bool(_FOR_PROGRAMS & options) and not wants_help
    try:
        if not wants_help and (args[0] in _STARTS_RUNS or {"--run", "--config"} & options):
            # Importing Lightning under a launcher's variable that holds no number ends in a traceback.
            check_launcher(10**6 if args[0] in MEASURING else 1)
            is_run = args[0] in _STARTS_RUNS or "--run" in options
            if is_run and not {"--print_config", "--dry_run"} & options:
                from lmbench.campaign.waiting import give_way

                give_way(is_comparison=args[0] in _COMPARES)
                if is_whole_process and args[0] in MEASURING:
                    leave_no_process()
        with result_alone(is_whole_process) if is_for_programs else nullcontext():
            if hasattr(module := module_of(args[0]), "run"):
                return int(module.run(args))
            from lmbench.commands.parser import run_typed

            return run_typed(args[0], function_of(args[0]), args[1:], getattr(module, "more_help", str)())
    except UsageError as error:
        tell(str(error))
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "lightning"):
            raise
        tell(f"`lmbench {args[0]}` needs {error.name}, which {sys.executable} lacks; showing results does not")
    return ExitCode.USAGE
