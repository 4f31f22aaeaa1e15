"""What of the gradients' synchronization no work hides, without a trace: the same steps without it."""

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
    """Takes some steps with and some without synchronizing gradients, after all other probe steps.

    The difference is communication that no work hides, waiting for other ranks included. DDP alone can leave it out
    (`DistributedDataParallel.no_sync`): the other strategies have no whole gradients, or no whole parameters, without
    it. Ranks part in these steps, and nothing follows them.

    Leaves `probe.synchronized_step_s` and `probe.unsynchronized_step_s`, means of this rank.
    """

    def prepare(self) -> None:
        has_probe = isinstance(self.trainer.strategy, DDPStrategy) and self.trainer.world_size > 1
        kinds = (ProbeKind.SYNCHRONIZED, ProbeKind.UNSYNCHRONIZED) if has_probe else ()
        self.own_probes = tuple(kind for kind in kinds for _ in range(_STEPS))

    def probe_begins(self, kind: ProbeKind) -> None:
        if kind not in self.own_probes:
            return
        # What `no_sync` sets around a loop of one's own.
        model: Any = self.trainer.strategy.model
        model.require_backward_grad_sync = kind is ProbeKind.SYNCHRONIZED
        synchronize(self.session.device)
        self._began_s = time.perf_counter()

    def probe_ended(self, kind: ProbeKind) -> None:
        if kind not in self.own_probes:
            return
        synchronize(self.session.device)
        setattr(self.session.run.probe, f"{kind}_step_s", (time.perf_counter() - self._began_s) / _STEPS)
