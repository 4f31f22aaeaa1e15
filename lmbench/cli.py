"""The `lmbench` command. Only what is named is imported: help and reports work without torch."""

from __future__ import annotations

import gc
import importlib
import signal
import sys
from contextlib import nullcontext

from lmbench.errors import ExitCode, suggest, tell
from lmbench.instruments.milestones import begin
from lmbench.interruption import exit_code, listening, received
from lmbench.masking import keep_words_secret
from lmbench.standard_output import abandon_result, result_alone, result_stream, write_what_can_be

_MEASURING = "lmbench.fit.run"
#: With one of these a command's standard output is for programs, and holds nothing else.
_FOR_PROGRAMS = {"--json", "--quiet", "--print_config"}

# name: (module, what it does). Every module has `run(args: list[str]) -> int`.
COMMANDS = {
    "fit": (_MEASURING, "measure training: forward, backward and optimizer times, memory, MFU"),
    "validate": (_MEASURING, "measure inference on the validation data"),
    "show": ("lmbench.commands.show", "print a result again"),
    "fields": ("lmbench.commands.fields", "what a number of a result means, and its unit"),
    "sweep": ("lmbench.commands.sweep", "measure a grid of configurations, each in a process of its own"),
    "report": ("lmbench.commands.report", "results as tables to paste, as CSV, or as one page with charts"),
    "upload": ("lmbench.commands.upload", "bring results to W&B, each exactly once"),
    "board": ("lmbench.commands.board", "boards at W&B for each study, made or brought up to date"),
    "compare": ("lmbench.commands.compare", "is B slower than A? ratio with interval, and a verdict for CI"),
    "noise": ("lmbench.commands.noise", "how far a configuration is from itself: the floor that compare relies on"),
    "kernels": ("lmbench.commands.kernels", "where the time went: kernels by phase, kind and part of the model"),
    "memory": ("lmbench.commands.memory", "where the memory goes: a recorded peak explained, or one to come predicted"),
    "dtypes": ("lmbench.commands.dtypes", "which dtype every tensor of a step had, and the reason for each cast"),
    "nsys": ("lmbench.commands.nsys", "run a fit under Nsight Systems, limited to the profiled steps"),
    "ceiling": ("lmbench.commands.ceiling", "what matrix products and copies attain on this device, for kernels"),
    "numerics": ("lmbench.commands.numerics", "how wrong a sum in 16 bit is, and when norms and softmax overflow"),
    "overhead": ("lmbench.commands.overhead", "compare a bare loop, a plain Trainer and the harness"),
    "selfcheck": ("lmbench.commands.selfcheck", "show that the numbers are true on this machine"),
}


def help_text() -> str:
    lines = "\n".join(f"  {name:<10} {what}" for name, (_, what) in COMMANDS.items())
    return (
        "usage: lmbench COMMAND [OPTIONS]\n\n"
        f"Measure training loops of Transformer language models.\n\ncommands:\n{lines}\n\n"
        "options:\n  -h, --help   this text\n  --version    which lmbench this is\n\n"
        "`lmbench COMMAND -h` tells a command's options; exit codes: 0 fine, 1 internal error, 2 usage,\n"
        "3 out of memory, 4 a guard failed under --measure.strict, 5 error in your code, 10 slower,\n"
        "11 undecided, 12 invalid, 130 interrupted, 143 terminated."
    )


def main(argv: list[str] | None = None) -> int:
    """Run one command; returns its exit code. Ctrl-C and SIGTERM end it with 130 and 143, without a traceback."""
    begin()
    write_what_can_be()
    with listening(until_exit=argv is None):
        code = 0
        try:
            code = _run(sys.argv[1:] if argv is None else argv, is_whole_process=argv is None)
        except BaseException as error:
            if isinstance(error, OSError) and (lost := _lost_output()) is not None:
                return _without_output(lost, 0)
            if received() is None:
                raise
        signum = received()
        # A command may have taken the exception of a signal for argparse's SystemExit; it is no success.
        if signum is not None and code == 0:
            tell(f"stopped by {signal.Signals(signum).name}")
            code = exit_code(signum)
        if argv is None:
            # Python's own end would otherwise walk over all that was imported, for most of a second.
            gc.freeze()
        return _flushed(code)


def _flushed(code: int) -> int:
    """The exit code, once the output is out."""
    try:
        if result_stream() is not None:
            result_stream().flush()
    except OSError as error:
        return _without_output(error, code)
    return code


def _lost_output() -> OSError | None:
    """Why what was printed cannot be written, None where it can."""
    try:
        if (stream := result_stream()) is not None:
            # What failed once may not be tried again by a flush.
            stream.write("\n")
            stream.flush()
    except OSError as error:
        return error
    return None


def _without_output(error: OSError, code: int) -> int:
    """The exit code of a command whose output is lost. A reader that went away (`| head`) is no failure."""
    abandon_result()
    if isinstance(error, BrokenPipeError):
        return code
    tell(f"standard output: {error.strerror}")
    return code or 1


def _run(args: list[str], is_whole_process: bool) -> int:
    if args[:1] == ["help"] and args[1:2] and args[1] in COMMANDS:
        args = [args[1], "-h"]
    if not args or args[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    if args[0] == "--version":
        from lmbench import __version__

        print(__version__)
        return 0
    if args[0] not in COMMANDS:
        hint = _shipped(args[0]) or suggest(args[0], [*COMMANDS, "--version"])
        commands = f" (commands: {', '.join(COMMANDS)})"
        tell(f"unknown command {args[0]!r}{hint or commands}")
        return ExitCode.USAGE
    # In an option's name `-` and `_` are the same.
    args = [_spelt(word) for word in args]
    keep_words_secret(args)
    module = COMMANDS[args[0]][0]
    if module == _MEASURING and args[1:] == ["-h"]:
        module = "lmbench.commands.fit_help"
    # What nsys is given it hands on.
    options = {word.partition("=")[0] for word in args}
    is_for_programs = args[0] != "nsys" and bool(_FOR_PROGRAMS & options) and not {"-h", "--help"} & options
    with result_alone(is_whole_process) if is_for_programs else nullcontext():
        found = importlib.import_module(module)
        typed = getattr(found, args[0], None)
        if typed is not None and not hasattr(found, "run"):
            from lmbench.commands.parser import run_typed

            return run_typed(args[0], typed, args[1:])
        return int(found.run(args))


def _shipped(word: str) -> str:
    """What a configuration or a study is given to."""
    from lmbench.configs import shipped_configs, shipped_studies

    for command, shipped in (("fit", shipped_configs()), ("sweep", shipped_studies())):
        if word in shipped:
            return f"; did you mean `lmbench {command} {word}`?"
    return ""


def _spelt(word: str) -> str:
    name, equals, value = word.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if name.startswith("--") else word
