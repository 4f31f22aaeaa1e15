"""Measures what the gradients' synchronization costs, and what the loop adds to it, without a trace."""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

from lightning.pytorch.strategies import DDPStrategy
from torch.nn.parallel import DistributedDataParallel

from lmbench.callbacks.observer import Observer
from lmbench.code_owners import location_of
from lmbench.instruments.compiling import bucket_split_count
from lmbench.instruments.window import ProbeKind

#: Probe steps of each kind.
_STEPS = 8


class CommunicationProbe(Observer):
    """Measures communication between ranks; on one rank it does nothing.

    After all other probe steps it times steps with and without gradient synchronization. The difference is the
    communication that no computation hides, waiting for other ranks included. Only DDP can train a step without it
    (`DistributedDataParallel.no_sync`): other strategies need it for whole gradients or parameters. The ranks' weights
    diverge in these steps, so no other steps follow.

    Recorded under `probe`, as means over 8 steps of this rank; null on one rank and without DDP:

    - `synchronized_step_s`: seconds of a step with synchronization.
    - `unsynchronized_step_s`: seconds of a step without it.

    Recorded under `communication`, of the window:

    - `sigterm_check_s`, `sigterm_check_location`: host seconds per step in Lightning's check for SIGTERM, and its line.
    - `bucket_copy_bytes`: gradients that DDP copies out of buckets; null without DDP.
    - `bucket_split_count`: graphs that Dynamo added by splitting at DDP's buckets; null without DDP.
    """

    def prepare(self) -> None:
        self.own_probes = ()
        self._checked_s = 0.0
        if isinstance(self.trainer.strategy, DDPStrategy) and self.trainer.world_size > 1:
            self.own_probes = (ProbeKind.SYNCHRONIZED,) * _STEPS + (ProbeKind.UNSYNCHRONIZED,) * _STEPS

    def window_opened(self) -> None:
        loop: Any = self.trainer.fit_loop.epoch_loop
        # An attribute of the loop itself is lmbench's, which has turned the check off.
        if self.trainer.world_size > 1 and "_broadcast_sigterm_tensor" not in vars(loop):
            check = loop._broadcast_sigterm_tensor

            def timed_check() -> None:
                began_s = time.perf_counter()
                check()
                self._checked_s += time.perf_counter() - began_s

            self.undo.enter_context(patch.object(loop, "_broadcast_sigterm_tensor", timed_check))
            code = check.__func__.__code__
            location = location_of(code.co_filename, code.co_firstlineno)
            self.run.communication.sigterm_check_location = location

    def window_closed(self) -> None:
        self.undo.close()
        if self.trainer.world_size == 1:
            return
        facts = self.run.communication
        facts.sigterm_check_s = self._checked_s / max(self.session.window_steps, 1)
        model = self.trainer.strategy.model
        if isinstance(model, DistributedDataParallel):
            copied_bytes = sum(p.nbytes for p in model.parameters() if p.requires_grad)
            facts.bucket_copy_bytes = 0 if model.gradient_as_bucket_view else copied_bytes
            facts.bucket_split_count = bucket_split_count()

    def probe_begins(self, kind: ProbeKind) -> None:
        if kind not in self.own_probes:
            return
        # The attribute that `no_sync` sets; as a context manager it does not fit around Lightning's loop.
        model: Any = self.trainer.strategy.model
        model.require_backward_grad_sync = kind is ProbeKind.SYNCHRONIZED
        self.device.synchronize()
        self._began_s = time.perf_counter()

    def probe_ended(self, kind: ProbeKind) -> None:
        if kind not in self.own_probes:
            return
        self.device.synchronize()
        setattr(self.run.probe, f"{kind}_step_s", (time.perf_counter() - self._began_s) / _STEPS)
