"""Run one measurement from a command line and turn whatever happens into an exit code and one line."""

from __future__ import annotations

import lmbench.fit.startup  # noqa: F401

# isort: split
import sys
import traceback
from dataclasses import replace
from pathlib import Path

import torch
from jsonargparse import ArgumentError

from lmbench.callbacks import RunRecorder
from lmbench.errors import ExitCode, UsageError, tell
from lmbench.fit.choice import OWN_PATHS
from lmbench.fit.cli import BenchCLI
from lmbench.fit.command_line import read
from lmbench.fit.completion import complete_record
from lmbench.fit.harness import check_measured
from lmbench.fit.left_out import leave_out
from lmbench.fit.messages import translate
from lmbench.fit.surroundings import quiet
from lmbench.instruments.ending import error_facts, is_of_other_checkpoint, is_usage_error
from lmbench.instruments.milestones import reach
from lmbench.instruments.oom import out_of_memory
from lmbench.instruments.own_code import own_lines
from lmbench.interruption import exit_code, held, received
from lmbench.masking import masked_message, masked_text
from lmbench.records.codec import encode_run
from lmbench.records.measured import RunError
from lmbench.report.render import Output, give
from lmbench.report.run import run_answer
from lmbench.standard_output import abandon_result, write_result
from lmbench.text import shown, shown_json, shown_lines
from lmbench.wandb.publish import publish_run


class Measurement(BenchCLI):
    """Remembers itself from its first moment on, since LightningCLI runs everything in its constructor."""

    latest: BenchCLI | None = None

    def __init__(self, args: list[str], announces: bool, only_settings: bool = False) -> None:
        Measurement.latest = self
        super().__init__(args, announces, only_settings)

    def after_fit(self) -> None:
        assert self.recorder is not None
        check_measured(self.recorder)

    after_validate = after_fit


def run(args: list[str]) -> int:
    """Run `lmbench fit|validate` with the given words; returns the exit code.

    `--json` prints the result's record and nothing else on standard output, `--quiet` only where the result lies.
    """
    reach("imported")
    quiet()
    find_modules_in_current_folder()
    Measurement.latest = None
    try:
        words = read(args)
        is_loud = not (words.as_json or words.is_quiet)
        if words.is_nothing and not words.only_settings:
            words = replace(words, options=_without_configuration(words.options))
        options, told = leave_out(words.options)
        if told is not None:
            tell(told)
        Measurement(options, is_loud, words.only_settings)
    except BaseException as error:
        with held():
            code = _ended_by(error)
        if code is not None:
            return code
    recorder = _recorder()
    assert recorder is not None
    assert Measurement.latest is not None
    complete_record(recorder, is_predicted=Measurement.latest.memory.predict)
    code = _finish(recorder, words.as_json, words.is_quiet)
    _publish(recorder, is_loud)
    signum = received()
    # Whoever stops the upload of a run that is complete stops this command all the same.
    return exit_code(signum) if signum is not None and code == ExitCode.OK else code


def _without_configuration(words: list[str]) -> list[str]:
    """What is measured where nothing was named: on a GPU what the defaults are, else what a CPU is done with soon."""
    if torch.cuda.is_available():
        tell(f"no configuration was named: {words[0]} measures size small in float32; try --config large_bf16, or -h")
        return words
    tell(
        f"no configuration was named, and there is no GPU here: this is `lmbench {words[0]} --config smoke`, a tiny "
        "model, to see that it works; what there is to measure is in `lmbench fit -h`"
    )
    return read([*words, "--config", "smoke"]).options


def _ended_by(error: BaseException) -> int | None:
    """The exit code where the error leaves no result, said in one line; None where a result tells of it."""
    recorder = _recorder()
    if received() is None:
        error = as_usage_error(error)
    if recorder is None:
        return _before_anything(error)
    try:
        recorder.end_by(error)
    except UsageError as unwritable:
        return _complain(unwritable)
    if recorder.folder is None:
        return _complain(error)
    # Lightning turns a Ctrl-C into SystemExit(1); what it was is in the record by now.
    if recorder.exit_code is ExitCode.INTERNAL:
        _print_traceback(error)
    elif recorder.exit_code is ExitCode.USER_CODE:
        # Whose step expects another form fails where it takes the batch apart.
        is_ours = recorder.run.data.name == OWN_PATHS["data"] and not recorder.folder.steps_written
        hint = "  (the batch is lmbench's: a tuple of tokens and targets, int64 of batch x context)" if is_ours else ""
        _print_own_lines(error, recorder.run.error, recorder.folder.path, hint)
    return None


