"""Measures how much of the gradient synchronization no computation hides, without a trace."""

from __future__ import annotations

import time
from typing import Any

from lightning.pytorch.strategies import DDPStrategy

from lmbench.callbacks.observer import Observer
from lmbench.instruments.clock import synchronize
from lmbench.instruments.window import ProbeKind

#: Probe steps of each kind.
_STEPS = 8


class CommunicationProbe(Observer):
    """Times steps with and without gradient synchronization, after all other probe steps.

    The difference is the communication that no computation hides, waiting for other ranks included. Only DDP can train
    a step without it (`DistributedDataParallel.no_sync`): other strategies need it for whole gradients or parameters.
    The ranks' weights diverge in these steps, so no other steps follow.

    Recorded under `probe`, as means over 8 steps of this rank; null on one rank and without DDP:

    - `synchronized_step_s`: seconds of a step with synchronization.
    - `unsynchronized_step_s`: seconds of a step without it.
    """

    def prepare(self) -> None:
        self.own_probes = ()
        if isinstance(self.trainer.strategy, DDPStrategy) and self.trainer.world_size > 1:
            self.own_probes = (ProbeKind.SYNCHRONIZED,) * _STEPS + (ProbeKind.UNSYNCHRONIZED,) * _STEPS

    def probe_begins(self, kind: ProbeKind) -> None:
        if kind not in self.own_probes:
            return
        # The attribute that `no_sync` sets; as a context manager it does not fit around Lightning's loop.
        model: Any = self.trainer.strategy.model
        model.require_backward_grad_sync = kind is ProbeKind.SYNCHRONIZED
        synchronize(self.session.device)
        self._began_s = time.perf_counter()

    def probe_ended(self, kind: ProbeKind) -> None:
        if kind not in self.own_probes:
            return
        synchronize(self.session.device)
        setattr(self.session.run.probe, f"{kind}_step_s", (time.perf_counter() - self._began_s) / _STEPS)
