"""Model FLOPs per token: exact for lmbench's Transformer, counted on a fake copy for a user's module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from lmbench.sizes import ModelShape

if TYPE_CHECKING:
    from torch import nn

FORMULA_SOURCE = "formula: sum of 2mnk over the matmuls"
COUNTER_SOURCE = "torch.utils.flop_counter on a fake copy"

# A backward pass has two products, for the input's and the weight's gradient, for each one of the forward.
_FORWARDS_PER_MODE = {"inference": 1, "forward": 1, "forward_backward": 3, "train_step": 3}


class UncountableError(Exception):
    """A module's FLOPs could not be counted; the message is the reason, fit for a table's footnote."""


@dataclass(frozen=True)
class FlopCount:
    """Model FLOPs of one forward pass, per token.

    per_token_flops counts attention in full (torchtitan's count); causal_per_token_flops counts half of it
    (Megatron's) and is None where attention cannot be told from other matmuls. source says where the
    figures come from.
    """

    per_token_flops: int
    causal_per_token_flops: int | None
    source: str


def mode_multiplier(mode: str) -> int:
    """How many forward passes' worth of model FLOPs one batch of a mode is: 1, or 3 with a backward pass."""
    return _FORWARDS_PER_MODE[mode]


def forward_flops(shape: ModelShape, context_length: int) -> FlopCount:
    """Matmul FLOPs of one forward pass per token, exactly.

    A product of [m, k] and [k, n] costs 2mnk (a multiply and an add each). Per token and layer: q, k, v,
    output 8 * d_model^2; gate, up, down 6 * d_model * d_ff; scores and values 4 * context * d_model. Once:
    the head 2 * d_model * vocab. The embedding is a look-up; norms, softmax and other elementwise work are
    not model FLOPs.
    """
    dense = shape.num_layers * (8 * shape.d_model**2 + 6 * shape.d_model * shape.d_ff)
    dense += 2 * shape.d_model * shape.vocab_size
    attention = shape.num_layers * 4 * context_length * shape.d_model
    return FlopCount(dense + attention, dense + attention // 2, FORMULA_SOURCE)


def counter_flops(
    module: nn.Module, batch: Any, tokens: int, step: Callable[[nn.Module, Any], Any] | None = None
) -> FlopCount:
    """Count one forward pass of any module on fake tensors: no memory, no kernels, nothing of it changed.

    Args:
        module: any module; its own parameters are not copied, only their shapes, types and devices are taken.
        batch: what the step takes; tensors in it are replaced by fakes.
        tokens: tokens in that batch (the count is divided by it).
        step: calls the module on the batch; by default ``training_step(batch, 0)`` where the module has
            one, else ``module(*batch)`` for a tuple or list and ``module(batch)`` otherwise.

    Attention through scaled_dot_product_attention is counted by its plain formula: fused kernels may pad
    head_dim, and some have no formula, which would count as zero. Operators outside PyTorch's own are not
    counted, and are named in ``source``.

    Raises:
        UncountableError: the module does not run on fake tensors (it reads values, or calls a raw extension).
    """
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

    def fused_flops(q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> int:
        return int(sdpa_flop_count(q, k, v))

    # The counter has no formula for the fused CPU kernel, which a module may insist on.
    fused_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    counter = FlopCounterMode(display=False, custom_mapping={fused_on_cpu: fused_flops})
    try:
        # A compiled module would start to compile for fakes.
        eager = torch.compiler.set_stance("force_eager")
        with _quiet_log(module), eager, sdpa_kernel(SDPBackend.MATH), counter:
            foreign = _run_on_fakes(module, batch, step or _default_step)
    except Exception as error:
        first_line = (str(error).splitlines() or [""])[0]
        raise UncountableError(f"not countable on fake tensors: {type(error).__name__}: {first_line}") from error
    source = COUNTER_SOURCE
    if foreign:
        source += f"; not counted: {', '.join(sorted(foreign))}"
    return FlopCount(round(counter.get_total_flops() / tokens), None, source)


def _run_on_fakes(module: nn.Module, batch: Any, step: Callable[[nn.Module, Any], Any]) -> set[str]:
    """Run the step with all its tensors replaced by fakes; return the names of foreign operators."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils._python_dispatch import TorchDispatchMode
    from torch.utils._pytree import tree_map_only

    foreign: set[str] = set()

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace not in {"aten", "prim", "prims", "profiler"}:
                foreign.add(func.name())
            return func(*args, **(kwargs or {}))

    class Step(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def forward(self, inputs: Any) -> Any:
            return step(self.module, inputs)

    wrapper = Step()
    tensors = dict(wrapper.named_parameters()) | dict(wrapper.named_buffers())
    fake_mode = FakeTensorMode(allow_non_fake_inputs=True)
    fakes: dict[str, torch.Tensor] = {name: fake_mode.from_tensor(tensor) for name, tensor in tensors.items()}
    fake_batch = tree_map_only(torch.Tensor, fake_mode.from_tensor, batch)
    with fake_mode, Watch(), torch.no_grad():  # type: ignore[no-untyped-call]
        torch.func.functional_call(wrapper, fakes, (fake_batch,))
    return foreign


def _default_step(module: nn.Module, batch: Any) -> Any:
    training_step: Callable[[Any, int], Any] | None = getattr(module, "training_step", None)
    if training_step is not None:
        return training_step(batch, 0)
    return module(*batch) if isinstance(batch, (tuple, list)) else module(batch)


@contextmanager
def _quiet_log(module: nn.Module) -> Iterator[None]:
    """Silence a LightningModule's ``log``: outside of a loop it raises, inside it would keep fake tensors."""
    names = [name for name in ("log", "log_dict") if hasattr(module, name)]
    kept = {name: module.__dict__[name] for name in names if name in module.__dict__}
    for name in names:
        module.__dict__[name] = lambda *args, **kwargs: None
    try:
        yield
    finally:
        for name in names:
            del module.__dict__[name]
        module.__dict__.update(kept)
