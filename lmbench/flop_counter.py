"""Model FLOPs of any module's step, counted on a fake copy of it, and what operators that read values return there."""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext, redirect_stdout, suppress
from functools import cache
from io import StringIO
from typing import Any

import torch
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch._subclasses.fake_impls import register_op_impl
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeCopyMode,
    FakeTensor,
    FakeTensorMode,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.data import DataLoader, Dataset
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.weak import WeakIdKeyDictionary

from lmbench.sizes import FlopCount, attention_flops

#: The name of an operator that multiplies matrices or vectors: `aten::mv`, `aten::mkldnn_rnn_layer`.
_PRODUCT = re.compile(r"(_|:|add)(mm|mv|dot|rnn|trilinear)(_|$|\.)")
COUNTER_SOURCE = "torch.utils.flop_counter on a fake copy"
#: Operators by which a router chooses experts, and those that pass on the share of elements that one expert has.
_CHOICES = frozenset({"topk", "argmax", "max", "multinomial"})
_MASKS = frozenset({"eq", "_to_copy", "clone", "mul", "bitwise_and", "logical_and"})


class UncountableError(Exception):
    """A module's FLOPs cannot be counted; the message gives the reason, short enough for a table's footnote."""


def counter_flops(module: nn.Module, batch: Any, tokens: int, step: str, has_backward: bool = False) -> FlopCount:
    """Count the FLOPs of a module's step on a fake copy of it, which uses no memory and runs no kernels.

    The backward pass is counted too, because it has fewer products than two forward passes where weights are frozen
    and where a part runs without a graph.

    Attention through scaled_dot_product_attention is counted by its plain formula: fused kernels may pad head_dim, and
    some have no formula, which would count as zero. Products without a formula (an LSTM as one kernel) and operators
    that are not PyTorch's are not counted, but named in ``source``. So is a number that the step reads, since it may
    decide what the step does.

    Args:
        module: any module; it is not changed. Of its tensors only shapes, dtypes and devices are copied. Its other
            attributes (metrics, lists) are copied, since the step may change them, but its trainer and data are shared.
        batch: the step's batch; its tensors are replaced by fakes.
        tokens: number of tokens in the batch, by which the count is divided.
        step: name of the method that takes the batch, such as ``training_step``. A second parameter gets the batch's
            index, 0.
        has_backward: whether the step returns a loss, or a mapping with one, whose backward pass counts.

    Raises:
        UncountableError: the module cannot be copied, or does not run on fake tensors because shapes or branches depend
            on values that follow from weights, or it calls a raw extension.
    """
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    is_fused, set_fused = torch.backends.mha.get_fastpath_enabled(), torch.backends.mha.set_fastpath_enabled
    try:
        # In inference nn.TransformerEncoder calls one kernel a layer, which has no formula.
        set_fused(False)
        # The step may print numbers, which are made up here.
        with redirect_stdout(StringIO()):
            forward, backward, recomputed, remarks = _fake_step_flops(module, batch, step, has_backward)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise UncountableError(f"not countable on fake tensors: {type(error).__name__}: {first_line}") from error
    finally:
        set_fused(is_fused)
        # Functions are not copied: one that the module keeps, or a recomputed block's, may hold its own parameters.
        for parameter, gradient in gradients:
            parameter.grad = gradient
    return FlopCount(
        round(forward / tokens),
        None,
        "; ".join([COUNTER_SOURCE, *remarks]),
        round(recomputed / tokens) if has_backward else None,
        round(backward / tokens) if has_backward and backward != 2 * forward else None,
    )