def _before_anything(error: BaseException) -> int:
    """The command line was not understood, or asked for help."""
    if received() is None:
        if is_usage_error(error):
            return _complain(error)
        if isinstance(error, SystemExit) and error.code in (0, None):
            return ExitCode.OK
        if isinstance(error, SystemExit):
            # The parser raises; so it was a module that was named.
            place = traceback.extract_tb(error.__traceback__)[-1]
            return _complain(f"importing failed at {place.filename}:{place.lineno}: SystemExit: {error}")
        memory = out_of_memory(error)
        if memory is not None:
            return _complain(f"out of memory before anything was built: {memory.message}", ExitCode.OUT_OF_MEMORY)
        if isinstance(error, Exception) and own_lines(error):
            return _print_own_lines(error, error_facts(type(error).__name__, str(error), "setup"))
        if isinstance(error, Exception):
            _print_traceback(error)
            return ExitCode.INTERNAL
    raise error


def as_usage_error(error: BaseException) -> BaseException:
    """The user's mistake behind an error of the libraries, in one line; any other error as it is."""
    if isinstance(error, ValueError) and "Union subtypes" in str(error) and error.__cause__ is not None:
        # jsonargparse's wrapping of whatever the constructor of a user's class raised.
        return as_usage_error(error.__cause__)
    if isinstance(error, ArgumentError):
        assert Measurement.latest is not None
        return UsageError(translate(str(error), Measurement.latest.options()))
    if is_of_other_checkpoint(error):
        return UsageError(f"the checkpoint is of another model: {str(error).splitlines()[1].strip()[:200]}")
    return error


def find_modules_in_current_folder() -> None:
    """Let a user's module be found beside where the command is given."""
    # As `python -m` does; an installed command leaves it out.
    here = str(Path.cwd())
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)


def _recorder() -> RunRecorder | None:
    return Measurement.latest.recorder if Measurement.latest else None


def _complain(what: BaseException | str, code: ExitCode = ExitCode.USAGE) -> int:
    tell(str(what))
    return code


def _print_traceback(error: BaseException) -> None:
    _print_lines("".join(traceback.format_exception(error)))


def _print_own_lines(error: BaseException, facts: RunError | None, folder: Path | None = None, hint: str = "") -> int:
    """An error of the user's own code: their lines, and below them what happened."""
    assert facts is not None
    lines = own_lines(error)
    notes = [*getattr(error, "__notes__", ()), *([hint] if hint else [])]
    _print_lines("".join([*(line.lines() for line in lines), *(f"{note}\n" for note in notes)]))
    nowhere = "" if lines else ", at no line of yours"
    whole = f" (all frames: {folder / facts.traceback_file})" if folder is not None and facts.traceback_file else ""
    return _complain(
        f"error in your code, in {facts.phase}{nowhere}: {facts.kind}: {facts.message}{whole}", ExitCode.USER_CODE
    )


def _print_lines(text: str) -> None:
    print(shown_lines(masked_message(text)), end="", file=sys.stderr)


def _finish(recorder: RunRecorder, as_json: bool, is_quiet: bool) -> int:
    assert recorder.folder is not None
    assert recorder.exit_code is not None
    try:
        if as_json:
            write_result(shown_json(encode_run(recorder.run).decode()))
        elif is_quiet:
            write_result(f"{recorder.folder.path}\n")
        else:
            give(run_answer(recorder.run, recorder.folder.path, with_banner=False), Output())
    except BrokenPipeError:
        # Whoever read the output has enough of it.
        return int(recorder.exit_code)
    except Exception as fault:
        if not isinstance(fault, OSError):
            traceback.print_exc()
        tell(f"the result could not be printed ({fault}); it is in {recorder.folder.path}")
        if isinstance(fault, OSError):
            abandon_result()
        return int(recorder.exit_code or ExitCode.INTERNAL)
    return int(recorder.exit_code)


def _publish(recorder: RunRecorder, is_loud: bool) -> None:
    """Let W&B have the result, now that it is complete and shown; nothing of that changes how the run ended."""
    measurement = Measurement.latest
    assert measurement is not None
    assert recorder.folder is not None
    is_interrupted = recorder.run.outcome == "interrupted"
    told = publish_run(recorder.folder.path, measurement.filing, measurement.wandb.timeout_s, is_interrupted)
    if told is None:
        return
    if told.is_problem:
        tell(told.line)
    elif is_loud:
        print(f"W&B          {shown(masked_text(told.line))}")
        if told.command is not None:
            print(f"upload       {shown(told.command)}")
