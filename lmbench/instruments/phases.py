"""Which phase of a step is going on, read from Lightning's own profiler actions.

Callbacks have no hook for the data wait, the transfer, the start of the forward or the end of clipping; Lightning's
profiler actions bound all of them exactly, also under accumulation. `PhaseTrack` is the state machine that turns
actions into a sequence of phases; `BorderProfiler` is the delegating profiler that feeds it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from typing import Any

from lightning.pytorch.profilers import PassThroughProfiler, Profiler
from torch import nn
from torch.optim import Optimizer

from lmbench.records.vocabulary import EXCLUDED, PHASES


class PhaseTrack:
    """A stack of phases; listeners hear of every change, with the phase that begins.

    Attributes:
        has_scaler: under `16-mixed` the gradients are unscaled between backward and clipping; that time is the
            optimizer's.
        clips: whether gradients are clipped, so that `clip` is a phase of its own and not an empty pair of borders.
    """

    def __init__(self) -> None:
        self.has_scaler, self.clips = False, True
        self.is_manual = False
        self.listeners: list[Callable[[str], None]] = []
        self._hidden: set[str] = set()
        self._announced: set[str] = set()
        self.reset()

    def reset(self, *phases: str) -> None:
        """Forget what was going on (a run begins, or an exception cut a phase short); take `phases` to be going on, the
        innermost last. Nobody is told."""
        self._stack = ["other", *phases]
        self.current = self._stack[-1]

    def unlisten(self, listener: Callable[[str], None]) -> None:
        """Take a listener away, if it is there."""
        if listener in self.listeners:
            self.listeners.remove(listener)

    # manual optimization

    def watch_manual_optimization(self) -> None:
        """A `training_step` that optimizes by hand: of what it does, only what Lightning announces has borders.

        These are `manual_backward` (between the hooks on_before_backward and on_after_backward) and the update of
        Lightning's optimizers (from on_before_optimizer_step to the end of `step`; under a scaler the unscaling before
        it has no border). The rest of the step is `other`: forward, clipping and zeroing cannot be told apart.
        """
        self.is_manual = True
        self._hidden = {"forward", "clip", "zero_grad"} | ({"optimizer"} if self.has_scaler else set())

    def expect(self, phase: str, *_: Any) -> None:
        """Something of the phase happens: from now on the phase's time is `other`, if it is not going on."""
        if self._stack[-1] != phase:
            self._hidden.add(phase)

    def unseen_phases(self) -> list[str]:
        """Phases whose time is in `other` because nobody can tell where they begin and end."""
        if not self.is_manual:
            return []
        unannounced = {"backward", "optimizer"} - self._announced
        return [phase for phase in PHASES if phase in self._hidden | unannounced]

    def enter(self, phase: str) -> None:
        self._stack.append(phase)
        self._announce()

    def leave(self, **turns: str) -> None:
        """The innermost phase ends; the one around it turns into another one, where `turns` says which."""
        if len(self._stack) > 1:
            self._stack.pop()
        self.turn(**turns)

    def turn(self, **turns: str) -> None:
        """The innermost phase turns into another one; what lies around all of them stays `other`."""
        if len(self._stack) > 1:
            self._stack[-1] = turns.get(self._stack[-1], self._stack[-1])
        self._announce()

    def _announce(self) -> None:
        phase = self._stack[-1]
        if phase in self._hidden:
            phase = "other"
        if phase != self.current:
            self.current = phase
            for listener in self.listeners:
                listener(phase)

    # What actions mean that are more than a phase's beginning and end.

    def start_data(self) -> None:
        if "forward" not in self._stack:
            self._stack = ["other"]
        self.enter("data")

    def stop_data(self) -> None:
        if "forward" in self._stack:
            # A module that takes the dataloader's iterator fetches and moves its batch itself, inside its step.
            self.leave()
        else:
            # What follows up to the end of `batch_to_device` prepares and moves the batch.
            self.turn(data="transfer")

    def start_transfer(self) -> None:
        if self._stack[-1] != "transfer":
            self.enter("transfer")

    def blame(self, exception: BaseException) -> None:
        """Note on an exception the phase it was raised in: the innermost action that it unwinds knows."""
        if not hasattr(exception, "lmbench_phase"):
            with suppress(AttributeError):  # a frozen dataclass, say
                exception.lmbench_phase = self.current  # type: ignore[attr-defined]

    # The same in manual optimization, where these happen inside the forward.

    def start_manual(self, phase: str) -> None:
        if self._stack[-1] == phase:
            # An optimizer that runs its closure several times: forwards lie inside the update.
            self._hidden.add(phase)
            return
        self._announced.add(phase)
        self.enter(phase)

    def stop_manual(self, phase: str) -> None:
        if self._stack[-1] == phase:
            self.leave()


def _nothing() -> None:
    pass


_Handlers = dict[tuple[str, str], tuple[Callable[[], None], Callable[[], None]]]