def _fake_step_flops(
    module: nn.Module, batch: Any, step: str, has_backward: bool
) -> tuple[int, int, int, Mapping[str, None]]:
    """The FLOPs of forward and backward pass and of recomputing, and remarks on the count."""
    group_every_dtype()
    counter = FlopCounterMode(display=False, custom_mapping=_formulas())
    # Only the total is needed. PyTorch's hooks on modules fail for a part of a tensor with a graph, under no_grad.
    counter.mod_tracker = _Untracked()  # type: ignore[assignment]
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    remarks, recomputed = dict[str, None](), list[int]()
    is_all_trained = all(parameter.requires_grad for parameter in module.parameters())

    known = KnownValues(fake_mode)

    def fake_input(tensor: Any) -> Any:
        fake = known.fake_of(tensor)
        # Where all is trained, a first layer of numbers counts as every other, as is usual for MFU.
        return fake.requires_grad_() if has_backward and is_all_trained and fake.is_floating_point() else fake

    # Without this a compiled module would be compiled for fake tensors.
    with torch.compiler.set_stance("force_eager"), sdpa_kernel(SDPBackend.MATH), counter:
        with FakeCopyMode(fake_mode):
            fake = _copy_to_count(module, fake_mode)
        # Unlike pytrees, this also replaces tensors in a tokenizer's mapping, which is not a dict.
        fake_batch = apply_to_collection(batch, torch.Tensor, fake_input)
        with fake_mode, _watch(remarks, counter, recomputed, known), torch.set_grad_enabled(has_backward):
            loss = call_step(fake, step, fake_batch)
            forward = counter.get_total_flops()
            # A gradient that the step takes itself, with a graph, recomputes nothing.
            recomputed.clear()
            if has_backward:
                loss.backward()
    backward = counter.get_total_flops() - forward - sum(recomputed)
    return forward, backward, sum(recomputed), remarks


def call_step(module: nn.Module, step: str, batch: Any) -> Any:
    """The loss that a module's step returns, alone or in a mapping. A second parameter gets the batch's index, 0."""
    method = getattr(module, step)
    output = method(batch, *([0] if len(inspect.signature(method).parameters) > 1 else []))
    return output.get("loss") if isinstance(output, Mapping) else output


class _Untracked(nullcontext[None]):
    """In the place of the counter's ModuleTracker: all products belong to the whole."""

    parents = ("Global",)


def _formulas() -> dict[Any, Any]:
    """Model FLOPs of operators from the shapes of their arguments, which PyTorch's counter does not know, or counts as
    hardware FLOPs."""

    def grouped(a: Any, b: Any, *_: Any, **__: Any) -> Any:
        # Only two batches of matrices are multiplied in pairs; otherwise the groups part one of the three lengths.
        return 2 * math.prod(a if len(b) == 3 else a[-2:]) * b[-1]

    def convolution_backward(gradient: Any, x: Any, weight: Any, *settings: Any, **_: Any) -> Any:
        # PyTorch counts the weight's gradient as if each group had all channels.
        is_transposed, needed = settings[4], settings[-1]
        return 2 * sum(needed[:2]) * x[0] * math.prod(weight) * math.prod((x if is_transposed else gradient)[2:])

    formulas: dict[Any, Any] = {
        torch.ops.aten._grouped_mm: grouped,
        torch.ops.aten.convolution_backward: convolution_backward,
    }
    # A module may select a fused kernel. PyTorch counts that its backward computes the scores again.
    for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
        forward, backward = (
            getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}{ending}") for ending in ("", "_backward")
        )
        formulas[forward] = lambda q, k, v, *_, **__: attention_flops(q, k, v)
        formulas[backward] = lambda _, q, k, v, *__, **___: 2 * attention_flops(q, k, v)
    return formulas


