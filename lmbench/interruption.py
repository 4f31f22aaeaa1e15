"""Ctrl-C, SIGTERM and a terminal that goes away (SIGHUP) end a run where it stands, never in the middle of a write.

Python runs a signal's handler between any two instructions of the main thread. Under `listening` the handler raises at
that point, also where Lightning would only look after the next batch; inside `held` it waits for the end of the block.
Only the first signal raises: a second Ctrl-C must not break into the closing of what the first one ended.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any

#: A further signal ends the process on the spot if the first one has not done so after this time.
PATIENCE_S = 5.0

# Only these are taken over, and only from their defaults: whoever ignores or handles a signal goes on doing so.
_DEFAULTS: dict[int, object] = {
    signal.SIGINT: signal.default_int_handler,
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGHUP: signal.SIG_DFL,
}


# Whose handlers others let raise: PyTorch says so that a loader's process died (a signal for all ends it while the
# run's record is being closed), and alarms end what takes too long.
_OTHERS = (signal.SIGCHLD, signal.SIGALRM)


class Terminated(SystemExit):
    """SIGTERM or SIGHUP came. A SystemExit like Lightning's own: nobody shall take it for a failure of what it ends."""


#: Signals: `received` is the first one since `listening` began, `waiting` one that came within `depth` held blocks.
_state = SimpleNamespace(is_listening=False, received=None, received_at_s=0.0, depth=0, waiting=None)


def received() -> int | None:
    """The first SIGINT, SIGTERM or SIGHUP since `listening` began, None without one."""
    first: int | None = _state.received
    return first


def exit_code(signum: int) -> int:
    """What a process that a signal ended exits with: as a shell says it for Ctrl-C, else for SIGTERM."""
    return 128 + (signal.SIGINT if signum == signal.SIGINT else signal.SIGTERM)


def interrupt(signum: int) -> None:
    """Raise what a signal raises: KeyboardInterrupt or Terminated."""
    if signum == signal.SIGINT:
        raise KeyboardInterrupt
    raise Terminated(exit_code(signum))


@contextmanager
def listening(until_exit: bool = False) -> Iterator[None]:
    """Within, SIGINT raises KeyboardInterrupt, the others Terminated, at once or when a `held` block ends.

    With `until_exit` what comes afterwards, while Python shuts down, ends the process without a traceback. Inside
    another such block this one changes nothing.
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
            signal.signal(signum, (lambda signum, _: os._exit(exit_code(signum))) if until_exit else handler)
        _state.is_listening = False


@contextmanager
def held() -> Iterator[None]:
    """`with held():` makes these signals wait; at the end of the block the first of them raises.

    In somebody else's program, where nobody is listening, Ctrl-C waits too; and so do others' handlers that raise.
    """
    _state.depth += 1
    arrived: list[int] = []
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
    """Set a handler where the default, or of `_OTHERS` one in Python, is; returns what was there.

    Only the main thread can.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    before = {signum: signal.getsignal(signum) for signum in signals}
    free = [s for s, now in before.items() if (now is _DEFAULTS[s] if s in _DEFAULTS else callable(now))]
    return {signum: signal.signal(signum, handler) for signum in free}


def _on_signal(signum: int, frame: FrameType | None) -> None:
    if not _state.is_listening:
        _state.waiting = signum
    elif _state.received is None:
        _state.received, _state.received_at_s = signum, time.monotonic()
        # What libraries warn of from now on is how they were interrupted (PyTorch's compiler prints a traceback).
        warnings.simplefilter("ignore")
        if _state.depth:
            _state.waiting = signum
        else:
            interrupt(signum)
    elif time.monotonic() - _state.received_at_s > PATIENCE_S:
        os._exit(exit_code(signum))
