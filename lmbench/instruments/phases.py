"""Tracks the running phase of a step by the actions that Lightning reports to its profiler.

Callbacks have no hook for the data wait, the transfer, the start of the forward or the end of clipping. Lightning's
profiler actions bound all of these exactly, also under accumulation. `BorderProfiler` passes the actions on, and the
state machine `PhaseTrack` turns them into a sequence of phases.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from functools import partial
from typing import Any
from unittest.mock import patch

from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from torch import nn
from torch.optim import Optimizer

from lmbench.records.vocabulary import CHECKPOINT, PHASES, VALIDATION

#: Owners of Lightning's actions.
LOOP, STRATEGY, MODULE, CALLBACK = "loop", "Strategy", "LightningModule", "Callback"

Handler = Callable[[], None]


class PhaseTrack:
    """A stack of phases, whose listeners are called with every phase that begins.

    Args:
        has_scaler: whether gradients are unscaled between backward and clipping (`16-mixed`), in phase `optimizer`.
        clips: whether gradients are clipped; otherwise there is no phase `clip`.

    Attributes:
        current: the running phase.
    """

    def __init__(self, has_scaler: bool = False, clips: bool = True) -> None:
        self.has_scaler, self.clips = has_scaler, clips
        self._listeners = list[Callable[[str], None]]()
        #: Phases whose time counts as `other`.
        self._hidden = set[str]()
        self._stack = ["other"]
        self.current = "other"
        #: Whether a training validates, which takes all time but that of checkpoints.
        self._is_validating = False

    def set_validating(self, is_on: bool) -> None:
        """Begin or end a validation within a training; in it listeners hear of checkpoints alone."""
        self._is_validating = is_on
        self._stack = ["other"]
        self._announce()

    def listen(self, listener: Callable[[str], None], undo: ExitStack) -> None:
        """Call a function with every phase that begins, until `undo` is closed."""
        self._listeners.append(listener)
        undo.callback(self._listeners.remove, listener)

    def unseen_phases(self) -> list[str]:
        """Phases whose time counts as `other`, because their beginning and end are unknown."""
        return [phase for phase in PHASES if phase in self._hidden]

    def enter(self, phase: str) -> None:
        self._stack.append(phase)
        self._announce()

    def leave(self, around: str = "", then: str = "") -> None:
        """End the innermost phase; if the phase around it is `around`, it turns into `then`."""
        if len(self._stack) > 1:
            self._stack.pop()
        self.turn(around, then)

    def turn(self, phase: str, then: str) -> None:
        """Replace the innermost phase if it is `phase`; outside of all phases it stays `other`."""
        if self._stack[-1] == phase and len(self._stack) > 1:
            self._stack[-1] = then
        self._announce()

    def _announce(self) -> None:
        phase = self._stack[-1]
        if phase in self._hidden:
            phase = "other"
        if self._is_validating and phase != CHECKPOINT:
            phase = VALIDATION
        if phase != self.current:
            self.current = phase
            for listener in self._listeners:
                listener(phase)

    # Actions that do more than begin and end a phase.

    def start_data(self) -> None:
        if "forward" not in self._stack:
            self._stack = ["other"]
        self.enter("data")

    def stop_data(self) -> None:
        if "forward" in self._stack:
            # A module that takes the dataloader's iterator fetches and moves its batch inside its step.
            self.leave()
        else:
            # From here to the end of `batch_to_device` Lightning prepares and moves the batch.
            self.turn("data", "transfer")

    def start_transfer(self) -> None:
        if self._stack[-1] != "transfer":
            self.enter("transfer")

    def blame(self, exception: BaseException) -> None:
        """Note the running phase on an exception, unless an inner action has done so."""
        if not hasattr(exception, "lmbench_phase"):
            with suppress(AttributeError):  # of a frozen dataclass, say
                exception.lmbench_phase = self.current  # type: ignore[attr-defined]

    def handlers(self) -> dict[tuple[str, str], tuple[Handler, Handler]]:
        """The functions for start and stop of each action that bounds a phase, by the action's owner and name."""
        data = self.start_data, self.stop_data
        update = partial(self.leave, "other", "optimizer")
        forward = partial(self.enter, "forward"), self.leave
        return {
            (LOOP, "train_dataloader_next"): data,
            (LOOP, "val_next"): data,
            (STRATEGY, "training_step"): forward,
            (STRATEGY, "validation_step"): forward,
            (STRATEGY, "batch_to_device"): (self.start_transfer, self.leave),
            (STRATEGY, "backward"): (partial(self.enter, "backward"), update if self.has_scaler else self.leave),
            # This action contains the closure with forward and backward, so until clipping ends its time is `other`.
            (MODULE, "optimizer_step"): (partial(self.enter, "other"), self.leave),
            # Zeroing after the update ends the update.
            (MODULE, "optimizer_zero_grad"): (
                partial(self.enter, "zero_grad"),
                partial(self.leave, "optimizer", "other"),
            ),
            # The update follows clipping directly, inside the running `optimizer_step` action.
            (MODULE, "configure_gradient_clipping"): (partial(self.enter, "clip" if self.clips else "other"), update),
            ("", "save_checkpoint"): (partial(self.enter, CHECKPOINT), self.leave),
        }


