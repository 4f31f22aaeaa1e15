"""What ended a run: outcome, exit code and the record's `error`, from an exception; whose code it came through, and
whether it is a lack of memory.
"""

from __future__ import annotations

import errno
import json
import os
import re
import signal
import sys
import sysconfig
import traceback
from collections.abc import Callable
from pathlib import Path
from traceback import FrameSummary, walk_tb
from types import TracebackType
from typing import NamedTuple

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed import DistError, DistNetworkError

from lmbench.errors import ExitCode, UsageError
from lmbench.interruption import Terminated, exit_code, received
from lmbench.records.measured import RunError

_SIGNAL_NAMES: dict[int, str] = {signal.SIGINT: "SIGINT (Ctrl-C)", signal.SIGTERM: "SIGTERM"}

# How DDP begins to tell of a parameter without a gradient.
_UNUSED = "Expected to have finished reduction in the prior iteration"
# The last line of whatever fails while it is compiled.
_DYNAMOS_ADVICE = "Set TORCHDYNAMO_VERBOSE=1"


class Ending(NamedTuple):
    """How a run ended; `error` is None where it ended by itself."""

    outcome: str
    exit_code: ExitCode
    error: RunError | None = None


#: The kind of error of a rank that only heard of another one's.
COLLECTIVE_FAILED = "CollectiveFailed"
COMPLETE = Ending("ok", ExitCode.OK)


def is_usage_error(exception: BaseException) -> bool:
    """Whether an exception is the user's mistake: a line says it all."""
    is_port_taken = isinstance(exception, DistNetworkError) and "EADDRINUSE" in str(exception)
    is_told = isinstance(exception, UsageError | MisconfigurationException)
    return is_told or is_port_taken or is_of_other_checkpoint(exception)


def is_of_other_checkpoint(exception: BaseException) -> bool:
    """Whether a checkpoint does not fit the model (`nn.Module.load_state_dict`, or Lightning's sharded one), or its
    optimizer."""
    # A KeyError is told in quotes.
    begins = ("Error(s) in loading state_dict", "loaded state dict", '"The model contains a key')
    return isinstance(exception, RuntimeError | ValueError | KeyError) and str(exception).startswith(begins)


def judge(exception: BaseException, phase: str, is_own_subject: bool = True) -> Ending:
    """The ending that an exception makes; once a signal came, whatever is raised is its doing.

    `is_own_subject` says that module and data are lmbench's own: then an exception at no line of the user's is not
    theirs.
    """
    signum = received()
    if signum is None and isinstance(exception, KeyboardInterrupt):
        signum = signal.SIGINT
    elif signum is None and isinstance(exception, SIGTERMException | Terminated):
        signum = signal.SIGTERM
    if signum is not None:
        return interrupted(signum, phase)
    if (lack := out_of_memory(exception)) is not None:
        lack.phase = phase
        return Ending("oom", ExitCode.OUT_OF_MEMORY, lack)
    lines, message = own_lines(exception), str(exception)
    if isinstance(exception, SystemExit):
        message = f"somebody's code asked to exit with {exception.code}"
    elif message.startswith(_UNUSED):
        message = (
            "the loss does not depend on all parameters, for whose gradients ddp waits; freeze the others "
            "(requires_grad_(False)), or give --trainer.strategy ddp_find_unused_parameters_true"
        )
    facts = error_facts(type(exception).__name__, message, phase)
    facts.location = place(lines[-1]) if lines else None
    modules = [str(frame.f_globals.get("__name__")) for frame, _ in walk_tb(exception.__traceback__)]
    if not lines and "".join(modules[-1:]).startswith("torch.distributed.tensor."):
        reason = "PyTorch cannot do that with what several devices share: choose another optimizer, or ddp"
        facts.message = f"{facts.message}; {reason}"
        return Ending("error", ExitCode.USAGE, facts)
    if is_usage_error(exception):
        return Ending("error", ExitCode.USAGE, facts)
    # What PyTorch refuses between two lines of a module (a loss without a gradient, say) is that module's; so is what
    # cannot be compiled, of which the compiler alone has frames.
    compiler = sys.modules.get("torch._dynamo.exc")
    is_compilers = compiler is not None and isinstance(exception, compiler.TorchDynamoException)
    is_lmbenchs = is_own_subject or (is_lmbenchs_own(exception) and not is_compilers)
    return Ending("error", ExitCode.USER_CODE if lines or not is_lmbenchs else ExitCode.INTERNAL, facts)


