"""Derives a run's outcome, exit code and `error` from the exception that ended it.

Also tells whose code an exception came through, and whether memory ran out.
"""

from __future__ import annotations

import errno
import inspect
import re
import signal
import traceback
from pathlib import Path
from traceback import FrameSummary, walk_tb
from types import TracebackType
from typing import NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch._dynamo.exc import TorchDynamoException
from torch.nn.parallel import DistributedDataParallel

from lmbench.code_owners import INSTALLED, code_owner, location_of
from lmbench.errors import ExitCode, UsageError, message_of
from lmbench.interruption import Terminated, exit_code, received
from lmbench.records.measured import RunError

# The first words of DDP's error about a parameter without a gradient.
_DDP_UNUSED_PARAMETER = "Expected to have finished reduction in the prior iteration"
# The first words of Lightning's errors about what `training_step` returned; it names no line.
_WRONG_LOSS = "In automatic"
# The first words of the last line of every error in compilation.
_DYNAMO_ADVICE = "Set TORCHDYNAMO_VERBOSE=1"


class Ending(NamedTuple):
    """How a run ended; `error` is None where nothing failed."""

    outcome: str
    exit_code: ExitCode
    error: RunError | None = None


COMPLETE = Ending("ok", ExitCode.OK)


def is_usage_error(exception: BaseException) -> bool:
    """Whether an exception is a mistake of the user's, of which its message says everything."""
    is_wrong_loss = message_of(exception).startswith(_WRONG_LOSS)
    is_refused = isinstance(exception, UsageError | MisconfigurationException) and not is_wrong_loss
    return is_refused or is_checkpoint_mismatch(exception)


def is_checkpoint_mismatch(exception: BaseException) -> bool:
    """Whether `load_state_dict`, or Lightning's sharded one, refused a checkpoint that does not fit."""
    # `str` puts the message of a KeyError in quotes.
    beginnings = ("Error(s) in loading state_dict", "loaded state dict", '"The model contains a key')
    return isinstance(exception, RuntimeError | ValueError | KeyError) and message_of(exception).startswith(beginnings)


def judge(exception: BaseException, phase: str, is_lmbench_subject: bool = True) -> Ending:
    """The ending of a run that an exception ended; after a signal, every exception is its consequence.

    Args:
        exception: the exception.
        phase: the phase in which it was raised.
        is_lmbench_subject: module and data are lmbench's own classes. An exception that came through no line of the
            user's is then an internal error.
    """
    signum = received()
    if signum is None and isinstance(exception, KeyboardInterrupt):
        signum = signal.SIGINT
    elif signum is None and isinstance(exception, SIGTERMException | Terminated):
        signum = signal.SIGTERM
    if signum is not None:
        return interrupted(signum, phase)
    if (shortage := out_of_memory(exception)) is not None:
        shortage.phase = phase
        return Ending("oom", ExitCode.OUT_OF_MEMORY, shortage)
    lines, message = user_lines(exception), message_of(exception)
    if isinstance(exception, SystemExit):
        message = f"somebody's code asked to exit with {exception.code}"
    elif message.startswith(_DDP_UNUSED_PARAMETER):
        message = (
            f"the loss does not depend on all parameters, for whose gradients ddp waits{_unused(exception)}; freeze "
            "the others (requires_grad_(False)), or give --trainer.strategy ddp_find_unused_parameters_true"
        )
    facts = error_facts(type(exception).__name__, message, phase)
    facts.location = frame_location(lines[-1]) if lines else None
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(exception.__traceback__)]
    if not lines and modules and modules[-1].startswith("torch.distributed.tensor."):
        reason = "PyTorch cannot do that with what several devices share: choose another optimizer, or ddp"
        facts.message = f"{facts.message}; {reason}"
        return Ending("error", ExitCode.USAGE, facts)
    if is_usage_error(exception):
        return Ending("error", ExitCode.USAGE, facts)
    # The user's module is also to blame where PyTorch fails between two of its lines (a loss without a gradient, say).
    # The same holds for a module that cannot be compiled, where only the compiler has frames.
    is_compiler_error = isinstance(exception, TorchDynamoException)
    is_internal = is_lmbench_subject or (is_lmbench_failure(exception) and not is_compiler_error)
    return Ending("error", ExitCode.USER_CODE if lines or not is_internal else ExitCode.INTERNAL, facts)


