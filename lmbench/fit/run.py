"""Run one measurement from a command line, and turn every outcome into an exit code and one line."""

from __future__ import annotations

import re
import sys
import traceback
from collections.abc import Callable
from contextlib import redirect_stderr, suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule

from lmbench.callbacks import PhaseTimer, RunRecorder
from lmbench.errors import ExitCode, UsageError, check_known, find_modules_in_current_folder, message_of, tell
from lmbench.fit.command_line import CommandLine
from lmbench.fit.measurement import Measurement, complete_record
from lmbench.fit.ranks import (
    RankEnd,
    cause_of,
    count_to_start,
    ending_of_ranks,
    ends_by_records,
    is_watched,
    leave_group,
    rank_of_process,
    run_ranks,
    tell_stack,
)
from lmbench.fit.settings import MeasureSettings
from lmbench.fit.trainer import quiet
from lmbench.instruments.ending import (
    error_facts,
    interrupted,
    is_usage_error,
    out_of_memory,
    user_lines,
)
from lmbench.interruption import Terminated, exit_code, held, listening, received
from lmbench.masking import (
    keep_words_secret,
    masked,
    masked_message,
    masked_text,
    masked_words,
    shown,
    shown_json,
    shown_lines,
)
from lmbench.records.codec import encode_run
from lmbench.records.measured import RunError
from lmbench.records.process import reach
from lmbench.records.store import new_run_id
from lmbench.records.vocabulary import DAMAGED, Values
from lmbench.report.render import Output, give
from lmbench.report.run import run_answer
from lmbench.rooms import ROOMS
from lmbench.standard_output import abandon_result, write_result
from lmbench.wandb.publish import publish_run

#: Exit codes that the printed result explains, so that a line is needed only if the result is not printed.
_EXPLAINED_BY_RESULT = (ExitCode.USAGE, ExitCode.OUT_OF_MEMORY, ExitCode.GUARD_FAILED)
#: What C++ code of PyTorch logs in a rank: `[rank1]:[E1127 05:06:06.580274014 ProcessGroupNCCL.cpp:689] ...`.
_CXX_LINES = re.compile(r"^(?:\[rank\d+\]:)?\[[IWEF]\d{4} .*\n?", re.M)
#: LightningCLI's flags of `--print_config`, each with the argument of `CommandLine.write`.
_SKIPPED = {"skip_null": "skip_none", "skip_default": "skip_default"}
#: Flags that change what is printed, not what is measured.
_FLAGS = {"--json", "--quiet", "--print_config"}


def run(args: list[str], run_id: str | None = None) -> int:
    """Run `lmbench fit|validate` with the given words; returns the exit code.

    Standard output has only the record with `--json`, only the result's folder with `--quiet`, and only the settings
    with `--print_config`.

    Args:
        args: the command and its words.
        run_id: the run of which this process is a rank that has started anew.
    """
    reach("imported")
    quiet()
    find_modules_in_current_folder()
    command, flags = args[0], _FLAGS & {word.partition("=")[0] for word in args}
    is_loud = not {"--json", "--quiet"} & flags
    try:
        skipped = _skipped(args)
        words = [word for word in args[1:] if word.partition("=")[0] not in flags]
        if not words and "--print_config" not in flags:
            raise UsageError(f"name a configuration, such as `lmbench {command} smoke`; `lmbench fit -h` lists them")
        line = CommandLine(command, words)
        if rank_of_process() == 0 and not is_watched():
            for sentence in line.ignored:
                tell(sentence)
        if "--print_config" in flags:
            line.write(**skipped)
            write_result(line.text)
            return ExitCode.OK
        settings, wandb = line.build("measure"), line.build("wandb")
        rooms = {room.name: vars(line.build(room.name)) for room in ROOMS if room.settings}
        if settings.run_id is not None:
            # A replay is a run of its own, outside of the sweep that named this run and its folder.
            line.config.measure.run_id, line.config.measure.results_dir = None, MeasureSettings.results_dir
        line.write()
        rank_count = count_to_start(vars(line.build("trainer", callbacks=None, logger=None, profiler=None)))
        settings.run_id = settings.run_id or run_id or (new_run_id() if rank_count > 1 else None)
        facts = {
            "command": command, "argv": masked_words([command, *line.words]), "config": masked(line.content),
            "wandb": wandb.filing(),
        }  # fmt: skip
        measurement = Measurement(command, line.model, settings, rooms, facts, line.text)
        recorder, measure = measurement.recorder, partial(_measure, measurement, line, is_loud)
        code = measure() if rank_count == 1 else _measure_by_ranks(measurement, rank_count, measure, args)
        if recorder.folder is None or rank_of_process() or is_watched():
            return code
    except BaseException as error:
        return report_failure(error)
    code = _finish(recorder, flags)
    _publish(recorder, wandb.timeout_s, is_loud)
    signum = received()
    # A signal during the upload ends the command with that signal's code, although the run is complete.
    return exit_code(signum) if signum is not None and code == ExitCode.OK else code