def interrupted(signum: int, phase: str | None) -> Ending:
    """The ending of a run that a signal ended."""
    name = signal.Signals(signum).name
    facts = error_facts(name, f"stopped by {_SIGNAL_NAMES.get(signum, name)}", phase)
    return Ending("interrupted", ExitCode(exit_code(signum)), facts)


def failed(kind: str, message: str, phase: str | None, exit_code: ExitCode = ExitCode.INTERNAL) -> Ending:
    """The ending of a run that failed without an exception of its own."""
    return Ending("error", exit_code, error_facts(kind, message, phase))


def error_facts(kind: str, message: str, phase: str | None) -> RunError:
    """The record's `error`."""
    lines = [line for line in message.splitlines() if line.strip() and not line.startswith(_DYNAMOS_ADVICE)]
    if "Traceback (most recent call last):" in message:
        # Of another process: its first line says which, its last one what happened.
        lines = [lines[0], lines[-1]]
    line = " ".join(" ".join(lines).split())[:2000]
    return RunError(kind, line, phase)


#: PyTorch's MPS allocator writes GB and means 2^30, as its other allocators do.
_POWERS = " KMGTPE"
_AMOUNT = re.compile(
    r"(?:[Tt]ried to allocate|[Uu]nable to (?:allocate|mmap)) "
    rf"(?P<number>\d+(?:\.\d+)?) ?(?P<power>[{_POWERS.strip()}]?)(?:i?B|bytes?)\b"
)

#: What each library says when the device's memory is used up.
_DEVICE = re.compile(
    r"(?:CUDA|HIP|XPU|MPS backend) out of memory"
    r"|(?:CUDA|HIP) error: out of memory|[Cc]uda failure[^\n]*out of memory|cudaErrorMemoryAllocation"
    r"|CU(?:BLAS|DNN|SOLVER|SPARSE|FFT)_(?:STATUS_)?(?:\w*_)?ALLOC(?:ATION)?_FAILED"
)

#: The same for the host's memory; cuDNN has a name of its own for that.
_HOST = re.compile(
    r"DefaultCPUAllocator: (?:can't allocate memory|not enough memory)|std::bad_alloc"
    r"|[Uu]nable to allocate [\d.]+ ?[KMGTPE]?i?(?:B|bytes?) for an array"
    r"|[Uu]nable to mmap \d+ bytes[^\n]*Cannot allocate memory"
    r"|CUDNN_STATUS_\w*HOST_ALLOCATION_FAILED"
)


def out_of_memory(exc: BaseException) -> RunError | None:
    """The lack of memory behind an exception, as a record has it: itself, one that caused it, or one in its group.

    It has the bytes asked for if the message says, whose memory it was, and the message in one line.

    A Ctrl-C stays one even while such an error is being handled. Bytes asked for are as exact as the message:
    for a GPU, PyTorch rounds to two decimals of its unit.
    """
    if isinstance(exc, KeyboardInterrupt):
        return None
    links: list[BaseException] = [exc]
    for link in links:
        if (where := _where(link)) is not None:
            amount = _AMOUNT.search(str(link))
            size = amount and round(float(amount["number"]) * 1024 ** _POWERS.index(amount["power"] or " "))
            # The line of the message that tells of memory, else its first one, else the exception's name.
            lines = [" ".join(line.split()) for line in str(link).splitlines() if line.strip()]
            telling = [line for line in lines if _HOST.search(line) or _DEVICE.search(line)]
            message = next(iter(telling or lines), type(link).__name__)[:500]
            return RunError(type(exc).__name__, message, requested_bytes=size, where=where)
        # What it was raised from or during, and the members of a group.
        context = None if link.__suppress_context__ else link.__context__
        members = link.exceptions if isinstance(link, BaseExceptionGroup) else ()
        links += [other for other in (*members, link.__cause__, context) if other is not None and other not in links]
    return None


def _where(exc: BaseException) -> str | None:
    text = str(exc)
    # PyTorch raises RuntimeError and subclasses; other exceptions may quote such words without meaning them.
    is_torchs = isinstance(exc, RuntimeError)
    if (
        isinstance(exc, MemoryError)
        or getattr(exc, "errno", None) == errno.ENOMEM
        or (is_torchs and _HOST.search(text))
    ):
        return "host"
    # torch.OutOfMemoryError, told by its name so that this module needs no torch.
    if is_torchs and (_DEVICE.search(text) or "OutOfMemoryError" in [base.__name__ for base in type(exc).__mro__]):
        return "device"
    return None