def interrupted(signum: int, phase: str | None) -> Ending:
    """The ending of a run that a signal ended."""
    name = signal.Signals(signum).name
    shown = "SIGINT (Ctrl-C)" if signum == signal.SIGINT else name
    return Ending("interrupted", ExitCode(exit_code(signum)), error_facts(name, f"stopped by {shown}", phase))


def failed(kind: str, message: str, phase: str | None, exit_code: ExitCode = ExitCode.INTERNAL) -> Ending:
    """The ending of a run that failed without an exception."""
    return Ending("error", exit_code, error_facts(kind, message, phase))


def _unused(exception: BaseException) -> str:
    """The names of the parameters whose indices ddp's error has, for a sentence; empty if they are unknown."""
    indices = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(exception))
    wrappers = [frame.f_locals.get("self") for frame, _ in walk_tb(exception.__traceback__)]
    for wrapper in wrappers:
        if indices and isinstance(wrapper, DistributedDataParallel):
            names = [name for name, parameter in wrapper.module.named_parameters() if parameter.requires_grad]
            return f" ({', '.join(names[int(index)] for index in indices[1].split())})"
    return ""


def error_facts(kind: str, message: str, phase: str | None) -> RunError:
    """The record's `error`, with the message in one line of at most 2000 characters."""
    lines = [line for line in message.splitlines() if line.strip() and not line.startswith(_DYNAMO_ADVICE)]
    if "Traceback (most recent call last):" in message:
        # A traceback of another process: the first line names the process, the last one the error.
        lines = [lines[0], lines[-1]]
    line = " ".join(" ".join(lines).split())[:2000]
    return RunError(kind, line, phase)


#: Powers of 1024: PyTorch's MPS allocator writes GB but means 2^30 bytes, as its other allocators do.
_POWERS = " KMGTPE"
_AMOUNT = re.compile(
    r"(?:[Tt]ried to allocate|[Uu]nable to (?:allocate|mmap)) "
    rf"(?P<number>\d+(?:\.\d+)?) ?(?P<power>[{_POWERS.strip()}]?)(?:i?B|bytes?)\b"
)

#: Messages of libraries when the device's memory is used up.
_DEVICE = re.compile(
    r"(?:CUDA|HIP|XPU|MPS backend) out of memory"
    r"|(?:CUDA|HIP) error: out of memory|[Cc]uda failure[^\n]*out of memory|cudaErrorMemoryAllocation"
    r"|CU(?:BLAS|DNN|SOLVER|SPARSE|FFT)_(?:STATUS_)?(?:\w*_)?ALLOC(?:ATION)?_FAILED"
)

#: Messages when the host's memory is used up.
_HOST = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)|std::bad_alloc"
    r"|[Uu]nable to allocate [\d.]+ ?[KMGTPE]?i?(?:B|bytes?) for an array"
    r"|[Uu]nable to mmap \d+ bytes[^\n]*Cannot allocate memory"
    r"|CUDNN_STATUS_\w*HOST_ALLOCATION_FAILED"
)