def _skipped(args: list[str]) -> dict[str, bool]:
    """What LightningCLI's `--print_config=skip_null,skip_default` leaves out, as arguments of `CommandLine.write`.

    Raises:
        UsageError: LightningCLI has no such flag.
    """
    flags = [flag for word in args for flag in word.split(",") if word.startswith("--print_config=")]
    names = [flag.removeprefix("--print_config=") for flag in flags]
    for name in names:
        check_known("flag of --print_config", name, _SKIPPED)
    return {_SKIPPED[name]: True for name in names}


def _measure(measurement: Measurement, line: CommandLine, is_loud: bool) -> int:
    """Measure as this process's rank, and report a failure; returns the exit code."""
    is_first, recorder, config = rank_of_process() == 0, measurement.recorder, line.config
    options = {name: config[name] for name in ("ckpt_path", "weights_only", "verbose") if name in config}

    def build() -> tuple[LightningModule, Any, PhaseTimer, Values]:
        return line.build("model"), line.build("data"), line.build("timer"), vars(line.build("trainer"))

    tell_stack()
    failure = measurement.run(build, seed=config.seed_everything, announces=is_loud and is_first, **options)
    count, is_of_other_rank = recorder.run.rank_count, False
    if failure is not None:
        leave_group()
    if is_first and failure is not None and recorder.folder is not None and count > 1 and not is_watched():
        # A launcher ends the other ranks by a signal once one has failed; find the cause before that.
        with suppress(Terminated), held():
            path = recorder.folder.path
            ends = ends_by_records(path, count)
            cause = cause_of(ends)
            if cause is not None and (ending := ending_of_ranks(cause, ends)) is not None:
                recorder.take_over(path, ending)
                is_of_other_rank = True
    if failure is not None and not is_of_other_rank:
        # A watched rank's own standard error is its log, which is printed if this rank ended the measurement.
        with redirect_stderr(sys.__stderr__ if is_watched() else sys.stderr):
            if recorder.folder is None:
                return _complain(failure, ExitCode.USAGE)
            # Decide by the record, since Lightning turns a Ctrl-C into SystemExit(1).
            if recorder.exit_code is ExitCode.INTERNAL:
                _print_lines("".join(traceback.format_exception(failure)))
            elif recorder.exit_code is ExitCode.USER_CODE:
                assert recorder.run.error is not None
                # What a watched rank heard in a collective is told once it is known which other rank is the cause.
                if not (is_watched() and recorder.run.error.collective):
                    _print_own_lines(failure, recorder.run.error, recorder.folder.path)
    if is_first:
        complete_record(recorder, is_predicted=measurement.rooms["memory"]["predict"])
    return int(recorder.exit_code or 0)


def _measure_anew(args: list[str], run_id: str | None) -> int:
    """Measure as a rank whose process has just been started; returns the exit code."""
    keep_words_secret(args)
    with listening(until_exit=True):
        return run(args, run_id)


def _measure_by_ranks(measurement: Measurement, count: int, measure: Callable[[], int], args: list[str]) -> int:
    """Measure by `count` ranks, and take over the record of rank 0; returns the exit code."""
    recorder, ends, stop = measurement.recorder, list[RankEnd](), None
    path = Path(recorder.results_dir, recorder.run_id or "").absolute()
    existed = path.exists()
    with suppress(KeyboardInterrupt, Terminated):
        measure_anew = partial(_measure_anew, args, recorder.run_id)
        ends, stop = run_ranks(path, count, measure, measure_anew, measurement.settings.collective_timeout_s)
    signum = received()
    cause = cause_of(ends) if signum is None else None
    ending = None if cause is None else ending_of_ranks(cause, ends, stop)
    is_of_others = existed or any(not end.rank and end.run.outcome == DAMAGED for end in ends)
    if path.is_dir() and not is_of_others:
        # After a signal, the ranks' own errors may only say that the other ranks are gone.
        recorder.take_over(path, ending if signum is None else interrupted(signum, None))
    if cause is not None and cause.code > 0 and not cause.was_waited_for:
        _print_lines(_CXX_LINES.sub("", cause.log))
    if recorder.folder is not None or cause is None:
        return int(recorder.exit_code or 0)
    if cause.code < 0 and ending is not None and ending.error is not None:
        tell(str(ending.error.message))
    return max(cause.code, ExitCode.INTERNAL)


