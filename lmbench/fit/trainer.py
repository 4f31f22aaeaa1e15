"""Lightning's Trainer, as a measurement needs it."""

from __future__ import annotations

import logging
import sys
import warnings
from functools import partial
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Trainer
from lightning.pytorch.plugins import MixedPrecision, Precision
from lightning.pytorch.profilers import Profiler
from lightning.pytorch.strategies import Strategy, StrategyRegistry
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher
from lightning.pytorch.utilities import GradClipAlgorithmType

from lmbench.callbacks import Compiler, KernelProfiler
from lmbench.errors import UsageError, check_at_least, check_launcher, unknown
from lmbench.fit.model_parallel import STRATEGIES
from lmbench.instruments.compiling import CompileOptions
from lmbench.precision import PRECISIONS, find_precision

#: What Lightning says while it sets up and runs, which is about its own calls and not about the measurement.
LOGGERS = ("lightning.pytorch", "lightning.fabric")

# What would add time or synchronize inside the window is off unless asked for.
TRAINER_DEFAULTS: dict[str, Any] = {
    "devices": 1,
    "max_epochs": -1,
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
    "limit_val_batches": 0,
    "use_distributed_sampler": False,
}

LIGHTNING_PROFILERS = ("simple", "advanced", "pytorch", "xla")

#: What `RepairedMixedPrecision` repairs, for the record.
REPAIRS = (
    "autocast keeps its cache of cast weights (Lightning 2.6 turns it off: issue #21611)",
    "clipping works with a fused optimizer where there is no loss scaler (Lightning 2.6 refuses: issue #21435)",
)
FLOAT16_ON_A_CPU = "16-mixed on a CPU is float16 with a loss scaler (Lightning 2.6 would take bfloat16)"


class RepairedMixedPrecision(MixedPrecision):
    """`MixedPrecision` with autocast's weight cache on, and clipping allowed for fused optimizers without a scaler."""

    def autocast_context_manager(self) -> torch.autocast:
        return torch.autocast(self.device, dtype=PRECISIONS[self.precision].compute_dtype())

    def clip_gradients(
        self,
        optimizer: Any,
        clip_val: int | float = 0.0,
        gradient_clip_algorithm: GradClipAlgorithmType = GradClipAlgorithmType.NORM,
    ) -> None:
        # Without a scaler a fused optimizer unscales nothing, and Lightning's refusal has no reason.
        owner = Precision if self.scaler is None else MixedPrecision
        owner.clip_gradients(self, optimizer, clip_val, gradient_clip_algorithm)


def as_list(callbacks: Any) -> list[Any]:
    """The Trainer's flag `callbacks`, which takes none, one, or several."""
    if callbacks is None:
        return []
    return list(callbacks) if isinstance(callbacks, list | tuple) else [callbacks]


class BenchTrainer(Trainer):
    """A Trainer whose defaults disturb nothing; takes every flag that Lightning's takes.

    Args:
        compile: compile the module in place: true, or options.
    """

    def __init__(self, *args: Any, compile: bool | CompileOptions = False, **kwargs: Any) -> None:
        options = CompileOptions() if compile is True else compile or None
        kwargs["callbacks"] = [Compiler(options), *as_list(kwargs.get("callbacks"))]
        precision = str(kwargs.get("precision") or "32-true")
        check_at_least(1, **{"trainer.accumulate_grad_batches": kwargs.get("accumulate_grad_batches", 1)})
        devices = str(kwargs.get("devices", 1))
        if devices.isdecimal():
            check_launcher(int(devices) * int(kwargs.get("num_nodes", 1)))
        profiler = kwargs.get("profiler")
        if profiler == "kernels":
            kwargs["profiler"] = KernelProfiler()
        elif isinstance(profiler, str) and profiler.lower() not in LIGHTNING_PROFILERS:
            raise UsageError(
                f"trainer.profiler is {profiler!r}; allowed: kernels, {', '.join(LIGHTNING_PROFILERS)}, or a class "
                "such as lmbench.KernelProfiler"
            )
        # From a copy: jsonargparse would take `kwargs.get` for an argument without a type.
        strategy = dict(kwargs).get("strategy", "auto")
        if isinstance(strategy, str) and strategy not in ("auto", *StrategyRegistry.available_strategies()):
            raise unknown("trainer.strategy", strategy, STRATEGIES, ", or another of Lightning's")
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
        meaning = find_precision(precision)
        if self.strategy.root_device.type == "cpu" and meaning is not None and not meaning.runs_on_cpu:
            allowed = ", ".join(name for name, known in PRECISIONS.items() if known.runs_on_cpu)
            raise UsageError(f"precision {precision} on a CPU; allowed there: {allowed}")
        built_profiler: Profiler = self.profiler  # type: ignore[attr-defined]
        if built_profiler.filename is None:
            # Its report would go to a logger that lmbench keeps quiet; standard output may be a record's.
            built_profiler._write_stream = partial(print, file=sys.stderr)
        _leave_in_place(self.strategy)
        self.repairs: list[str] = []
        plugin = self.strategy.precision_plugin
        if type(plugin) is MixedPrecision:
            asked = "16-mixed" if precision in ("16-mixed", "16") else plugin.precision
            # Without a scaler the plugin makes its own.
            self.strategy.precision_plugin = RepairedMixedPrecision(asked, plugin.device, plugin.scaler)  # type: ignore[arg-type]
            self.repairs = [*REPAIRS, *([FLOAT16_ON_A_CPU] if asked != plugin.precision else [])]


def _leave_in_place(strategy: Strategy) -> None:
    """Spare the copy of weights and optimizer state to the host when a run is over: the process ends next.

    For the 2.7B model that took 7 s of every run on an H200.
    """
    if type(strategy).teardown is not Strategy.teardown:
        return

    def teardown() -> None:
        # Lightning 2.6's, without its first half.
        strategy.precision_plugin.teardown()
        assert strategy.accelerator is not None
        strategy.accelerator.teardown()
        strategy.checkpoint_io.teardown()

    strategy.teardown = teardown  # type: ignore[method-assign]


def quiet() -> None:
    """Lightning's tips and notices about its own calls say nothing about the measurement."""
    for name in LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    warnings.filterwarnings("ignore", module=r"lightning\..*")
    warnings.filterwarnings("ignore", message=r".*LeafSpec.*")