#: Packages whose frames say nothing of the user's code. Another one, even an installed one, was brought by the user.
_LIBRARIES = """torch lightning lightning_utilities lightning_fabric pytorch_lightning torchmetrics triton jsonargparse
    numpy scipy msgspec rich yaml wandb tokenizers jinja2 pandas pynvml fsspec tqdm typeshed_client docstring_parser
    sympy"""
_OWN = "lmbench lmbench.callbacks lmbench.configs"

# Code without a file: Python's and PyTorch's own, as against a notebook's cell, `<string>` or `<stdin>`.
_GENERATED = re.compile(r"<(?:frozen |eval_with_key|__array_function__|attrs |lambdifygenerated)|.*[/\\]torchinductor_")

#: A frame as the message of an exception tells it that came from another process (a loader's worker).
_TOLD = re.compile(r'^ *File "(.+)", line (\d+), in (.+)(?:\n +(.+))?', re.MULTILINE)


def place(frame: FrameSummary) -> str:
    """`my_module.py:31 in training_step`."""
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"


def own_lines(exception: BaseException) -> list[FrameSummary]:
    """The user's lines that an exception came through, the one that failed last.

    Lines of the user's own files; where there are none, those of packages that only the user's code can have brought.
    """
    if "Original Traceback (most recent call last):" in str(exception):
        told = [(file, int(number), name, text) for file, number, name, text in _TOLD.findall(str(exception))]
    else:
        told = [(f.filename, f.lineno or 0, f.name, f.line) for f in traceback.extract_tb(exception.__traceback__)]
    # Without columns, which Python would underline.
    lines = [FrameSummary(file, number, name, line=text) for file, number, name, text in told]
    brought = [line for line in lines if not _is_library(line.filename)]
    return [line for line in brought if not _is_installed(line.filename)] or brought


def own_traceback(exception: BaseException) -> TracebackType | None:
    """The exception's traceback without the frames of Lightning and its like; None where the user has none in it."""
    kept: TracebackType | None = None
    for frame, line in reversed(list(traceback.walk_tb(exception.__traceback__))):
        if not _is_library(frame.f_code.co_filename):
            kept = TracebackType(kept, frame, frame.f_lasti, line)
    return kept


def is_lmbenchs_own(exception: BaseException) -> bool:
    """Whether lmbench's own code failed, in what Lightning called of it or beside that: of the frames that are neither
    PyTorch's nor Python's, the last one is lmbench's."""
    for frame in reversed(traceback.extract_tb(exception.__traceback__)):
        if _is_in(frame.filename, _folders(_OWN)):
            return True
        if _is_in(frame.filename, _folders("lightning jsonargparse")):
            return False
    return True


def _is_library(file: str) -> bool:
    """Whether a file is Python's, lmbench's, or of the libraries below it."""
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if _GENERATED.match(file) or (cache and file.startswith(cache)):
        return True
    if file.startswith("<"):
        return False
    paths = sysconfig.get_paths()
    is_python = _is_in(file, [paths["stdlib"], paths["platstdlib"]]) and not _is_installed(file)
    return is_python or _is_in(file, _folders(f"{_OWN} {_LIBRARIES}"))


def _is_installed(file: str) -> bool:
    return bool({"site-packages", "dist-packages"} & set(Path(file).parts))


def _folders(names: str) -> list[str]:
    """Where packages lie (of a single file, that file), of those that are imported: only they can have a frame."""
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names.split()}
    # A package is where its own file is: lmbench's path names a checkout's root too.
    return [file.removesuffix(f"{os.sep}__init__.py") for file in files.values() if file]


def _is_in(file: str, folders: list[str]) -> bool:
    return any(file == folder or file.startswith(folder + os.sep) for folder in folders)


def failed_collective(exception: BaseException) -> str | None:
    """The collective that an exception is about, by PyTorch's flight recorder; None where it is about none."""
    dump: Callable[..., bytes] | None = getattr(torch._C._distributed_c10d, "_dump_fr_trace_json", None)
    if dump is None or not (isinstance(exception, DistError) or re.search("gloo|pair closure", str(exception))):
        return None
    entries = json.loads(dump(True, False)).get("entries", [])
    # Gloo's all stay `scheduled`, and it raises from the last one; NCCL's begin later than they are issued.
    entry = next((entry for entry in entries if entry["state"] == "started"), entries[-1] if entries else None)
    if entry is None:
        return None
    sizes = ", ".join(" x ".join(map(str, size)) for size in entry["input_sizes"])
    return f"{entry['profiling_name']}, number {entry['collective_seq_id']} of its group, of {sizes} elements"