def out_of_memory(exception: BaseException) -> RunError | None:
    """The record's `error` if memory ran out, else None.

    The shortage may be the exception itself, its cause or context, or a member of its group. A Ctrl-C while a shortage
    is handled stays a Ctrl-C. The requested bytes are as exact as the message: PyTorch rounds a GPU's to two decimals
    of the unit.
    """
    if isinstance(exception, KeyboardInterrupt):
        return None
    chain = [exception]
    for link in chain:
        if (where := _exhausted_memory(link)) is not None:
            amount = _AMOUNT.search(message_of(link))
            size = amount and round(float(amount["number"]) * 1024 ** _POWERS.index(amount["power"] or " "))
            # Keep the line about memory, else the first line, else the exception's name.
            lines = [" ".join(line.split()) for line in message_of(link).splitlines() if line.strip()]
            memory_lines = [line for line in lines if _HOST.search(line) or _DEVICE.search(line)]
            message = next(iter(memory_lines or lines), type(link).__name__)[:500]
            return RunError(type(exception).__name__, message, requested_bytes=size, where=where)
        context = None if link.__suppress_context__ else link.__context__
        members = link.exceptions if isinstance(link, BaseExceptionGroup) else ()
        chain += [other for other in (*members, link.__cause__, context) if other is not None and other not in chain]
    return None


def _exhausted_memory(exception: BaseException) -> str | None:
    """Whose memory ran out, `host` or `device`; None if the exception is about something else."""
    text = message_of(exception)
    if isinstance(exception, MemoryError) or getattr(exception, "errno", None) == errno.ENOMEM:
        return "host"
    # PyTorch raises RuntimeErrors; other exceptions may quote these messages.
    if not isinstance(exception, RuntimeError):
        return None
    if _HOST.search(text):
        return "host"
    return "device" if isinstance(exception, torch.OutOfMemoryError) or _DEVICE.search(text) else None


#: A frame in the message of an exception that came from another process (a loader's worker).
_QUOTED_FRAME = re.compile(r'^ *File "(.+)", line (\d+), in (.+)(?:\n +(.+))?', re.MULTILINE)


def frame_location(frame: FrameSummary) -> str:
    """File, line and function of a frame: `my_module.py:31 in training_step`."""
    return f"{location_of(frame.filename, frame.lineno)} in {frame.name}"


def user_lines(exception: BaseException) -> list[FrameSummary]:
    """The user's lines that an exception came through, the failing one last.

    These are lines of the user's own files, or else of installed packages that only the user's code can have imported.
    """
    # New summaries have no columns, which Python would underline.
    frames = traceback.extract_tb(exception.__traceback__)
    lines = [FrameSummary(frame.filename, frame.lineno, frame.name, line=frame.line) for frame in frames]
    if "Original Traceback (most recent call last):" in message_of(exception):
        quoted = _QUOTED_FRAME.findall(message_of(exception))
        lines = [FrameSummary(file, int(number), name, line=text) for file, number, name, text in quoted]
    if message_of(exception).startswith(_WRONG_LOSS):
        values = (frame.f_locals.get("trainer") for frame, _ in walk_tb(exception.__traceback__))
        trainer = next((value for value in values if isinstance(value, Trainer)), None)
        if trainer is not None:
            lines.append(definition_of_step(trainer.lightning_module))
    users = [line for line in lines if code_owner(line.filename) == "user"]
    return [line for line in users if not INSTALLED & set(Path(line.filename).parts)] or users


def definition_of_step(module: LightningModule) -> FrameSummary:
    """The first line of a module's `training_step`."""
    code = inspect.unwrap(type(module).training_step).__code__
    return FrameSummary(code.co_filename, code.co_firstlineno, code.co_name)


def user_traceback(exception: BaseException) -> TracebackType | None:
    """The exception's traceback without frames of Python, lmbench and its libraries; None if no frame is left."""
    trace: TracebackType | None = None
    for frame, line in reversed(list(walk_tb(exception.__traceback__))):
        if code_owner(frame.f_code.co_filename) == "user":
            trace = TracebackType(trace, frame, frame.f_lasti, line)
    return trace


def is_lmbench_failure(exception: BaseException) -> bool:
    """Whether lmbench's code failed: the innermost frame of lmbench, Lightning and jsonargparse is lmbench's, or none
    of them has one."""
    owners = [code_owner(frame.f_code.co_filename) for frame, _ in walk_tb(exception.__traceback__)]
    callers = [owner for owner in owners if owner in ("lmbench", "lightning")]
    return not callers or callers[-1] == "lmbench"
