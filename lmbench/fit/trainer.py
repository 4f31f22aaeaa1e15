"""Lightning's Trainer with defaults, precisions and checks for a measurement."""

from __future__ import annotations

import logging
import math
import sys
import warnings
from functools import partial
from typing import Any, Literal

from lightning.fabric.plugins.precision.precision import _PRECISION_INPUT
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher

from lmbench.callbacks import Compiler, KernelProfiler, Recomputer
from lmbench.callbacks.events import LeanCallback
from lmbench.errors import UsageError, check_at_least, check_launcher, unknown
from lmbench.fit.mixed_precision import FP8_CHANGES, REPAIRS, ROWWISE, Fp8Precision, Fp8Tokens, RepairedMixedPrecision
from lmbench.fit.strategies import STRATEGIES
from lmbench.instruments.compiling import CompileOptions
from lmbench.instruments.recomputing import RecomputeOptions
from lmbench.precision import find_precision
from lmbench.records.vocabulary import Values

#: Loggers of messages that are not about the measurement, with the level from which they are shown. torchao, which
#: transformers imports too, warns of libraries that this machine cannot load, and torch 2.13 of the way in which
#: torchao 0.18 registers constants.
LOGGERS = {
    "lightning.pytorch": logging.WARNING, "lightning.fabric": logging.WARNING, "torchao": logging.ERROR,
    "torch.utils._pytree": logging.ERROR,
}  # fmt: skip

# Everything that adds time or a synchronize to the window is off by default.
TRAINER_DEFAULTS: Values = {
    "devices": 1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
}

#: Lightning's own profilers.
_PROFILERS = ("simple", "advanced", "pytorch", "xla")

FLOAT16_ON_A_CPU = "16-mixed on a CPU is float16 with a loss scaler (Lightning 2.6 would take bfloat16)"


def as_list(callbacks: Any) -> list[Any]:
    """The Trainer's flag `callbacks`, which may be None, one callback or several, as a list."""
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]


class EpochAfterEpoch(LeanCallback):
    """Lets a Trainer train on after its last epoch.

    Modules make their schedules from the Trainer's `max_epochs` or `estimated_stepping_batches`, so these have to be
    finite: of -1 epochs a usual schedule is an error, or a learning rate of 0.
    """

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        loop = trainer.fit_loop
        loop.max_epochs = max(loop.max_epochs or 0, trainer.current_epoch + 2)


