"""Run one part of the model by itself, on what it is given in the model, and take its kernel time from a trace.

Random operands would not do: the gradient of the keys is laid out the other way round than that of the queries, and
RoPE's backward takes 1.4 times as long for it. Nor would just any state of the cache: a fused RoPE takes 6.1 us on
queries and keys just written, 7.3 us on those of memory, and 7.2 us in the model (H200, torch 2.11).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from lmbench.kernels.findings import examine
from lmbench.model.transformer import Transformer

ROUNDS = 5


@dataclass
class Call:
    """One call within a training step: its inputs and the gradients of its outputs, with their layouts."""

    work: Callable[..., Tensor | tuple[Tensor, ...]]
    inputs: list[Tensor]
    gradients: list[Tensor] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)

    def wanted(self):
        """What the step takes gradients of."""
        return [x for x in (*self.inputs, *self.weights) if x.requires_grad]


def calls_in_the_model(shape, batch, context, *kinds):
    """For each class the calls of its modules in one training step on random tokens, in fp32 with naive attention."""
    with torch.device("cuda"):
        model = Transformer(shape, context, "naive")
        tokens, targets = torch.randint(shape.vocab_size, (2, batch, context))
    calls = {kind: [] for kind in kinds}

    def keep(module, inputs, output):
        copies = [x.detach().clone().requires_grad_(x.requires_grad) for x in inputs]
        call = Call(module, copies, weights=list(module.parameters()))
        output.register_hook(lambda gradient: call.gradients.append(gradient.detach().clone()))
        calls[type(module)].append(call)

    hooks = [module.register_forward_hook(keep) for module in model.modules() if type(module) in kinds]
    model(tokens, targets).backward()
    for hook in hooks:
        hook.remove()
    return [calls[kind] for kind in kinds]


def kernel_time_alone(calls, path):
    """Kernel time of forward and of backward, in s a round: all calls forward and then, last first, backward.

    The trace is left at `path`.
    """
    _round(calls)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recording:
        for number in range(ROUNDS):
            with record_function(f"lmbench.step:{number}"):
                _round(calls)
        torch.cuda.synchronize()
    recording.export_chrome_trace(str(path))
    times = examine(path).work.seconds("phase")
    return {phase: seconds for phase, seconds in times.items() if phase != "outside"}


def _round(calls):
    outputs = []
    for call in calls:
        _write_again(call.inputs)
        with record_function("lmbench.phase:forward"):
            outputs.append(call.work(*call.inputs))
    for call in reversed(calls):
        _write_again(call.gradients)
        with record_function("lmbench.phase:backward"):
            torch.autograd.grad(outputs.pop(), call.wanted(), call.gradients)


def _write_again(tensors):
    """Bring the cache into the model's state: what was just written is in it, still to be stored."""
    for tensor in tensors:
        if tensor.is_floating_point():
            tensor.data.mul_(1)
