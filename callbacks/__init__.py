"""Lightning callbacks that measure; each also works in a Trainer of your own, where it only watches."""

from lmbench.callbacks.compiler import Compiler
from lmbench.callbacks.dtype_recorder import DtypeRecorder
from lmbench.callbacks.gradient_norm import GradientNorm
from lmbench.callbacks.kernel_capture import KernelCapture, KernelProfiler
from lmbench.callbacks.memory_history import MemoryHistory
from lmbench.callbacks.memory_recorder import MemoryRecorder
from lmbench.callbacks.observer import Observer
from lmbench.callbacks.phase_timer import PhaseTimer
from lmbench.callbacks.progress_line import ProgressLine
from lmbench.callbacks.run_recorder import RunRecorder
from lmbench.callbacks.session import MeasurementSession
from lmbench.callbacks.sync_finder import SyncFinder
from lmbench.callbacks.throughput_meter import ThroughputMeter
from lmbench.callbacks.training_check import TrainingCheck

__all__ = [
    "Compiler",
    "DtypeRecorder",
    "GradientNorm",
    "KernelCapture",
    "KernelProfiler",
    "MeasurementSession",
    "MemoryHistory",
    "MemoryRecorder",
    "Observer",
    "PhaseTimer",
    "ProgressLine",
    "RunRecorder",
    "SyncFinder",
    "ThroughputMeter",
    "TrainingCheck",
]
