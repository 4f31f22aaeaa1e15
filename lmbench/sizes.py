"""Model sizes: named shapes, exact parameter counts, and model FLOPs per token.

The FLOPs of lmbench's Transformer follow from an exact formula; those of a user's module are counted on a fake copy.
"""

from __future__ import annotations

import copy
import inspect
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING, Any

from lmbench.errors import UsageError, check_at_least, unknown
from lmbench.records.vocabulary import BACKWARD_MODES

if TYPE_CHECKING:
    from torch import nn

DEFAULT_VOCAB_SIZE = 10_000
#: Operators by which a router chooses experts, and those that pass on the share of elements that one expert has.
_CHOICES = frozenset({"topk", "argmax", "max", "multinomial"})
_MASKS = frozenset({"eq", "_to_copy", "clone", "mul", "bitwise_and", "logical_and"})


@dataclass(frozen=True)
class ModelShape:
    """Shape of a decoder-only Transformer (RMSNorm, RoPE, SwiGLU, untied embedding and head, no biases).

    Raises:
        UsageError: a value is below 1, the heads do not divide the width, or head_dim is odd (RoPE rotates pairs).
    """

    d_model: int
    d_ff: int
    num_layers: int
    num_heads: int
    vocab_size: int = DEFAULT_VOCAB_SIZE

    def __post_init__(self) -> None:
        check_at_least(1, **asdict(self))
        if self.d_model % self.num_heads:
            raise UsageError(f"num_heads {self.num_heads} does not divide d_model {self.d_model}; change one of them")
        if self.head_dim % 2:
            raise UsageError(
                f"head_dim is {self.head_dim} (d_model {self.d_model} / num_heads {self.num_heads}); "
                "rotary embeddings need an even head_dim: change num_heads or d_model"
            )

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.d_model // self.num_heads

    @property
    def parameter_count(self) -> int:
        """Exact number of parameters.

        Embedding and head have 2 * vocab * d_model. Each layer has 4 * d_model^2 (q, k, v, output), 3 * d_model * d_ff
        (gate, up, down) and two norms of d_model. The last norm has d_model.
        """
        layer = 4 * self.d_model**2 + 3 * self.d_model * self.d_ff + 2 * self.d_model
        return 2 * self.vocab_size * self.d_model + self.num_layers * layer + self.d_model


#: The named sizes with their d_model, d_ff, num_layers and num_heads.
_TABLE = """
tiny      64    128   2   4
small    768   3072  12  12
medium  1024   4096  24  16
large   1280   5120  36  20
xl      1600   6400  48  25
2.7B    2560  10240  32  32
xl_2026 2560  10240  32  32
10B     4608  12288  50  36
"""
SIZES = {name: ModelShape(*map(int, numbers)) for name, *numbers in map(str.split, _TABLE.strip().splitlines())}
#: What Stanford's course CS336 calls a size in assignment 2, by year. In 2026 it gave the name of one size to another.
COURSE_NAMES = {
    **dict.fromkeys(("small", "medium", "large"), "2025, 2026"),
    "xl": "2025", "2.7B": "2025", "xl_2026": "2026, as xl", "10B": "2026",
}  # fmt: skip


def resolve_shape(size: str | None, vocab_size: int = DEFAULT_VOCAB_SIZE, **dimensions: int | None) -> ModelShape:
    """The shape of a named size, with some dimensions overridden; without a size all four dimensions are needed.

    Args:
        size: a name of `SIZES`, in letters of any case, or None.
        vocab_size: number of token ids.
        dimensions: d_model, d_ff, num_layers and num_heads; None leaves that of the size.

    Raises:
        UsageError: the size is unknown, a dimension is missing, or :class:`ModelShape` refuses the shape.
    """
    overrides = {name: value for name, value in dimensions.items() if value is not None}
    named: dict[str, int] = {}
    if size is not None:
        shapes = {name.lower(): shape for name, shape in SIZES.items()}
        if size.lower() not in shapes:
            raise unknown("model size", size, SIZES, ", or give all dimensions")
        named = asdict(shapes[size.lower()])
    shape = named | overrides | {"vocab_size": vocab_size}
    missing = [name for name in ("d_model", "d_ff", "num_layers", "num_heads") if name not in shape]
    if missing:
        raise UsageError(f"without a model size, {', '.join(missing)} must be given too (sizes: {', '.join(SIZES)})")
    return ModelShape(**shape)


def size_name(shape: ModelShape) -> str | None:
    """The first name of a shape's size, whatever the vocabulary; None for a shape without a name."""
    return next((name for name, named in SIZES.items() if replace(named, vocab_size=shape.vocab_size) == shape), None)


FORMULA_SOURCE = "formula: sum of 2mnk over the matmuls"
#: The name of an operator that multiplies matrices or vectors: `aten::mv`, `aten::mkldnn_rnn_layer`.
_PRODUCT = re.compile(r"(_|:|add)(mm|mv|dot|rnn|trilinear)(_|$|\.)")
COUNTER_SOURCE = "torch.utils.flop_counter on a fake copy"


class UncountableError(Exception):
    """A module's FLOPs cannot be counted; the message gives the reason, short enough for a table's footnote."""


