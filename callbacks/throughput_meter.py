"""Tokens, FLOPs, watts: what the window achieved."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lmbench.callbacks.session import Observer
from lmbench.measure.device_state import DeviceSensor, derive_device_state
from lmbench.measure.schedule import ProbeKind, Stage


class ThroughputMeter(Observer):
    """Tokens per second, model FLOP/s, MFU, power and energy per token of the window.

    The module tells its tokens by `tokens_per_batch(batch) -> int` and its FLOPs by `flops_per_token() -> FlopCount`;
    without them the fields are null, with the reason in `throughput.mfu_reason`.

    Leaves `window.tokens`, `flops.*` and `device_state.*` (NVML readings at both ends of the window).
    """

    def __init__(self) -> None:
        self._tokens = 0

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._module = pl_module
        self._trainer = trainer
        self._count_tokens = getattr(pl_module, "tokens_per_batch", None)

    def run_started(self) -> None:
        self._sensor = DeviceSensor(self.session.device)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._count_tokens is not None:
            self.session.add_tokens(self._count_tokens(batch))

    def on_validation_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any) -> None:
        if trainer.state.fn != "fit":
            self.on_train_batch_start(trainer, pl_module, batch, 0)

    def on_test_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, *_: Any) -> None:
        self.on_train_batch_start(trainer, pl_module, batch, 0)

    def before_window(self) -> None:
        self._tokens = 0
        self._open = self._sensor.read()

    def step_ended(self, stage: Stage, kind: ProbeKind | None) -> None:
        if stage is Stage.WINDOW:
            self._tokens += self.session.step_facts["tokens"] or 0

    def window_closed(self) -> None:
        facts = self.session.facts
        close = self._sensor.read()
        facts["window"]["tokens"] = self._tokens or None
        facts["device_state"] = {
            "open": self._open,
            "close": close,
            **derive_device_state(self._open, close, facts["window"]["raw_wall_s"]),
        }
