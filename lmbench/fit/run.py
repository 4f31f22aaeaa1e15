"""Run one measurement from a command line and turn whatever happens into an exit code and one line."""

from __future__ import annotations

import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule

from lmbench.callbacks import RunRecorder
from lmbench.data.datamodule import TokenData
from lmbench.errors import ExitCode, UsageError, tell
from lmbench.fit.choice import path_of
from lmbench.fit.command_line import CommandLine
from lmbench.fit.completion import complete_record
from lmbench.fit.measurement import Measurement
from lmbench.fit.settings import MeasureSettings, MemorySettings
from lmbench.fit.surroundings import quiet
from lmbench.fit.trainer import as_list
from lmbench.instruments.ending import error_facts, is_of_other_checkpoint, is_usage_error
from lmbench.instruments.milestones import reach
from lmbench.instruments.oom import out_of_memory
from lmbench.instruments.own_code import own_lines
from lmbench.interruption import exit_code, held, received
from lmbench.masking import masked, masked_message, masked_text, masked_words
from lmbench.records.codec import encode_run
from lmbench.records.measured import RunError
from lmbench.report.render import Output, give
from lmbench.report.run import run_answer
from lmbench.standard_output import abandon_result, write_result
from lmbench.text import shown, shown_json, shown_lines
from lmbench.wandb.publish import WandbSettings, publish_run

#: About what is printed, not about what is measured.
_FLAGS = {"--json", "--quiet", "--print_config"}


def run(args: list[str]) -> int:
    """Run `lmbench fit|validate` with the given words; returns the exit code.

    `--json` prints the result's record and nothing else on standard output, `--quiet` only where the result lies,
    `--print_config` the settings.
    """
    reach("imported")
    quiet()
    find_modules_in_current_folder()
    command, flags = args[0], _FLAGS & set(args)
    recorder: RunRecorder | None = None
    try:
        words = [word for word in args[1:] if word not in flags]
        line = CommandLine(command, words if words or "--print_config" in flags else _without_configuration(command))
        for sentence in line.ignored:
            tell(sentence)
        if "--print_config" in flags:
            line.write()
            write_result(line.text)
            return ExitCode.OK
        measurement, memory, wandb = _measurement(line)
        recorder = measurement.recorder
        options = {name: line.config[name] for name in ("ckpt_path", "weights_only", "verbose") if name in line.config}
        measurement.run(
            lambda: _built(line, measurement),
            seed=line.config.seed_everything,
            announces=not {"--json", "--quiet"} & flags,
            **options,
        )
    except BaseException as error:
        with held():
            code = _ended_by(error, recorder)
        if code is not None:
            return code
    assert recorder is not None
    complete_record(recorder, is_predicted=memory.predict)
    code = _finish(recorder, "--json" in flags, "--quiet" in flags)
    _publish(recorder, wandb, is_loud=not {"--json", "--quiet"} & flags)
    signum = received()
    # Whoever stops the upload of a run that is complete stops this command all the same.
    return exit_code(signum) if signum is not None and code == ExitCode.OK else code


def _measurement(line: CommandLine) -> tuple[Measurement, MemorySettings, WandbSettings]:
    """The measurement that a command line asks for, with the settings of what follows it."""
    settings, memory, dtypes, wandb = (line.build(group) for group in ("measure", "memory", "dtypes", "wandb"))
    if settings.run_id is not None:
        # A replay is a run of its own, outside of the sweep that gave this one its place.
        line.config.measure.run_id, line.config.measure.results_dir = None, MeasureSettings.results_dir
    line.write()
    facts = {
        "command": line.command, "argv": masked_words([line.command, *line.words]), "config": masked(line.content),
        "wandb": wandb.filing(),
    }  # fmt: skip
    passes = {"memory": vars(memory), "dtypes": vars(dtypes)}
    return Measurement(line.command, line.model, settings, {}, passes, facts, line.text), memory, wandb


def _built(line: CommandLine, measurement: Measurement) -> tuple[LightningModule, Any, list[Callback]]:
    """The objects that a command line describes."""
    module, data, timer = (line.build(key) for key in ("model", "data", "timer"))
    measurement.flags = vars(line.build("trainer"))
    return module, data, [*as_list(measurement.flags.pop("callbacks")), timer]


def _without_configuration(command: str) -> list[str]:
    """What is measured where nothing was named: on a GPU what the defaults are, else what a CPU is done with soon."""
    if torch.cuda.is_available():
        tell(f"no configuration was named: {command} measures size small in float32; try --config large_bf16, or -h")
        return []
    tell(
        f"no configuration was named, and there is no GPU here: this is `lmbench {command} --config smoke`, a tiny "
        "model, to see that it works; what there is to measure is in `lmbench fit -h`"
    )
    return ["--config", "smoke"]


def _ended_by(error: BaseException, recorder: RunRecorder | None) -> int | None:
    """The exit code where the error leaves no result, said in one line; None where a result tells of it."""
    if received() is None and is_of_other_checkpoint(error):
        error = UsageError(f"the checkpoint is of another model: {str(error).splitlines()[1].strip()[:200]}")
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
        _print_lines("".join(traceback.format_exception(error)))
    elif recorder.exit_code is ExitCode.USER_CODE:
        # Whose step expects another form fails where it takes the batch apart.
        is_ours = recorder.run.data.name == path_of(TokenData) and not recorder.folder.steps_written
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
            _print_lines("".join(traceback.format_exception(error)))
            return ExitCode.INTERNAL
    raise error


def find_modules_in_current_folder() -> None:
    """Let a user's module be found beside where the command is given."""
    # As `python -m` does; an installed command leaves it out.
    here = str(Path.cwd())
    if not {"", here} & set(sys.path):
        sys.path.insert(0, here)


def _complain(what: BaseException | str, code: ExitCode = ExitCode.USAGE) -> int:
    tell(str(what))
    return code


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


def _publish(recorder: RunRecorder, wandb: WandbSettings, is_loud: bool) -> None:
    """Let W&B have the result, now that it is complete and shown; nothing of that changes how the run ended."""
    assert recorder.folder is not None
    is_interrupted = recorder.run.outcome == "interrupted"
    assert recorder.given.wandb is not None
    told = publish_run(recorder.folder.path, recorder.given.wandb, wandb.timeout_s, is_interrupted)
    if told is None:
        return
    if told.is_problem:
        tell(told.line)
    elif is_loud:
        print(f"W&B          {shown(masked_text(told.line))}")
        if told.command is not None:
            print(f"upload       {shown(told.command)}")