@dataclass(frozen=True)
class FlopCount:
    """Model FLOPs of one forward pass, per token.

    Attributes:
        per_token_flops: count with attention in full, as torchtitan counts.
        causal_per_token_flops: count with half of attention, as Megatron counts; None where attention cannot be told
            from other matrix products.
        source: how the FLOPs were counted.
        recomputed_per_token_flops: FLOPs that activation checkpointing adds to a backward pass; None where unknown.
        backward_per_token_flops: count of the backward pass; None where it is twice the forward pass.
    """

    per_token_flops: int
    causal_per_token_flops: int | None
    source: str
    recomputed_per_token_flops: int | None = None
    backward_per_token_flops: int | None = None


def mode_multiplier(mode: str) -> int:
    """Model FLOPs of one batch in a mode, in forward passes: 1, or 3 with a backward pass.

    For each product of the forward pass, the backward pass has two: for the gradients of the input and of the weight.
    """
    return 3 if mode in BACKWARD_MODES else 1


def forward_flops(shape: ModelShape, context_length: int) -> FlopCount:
    """Exact FLOPs of the matrix products of one forward pass, per token.

    A product of [m, k] and [k, n] costs 2mnk, since a multiply-add counts as two. For each layer: q, k, v and output
    8 * d_model^2; gate, up and down 6 * d_model * d_ff; scores and values 4 * context * d_model. Once: the head
    2 * d_model * vocab. The embedding is a look-up; norms, softmax and other elementwise work are not model FLOPs.
    """
    dense = shape.num_layers * (8 * shape.d_model**2 + 6 * shape.d_model * shape.d_ff)
    dense += 2 * shape.d_model * shape.vocab_size
    attention = shape.num_layers * 4 * context_length * shape.d_model
    return FlopCount(dense + attention, dense + attention // 2, FORMULA_SOURCE)


def runs_again(count: int, group: int, is_nested: bool) -> tuple[int, int]:
    """How often recomputing runs blocks again: to their end, and only up to what their backward pass needs.

    PyTorch ends a recomputation there, so the end of a group's last block is left out. A nested group is first run up
    to its last block's input, and then each block by itself.

    Args:
        count: blocks that are computed again.
        group: number of blocks that are computed again together.
        is_nested: whether each block of a group is then computed again by itself.
    """
    groups = -(-count // group)
    return count - groups, count if is_nested else groups


def attention_flops(query: Sequence[int], key: Sequence[int], value: Sequence[int], is_backward: bool = False) -> int:
    """FLOPs of fused attention; its keys may have fewer heads than its queries, which torch 2.11's counter refuses.

    Args:
        query, key, value: shapes (batch, heads, length, width).
        is_backward: count the backward, which computes the scores again.
    """
    query_products, value_products = (3, 2) if is_backward else (1, 1)
    scores = math.prod(query[:-1]) * key[-2]
    return 2 * scores * (query_products * query[-1] + value_products * value[-1])


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
            on values, or it calls a raw extension.
    """
    gradients = [(parameter, parameter.grad) for parameter in module.parameters()]
    try:
        forward, backward, recomputed, remarks = _fake_step_flops(module, batch, step, has_backward)
    except Exception as error:
        first_line = str(error).partition("\n")[0]
        raise UncountableError(f"not countable on fake tensors: {type(error).__name__}: {first_line}") from error
    finally:
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
    import torch
    from lightning_utilities.core.apply_func import apply_to_collection
    from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensorMode
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    group_every_dtype()
    counter = FlopCounterMode(display=False, custom_mapping=_formulas())
    # Only the total is needed. PyTorch's hooks on modules fail for a part of a tensor with a graph, under no_grad.
    counter.mod_tracker = _Untracked()  # type: ignore[assignment]
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    remarks, recomputed = dict[str, None](), [0]
    is_all_trained = all(parameter.requires_grad for parameter in module.parameters())

    def fake_input(tensor: Any) -> Any:
        fake = fake_mode.from_tensor(tensor)
        # Where all is trained, a first layer of numbers counts as every other, as is usual for MFU.
        return fake.requires_grad_() if has_backward and is_all_trained and fake.is_floating_point() else fake

    # Without this a compiled module would be compiled for fake tensors.
    with torch.compiler.set_stance("force_eager"), sdpa_kernel(SDPBackend.MATH), counter:
        with FakeCopyMode(fake_mode):
            fake = _copy_to_count(module, fake_mode)
        # Unlike pytrees, this also replaces tensors in a tokenizer's mapping, which is not a dict.
        fake_batch = apply_to_collection(batch, torch.Tensor, fake_input)
        with fake_mode, _watch(remarks, counter, recomputed), torch.set_grad_enabled(has_backward):
            method = getattr(fake, step)
            loss = method(fake_batch, *([0] if len(inspect.signature(method).parameters) > 1 else []))
            forward = counter.get_total_flops()
            if has_backward:
                (loss["loss"] if isinstance(loss, Mapping) else loss).backward()
    backward = counter.get_total_flops() - forward - sum(recomputed)
    return forward, backward, sum(recomputed), remarks


class _Untracked(nullcontext[None]):
    """In the place of the counter's ModuleTracker: all products belong to the whole."""

    parents = ("Global",)


def _formulas() -> dict[Any, Any]:
    """Model FLOPs of operators from the shapes of their arguments, which PyTorch's counter does not know, or counts as
    hardware FLOPs."""
    import torch

    def grouped(a: Any, b: Any, *_: Any, **__: Any) -> Any:
        # Only two batches of matrices are multiplied in pairs; otherwise the groups part one of the three lengths.
        return 2 * math.prod(a if len(b) == 3 else a[-2:]) * b[-1]

    formulas: dict[Any, Any] = {torch.ops.aten._grouped_mm: grouped}
    # A module may select a fused kernel. PyTorch counts that its backward computes the scores again.
    for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention"):
        forward, backward = (
            getattr(torch.ops.aten, f"_scaled_dot_product_{kernel}{ending}") for ending in ("", "_backward")
        )
        formulas[forward] = lambda q, k, v, *_, **__: attention_flops(q, k, v)
        formulas[backward] = lambda _, q, k, v, *__, **___: 2 * attention_flops(q, k, v)
    return formulas


def _watch(remarks: dict[str, None], counter: Any, recomputed: list[int]) -> AbstractContextManager[object]:
    """Within, operators that read values get an answer, which `remarks` note, as they note those not PyTorch's.

    `recomputed` gets the FLOPs of each operator that a backward pass runs with a graph of its own, which is what
    activation checkpointing does.
    """
    import torch
    from torch._subclasses.fake_tensor import DataDependentOutputException, DynamicOutputShapeException
    from torch.utils._python_dispatch import TorchDispatchMode

    routing = Routing()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            before = counter.get_total_flops()
            try:
                out = func(*args, **(kwargs or {}))
            except (DataDependentOutputException, DynamicOutputShapeException):
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
        # Each mask, of a byte an element, is an index into as many dimensions as it has.
        parts = [[index] if index is None or index.element_size() > 1 else indices_of(index) for index in args[1]]
        if all(part is not None for part in parts):
            out = func(
                tensor, [index for part in parts for index in (part if isinstance(part, list) else part.unbind(1))]
            )
    return out


class Routing:
    """How many tokens each expert takes in steps on fake tensors, which do not tell what a router chooses.

    An even share is assumed. Followed are the indices that topk, argmax, max and multinomial choose, and the masks that
    are made of them: `chosen == expert`, one_hot, and gates that are scattered into zeros.
    """

    def __init__(self) -> None:
        from torch.utils.weak import WeakIdKeyDictionary

        #: By storage, the share of its elements that one expert has, and numbers of an expert's tokens.
        self._shares: Any = WeakIdKeyDictionary()
        self._counts: Any = WeakIdKeyDictionary()

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
        elif name in _MASKS or (name in ("gt", "ne") and args[1] == 0):
            share = self._share(args[0])
        elif name == "bincount" and (count := self.count_kept(args[0])) is not None:
            self._counts[out.untyped_storage()] = count
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
    def _of_storage(known: Any, tensor: Any) -> Any:
        # A sparse tensor has no storage.
        return known.get(tensor.untyped_storage()) if str(getattr(tensor, "layout", None)) == "torch.strided" else None


@cache
def group_every_dtype() -> None:
    """Let fake tensors of every dtype be multiplied in groups, as the experts of transformers' models are.

    PyTorch's own fake refuses all but bfloat16, the dtype of its fast kernel; for others it has a slower one.
    """
    import torch
    from torch._subclasses.fake_impls import register_op_impl

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
    """A copy that logs nothing. It shares the module's trainer and data, which may be too large to copy, or refuse."""
    from torch.distributed.device_mesh import DeviceMesh
    from torch.utils.data import DataLoader, Dataset

    attributes = [item for part in module.modules() for item in vars(part).items()]
    shared: dict[int, Any] = {
        id(value): value
        for name, value in attributes
        # FSDP2's state has process groups.
        if name == "_trainer"
        or name.startswith("__composable_api_state_key")
        or isinstance(value, (DataLoader, Dataset, DeviceMesh))
    }
    with ExitStack() as as_whole:
        shared |= _unshard(module, fake_mode, as_whole)
        copied = copy.deepcopy(module, shared)
    # Inside a loop of Lightning's the trainer would keep fake tensors.
    silence_logging(copied)
    skip_value_checks(copied)
    return copied


def _unshard(module: nn.Module, fake_mode: Any, undo: ExitStack) -> dict[int, nn.Parameter]:
    """Let a module that FSDP2 shards be copied as a whole one, until the stack is closed.

    FSDP2 gives each part a class that refuses to be copied, and hooks that gather its parameters.

    Returns:
        A whole fake parameter for the `id` of each that is sharded.
    """
    import torch
    from torch import nn
    from torch.distributed.fsdp import FSDPModule

    sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
    # A function that is compiled for a part cannot be copied.
    if not sharded or any(inspect.isfunction(vars(part).get("forward")) for part in sharded):
        return {}
    for part in sharded:
        changes: dict[str, Any] = {"__class__": type(part).__bases__[1]}
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
