"""Records the tokens, FLOPs and power of the window."""

from __future__ import annotations

import time
from typing import Any

import torch
from lightning.fabric.utilities.apply_func import move_data_to_device

from lmbench.callbacks.events import Outputs
from lmbench.callbacks.observer import Observer
from lmbench.device.sensor import derive_device_state
from lmbench.instruments.host import host_state, read_host
from lmbench.instruments.subject import count_flops, padding_of, token_counter
from lmbench.instruments.window import ProbeKind
from lmbench.records.step import StepRecord
from lmbench.records.vocabulary import Stage

#: Seconds between two readings of the sensor within the window.
READING_INTERVAL_S = 10.0


class ThroughputMeter(Observer):
    """Records the tokens and FLOPs of the window, and the state of device and host at its two ends.

    A RunRecorder derives tokens per second, FLOP/s, MFU and energy per token from them.

    Tokens come from `tokens_per_batch(batch) -> int` of the module or else of its data module, or else from the batch's
    `input_ids`, or its largest tensor if that holds integers which an `nn.Embedding` can look up. FLOPs come from the
    module's `flops_per_token() -> FlopCount | int`. Without that method `lmbench fit` counts them on a fake copy of the
    module after the last step. In your own Trainer they are then null, because counting would run your `training_step`
    once more.

    Recorded in the step records and the run:

    - `tokens`: tokens of the step, on this rank.
    - `window.tokens`: tokens of the window; `window.tokens_reason`: why they are null.
    - `data.padding_fraction`: share of padding in the tokens of the warm-up's batches.
    - `flops.*`: FLOPs per token, where this callback counted them, or the `reason` why not.
    - `sm_clock_hz`, `temperature_c` of a step each 10 s.
    - `device_state.*`: power (watts), energy (joules), temperature, clocks and caps, from NVML or amdsmi.
    - `host_state.*`: shares of the cores' time that other processes and the hypervisor took, from the kernel.

    Raises:
        UsageError: `tokens_per_batch` returned no whole number.
    """

    def prepare(self) -> None:
        self._count_tokens = token_counter(self.module, self.trainer.datamodule)  # type: ignore[attr-defined]
        self._has_flops = callable(getattr(self.module, "flops_per_token", None))
        #: Batches of different numbers of tokens, by these, to count FLOPs on.
        self._samples = dict[int, Any]()
        #: Padding, and all tokens, of the warm-up's batches.
        self._padded = self._seen = 0

    def run_started(self) -> None:
        self._sensor = self.device.sensor()

    def batch_ended(self, outputs: Outputs, batch: Any) -> None:
        # There is no batch where the module's step takes the data iterator.
        tokens = None if batch is None else self._count_tokens(batch)
        if tokens is not None:
            step = self.session.step
            step.tokens = (step.tokens or 0) + tokens or None
            is_new = bool(tokens) and tokens not in self._samples
            # A copy to the host waits for the device, which would disturb the window and the lag probes.
            may_wait = self.session.stage is Stage.WARMUP or self.session.probe_kind is ProbeKind.TRAINING
            if is_new and (may_wait or not self._samples) and not self._has_flops and not self.session.only_watches:
                # On the device it would be in the window's peak of memory.
                self._samples[tokens] = move_data_to_device(batch, torch.device("cpu"))
        if self.session.stage is Stage.WARMUP:
            # Looking at a batch lets the host wait for the device.
            padded, seen = padding_of(batch)
            if tokens is not None:
                # `tokens_per_batch` may leave padding out.
                padded, seen = min(padded, max(0, tokens - (seen - padded))), tokens
            self._padded, self._seen = self._padded + padded, self._seen + seen

    def run_closing(self, exception: BaseException | None) -> None:
        # All steps are done, so running the module's step once more disturbs no measurement.
        stage = self.trainer.state.fn
        if exception is None and self._samples and stage is not None:
            run = self.run
            # Longer sequences take more FLOPs a token: count on the batch that is nearest to the window's mean.
            batches = (run.window.steps or 1) * (run.window.micro_batches or 1)
            tokens = min(self._samples, key=lambda count: abs(count * batches - (run.window.tokens or 0)))
            batch = move_data_to_device(self._samples[tokens], self.session.device)
            count_flops(run.flops, self.module, str(run.mode), stage.value, batch, tokens)

    def before_window(self) -> None:
        if self._seen:
            # By tokens: of batches of different lengths, the long ones have more padding.
            self.run.data.padding_fraction = self._padded / self._seen
        self._tokens = 0
        self._open, self._host_open = self._sensor.read(), read_host()
        self._reading_due_s = time.monotonic() + READING_INTERVAL_S

    def steps_recorded(self, records: list[StepRecord]) -> None:
        # The timer hands records over in excluded time.
        if self.session.stage is Stage.WINDOW and time.monotonic() >= self._reading_due_s:
            reading, self._reading_due_s = self._sensor.read(), time.monotonic() + READING_INTERVAL_S
            self.session.step.sm_clock_hz, self.session.step.temperature_c = reading.sm_clock_hz, reading.temperature_c

    def step_ended(self) -> None:
        if self.session.stage is Stage.WINDOW:
            self._tokens += self.session.step.tokens or 0

    def window_closed(self) -> None:
        run = self.run
        run.host_state = host_state(self._host_open, read_host())
        run.window.tokens = self._tokens or None
        if not self._tokens:
            reason = (
                "neither the module nor its data has tokens_per_batch(batch), no batch holds input_ids, and no "
                "nn.Embedding can look up the largest tensor of a batch"
            )
            run.window.tokens_reason = reason
        run.device_state = derive_device_state(self._open, self._sensor.read(), self.session.raw_wall_s)
