"""The measurement's own settings (`--measure.*`), and checks that no parser makes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal
from zipfile import is_zipfile

from jsonargparse.typing import register_type

from lmbench.errors import UsageError
from lmbench.instruments.window import Schedule
from lmbench.records.vocabulary import Mode

_SEED_LIMIT = 2**32


class Duration(float):
    """Seconds, from a text such as 90s, 10m or 2h."""

    def __new__(cls, text: str | float) -> Duration:
        number, unit = re.fullmatch(r"(.*?)([smh]?)", str(text)).groups()  # type: ignore[union-attr]
        return super().__new__(cls, float(number) * {"m": 60, "h": 3600}.get(unit, 1))


register_type(Duration, float)


@dataclass
class MeasureSettings(Schedule):
    """The mode, the length of the measurement, and the folder of its result.

    It also has the settings of `lmbench.Schedule`: warmup_steps, min_window_s, probe_steps, collective_timeout_s.

    Args:
        steps: least number of steps in the window.
        mode: forward (graph kept, no backward), forward_backward (no optimizer) or train_step. `lmbench validate`
            always measures inference (on validation_step), which `lmbench.measure` takes as a mode.
        matmul_precision: precision of float32 matrix products: highest is fp32, high is TF32.
        zero_grad: after_step frees gradients as soon as they are used; native is Lightning's order (between forward
            and backward), which keeps them alive through the forward. auto is after_step for lmbench's own models and
            native for your module, which is measured as it is.
        gradient_norm: record the gradient norm of every step that updates weights. It costs kernels, which count as
            phase `clip` of the step.
        sigterm_broadcast: with several ranks, keep Lightning's check for SIGTERM: a broadcast for each batch, whose
            result the host waits for. Without it lmbench, or the launcher, ends all ranks when one was ended.
        blocks: keep only so many of the module's alike blocks, to see what a block costs; null keeps all.
        what_if: note the change that this run makes true, such as collectives=0, to see it beside the prediction that a
            trace of the run called `nothing` makes (the study `what_if`). It changes nothing itself.
        loader: after the other probe steps, time the loader and the model alone, and with the fewest workers with
            which no step waits for its batch; nothing is timed if measure.probe_steps is 0.
        results_dir: folder of result folders.
        run_id: name of the result's folder; by default a new name is made up.
        strict: exit with 4 when a guard fails.
        price_per_hour: price of a device for an hour, in any currency; the result then says what tokens cost.

    Raises:
        UsageError: the price is below 0, or no number.
    """

    mode: Mode = "train_step"
    steps: int = 20
    min_window_s: float | Duration = 3.0
    probe_steps: int = 5
    matmul_precision: Literal["highest", "high"] = "highest"
    zero_grad: Literal["auto", "after_step", "native"] = "auto"
    gradient_norm: bool = False
    sigterm_broadcast: bool = False
    blocks: int | None = None
    what_if: str | None = None
    loader: bool = False
    results_dir: str = "results"
    run_id: str | None = None
    strict: bool = False
    price_per_hour: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.price_per_hour < 1e9:
            raise UsageError(
                f"measure.price_per_hour is {self.price_per_hour:g}; give the price of a device for an hour"
            )


def check_settings(config: Any) -> None:
    """Check the parsed settings of a command, a namespace with `get`, for values that the parser accepts.

    Raises:
        UsageError: the seed does not fit NumPy, `ckpt_path` is no checkpoint, or a limit keeps training from ending.
    """
    check_limits(config.trainer)
    seed = config.get("seed_everything")
    if seed is not None and not 0 <= seed < _SEED_LIMIT:
        raise UsageError(f"seed_everything is {seed}; it must be from 0 to {_SEED_LIMIT - 1}")
    # Addresses are left to Lightning. Its `best` and `last` name checkpoints of earlier runs of the same Trainer, and
    # this Trainer has none: they are refused.
    checkpoint = config.get("ckpt_path")
    if checkpoint is not None and "://" not in checkpoint and not is_zipfile(checkpoint):
        raise UsageError(f"ckpt_path {checkpoint!r} is no file that torch.save wrote; give a checkpoint's")


def check_limits(trainer: Any) -> None:
    """Refuse limits that keep training from ending; `trainer` has the Trainer's flags and a `get`.

    Raises:
        UsageError: `min_steps` or `min_epochs` is set.
    """
    for name in ("min_steps", "min_epochs"):
        if trainer.get(name) is not None:
            raise UsageError(
                f"trainer.{name} is {trainer.get(name)}; lmbench ends training itself, after the window: "
                "ask for more with --measure.steps or --measure.min_window_s"
            )
