"""Tokens, FLOPs, watts: what the window achieved."""

from __future__ import annotations

from typing import Any

from lmbench.callbacks.observer import Observer
from lmbench.instruments.environment import DeviceSensor, derive_device_state, host_state, read_host
from lmbench.instruments.subject import count_flops, note_peak, token_counter
from lmbench.instruments.window import ProbeKind
from lmbench.records.vocabulary import Stage


class ThroughputMeter(Observer):
    """Tokens per second, model FLOP/s, MFU, power and energy per token of the window.

    The module, or else its data module, tells the tokens by `tokens_per_batch(batch) -> int`, and the module its FLOPs
    by `flops_per_token() -> FlopCount | int`. Without the first, tokens are those of the batch's `input_ids`, or null.
    Without the second, `lmbench fit`
    counts on a fake copy of the module when all steps are done; in a Trainer of your own FLOPs are null then, since
    the counter would run your `training_step` once more. Reasons are left beside the blanks.

    Leaves `window.tokens`, `window.tokens_reason`, `device_state.*` (NVML readings at both ends of the window) and
    `host_state.*` (the kernel's, of other processes).
    """

    def prepare(self) -> None:
        self._tokens = 0
        self._count_tokens = token_counter(self.module, self.trainer.datamodule)  # type: ignore[attr-defined]
        self._tells_flops = callable(getattr(self.module, "flops_per_token", None))
        self._sample: tuple[Any, int] | None = None

    def run_started(self) -> None:
        self._sensor = DeviceSensor(self.session.device)

    def batch_ended(self, outputs: Any, batch: Any) -> None:
        # A module that takes the iterator of the data gets no batch.
        tokens = None if batch is None else self._count_tokens(batch)
        if tokens is not None:
            step = self.session.step
            step.tokens = (step.tokens or 0) + tokens or None
            if self._sample is None and not self._tells_flops and not self.session.only_watches:
                self._sample = batch, tokens

    def run_closing(self, exception: BaseException | None) -> None:
        # All steps are done: now a module that does not tell its FLOPs may be asked by the counter.
        stage = self.trainer.state.fn
        if exception is None and self._sample is not None and stage is not None:
            run = self.session.run
            count_flops(run.flops, self.module, run.mode or "train_step", stage.value, *self._sample)
            note_peak(run)

    def before_window(self) -> None:
        self._tokens = 0
        self._open, self._host_open = self._sensor.read(), read_host()

    def step_ended(self, stage: Stage, kind: ProbeKind | None) -> None:
        if stage is Stage.WINDOW:
            self._tokens += self.session.step.tokens or 0

    def window_closed(self) -> None:
        run = self.session.run
        run.host_state = host_state(self._host_open, read_host())
        run.window.tokens = self._tokens or None
        if not self._tokens:
            reason = "neither the module nor its data has tokens_per_batch(batch), and no batch holds input_ids"
            run.window.tokens_reason = reason
        run.device_state = derive_device_state(self._open, self._sensor.read(), self.session.raw_wall_s)
