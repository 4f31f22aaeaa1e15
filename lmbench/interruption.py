"""Ctrl-C and SIGTERM: they end a run where it stands, but never in the middle of a write.

Python runs a signal's handler between any two instructions of the main thread. Under `listening` the handler raises at
that point, also where Lightning would only look after the next batch; inside `held` it waits for the end of the block.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

#: A signal that comes so long after another one, while that still waits for a `held` block, ends the process at once.
PATIENCE_S = 5.0

# Only these are taken over, and only from their defaults: whoever ignores or handles a signal goes on doing so.
_DEFAULTS: dict[int, object] = {signal.SIGINT: signal.default_int_handler, signal.SIGTERM: signal.SIG_DFL}


class Terminated(SystemExit):
    """SIGTERM came. A SystemExit like Lightning's own, so that nobody takes it for a failure of the work it ends."""


class _State:
    def __init__(self) -> None:
        self.is_listening = False
        self.received: int | None = None
        self.depth = 0
        self.waiting: int | None = None
        self.waiting_since = 0.0


_state = _State()


def received() -> int | None:
    """The first SIGINT or SIGTERM since `listening` began, None without one."""
    return _state.received


def exit_code(signum: int) -> int:
    """What a process that a signal ended exits with."""
    return 128 + signum


def interrupt(signum: int) -> None:
    """Raise what a signal raises: KeyboardInterrupt or Terminated."""
    if signum == signal.SIGTERM:
        raise Terminated(exit_code(signum))
    raise KeyboardInterrupt


@contextmanager
def listening(until_exit: bool = False) -> Iterator[None]:
    """Within, SIGINT raises KeyboardInterrupt and SIGTERM raises Terminated, at once or when a `held` block ends.

    With `until_exit` what comes afterwards, while Python shuts down, ends the process without a traceback.
    """
    _state.received = _state.waiting = None
    replaced = _take_over(tuple(_DEFAULTS), _on_signal)
    _state.is_listening = True
    try:
        yield
    finally:
        _state.is_listening = False
        for signum, handler in replaced.items():
            signal.signal(signum, _leave if until_exit else handler)


class held:
    """`with held():` makes SIGINT and SIGTERM wait; at the end of the block the first of them raises.

    In somebody else's program, where nobody is listening, Ctrl-C waits too.
    """

    def __enter__(self) -> None:
        _state.depth += 1
        self._replaced = _take_over((signal.SIGINT,), _on_signal)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        for signum, handler in self._replaced.items():
            signal.signal(signum, handler)
        _state.depth -= 1
        if _state.depth == 0 and _state.waiting is not None:
            signum, _state.waiting = _state.waiting, None
            interrupt(signum)


_Handler = Callable[[int, FrameType | None], None]


def _take_over(signals: tuple[int, ...], handler: _Handler) -> dict[int, Any]:
    """Set a handler where there is none yet; returns what was there. Only the main thread can."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    free = [signum for signum in signals if signal.getsignal(signum) is _DEFAULTS[signum]]
    return {signum: signal.signal(signum, handler) for signum in free}


def _on_signal(signum: int, frame: FrameType | None) -> None:
    if _state.is_listening and _state.received is None:
        _state.received = signum
    if _state.depth == 0:
        interrupt(signum)
    elif _state.waiting is None:
        _state.waiting, _state.waiting_since = signum, time.monotonic()
    elif time.monotonic() - _state.waiting_since > PATIENCE_S:
        os._exit(exit_code(signum))


def _leave(signum: int, frame: FrameType | None) -> None:
    os._exit(exit_code(signum))
