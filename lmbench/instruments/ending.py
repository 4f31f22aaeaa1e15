"""What ended a run: outcome, exit code and the record's `error`, from an exception."""

from __future__ import annotations

import signal
import sys
from traceback import walk_tb
from typing import NamedTuple

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed import DistNetworkError

from lmbench.errors import ExitCode, UsageError
from lmbench.instruments.oom import out_of_memory
from lmbench.instruments.own_code import is_lmbenchs_own, own_lines, place
from lmbench.interruption import Terminated, exit_code, received
from lmbench.records.measured import RunError

_SIGNAL_NAMES: dict[int, str] = {signal.SIGINT: "SIGINT (Ctrl-C)", signal.SIGTERM: "SIGTERM"}

# The last line of whatever fails while it is compiled.
_DYNAMOS_ADVICE = "Set TORCHDYNAMO_VERBOSE=1"


class Ending(NamedTuple):
    """How a run ended; `error` is None where it ended by itself."""

    outcome: str
    exit_code: ExitCode
    error: RunError | None = None


COMPLETE = Ending("ok", ExitCode.OK)


def is_usage_error(exception: BaseException) -> bool:
    """Whether an exception is the user's mistake: a line says it all."""
    is_port_taken = isinstance(exception, DistNetworkError) and "EADDRINUSE" in str(exception)
    is_told = isinstance(exception, UsageError | MisconfigurationException)
    return is_told or is_port_taken or is_of_other_checkpoint(exception)


def is_of_other_checkpoint(exception: BaseException) -> bool:
    """Whether a checkpoint does not fit the model (`nn.Module.load_state_dict`)."""
    return isinstance(exception, RuntimeError) and str(exception).startswith("Error(s) in loading state_dict")


def _is_of_shared_tensors(exception: BaseException) -> bool:
    """Whether PyTorch's distributed tensors refused an operator."""
    frames = [frame for frame, _ in walk_tb(exception.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).startswith("torch.distributed.tensor.")


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
    facts = error_facts(type(exception).__name__, message, phase)
    facts.location = place(lines[-1]) if lines else None
    if not lines and _is_of_shared_tensors(exception):
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
