"""What may differ between the two sides of a comparison, and what makes it invalid: one table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Rule = Literal["always", "host"]


@dataclass(frozen=True)
class Check:
    """One recorded fact that has to be the same on both sides.

    `set_by` are the settings that choose it: where one of them differs too, the fact is the thing compared and may
    differ. Without one (or where they are the same) a difference is no choice of the user's, and invalidates:
    `always`, or under `host` only where the host is part of what was measured (a CPU, or a lag near zero). A fact that
    is not recorded on a side differs from nothing.
    """

    path: str
    what: str
    rule: Rule = "always"
    set_by: tuple[str, ...] = ()


def _flag(name: str, what: str, *set_by: str) -> Check:
    return Check(f"environment.flags.{name}", what, "always", set_by)


_COMPILE = ("is_enabled", "mode", "backend", "fullgraph", "dynamic", "regional")

CHECKS: tuple[Check, ...] = (
    Check("device_type", "the device type"),
    Check("environment.gpu.name", "the GPU"),
    Check("environment.gpu.sku", "the GPU's SKU"),
    Check("environment.gpu.is_mig", "MIG"),
    Check("environment.gpu.power_limit_w", "the power limit"),
    Check("mode", "the mode", set_by=("measure.mode", "mode")),
    Check("precision", "the precision", set_by=("trainer.precision", "trainer.plugins")),
    Check("matmul_precision", "the float32 matmul precision", set_by=("measure.matmul_precision",)),
    Check("clock", "the clock", set_by=("timer.clock",)),
    Check("zero_grad", "when gradients are zeroed", set_by=("measure.zero_grad",)),
    Check("gc_policy", "garbage collection"),
    Check("world_size", "the number of ranks", set_by=("trainer.devices", "trainer.num_nodes", "trainer.strategy")),
    Check("window.micro_batches", "micro-batches a step", set_by=("trainer.accumulate_grad_batches", "data", "model")),
    *(Check(f"compile.{name}", f"torch.compile ({name})", set_by=("trainer.compile",)) for name in _COMPILE),
    _flag("float32_matmul_precision", "float32 matmuls", "measure.matmul_precision"),
    _flag("cuda_matmul_allow_tf32", "TF32 in matmuls", "measure.matmul_precision"),
    _flag("cudnn_allow_tf32", "TF32 in cuDNN"),
    _flag("cudnn_benchmark", "cudnn.benchmark", "trainer.benchmark", "trainer.deterministic"),
    _flag("cudnn_deterministic", "cudnn.deterministic", "trainer.deterministic"),
    _flag("deterministic_algorithms", "deterministic algorithms", "trainer.deterministic"),
    _flag("anomaly_mode", "anomaly detection", "trainer.detect_anomaly"),
    _flag("allocator_backend", "the allocator", "sweep.environment"),
    Check("environment.host.hostname", "the host", "host"),
    Check("environment.host.cpu_model", "the CPU", "host"),
    Check("environment.host.core_count", "the number of cores", "host"),
    Check("environment.host.affinity", "the cores it may use", "host"),
    Check("environment.flags.thread_count", "PyTorch's threads", "host", ("sweep.environment",)),
)

#: Parts of a record that are the thing compared where they differ: said, and never invalid unless `--about` names
#: something else.
COMPARED = ("environment.code", "environment.versions", "sweep.environment")

#: What follows from settings or code, said where it differs: the work of a step may not be the same.
CONSEQUENCES = ("model.parameter_count", "model.optimizer", "model.attention", "flops.per_token_flops")

#: Environment variables that name a place or repeat a setting; any other one that differs invalidates.
_PLACES = ("_DIR", "_HOME", "_PATH", "_FILE", "_VISIBLE_DEVICES", "_RUN_ID", "_CACHE")
_REPEATED = ("LMBENCH_", "TORCHELASTIC_")


def variable_matters(name: str) -> bool:
    return not name.endswith(_PLACES) and not name.startswith(_REPEATED)
