"""Activation checkpointing of a module's blocks, in place: the blocks to compute again, in groups, and what they keep.

A checkpointed block saves its input instead of its operators' tensors, and runs again when its backward pass begins
(Chen et al. 2016).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.attention import _cur_sdpa_kernel_backends, sdpa_kernel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from lmbench.errors import UsageError, check_at_least
from lmbench.instruments.module_parts import block_lists
from lmbench.sizes import ModelShape, runs_again

Kept = Literal["inputs", "attention", "matmuls", "all"]

_ATTENTION = (
    "_scaled_dot_product_(flash_attention(_for_cpu)?|efficient_attention|cudnn_attention|fused_attention_overrideable)"
)
#: Operators whose results are saved, by name without the overload. Everything else is computed again: norms, rotation,
#: gating, and attention written out, whose tensors grow with the square of the length (Korthikanti et al. 2022).
_SAVED = {
    "attention": re.compile(f"aten::{_ATTENTION}"),
    "matmuls": re.compile(f"aten::(mm|addmm|_scaled_mm|{_ATTENTION})"),
}

#: Arguments of transformers' blocks that give no cache of keys and values: it would grow when a block runs again. The
#: library's own checkpointing (`GradientCheckpointingLayer`) changes them, too.
_WITHOUT_CACHE = {"past_key_values": None, "past_key_value": None, "layer_past": None, "use_cache": False}


@dataclass
class RecomputeOptions:
    """Which blocks the backward pass computes again: any of these, as in `--trainer.recompute.group 2`.

    The blocks are the members of the module's lists of alike modules, such as `blocks` or `layers`.

    Args:
        first: number of blocks, from the first on; null is all of them. The first blocks have their backward last, when
            the tensors of the others are gone.
        group: number of consecutive blocks that are computed again together, so that only their first input is kept.
            The module has to hand each block's output to the next block, with the same other arguments.
        nested: within a group, keep the inputs of blocks, and compute each block again by itself.
        keep: what a block keeps: inputs (only its input), attention (the results of fused attention too), matmuls
            (those of linear layers and of fused attention) or all (nothing is computed again, for offload).
        offload: keep it in the host's memory. It is copied there in the forward pass, and back in the backward pass.

    Raises:
        UsageError: a number is below 1, or settings exclude each other.
    """

    first: int | None = None
    group: int = 1
    nested: bool = False
    keep: Kept = "inputs"
    offload: bool = False

    def __post_init__(self) -> None:
        check_at_least(1, "trainer.recompute", first=self.first or 1, group=self.group)
        if self.group > 1 and self.keep != "inputs":
            raise UsageError(f"trainer.recompute.group is {self.group}, with keep {self.keep}; allowed: keep inputs")
        if self.offload and self.keep in _SAVED:
            raise UsageError(f"trainer.recompute.offload with keep {self.keep}; allowed: keep inputs or all")


def recomputed_flops(options: RecomputeOptions, shape: ModelShape, context_length: int, is_written_out: bool) -> int:
    """Matmul FLOPs per token that the backward pass of lmbench's Transformer computes again.

    Blocks are computed again up to the last tensor that their backward pass needs, the input of the last product. So
    that product (2 * d_model * d_ff) is not repeated. Products that fused attention repeats inside its kernel do not
    count. The terms are those of `lmbench.sizes.forward_flops`.

    Args:
        options: which blocks, and what they keep.
        shape: the model's shape.
        context_length: tokens in a sequence.
        is_written_out: whether attention runs as matmul, mask, softmax, matmul.
    """
    attention, last = 4 * context_length * shape.d_model, 2 * shape.d_model * shape.d_ff
    count = min(options.first or shape.num_layers, shape.num_layers)
    if options.keep in _SAVED and not is_written_out:
        attention = 0
    if options.keep == "all":
        return 0
    if options.keep == "matmuls":
        return count * attention
    block = 8 * shape.d_model**2 + 3 * last + attention
    whole_runs, shorter_runs = runs_again(count, options.group, options.nested)
    return whole_runs * block + shorter_runs * (block - last)


def _checkpointed(keep: Kept, function: Callable[..., Any], *inputs: Any, **named: Any) -> Any:
    """Call a function, saving for the backward only the inputs, the random state, and the results that `keep` names.

    Attention takes the same kernels when it runs again.
    """
    if keep in _SAVED:
        named["context_fn"] = partial(create_selective_checkpoint_contexts, partial(_policy, keep))
    if not torch.compiler.is_compiling():
        function = sdpa_kernel(_cur_sdpa_kernel_backends())(function)
    return checkpoint(function, *inputs, use_reentrant=False, **named)


def _policy(keep: Kept, ctx: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = _SAVED[keep].fullmatch(operator.name().partition(".")[0])
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def recompute_in_place(module: nn.Module, options: RecomputeOptions) -> ExitStack:
    """Let the module's blocks be computed again in the backward pass, until the returned stack is closed.

    Raises:
        UsageError: the module has no list of blocks.
    """
    lists, undo = block_lists(module), ExitStack()
    if not lists:
        raise UsageError(
            f"trainer.recompute needs a list of blocks of one class, and {type(module).__name__} has none; leave it out"
        )
    # The module's description tells of it.
    module.recompute_options = options  # type: ignore[assignment]
    undo.callback(delattr, module, "recompute_options")
    for blocks in lists:
        chosen = list(blocks)[: options.first]
        for start in range(0, len(chosen), options.group):
            group = _BlockGroup(chosen[start : start + options.group], options)
            for index, block in enumerate(group.blocks):
                undo.enter_context(patch.object(block, "forward", group.pass_on if index else group.forward))
    return undo


class _BlockGroup:
    """Consecutive blocks that are computed again together: the first one's call runs them all, the others pass on."""

    def __init__(self, blocks: list[Any], options: RecomputeOptions) -> None:
        self.blocks, self._options = blocks, options
        self._functions = [block.forward for block in blocks]
        self._output: Any = None
        #: The first block's arguments besides the hidden state, while others of the group are to be called.
        self._others = list[Any]()
        self._passes = 0

    def forward(self, *inputs: Any, **named: Any) -> Any:
        options = self._options
        if len(self.blocks) > 1 and not inputs:
            raise self._refusal("gives a block its hidden state by name")
        if not torch.is_grad_enabled() or options.keep == "all":
            call: Callable[..., Any] = self._run
        else:
            call = partial(_checkpointed, options.keep, self._run)
        is_offloaded = options.offload and torch.is_grad_enabled()
        with torch.autograd.graph.saved_tensors_hooks(_pack, _unpack) if is_offloaded else nullcontext():
            output = call(*inputs, **named)
        if len(self.blocks) > 1:
            self._output, self._others, self._passes = output, [*inputs[1:], *named.values()], 1
        return output

    def pass_on(self, *inputs: Any, **named: Any) -> Any:
        output, others = self._output, [*inputs[1:], *named.values()]
        is_same = len(others) == len(self._others) and all(a is b for a, b in zip(others, self._others, strict=True))
        if not inputs or inputs[0] is not first_of(output) or not is_same:
            raise self._refusal("does more between its blocks than hand the output of one to the next")
        self._passes += 1
        if self._passes == len(self.blocks):
            # Keep no tensor beyond the forward pass.
            self._output, self._others = None, []
        return output

    def _refusal(self, what: str) -> UsageError:
        """The error for a module whose blocks cannot run as a group: `what` it does."""
        return UsageError(f"trainer.recompute.group is {len(self.blocks)}, and the module {what}; give group 1")

    def _run(self, *inputs: Any, **named: Any) -> Any:
        is_nested = self._options.nested and torch.is_grad_enabled()
        named |= {name: value for name, value in _WITHOUT_CACHE.items() if name in named}
        output: Any = None
        for index, function in enumerate(self._functions):
            run = partial(_checkpointed, "inputs", function) if is_nested else function
            output = run(*inputs, **named) if index == 0 else run(first_of(output), *inputs[1:], **named)
        return output


def first_of(output: Any) -> Any:
    """The hidden state of a block's output, which may be a tuple."""
    return output[0] if isinstance(output, tuple) else output


def moved_to_host(tensor: Tensor) -> Callable[[], Tensor]:
    """Copy a tensor into pinned memory of the host; returns the function that copies it back to its device."""
    if tensor.device.type == "cpu":
        return lambda: tensor
    device, copy = tensor.device, torch.empty_like(tensor, device="cpu", pin_memory=True)
    copy.copy_(tensor, non_blocking=True)
    return lambda: copy.to(device, non_blocking=True)


def _pack(tensor: Tensor) -> Any:
    # Parameters, and views of them, stay on the device anyway.
    owner = tensor if tensor._base is None else tensor._base
    return tensor if isinstance(owner, nn.Parameter) else moved_to_host(tensor)


def _unpack(packed: Any) -> Tensor:
    unpacked: Tensor = packed() if callable(packed) else packed
    return unpacked
