"""The measurement's own settings, the command line's group `--measure.*`; and settings nothing can be measured with."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal
from zipfile import is_zipfile

from lmbench.errors import UsageError
from lmbench.instruments.window import Schedule
from lmbench.records.vocabulary import Mode

_SEED_LIMIT = 2**32


@dataclass
class MeasureSettings(Schedule):
    """What is measured, for how long, and where the result goes.

    Args:
        mode: forward (graph kept, no backward), forward_backward (no optimizer) or train_step. `lmbench validate`
            measures inference, whatever this says.
        warmup_steps: steps before the window.
        steps: the window's steps, at least.
        min_window_s: the window's seconds, at least.
        probe_steps: unmeasured steps after the window that look at the lag inside phases; 0 leaves out all probes.
        matmul_precision: float32 matrix products: highest is fp32, high is TF32.
        zero_grad: after_step frees gradients as soon as they are used; native is Lightning's order (between forward
            and backward), which keeps them alive through the forward. auto is after_step for lmbench's own model and
            native for yours, which is measured as it is.
        gradient_norm: record the gradient norm of every step that updates weights. It costs kernels, which are phase
            `clip` of the step.
        collective_timeout_s: how long a rank waits for the others, once the first step is done, before it ends the run.
        results_dir: where result folders go.
        run_id: the result folder's name; by default one of its own is made up.
        strict: exit with 4 when a guard fails.
    """

    mode: Mode = "train_step"
    steps: int = 20
    min_window_s: float = 3.0
    probe_steps: int = 10
    matmul_precision: Literal["highest", "high"] = "highest"
    zero_grad: Literal["auto", "after_step", "native"] = "auto"
    gradient_norm: bool = False
    results_dir: str = "results"
    run_id: str | None = None
    strict: bool = False


@dataclass
class MemorySettings:
    """What is told of the device's memory, for `lmbench memory`.

    Args:
        predict: predict the run's memory too, when it is over and in a process of its own, and keep both figures.
        history: record the allocator's history over a few steps after the warm-up; that makes the run no timing.
        steps: steps to record; they are the run's window, whatever measure.steps and measure.min_window_s say.
        max_entries: entries that the history may hold; older ones are lost, and that is said.
    """

    predict: bool = False
    history: bool = False
    steps: int = 3
    max_entries: int = 1_000_000


@dataclass
class DtypeSettings:
    """What is told of dtypes, for `lmbench dtypes`.

    Args:
        record: note the dtypes of parameters, modules, operators, loss, gradients and optimizer state on one probe
            step, with the reason for each cast; none without measure.probe_steps.
    """

    record: bool = False


def refuse(config: Any) -> None:
    """Look through the parsed settings of a command, a namespace with `get`, for what every parser lets through.

    Raises:
        UsageError: a seed that NumPy cannot take, a file that is no checkpoint, or a limit that would keep training
            from ending.
    """
    refuse_least(config.trainer)
    seed = config.get("seed_everything")
    if seed is not None and not 0 <= seed < _SEED_LIMIT:
        raise UsageError(f"seed_everything is {seed}; it must be from 0 to {_SEED_LIMIT - 1}")
    # An address is the file system's business; `best` and `last` are of earlier runs of the same Trainer, and there
    # are none.
    checkpoint = config.get("ckpt_path")
    if checkpoint is not None and "://" not in checkpoint and not is_zipfile(checkpoint):
        raise UsageError(f"ckpt_path {checkpoint!r} is no file that torch.save wrote; give a checkpoint's")


def refuse_least(trainer: Any) -> None:
    """Look for limits that would keep training from ending; `trainer` has the Trainer's flags and a `get`.

    Raises:
        UsageError: there is one.
    """
    for name in ("min_steps", "min_epochs"):
        if trainer.get(name) is not None:
            raise UsageError(
                f"trainer.{name} is {trainer.get(name)}; lmbench ends training itself, after the window: "
                "ask for more with --measure.steps or --measure.min_window_s"
            )
