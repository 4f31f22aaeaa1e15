"""Lightning callbacks that measure a training loop; each also works in your own Trainer, where it only watches."""

from lmbench.callbacks.allocator_recorder import AllocatorRecorder as AllocatorRecorder
from lmbench.callbacks.checkpoint_recorder import CheckpointRecorder as CheckpointRecorder
from lmbench.callbacks.communication_probe import CommunicationProbe as CommunicationProbe
from lmbench.callbacks.compiler import Compiler as Compiler
from lmbench.callbacks.counterfactual import Counterfactual as Counterfactual
from lmbench.callbacks.dtype_recorder import DtypeRecorder as DtypeRecorder
from lmbench.callbacks.events import Events as Events
from lmbench.callbacks.gradient_norm import GradientNorm as GradientNorm
from lmbench.callbacks.host_owners import HostOwners as HostOwners
from lmbench.callbacks.host_step import HostStep as HostStep
from lmbench.callbacks.kernel_capture import KernelCapture as KernelCapture
from lmbench.callbacks.kernel_capture import KernelProfiler as KernelProfiler
from lmbench.callbacks.learning_rate import LearningRate as LearningRate
from lmbench.callbacks.loader_probe import LoaderProbe as LoaderProbe
from lmbench.callbacks.memory_history import MemoryHistory as MemoryHistory
from lmbench.callbacks.memory_recorder import MemoryRecorder as MemoryRecorder
from lmbench.callbacks.observer import Observer as Observer
from lmbench.callbacks.phase_timer import PhaseTimer as PhaseTimer
from lmbench.callbacks.progress_line import ProgressLine as ProgressLine
from lmbench.callbacks.recomputer import Recomputer as Recomputer
from lmbench.callbacks.run_recorder import RunRecorder as RunRecorder
from lmbench.callbacks.session import MeasurementSession as MeasurementSession
from lmbench.callbacks.sync_finder import SyncFinder as SyncFinder
from lmbench.callbacks.throughput_meter import ThroughputMeter as ThroughputMeter
from lmbench.callbacks.training_check import TrainingCheck as TrainingCheck
from lmbench.callbacks.turns import Turns as Turns