class BenchTrainer(Trainer):
    """Lightning's Trainer with three more flags, checks of its flags, and Lightning's mixed precision repaired.

    `repairs` lists the repairs, for the record.

    Args:
        precision: Lightning's name of a precision, or fp8-tensorwise, fp8-tensorwise-fast or fp8-rowwise: bf16-mixed
            with linear layers in fp8, by torchao.
        compile: compile the module in place: true, or options of torch.compile.
        recompute: which blocks the backward pass computes again; none by default.

    Raises:
        UsageError: Lightning refuses a flag, or the flags do not fit the launcher.
    """

    def __init__(
        self,
        *args: Any,
        precision: _PRECISION_INPUT | Literal["fp8-tensorwise", "fp8-tensorwise-fast", "fp8-rowwise"] | None = None,
        compile: bool | CompileOptions = False,
        recompute: RecomputeOptions | None = None,
        **kwargs: Any,
    ) -> None:
        options = CompileOptions() if compile is True else compile or None
        name = str(precision or "32-true")
        meaning = find_precision(name)
        is_fp8 = meaning is not None and meaning.peak == "fp8"
        kwargs["precision"] = "bf16-mixed" if is_fp8 else precision
        callbacks = [Compiler(options), *([] if recompute is None else [Recomputer(recompute)])]
        if is_fp8:
            callbacks.append(Fp8Tokens())
            # torchao's tensors cannot be cast in inference mode.
            kwargs["inference_mode"] = False
        if kwargs.get("max_epochs") is None and kwargs.get("max_steps", -1) == -1:
            # As many as Lightning gives a Trainer without a limit.
            kwargs["max_epochs"] = 1000
            callbacks.append(EpochAfterEpoch())
        own = as_list(kwargs.get("callbacks"))
        if any(isinstance(callback, Checkpoint) for callback in own):
            # TRAINER_DEFAULTS turns checkpointing off, and Lightning then refuses a Checkpoint callback.
            kwargs["enable_checkpointing"] = True
        kwargs["callbacks"] = [*callbacks, *own]
        check_at_least(1, "trainer", accumulate_grad_batches=kwargs.get("accumulate_grad_batches", 1))
        devices = str(kwargs.get("devices", 1))
        if devices.isdecimal():
            check_launcher(int(devices) * int(kwargs.get("num_nodes", 1)))
        profiler = kwargs.get("profiler")
        if profiler == "kernels":
            kwargs["profiler"] = KernelProfiler()
        elif isinstance(profiler, str) and profiler not in _PROFILERS:
            allowed = f"kernels, {', '.join(_PROFILERS)}, or a class such as lmbench.KernelProfiler"
            raise UsageError(f"trainer.profiler is {profiler!r}; allowed: {allowed}")
        strategy = kwargs.get("strategy")
        if isinstance(strategy, str) and strategy.lower() not in ("auto", *StrategyRegistry):
            raise unknown("trainer.strategy", strategy, ["auto", *STRATEGIES], ", or the path of a class")
        try:
            super().__init__(*args, **kwargs)
        except (ValueError, TypeError, ImportError, RuntimeError, MisconfigurationException) as error:
            raise UsageError(f"the Trainer refuses its flags: {error}") from error
        check_launcher(self.world_size)
        if self.world_size != self.num_devices * self.num_nodes:
            raise UsageError(
                f"{self.num_devices} devices on {self.num_nodes} nodes asked for, and the launcher started "
                f"{self.world_size} processes; start one for each device, such as `srun --ntasks-per-node`"
            )
        if isinstance(self.strategy.launcher, _MultiProcessingLauncher):
            raise UsageError("trainer.strategy spawns or forks processes of Python objects; give ddp in place of it")
        built_profiler: Profiler = self.profiler  # type: ignore[attr-defined]
        if built_profiler.filename is None:
            # Print the profiler's report on standard error: `quiet` silences its logger, and standard output may hold a
            # record.
            built_profiler._write_stream = partial(print, file=sys.stderr)
        _skip_copy_to_host(self.strategy)
        self.repairs = self._repair_precision(name, options, is_fp8=is_fp8)

    @property
    def estimated_stepping_batches(self) -> int | float:
        """Steps of the whole training, of which modules make schedules: 100,000 where neither data nor flags end it.

        Lightning's own answer is -1 there, or infinity.
        """
        steps = super().estimated_stepping_batches
        return steps if 0 <= steps < math.inf else 100_000

    def _repair_precision(self, name: str, options: CompileOptions | None, *, is_fp8: bool) -> list[str]:
        """Replace the precision plugin of fp8 and of mixed precision; returns the repairs."""
        plugin = self.strategy.precision_plugin
        if is_fp8:
            self.strategy.precision_plugin = Fp8Precision(name, self.strategy)
            return [*REPAIRS, *(FP8_CHANGES if options is not None and name == ROWWISE else FP8_CHANGES[:1])]
        if type(plugin) is not MixedPrecision:
            return []
        mixed = "16-mixed" if name in ("16-mixed", "16") else plugin.precision
        # Given no scaler, the plugin makes its own for float16.
        self.strategy.precision_plugin = RepairedMixedPrecision(mixed, plugin.device, plugin.scaler)  # type: ignore[arg-type]
        return [*REPAIRS, *([FLOAT16_ON_A_CPU] if mixed != plugin.precision else [])]


def _skip_copy_to_host(strategy: Strategy) -> None:
    """Skip Lightning's copy of weights and optimizer state to the host at the end of a run.

    The process ends next, or `lmbench.measure` moves the module back itself. For the 2.7B model the copy took 7 s of
    every run on an H200.
    """
    if type(strategy).teardown is not Strategy.teardown:
        return

    def teardown() -> None:
        # Lightning 2.6's teardown without its first half, the copy.
        strategy.precision_plugin.teardown()
        assert strategy.accelerator is not None
        strategy.accelerator.teardown()
        strategy.checkpoint_io.teardown()

    strategy.teardown = teardown  # type: ignore[method-assign]


def quiet() -> None:
    """Silence tips and warnings of libraries about their own calls, which say nothing about the measurement."""
    for name, level in LOGGERS.items():
        logging.getLogger(name).setLevel(level)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    warnings.filterwarnings("ignore", message=r".*LeafSpec.*")
    # A model that `from_pretrained` left in eval mode trains without dropout, and faster.
    warnings.filterwarnings("default", message=r"Found .* in eval mode")
