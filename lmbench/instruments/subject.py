"""Describes the measured module and data: their class, parameters, FLOPs and tokens, from their own methods."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass, replace
from functools import cache
from itertools import chain
from typing import Any, TypeVar, get_type_hints

import msgspec
import torch
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves

from lmbench.errors import UsageError
from lmbench.flop_counter import UncountableError, counter_flops, unsharded
from lmbench.precision import PRECISIONS, dtype_name, find_precision, peak_flops
from lmbench.records.run import Data, Flops, Model, RunRecord
from lmbench.records.vocabulary import recompute_words
from lmbench.sizes import FlopCount, mode_multiplier

#: The label that PyTorch's cross-entropy ignores.
IGNORED = -100
#: Integers that an embedding looks up.
_ID_DTYPES = (torch.int32, torch.int64)

Facts = TypeVar("Facts", Model, Data)


def path_of(cls: type) -> str:
    """The dotted path of a class; of one that FSDP2 made, the path of the class that it shards."""
    cls = unsharded(cls)
    return f"{cls.__module__}.{cls.__qualname__}"


def describe_model(module: LightningModule, optimizers: Sequence[Optimizer], precision: str) -> Model:
    """The `model` of a run's record: class, parameters, optimizers, and the answer of `module.describe()`.

    Raises:
        UsageError: the module is lazy.
    """
    refuse_lazy(module, "measured")
    parameters = list(module.parameters())
    model = Model(
        name=path_of(type(module)),
        parameter_count=sum(p.numel() for p in parameters),
        trainable_parameter_count=sum(p.numel() for p in parameters if p.requires_grad),
    )
    model, labels = _described(model, module), []
    counts, known = Counter[str](), find_precision(precision)
    for parameter in parameters:
        if parameter.is_floating_point():
            counts[dtype_name(parameter.dtype)] += parameter.numel()
    is_usual = known is None or counts.keys() <= {known.weights}
    # Not the `dtype` of a user's `describe`.
    model.dtype = None if is_usual else ", ".join(name for name, _ in counts.most_common())
    if (recompute := getattr(module, "recompute_options", None)) is not None:
        model.checkpoint = recompute_words(**vars(recompute))
    for optimizer in optimizers:
        # Name the implementation that was chosen: `AdamW fused`.
        flags = [optimizer.defaults.get(name) for name in ("fused", "foreach")]
        variant = " fused" if flags[0] else " foreach" if flags[1] else " loop" if flags == [False, False] else ""
        labels.append(f"{getattr(optimizer, 'label', type(optimizer).__name__)}{variant}")
    model.optimizer = ", ".join(labels) or model.optimizer
    return model


def refuse_lazy(module: LightningModule, what: str) -> None:
    """Raises UsageError for a module with parameters that have no sizes yet; it cannot be `what` ("measured")."""
    if any(map(is_lazy, module.parameters())):
        raise UsageError(f"cannot be {what}: a lazy module has no sizes; run a batch through it in `setup`")


def describe_data(trainer: Trainer) -> Data:
    """The `data` of a run's record: the class of the data module, and the answer of its `describe()`."""
    data = trainer.datamodule  # type: ignore[attr-defined]
    if data is None:
        return Data(source="loaders without a data module")
    return _described(Data(name=path_of(type(data))), data)


def _described(facts: Facts, subject: object) -> Facts:
    """The facts completed by the mapping that `subject.describe()` returns.

    A value goes into the field of its name if it fits the field's type, else into `described`. A user's `describe` may
    be any method, so one that needs arguments or returns no mapping is ignored.
    """
    describe, answer = getattr(subject, "describe", None), None
    with suppress(TypeError):
        answer = describe() if callable(describe) else None
    types = get_type_hints(type(facts))
    for name, value in (answer if isinstance(answer, Mapping) else {}).items():
        if name in types and name != "described":
            with suppress(msgspec.ValidationError):
                setattr(facts, name, msgspec.convert(value, types[name]))
                continue
        facts.described[str(name)] = value
    return facts


def describe_flops(module: LightningModule, mode: str) -> Flops:
    """The `flops` of a run's record for a mode, from the module's `flops_per_token()`; null without that method.

    Raises:
        UsageError: `flops_per_token()` returned neither a FlopCount nor a whole number.
    """
    flops, name = Flops(multiplier=mode_multiplier(mode)), f"{type(module).__name__}.flops_per_token()"
    method = getattr(module, "flops_per_token", None)
    if not callable(method):
        flops.reason = f"{type(module).__name__} has no flops_per_token()"
        return flops
    count = method()
    if not isinstance(count, FlopCount):
        count = FlopCount(_whole_number(count, name), None, "the module's own flops_per_token()")
    _note_count(flops, count)
    return flops


def _note_count(flops: Flops, count: FlopCount) -> None:
    multiplier, causal = flops.multiplier or 1, count.causal_per_token_flops
    flops.per_token_flops = count.per_token_flops * multiplier
    if count.backward_per_token_flops is not None:
        flops.per_token_flops, flops.multiplier = count.per_token_flops + count.backward_per_token_flops, None
    flops.causal_per_token_flops = None if causal is None else causal * multiplier
    recomputed = count.recomputed_per_token_flops
    flops.recomputed_per_token_flops = recomputed if recomputed is None or multiplier > 1 else 0
    flops.source, flops.reason = count.source, None