class ManualTrack(PhaseTrack):
    """The phases of a module that optimizes manually, whose backward passes and updates happen inside its forward.

    Lightning announces `manual_backward` (between the hooks on_before_backward and on_after_backward) and updates of
    its own optimizers (from on_before_optimizer_step to the end of `step`). Under a scaler the unscaling before an
    update has no border, so `optimizer` is hidden too. Forward, clipping and zeroing cannot be told apart, and count as
    `other`.
    """

    def __init__(self, has_scaler: bool, clips: bool) -> None:
        super().__init__(has_scaler, clips)
        self._hidden |= {"forward", "clip", "zero_grad", *(["optimizer"] if has_scaler else [])}
        #: Phases that have not begun through Lightning.
        self._unannounced = {"backward", "optimizer"}

    def unseen_phases(self) -> list[str]:
        return [phase for phase in PHASES if phase in self._hidden | self._unannounced]

    def handlers(self) -> dict[tuple[str, str], tuple[Handler, Handler]]:
        end_backward = partial(self._stop, "backward"), _nothing
        return {
            **super().handlers(),
            (MODULE, "on_before_backward"): (_nothing, partial(self._start, "backward")),
            # The first hook after backward ends it: a callback's, or else the module's.
            (CALLBACK, "on_after_backward"): end_backward,
            (MODULE, "on_after_backward"): end_backward,
            (MODULE, "on_before_optimizer_step"): (_nothing, partial(self._start, "optimizer")),
            ("", "optimizer_step"): (_nothing, partial(self._stop, "optimizer")),
        }

    def _start(self, phase: str) -> None:
        if self._stack[-1] == phase:
            # The optimizer runs its closure several times, so forwards lie inside the update.
            self._hidden.add(phase)
            return
        self._unannounced.discard(phase)
        self.enter(phase)

    def _stop(self, phase: str) -> None:
        if self._stack[-1] == phase:
            self.leave()

    def watch_bypasses(self, undo: ExitStack, module: nn.Module, optimizers: Iterable[Any]) -> None:
        """Hide `backward` or `optimizer` where the module bypasses Lightning, until `undo` is closed.

        A `training_step` may call `loss.backward()` beside `self.manual_backward(loss)`, or PyTorch's optimizer beside
        Lightning's. Then a part of the phase has no borders, and the time of the other part alone would be wrong.
        PyTorch's hooks reveal the bypass: `Tensor.register_post_accumulate_grad_hook` and
        `Optimizer.register_step_post_hook`. They cost the host a call for every parameter, so close `undo` before the
        window.
        """
        for parameter in module.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(partial(self._hide_unless_running, "backward"))
                undo.callback(hook.remove)
        for optimizer in optimizers:
            if isinstance(optimizer, Optimizer):
                hook = optimizer.register_step_post_hook(partial(self._hide_unless_running, "optimizer"))
                undo.callback(hook.remove)

    def _hide_unless_running(self, phase: str, *_: Any) -> None:
        """Hide a phase from now on, if its work happens while another phase is running."""
        if self._stack[-1] != phase:
            self._hidden.add(phase)


def _nothing() -> None:
    pass


class Scope:
    """The two functions for an action's start and stop, as a context manager without state, so it can be reused."""

    __slots__ = ("_track", "start", "stop")

    def __init__(self, track: PhaseTrack, start: Callable[[], None], stop: Callable[[], None]) -> None:
        self.start, self.stop, self._track = start, stop, track

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, kind: Any, exception: BaseException | None, trace: Any) -> None:
        if exception is not None:
            self._track.blame(exception)
        self.stop()


class BorderProfiler(Profiler):
    """Passes every action on to the user's profiler, and those that bound a phase to a `PhaseTrack`."""

    def __init__(self, inner: Profiler, track: PhaseTrack) -> None:
        super().__init__()
        self.inner, self.track = inner, track
        self._handlers = track.handlers()
        self._scopes = dict[str, AbstractContextManager[None]]()
        if isinstance(inner, PassThroughProfiler):
            # Without a profiler of the user's, an action costs a look-up and no generator.
            self.profile = self.scope  # type: ignore[method-assign,assignment]
        # Profiler defines these methods, so `__getattr__` does not pass them on.
        for name in ("summary", "describe", "setup", "teardown"):
            setattr(self, name, getattr(inner, name))

    def scope(self, action_name: str) -> AbstractContextManager[None]:
        """The scope of an action, made at its first use: of `[Strategy]SingleDeviceStrategy.backward`, say."""
        scope = self._scopes.get(action_name)
        if scope is None:
            owner, _, hook = action_name.rpartition(".")
            kind = owner.partition("]")[0].lstrip("[")
            # A loop is named by its class, which is private: `[_TrainingEpochLoop]`.
            handlers = self._handlers.get((LOOP if kind.startswith("_") else kind, hook))
            # Most actions bound no phase: 17 of a step's 27.
            scope = self._scopes[action_name] = Scope(self.track, *handlers) if handlers else nullcontext()
        return scope

    def start(self, action_name: str) -> None:
        self.inner.start(action_name)
        self.scope(action_name).__enter__()

    def stop(self, action_name: str) -> None:
        self.scope(action_name).__exit__(*sys.exc_info())
        self.inner.stop(action_name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


def watch_restarts(undo: ExitStack, track: PhaseTrack) -> None:
    """Count making the loader's iterator at the begin of an epoch as `data`, until `undo` is closed.

    Lightning announces only the batches that it takes from the iterator.
    """
    begin = _DataFetcher.__iter__

    def restart(fetcher: _DataFetcher) -> _DataFetcher:
        track.enter("data")
        try:
            return begin(fetcher)
        finally:
            track.leave()

    undo.enter_context(patch.object(_DataFetcher, "__iter__", restart))
