"""Ends a run at once on Ctrl-C, SIGTERM or a closed terminal (SIGHUP), but never in the middle of a write.

Python runs a signal handler between any two instructions of the main thread. Under `listening` the handler raises at
that point, where Lightning would only stop after the batch. Inside `held` it raises at the end of the block. Only the
first signal raises, because a second Ctrl-C must not interrupt the closing of the record.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

#: Seconds after the first signal from which a further one ends the process at once.
PATIENCE_S = 5.0

# The signals that are handled, with their default handlers. A signal with any other handler, or ignored, is left alone.
_DEFAULTS: dict[int, object] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}

# Signals whose handlers, set by other code, may raise. PyTorch's reports a loader process that died, as it may by a
# Ctrl-C while the record is being closed. Alarms end code that takes too long.
_OTHERS = (signal.SIGCHLD, signal.SIGALRM)


class Terminated(SystemExit):
    """SIGTERM or SIGHUP was received. As a SystemExit, like Lightning's exception, nobody takes it for a failure."""


class _State:
    """The first signal since `listening` began, and a signal that waits for the end of `depth` nested `held` blocks."""

    is_listening = False
    received: int | None = None
    received_at_s = 0.0
    waiting: int | None = None
    depth = 0


_state = _State()


def received() -> int | None:
    """The first SIGINT, SIGTERM or SIGHUP since `listening` began; None without one."""
    return _state.received


def is_listening() -> bool:
    """Whether signals raise, as they do within `listening`."""
    return _state.is_listening


def exit_code(signum: int) -> int:
    """The exit code of a process that a signal ended: 130 for SIGINT, else 143, as a shell reports SIGTERM."""
    return 128 + (signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)


def interrupt(signum: int) -> None:
    """Raise KeyboardInterrupt for SIGINT, Terminated for any other signal."""
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(exit_code(signum))


_leave = os._exit


@contextmanager
def exits_raised() -> Iterator[None]:
    """Within the block, `os._exit` called by this thread of this process raises SystemExit, so that it can be recorded.

    A fork, such as a loader's worker, still ends by it.
    """
    owner = os.getpid(), threading.get_ident()

    def leave(status: int) -> NoReturn:
        if (os.getpid(), threading.get_ident()) == owner:
            raise SystemExit(status)
        _leave(status)

    os._exit = leave
    try:
        yield
    finally:
        os._exit = _leave


@contextmanager
def listening(until_exit: bool = False) -> Iterator[None]:
    """Let signals raise within the block, at once or when a `held` block ends; a nested block changes nothing.

    Args:
        until_exit: let a signal after the block, while Python shuts down, end the process without a traceback.

    Raises:
        KeyboardInterrupt: SIGINT was received.
        Terminated: SIGTERM or SIGHUP was received.
    """
    if _state.is_listening:
        yield
        return
    _state.received = _state.waiting = None
    _state.is_listening = True
    replaced = _take_over(tuple(_DEFAULTS), _on_signal)
    try:
        yield
    finally:
        for signum, handler in replaced.items():
            signal.signal(signum, (lambda signum, _: _leave(exit_code(signum))) if until_exit else handler)
        _state.is_listening = False


@contextmanager
def held() -> Iterator[None]:
    """Let signals wait until the end of the block, where the first one raises.

    Ctrl-C also waits in a user's program outside of `listening`, and so do handlers of other code that may raise.
    """
    _state.depth += 1
    arrived = []
    replaced = _take_over((signal.SIGINT,), _on_signal)
    others = {} if _state.depth > 1 else _take_over(_OTHERS, lambda signum, _: arrived.append(signum))
    try:
        yield
    finally:
        for signum, handler in (replaced | others).items():
            signal.signal(signum, handler)
        _state.depth -= 1
        if _state.depth == 0 and _state.waiting is not None:
            signum, _state.waiting = _state.waiting, None
            interrupt(signum)
        for signum in dict.fromkeys(arrived):
            others[signum](signum, None)


def _take_over(signals: tuple[int, ...], handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Replace default handlers, and Python handlers of `_OTHERS`, by `handler`; returns the replaced ones by signal.

    Python allows this in the main thread only; any other thread replaces none.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}

    def is_replaceable(signum: int) -> bool:
        current = signal.getsignal(signum)
        return current is _DEFAULTS[signum] if signum in _DEFAULTS else callable(current)

    return {signum: signal.signal(signum, handler) for signum in filter(is_replaceable, signals)}


def _on_signal(signum: int, frame: FrameType | None) -> None:
    if not _state.is_listening:
        _state.waiting = signum
    elif _state.received is None:
        _state.received, _state.received_at_s = signum, time.monotonic()
        # From now on libraries warn only because they were interrupted (PyTorch's compiler prints a traceback).
        warnings.simplefilter("ignore")
        if _state.depth:
            _state.waiting = signum
        else:
            interrupt(signum)
    elif time.monotonic() - _state.received_at_s > PATIENCE_S:
        _leave(exit_code(signum))