class Scope:
    """An action's start and stop, also as a context manager; it has no state, so one serves every time."""

    __slots__ = ("_track", "start", "stop")

    def __init__(self, track: PhaseTrack, start: Callable[[], None], stop: Callable[[], None]) -> None:
        self.start, self.stop, self._track = start, stop, track

    def __enter__(self) -> None:
        self.start()

    def __exit__(self, kind: Any, exception: BaseException | None, trace: Any) -> None:
        if exception is not None:
            self._track.blame(exception)
        self.stop()


class _Scopes(dict[str, Scope]):
    """Every action's scope, made when the action is first seen; afterwards it costs one look-up."""

    def __init__(self, track: PhaseTrack) -> None:
        super().__init__()
        self._track = track

    def __missing__(self, action_name: str) -> Scope:
        track = self._track
        data, forward = (track.start_data, track.stop_data), (partial(track.enter, "forward"), track.leave)
        # The update follows clipping at once, inside the running `optimizer_step` action.
        clip = partial(track.enter, "clip"), partial(track.leave, other="optimizer")
        # What to do when an action starts and when it stops, by the beginning of its owner's name and its own. Owners
        # are `[_TrainingEpochLoop]`, `[Strategy]...`, `[LightningModule]...`; callbacks' own hooks mean nothing.
        handlers: _Handlers = {
            **{("[_", f"{loader}_next"): data for loader in ("train_dataloader", "val", "test")},
            **{("[S", f"{kind}_step"): forward for kind in ("training", "validation", "test")},
            ("[S", "batch_to_device"): (track.start_transfer, track.leave),
            ("[S", "backward"): (
                partial(track.enter, "backward"),
                partial(track.leave, other="optimizer") if track.has_scaler else track.leave,
            ),
            # Contains forward and backward (the closure), so it is nobody's time until clipping is over.
            ("[L", "optimizer_step"): (partial(track.enter, "other"), track.leave),
            # Gradients zeroed after the update: the update is over, do not go back to it.
            ("[L", "optimizer_zero_grad"): (
                partial(track.enter, "zero_grad"), partial(track.leave, optimizer="other"),
            ),
            ("[L", "configure_gradient_clipping"): (
                clip if track.clips else (_nothing, partial(track.turn, other="optimizer"))
            ),
            ("", "save_checkpoint"): (partial(track.enter, EXCLUDED), track.leave),
        }  # fmt: skip
        if track.is_manual:
            # The first of the callbacks' hooks after backward ends it; the module's own comes last.
            end_backward = (partial(track.stop_manual, "backward"), _nothing)
            handlers |= {
                ("[L", "on_before_backward"): (_nothing, partial(track.start_manual, "backward")),
                ("[C", "on_after_backward"): end_backward,
                ("[L", "on_after_backward"): end_backward,
                ("[L", "on_before_optimizer_step"): (_nothing, partial(track.start_manual, "optimizer")),
                ("", "optimizer_step"): (_nothing, partial(track.stop_manual, "optimizer")),
            }
        owner, _, hook = action_name.rpartition(".")
        scope = self[action_name] = Scope(track, *handlers.get((owner[:2], hook), (_nothing, _nothing)))
        return scope


class BorderProfiler(Profiler):
    """Passes every action on to the user's profiler and tells a `PhaseTrack` of the ones that bound a phase."""

    def __init__(self, inner: Profiler, track: PhaseTrack) -> None:
        super().__init__()
        self.inner, self.track = inner, track
        self._silent = isinstance(inner, PassThroughProfiler)
        self._scopes = _Scopes(track)
        # The rest of a profiler's life belongs to the user's own.
        for name in ("summary", "describe", "setup", "teardown"):
            setattr(self, name, getattr(inner, name))

    def start(self, action_name: str) -> None:
        self.inner.start(action_name)
        self._scopes[action_name].start()

    def stop(self, action_name: str) -> None:
        self._scopes[action_name].__exit__(None, sys.exc_info()[1], None)
        self.inner.stop(action_name)

    def profile(self, action_name: str) -> AbstractContextManager[Any]:  # type: ignore[override]
        """The scope of an action; without a profiler of the user's it costs a look-up and no generator."""
        return self._scopes[action_name] if self._silent else super().profile(action_name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["inner"], name)


class BypassWatch(ExitStack):
    """Marks `backward` or `optimizer` as unseen where manual optimization also goes around Lightning, until `close`.

    A `training_step` may call `loss.backward()` beside `self.manual_backward(loss)`, or PyTorch's own optimizer beside
    Lightning's: then a part of the phase has no borders, and the rest would be a wrong time under its name. PyTorch's
    hooks tell: `Tensor.register_post_accumulate_grad_hook`, `Optimizer.register_step_post_hook`. They cost the host
    a call for every parameter, so close it before the window.
    """

    def __init__(self, module: nn.Module, optimizers: Iterable[Any], track: PhaseTrack) -> None:
        super().__init__()
        for parameter in module.parameters():
            if parameter.requires_grad:
                hook = parameter.register_post_accumulate_grad_hook(partial(track.expect, "backward"))
                self.callback(hook.remove)
        for optimizer in optimizers:
            if isinstance(optimizer, Optimizer):
                self.callback(optimizer.register_step_post_hook(partial(track.expect, "optimizer")).remove)