def report_failure(error: BaseException) -> int:
    """Report an error that no record has, such as a wrong option; returns the exit code.

    Raises:
        BaseException: `error` itself, after a signal or when it is no Exception.
    """
    if received() is None and isinstance(error, SystemExit) and not error.code:
        return ExitCode.OK
    if received() is not None or not isinstance(error, Exception):
        raise error
    if is_usage_error(error):
        return _complain(error, ExitCode.USAGE)
    if memory := out_of_memory(error):
        return _complain(f"out of memory: {memory.message}", ExitCode.OUT_OF_MEMORY)
    if user_lines(error):
        return _print_own_lines(error, error_facts(type(error).__name__, message_of(error), "setup"))
    _print_lines("".join(traceback.format_exception(error)))
    return ExitCode.INTERNAL


def _complain(line: object, code: ExitCode) -> int:
    tell(str(line))
    return code


def _print_own_lines(error: BaseException, facts: RunError, folder: Path | None = None) -> int:
    """Print the lines of the user's code that an error came through, then the error; returns the exit code.

    Args:
        error: the error.
        facts: what is recorded of it.
        folder: the run's folder; None without one.
    """
    all_frames, lines = "", user_lines(error)
    if folder is not None and facts.traceback_file:
        all_frames = f" (all frames: {folder / facts.traceback_file})"
    notes = [f"{note}\n" for note in getattr(error, "__notes__", ())]
    _print_lines("".join([*traceback.format_list(lines), *notes]))
    where = facts.phase if lines else f"{facts.phase}, at no line of yours"
    return _complain(f"error in your code, in {where}: {facts.kind}: {facts.message}{all_frames}", ExitCode.USER_CODE)


def _print_lines(text: str) -> None:
    print(shown_lines(masked_message(text)), end="", file=sys.stderr)


def _finish(recorder: RunRecorder, flags: set[str]) -> int:
    """Print the result; returns the exit code."""
    path, code = recorder.result.path, int(recorder.exit_code or 0)
    error, failed = recorder.run.error, [guard.message for guard in recorder.run.guards if guard.status == "fail"]
    line = "; ".join(failed) if error is None else error.message or error.kind or ""
    # A rank that was killed, hung or waited printed no line itself, and those of others do not say which rank it was.
    is_of_rank = error is not None and line.startswith("rank ")
    if is_of_rank or (code in _EXPLAINED_BY_RESULT and {"--json", "--quiet"} & flags):
        tell(line)
    try:
        if "--json" in flags:
            write_result(shown_json(encode_run(recorder.run).decode()))
        elif "--quiet" in flags:
            write_result(f"{path}\n")
        else:
            give(run_answer(recorder.run, path, with_banner=False), Output())
    except BrokenPipeError:
        # The reader of the output, such as `head`, has closed it.
        return code
    except Exception as failure:
        if isinstance(failure, OSError):
            abandon_result()
        else:
            _print_lines(traceback.format_exc())
        tell(f"the result could not be printed ({failure}); it is in {path}")
        return code or ExitCode.INTERNAL
    return code


def _publish(recorder: RunRecorder, timeout_s: float, is_loud: bool) -> None:
    """Publish the complete result to W&B, and print a line about it; a failure does not change the exit code."""
    is_interrupted = recorder.run.outcome == "interrupted"
    published = publish_run(recorder.result.path, recorder.caller_fields["wandb"], timeout_s, is_interrupted)
    if published is None:
        return
    if published.is_problem:
        tell(published.line)
    elif is_loud:
        print(f"W&B          {shown(masked_text(published.line))}")
        if published.command is not None:
            print(f"upload       {shown(published.command)}")