def _watch(
    remarks: dict[str, None], counter: Any, recomputed: list[int], known: KnownValues
) -> AbstractContextManager[object]:
    """Within, operators that read values get an answer, which `remarks` note, as they note those not PyTorch's.

    An answer from `known` values needs no remark.

    `recomputed` gets the FLOPs of each operator that a backward pass runs with a graph of its own, which is what
    activation checkpointing does.
    """
    routing = Routing()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            before, kwargs = counter.get_total_flops(), kwargs or {}
            try:
                out = func(*args, **kwargs)
                known.follow(func, args, kwargs, out)
            except (DataDependentOutputException, DynamicOutputShapeException):
                if (out := known.answer(func, args, kwargs)) is not None:
                    return out
                if (out := without_values(func, args, routing)) is None:
                    raise
                if isinstance(out, float):
                    remarks["a number that the step reads taken as 1"] = None
                elif func._schema.name != "aten::bincount":
                    remarks["the same number of tokens for each expert"] = None
            routing.follow(func, args, out)
            is_own = func.namespace in {"aten", "prim", "prims", "profiler"}
            if counter.get_total_flops() == before and not (is_own and not _PRODUCT.search(func.name())):
                remarks[f"not counted: {func.name()}"] = None
            if torch._C._current_graph_task_id() != -1 and torch.is_grad_enabled():
                recomputed.append(counter.get_total_flops() - before)
            return out

    return Watch()  # type: ignore[no-untyped-call]