def note_peak(run: RunRecord) -> None:
    """Record the FLOPs in fp8 and the device's peak; null where they are unknown."""
    flops, fp8 = run.flops, run.model.fp8
    flops.peak_flops_per_s = flops.peak_source = None
    if fp8 is not None and flops.per_token_flops:
        layers_flops = 2 * (fp8.parameter_count or 0) * mode_multiplier(str(run.mode))
        # A smaller count means that not every token passes every layer.
        flops.fp8_per_token_flops = min(layers_flops, flops.per_token_flops)
    share = (flops.fp8_per_token_flops or 0) / (flops.per_token_flops or 1)
    gpu_name = run.environment.gpu.name
    precision, weights = str(run.precision), run.model.dtype
    if weights and not PRECISIONS[precision].is_mixed:
        # Products have the dtype of the weights: of most of them, where a few, such as norms, have another.
        most, _, _ = weights.partition(",")
        precision = next((p.name for p in PRECISIONS.values() if p.weights == p.compute == most), "")
    if gpu_name and (peak := peak_flops(gpu_name, precision, str(run.matmul_precision), share)):
        flops.peak_flops_per_s, flops.peak_source = peak.flops_per_s, peak.source


def count_flops(flops: Flops, module: LightningModule, mode: str, stage: str, batch: Any, tokens: int) -> None:
    """Count the FLOPs of a module without `flops_per_token()`, on a fake copy; `flops.reason` says why if that fails.

    Args:
        flops: the record to fill in.
        module: the module.
        mode: mode of the run.
        stage: `fit` counts `training_step`, `validate` counts `validation_step`.
        batch: a batch of the run.
        tokens: tokens in that batch.
    """
    try:
        if stage == "fit" and not module.automatic_optimization:
            raise UncountableError("a training_step that optimizes by hand is more than a forward pass")
        name = "training_step" if stage == "fit" else "validation_step"
        has_backward = mode_multiplier(mode) > 1
        try:
            count = counter_flops(module, batch, tokens, name, has_backward)
        except UncountableError:
            # A user's kernel may have no backward on fake tensors. Where all is trained, it is two forward passes.
            if not has_backward or not all(p.requires_grad for p in module.parameters()):
                raise
            count = counter_flops(module, batch, tokens, name)
            count = replace(count, source=f"{count.source}; the backward is taken as two forward passes")
    except UncountableError as error:
        flops.reason = f"{error}; give {type(module).__name__} a flops_per_token()"
        return
    flops.multiplier = mode_multiplier(mode)
    _note_count(flops, count)


def token_owner(module: LightningModule, data: object) -> Any:
    """The module, or else its data, if it has `tokens_per_batch(batch) -> int`; None without that method."""
    return next((owner for owner in (module, data) if callable(getattr(owner, "tokens_per_batch", None))), None)


def token_counter(module: LightningModule, data: object) -> Callable[[Any], int | None]:
    """A function that returns the tokens of a batch, or None where they are unknown.

    It calls `tokens_per_batch(batch) -> int` of the module, or else of its data. Without that method it counts, padding
    included, the `input_ids` of the batch, or else its largest tensor if that holds integers and the module has an
    `nn.Embedding` to look them up. The function raises UsageError for an answer that is no whole number.
    """
    if (owner := token_owner(module, data)) is not None:
        method, name = owner.tokens_per_batch, f"{type(owner).__name__}.tokens_per_batch(batch)"
        return lambda batch: _whole_number(method(batch), name)

    @cache
    def embeds() -> bool:
        return any(isinstance(part, nn.Embedding) for part in module.modules())

    def count_ids(batch: Any) -> int | None:
        ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
        if isinstance(ids, torch.Tensor):
            return ids.numel()
        if not embeds():
            return None
        # Images and embedded rows are larger than the labels beside them, weights of a loss are not.
        tensors = [(t.numel(), t.dtype in _ID_DTYPES) for t in tensors_of(batch) if t.dtype is not torch.bool]
        count, are_ids = max(tensors, default=(0, False))
        return count if are_ids else None

    return count_ids


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors of a value, such as a batch, in the order of its structure."""
    leaves = chain.from_iterable(tree_leaves(_plain(leaf)) for leaf in tree_leaves(value))
    return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _plain(leaf: Any) -> Any:
    """A tokenizer's batch, which is a mapping, and a dataclass as structures that pytrees know."""
    if isinstance(leaf, Mapping):
        return dict(leaf)
    if is_dataclass(leaf) and not isinstance(leaf, type):
        return [getattr(leaf, part.name) for part in fields(leaf)]
    return leaf


def padding_of(batch: Any) -> tuple[int, int]:
    """A batch's padding and its tokens: 0 in its `attention_mask`, or else -100 in a tensor of labels, and all of them.

    Waits for the device.
    """
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    # A mask of more dimensions tells pairs of tokens, often as what is added to their score.
    if isinstance(mask, torch.Tensor) and mask.ndim < 3:
        tensors, padding = [mask], 0
    else:
        tensors, padding = [t for t in tensors_of(batch) if t.dtype is torch.int64], IGNORED
    padded = [tensor == padding for tensor in tensors if tensor.layout is torch.strided and tensor.numel()]
    counts = [(int(is_padding.sum()), is_padding.numel()) for is_padding in padded]
    return max(counts, key=lambda count: count[0] / count[1], default=(0, 0))


def _whole_number(value: Any, name: str) -> int:
    with suppress(TypeError):
        if (number := operator.index(value)) >= 0:
            return number
    raise UsageError(f"{name} returned {value!r}; it must return a whole number, 0 or more")
