"""Facts about training: norms of gradients and parameters, gradients that are missing, and losses of batches."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_pre_hook

from lmbench.flop_counter import call_step
from lmbench.instruments.subject import tensors_of
from lmbench.records.measured import TrainingFacts


def loss_scaler(trainer: Trainer) -> torch.amp.GradScaler | None:
    """The gradient scaler of the trainer; None in a precision without a loss scale."""
    # Lightning's plugins with a scaler have no class in common.
    scaler: torch.amp.GradScaler | None = getattr(trainer.precision_plugin, "scaler", None)
    return scaler


def loss_scale(trainer: Trainer) -> float:
    """The factor by which losses are multiplied now, 1 in a precision without one. Waits for the device."""
    scaler = loss_scaler(trainer)
    return 1.0 if scaler is None else scaler.get_scale()


def logged_values(trainer: Any, taken: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and values that `self.log` has kept since the last call, as tensors on their device.

    Lightning 2.6 has them in a private collection. Its public `callback_metrics` waits for the device, and does not
    tell an old value from a new one. A value logged for the epoch alone (`on_step=False`) has none for the step.

    Args:
        trainer: the Trainer.
        taken: the latest values of earlier calls, which are filled in.
    """
    for key, metric in (trainer._results or {}).items():
        value = metric._forward_cache
        # Every call of `self.log` makes a new tensor.
        if type(value) is torch.Tensor and value.numel() == 1 and value is not taken.get(key):
            taken[key] = value
            yield metric.meta.name, value


def norms(tensors: Mapping[str, torch.Tensor | None], dtype: torch.dtype = torch.float32) -> dict[str, float]:
    """The 2-norm of each tensor by name, leaving out names without a tensor. Synchronizes.

    Args:
        tensors: tensors by name, such as parameters' gradients.
        dtype: lowest precision to compute in. Half precision would overflow; float64 shows the smallest step of a
            single weight.
    """
    values = {name: _values(tensor) for name, tensor in tensors.items() if tensor is not None}
    return {
        name: float(_of_all_ranks(torch.linalg.vector_norm(value, dtype=torch.promote_types(value.dtype, dtype))))
        for name, value in values.items()
    }


def fingerprints(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[float, float]]:
    """The 2-norm and the sum of each tensor by name, in float64: an update of a weight changes one. Synchronizes."""
    sums = {name: _values(tensor).sum(dtype=torch.float64) for name, tensor in tensors.items()}
    return {name: (norm, float(_of_all_ranks(sums[name]))) for name, norm in norms(tensors, torch.float64).items()}


def total_norm(gradients: Sequence[torch.Tensor]) -> torch.Tensor:
    """The 2-norm of all gradients together, as a scalar on their device: float64 if a gradient is, else float32.

    Does not wait for the device.
    """
    values = [_values(grad) for grad in gradients]
    # `torch.nn.utils.get_total_norm` would round each norm to the dtype of its gradient, which in bf16 has 8 bits.
    # PyTorch refuses to narrow float64, so then each norm keeps its gradient's dtype.
    dtypes = {value.dtype for value in values}
    dtype = None if torch.float64 in dtypes or dtypes == {torch.float32} else torch.float32
    # PyTorch mixes neither devices nor sharded tensors with others.
    groups = dict[Any, list[torch.Tensor]]()
    for value in values:
        groups.setdefault((value.device, getattr(value, "device_mesh", None)), []).append(value)
    norms_of_groups: list[torch.Tensor] = [
        _of_all_ranks(torch.linalg.vector_norm(torch.stack(_each_norm(group, dtype)))) for group in groups.values()
    ]
    if len(norms_of_groups) == 1:
        return norms_of_groups[0]
    norm: torch.Tensor = torch.linalg.vector_norm(torch.stack([n.to(values[0].device) for n in norms_of_groups]))
    return norm


def _each_norm(tensors: list[torch.Tensor], dtype: torch.dtype | None) -> list[torch.Tensor]:
    """The 2-norm of each tensor, computed in a dtype or else in its own."""
    if dtype is None or not isinstance(tensors[0], DTensor):
        return list(torch._foreach_norm(tensors, 2, dtype=dtype))
    # torch 2.14 takes the dtype of `_foreach_norm` on sharded tensors for a dimension.
    return [torch.linalg.vector_norm(tensor, dtype=dtype) for tensor in tensors]


def _values(tensor: torch.Tensor) -> torch.Tensor:
    """The values of a sparse tensor, and the real and imaginary parts of a complex one, of which norms are alike."""
    values = tensor.coalesce().values() if tensor.is_sparse else tensor
    return torch.view_as_real(values.resolve_conj()) if values.is_complex() else values


def _of_all_ranks(number: torch.Tensor) -> torch.Tensor:
    """The norm or sum over all ranks, where each rank has that of its shard."""
    return number.full_tensor() if isinstance(number, DTensor) else number


def parameters_of(optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The parameters of all of an optimizer's groups."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def unscales_itself(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer removes the fp16 loss scale from gradients only inside its step, as fused ones do."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def note_gradients(facts: TrainingFacts, trainable: Collection[str], norms: Mapping[str, float]) -> None:
    """Record which parameters have gradients, and the norm of all.

    Args:
        facts: the `probe.training` of a run's record, which is filled in.
        trainable: names of the trainable parameters.
        norms: the gradient's norm by parameter name; a parameter without a gradient has none.
    """
    facts.parameters = len(trainable)
    facts.missing_gradients = [name for name in trainable if name not in norms]
    facts.zero_gradients = [name for name, norm in norms.items() if norm == 0.0]
    facts.nonfinite_gradients = [name for name, norm in norms.items() if not math.isfinite(norm)]
    facts.gradient_norm = math.hypot(*norms.values()) if norms else None


def is_same_batch(batch: Any, other: Any) -> bool | None:
    """Whether two batches hold equal tensors. Synchronizes.

    None where they hold none, and where PyTorch cannot compare them, as sparse ones.
    """
    tensors, others = tensors_of(batch), tensors_of(other)
    with suppress(RuntimeError):
        if tensors or others:
            return len(tensors) == len(others) and all(map(torch.equal, tensors, others))
    return None


def try_batch(trainer: Trainer, batch: Any) -> tuple[torch.Tensor, Counter[nn.Embedding]] | None:
    """The loss that the module's present weights give to a batch, without compiled code; None if that fails.

    All batches meet the same random numbers, so that dropout makes no difference between them.

    Returns:
        The loss, and the number of rows that each embedding of the module looks up: tokens, or positions.
    """
    embedded = Counter[nn.Embedding]()

    def note(part: nn.Module, inputs: Any) -> None:
        if isinstance(part, nn.Embedding):
            embedded[part] += inputs[0].numel()

    # The step is the user's code, and may rely on the loop around it.
    with (
        suppress(Exception),
        # PyTorch tells the user of hooks beside compiled modules.
        warnings.catch_warnings(action="ignore"),
        isolate_rng(),
        torch.no_grad(),
        torch.compiler.set_stance("force_eager"),
        trainer.precision_plugin.train_step_context(),
        register_module_forward_pre_hook(note),
    ):
        return call_step(trainer.lightning_module, "training_step", batch).detach(), embedded
    return None