def without_values(func: Any, args: Any, routing: Routing, keeps_all: bool = False) -> Any:
    """What an operator that reads values returns on fake tensors; None where memory or FLOPs may depend on it.

    Args:
        func: the operator.
        args: its arguments.
        routing: how many elements are true in the mask of an expert.
        keeps_all: whether all elements of other masks are taken as true.
    """

    def indices_of(mask: Any) -> Any:
        kept = routing.count_kept(mask)
        kept = mask.numel() if kept is None and keeps_all else kept
        return None if kept is None else mask.new_empty((kept, mask.dim())).long()

    name, tensor = func._schema.name.removeprefix("aten::"), args[0]
    out: Any = None
    if name == "_local_scalar_dense":
        out = 1.0 if tensor.is_floating_point() else routing.value(tensor)
    elif name == "bincount" and len(args) == 3:
        # The number of bins is given.
        out = tensor.new_empty(args[2])
    elif name == "nonzero":
        out = indices_of(tensor)
    elif name == "masked_select" and (indices := indices_of(args[1])) is not None:
        out = tensor.new_empty(len(indices) * tensor.numel() // max(1, args[1].numel()))
    elif name == "index":
        out = _index(func, tensor, args[1], indices_of)
    return out


def _index(func: Any, tensor: Any, indices: Any, nonzero: Callable[[Any], Any]) -> Any:
    """Index a tensor by numbers and masks; None if `nonzero` does not know which elements of a mask are true."""
    numbers = list[Any]()
    for index in indices:
        # A mask, of a byte an element, is an index into as many dimensions as it has.
        if index is None or index.element_size() > 1:
            numbers.append(index)
        elif (positions := nonzero(index)) is None:
            return None
        else:
            numbers += positions.unbind(1)
    return func(tensor, numbers)


class KnownValues:
    """Values of fake tensors that follow from the batch and from constants alone, such as masks and lengths.

    Beside each operator on such tensors it runs the same one on their values.
    """

    #: Elements of a tensor whose values are followed, at most.
    _MOST = 2**24

    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self._fake_mode, self._values = fake_mode, WeakIdKeyDictionary()

    def fake_of(self, value: torch.Tensor) -> torch.Tensor:
        """A fake tensor of this value, which stays as it is."""
        fake = self._fake_mode.from_tensor(value)
        with _disable_current_modes():
            self._values[fake] = value.detach().clone()
        return fake

    def follow(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Note the values of an operator's result."""
        fakes = _tensors(out)
        values = None if any(fake.numel() > self._MOST for fake in fakes) else self._run(func, args, kwargs)
        if values is None and func._schema.name in ("aten::isnan", "aten::isinf"):
            # A step is measured whose numbers are finite.
            with _disable_current_modes():
                values = torch.zeros((), dtype=torch.bool, device=out.device).expand(out.shape)
        if values is not None:
            for fake, value in zip(fakes, _tensors(values), strict=True):
                self._values[fake] = value
        elif func._schema.is_mutable and args[0] in self._values:
            changed = self._values[args[0]].untyped_storage()._cdata
            for fake, value in [*self._values.items()]:
                if value.untyped_storage()._cdata == changed:
                    del self._values[fake]

    def answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operator that reads values returns; None where these are not known."""
        if func._schema.name == "aten::index" and self._are_known(args[1]):
            # Of the rows that a mask selects only the number is known.
            nonzero = torch.ops.aten.nonzero.default
            return _index(func, args[0], args[1], lambda mask: self.answer(nonzero, (mask,), {}))
        return apply_to_collection(self._run(func, args, kwargs), torch.Tensor, self.fake_of)

    def _are_known(self, values: Any) -> bool:
        return all(tensor in self._values or not isinstance(tensor, FakeTensor) for tensor in _tensors(values))

    def _run(self, func: Any, args: Any, kwargs: Any) -> Any:
        # Collectives, and changes of tensors that are not the step's own, are left alone.
        has_effect = func.namespace != "aten" or (func._schema.is_mutable and args[0] not in self._values)
        if has_effect or not self._are_known((args, kwargs)):
            return None
        args, kwargs = tree_map_only(FakeTensor, self._values.__getitem__, (args, kwargs))
        with _disable_current_modes(), suppress(Exception):
            return func(*args, **kwargs)
        return None


def _tensors(values: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor)]


class Routing:
    """How many tokens each expert takes in steps on fake tensors, which do not tell what a router chooses.

    An even share is assumed. Followed are the indices that topk, argmax, max and multinomial choose, and the masks that
    are made of them: `chosen == expert`, one_hot, and gates that are scattered into zeros.
    """

    def __init__(self) -> None:
        #: By storage, the share of its elements that one expert has, and numbers of an expert's tokens.
        self._shares: Any = WeakIdKeyDictionary()
        self._counts: Any = WeakIdKeyDictionary()
        #: By storage of a number of true elements, the size of the mask.
        self.mask_sizes: Any = WeakIdKeyDictionary()

    def follow(self, func: Any, args: Any, out: Any) -> None:
        """Note the result of an operator that makes or passes on what a router chose."""
        name = func._schema.name.removeprefix("aten::")
        share: float | None = None
        if name in _CHOICES:
            out = out[1] if isinstance(out, tuple) else out
            count = args[1] if name in ("topk", "multinomial") else 1
            # The largest of all is a number, and no choice for each token.
            share = out.numel() / max(1, args[0].numel() * count) if out.dim() else None
        elif name in ("scatter", "scatter_"):
            share = args[2].numel() / max(1, out.numel()) if self._share(args[2]) is not None else None
        elif name in _MASKS or (str(func) in ("aten.gt.Scalar", "aten.ne.Scalar") and args[1] == 0):
            share = self._share(args[0])
        elif name == "bincount" and (count := self.count_kept(args[0])) is not None:
            self._counts[out.untyped_storage()] = count
        elif name == "sum" and args[0].dtype is torch.bool:
            self.mask_sizes[out.untyped_storage()] = args[0].numel()
        elif name == "any" and (before := self._share(args[0])) is not None:
            share = min(1.0, before * args[0].numel() / max(1, out.numel()))
        if share is not None:
            self._shares[out.untyped_storage()] = share

    def count_kept(self, mask: Any) -> int | None:
        """The number of true elements of an expert's mask; None if no router made the mask."""
        share = self._share(mask)
        return None if share is None else max(1, round(share * mask.numel()))

    def value(self, tensor: Any) -> int | None:
        """A number of an expert's tokens, or whether it has any; None for other numbers, which may be lengths."""
        has_any = tensor.element_size() == 1 and self._share(tensor) is not None
        return True if has_any else self._counts.get(tensor.untyped_storage())

    def is_routed(self, value: Any) -> bool:
        """Whether a value, if it is a tensor, is made from what a router chose."""
        return self._share(value) is not None or self._of_storage(self._counts, value) is not None

    def _share(self, tensor: Any) -> float | None:
        share: float | None = self._of_storage(self._shares, tensor)
        return share

    @staticmethod
    def _of_storage(known: Any, value: Any) -> Any:
        # A sparse tensor has no storage.
        has_storage = isinstance(value, torch.Tensor) and value.layout is torch.strided
        return known.get(value.untyped_storage()) if has_storage else None


@cache
def group_every_dtype() -> None:
    """Let fake tensors of every dtype be multiplied in groups, as the experts of transformers' models are.

    PyTorch's own fake refuses all but bfloat16, the dtype of its fast kernel; for others it has a slower one.
    """

    @register_op_impl(torch.ops.aten._grouped_mm.default)
    def multiply(fake_mode: Any, func: Any, a: Any, b: Any, *others: Any, **named: Any) -> Any:
        if a.dtype is torch.bfloat16:
            return NotImplemented
        with fake_mode:
            return func(a.bfloat16(), b.bfloat16(), *others, **named).to(a.dtype)


def skip_value_checks(module: nn.Module) -> None:
    """Let a module's metrics not check their inputs, for which they read values that fake tensors lack."""
    for part in module.modules():
        # The attribute of torchmetrics' classification metrics.
        if "validate_args" in vars(part):
            vars(part)["validate_args"] = False


def _copy_to_count(module: nn.Module, fake_mode: Any) -> nn.Module:
    """A copy that logs nothing. It shares the module's data and its trainer's parts, which may be too large to copy."""
    attached = getattr(module, "_trainer", None)
    trainer = copy.copy(attached)
    if trainer is not None:
        # They would keep fake numbers.
        trainer.loggers = []
    attributes = [item for part in module.modules() for item in vars(part).items()]
    shared: dict[int, Any] = {
        id(value): value
        for name, value in attributes
        # FSDP2's state has process groups.
        if name.startswith("__composable_api_state_key") or isinstance(value, (DataLoader, Dataset, DeviceMesh))
    }
    with ExitStack() as as_whole:
        shared |= _unshard(module, fake_mode, as_whole)
        copied = copy.deepcopy(module, {**shared, id(attached): trainer})
    for part in copied.modules():
        # Lightning leaves the trainer out of a copied module.
        if "_trainer" in vars(part):
            vars(part)["_trainer"] = trainer
    # Inside a loop of Lightning's the trainer would keep fake tensors.
    silence_logging(copied)
    skip_value_checks(copied)
    return copied


def unsharded(cls: type) -> type:
    """The class that FSDP2 shards, of the class that it makes of it; any other class itself."""
    return cls.__bases__[1] if issubclass(cls, FSDPModule) else cls


def _unshard(module: nn.Module, fake_mode: Any, undo: ExitStack) -> dict[int, nn.Parameter]:
    """Let a module that FSDP2 shards be copied as a whole one, until the stack is closed.

    FSDP2 gives each part a class that refuses to be copied, and hooks that gather its parameters.

    Returns:
        A whole fake parameter for the `id` of each that is sharded.
    """
    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    # A function that is compiled for a part cannot be copied.
    if not sharded or any(inspect.isfunction(vars(part).get("forward")) for part in sharded):
        return {}
    for part in sharded:
        changes: dict[str, Any] = {"__class__": unsharded(type(part))}
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            hooks = getattr(part, name)
            kept = [(key, hook) for key, hook in hooks.items() if "torch.distributed.fsdp" not in hook.__module__]
            changes[name] = type(hooks)(kept)
        for name, value in changes.items():
            undo.callback(setattr, part, name, getattr(part, name))
            setattr(part, name, value)
    with fake_mode:
        return {
            id(p): nn.Parameter(torch.empty(p.shape, dtype=p.dtype, device=p.device), p.requires_grad)
            for p in module.parameters()
        }


def silence_logging(module: nn.Module) -> None:
    """Let `self.log` of a module and of its parts do nothing; it raises outside of a loop of Lightning's."""
    for part, name in itertools.product(module.modules(), ("log", "log_dict")):
        if hasattr(part, name):
            vars(part)[name] = lambda *args, **kwargs: None
