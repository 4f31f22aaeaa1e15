"""The recording of one step's dtypes: by hooks on modules, and by a mode that sees every PyTorch function called."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lmbench.autocast import autocast_lists
from lmbench.dtypes.answer import (
    CASTS,
    DtypeNotes,
    NotedCall,
    NotedModule,
    NotedOperator,
    is_floating,
    module_reason,
    operator_reason,
    tensor_reasons,
)
from lmbench.instruments.subject import tensors_of
from lmbench.precision import dtype_name
from lmbench.records.examined import DtypeRecord, NotedTensors

_Dtypes = tuple[str, ...]


def dtypes_in(value: Any) -> _Dtypes:
    """The dtypes of the tensors of a value in order.

    torchao's tensors report the dtype of their original; here they count with the dtype of their data.
    """
    return tuple(dtype_name(getattr(tensor, "_data", tensor).dtype) for tensor in tensors_of(value))


def counted(tensors: Iterable[Tensor]) -> dict[str, int]:
    """Number of tensors of each dtype, the most frequent first."""
    return dict(Counter(dtype_name(tensor.dtype) for tensor in tensors).most_common())


class StepDtypes(TorchFunctionMode):
    """Notes the dtypes of one step of a module on a device, from `start` to `stop`.

    Operators are noted as Python calls them, with the dtypes that the code passed and those that came back; autocast
    casts in between. A function in C++ counts as one operator.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self._module, self._device = module, device
        # With manual optimization the forward pass is not a phase of its own.
        self._phases = {"forward"} if getattr(module, "automatic_optimization", True) else {"forward", "other"}
        self._autocast_dtype: str | None = None
        # Counts by path of the calling module, operator's name, inputs, output, and whether autocast was on.
        self._operators = Counter[tuple[str, str, _Dtypes, str, bool]]()
        # Inputs and outputs of each kind of call, by the module's path.
        self._calls: dict[str, dict[tuple[_Dtypes, _Dtypes], None]] = defaultdict(dict)
        self._running = list[tuple[str, _Dtypes]]()
        self._latest: _Dtypes = ()
        self._gradients = dict[str, str]()
        self._batch = dict[str, int]()
        self._loss: Any = None

    def start(self, phase: str) -> None:
        """Begin to note a step that starts in `phase`."""
        self.phase = phase
        with ExitStack() as instruments:
            for path, child in self._module.named_modules():
                if path and not isinstance(child, torch.jit.ScriptModule):
                    # The first hook before and the last one after the forward see what the caller passes and gets.
                    begin = partial(self._begin, path)
                    hook = child.register_forward_pre_hook(begin, prepend=True, with_kwargs=True)
                    instruments.callback(hook.remove)
                    instruments.callback(child.register_forward_hook(self._end).remove)
            # Compiled code would run without the hooks, or be compiled again with them.
            instruments.enter_context(torch.compiler.set_stance("force_eager"))
            instruments.enter_context(self)
            self.stop = instruments.pop_all().close

    def border(self, phase: str) -> None:
        """Note that a phase of the step begins."""
        self.phase = phase

    def _begin(self, path: str, module: nn.Module, inputs: Any, named: Any) -> None:
        if not _is_recomputed():
            self._running.append((path, dtypes_in((inputs, named))))

    def _end(self, module: nn.Module, inputs: Any, output: Any) -> None:
        if not _is_recomputed() and self._running:
            path, inputs_dtypes = self._running.pop()
            self._latest = dtypes_in(output)
            self._calls[path][inputs_dtypes, self._latest] = None

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if self.phase not in self._phases or name in ("__get__", "__set__") or _is_recomputed():
            return result
        name, tensors = name.strip("_"), tensors_of((args, kwargs))
        # Beside other tensors, a tensor without dimensions does not decide the result's dtype.
        inputs = dtypes_in([tensor for tensor in tensors if tensor.ndim] or tensors)
        outputs = dtypes_in([tensor for tensor in tensors_of(result) if not tensor._is_view()])[:1]
        inputs = inputs[:1] if name in CASTS else inputs
        if inputs and outputs and any(map(is_floating, inputs + outputs)) and (name not in CASTS or inputs != outputs):
            under_autocast = torch.is_autocast_enabled(self._device.type)
            if under_autocast:
                self._autocast_dtype = dtype_name(torch.get_autocast_dtype(self._device.type))
            path = self._running[-1][0] if self._running else ""
            self._operators[path, name, inputs, outputs[0], under_autocast] += 1
        return result

    def note_batch(self, batch: Any) -> None:
        self._batch = counted(tensors_of(batch))

    def note_gradients(self) -> None:
        """Note the dtypes of the parameters' present gradients."""
        parameters = self._module.named_parameters()
        self._gradients = {name: dtype_name(p.grad.dtype) for name, p in parameters if p.grad is not None}

    def note_loss(self, loss: Any) -> None:
        """Note the loss: of a step's output, or the tensor that its backward starts from; None changes nothing."""
        self._loss = self._loss if loss is None else loss

    def fill_in(self, record: DtypeRecord, precision: str, mode: str, optimizers: Iterable[Optimizer]) -> DtypeNotes:
        """Complete the record with the step's dtypes; returns the notes for `dtypes.json`."""
        module, device_type = self._module, self._device.type
        lists = {} if self._autocast_dtype is None else autocast_lists(device_type)
        operators: dict[str, list[NotedOperator]] = defaultdict(list)
        for (path, name, inputs, output, under_autocast), count in self._operators.items():
            reason = operator_reason(name, inputs, output, lists.get(name), under_autocast)
            operators[path].append(NotedOperator(name, count, list(inputs), output, reason))
        modules = []
        for path, child in module.named_modules():
            # Left out are lists of modules, which are never called, and a step without operators of its own.
            has_forward = getattr(type(child), "forward", None) is not nn.Module.forward
            if operators[path] or (path and (has_forward or child._parameters)):
                modules.append(self._noted(path, child, operators[path]))
        logits, logits_reason, loss_reason = self._logits(operators)
        kinds = {
            "parameters": counted(module.parameters()),
            "buffers": counted(module.buffers()),
            "batch": self._batch,
            "logits": logits,
            "loss": counted(tensors_of(self._loss)),
            "gradients": dict(Counter(self._gradients.values())),
            "optimizer_state": counted(tensors_of([list(optimizer.state.values()) for optimizer in optimizers])),
        }
        reasons = tensor_reasons(precision, mode, record.loss_scale, kinds)
        reasons |= {"logits": logits_reason, "loss": loss_reason}
        record.autocast_dtype = self._autocast_dtype
        record.tensors = [
            NotedTensors(kind, dtypes, reasons[kind]) for kind, dtypes in kinds.items() if dtypes or kind != "buffers"
        ]
        return DtypeNotes(torch=str(torch.__version__), device_type=device_type, modules=modules)

    def _noted(self, path: str, module: nn.Module, operators: list[NotedOperator]) -> NotedModule:
        """The notes of a module; equal calls are noted once."""
        calls = self._calls[path]
        reason = "TorchScript: no hook sees its calls"
        if not isinstance(module, torch.jit.ScriptModule):
            has_gradients = any(name.startswith(f"{path}.") for name in self._gradients)
            has_children = next(module.children(), None) is not None
            reason = module_reason(operators, bool(calls) or not path, has_gradients, has_children)
        return NotedModule(
            path=path,
            class_name=type(module).__name__,
            reason=reason,
            parameters=counted(module.parameters(recurse=False)),
            calls=[NotedCall(*map(list, dtypes)) for dtypes in calls],
            operators=operators,
        )

    def _logits(self, operators: Mapping[str, list[NotedOperator]]) -> tuple[dict[str, int], str, str]:
        """The dtypes of the logits, the reason for them, and the reason for the loss's dtype.

        The logits are the input of the loss operator, before a cast that the code makes only for the loss.
        """
        for calls in operators.values():
            for before, loss in zip([None, *calls], calls, strict=False):
                if loss.name.endswith("_loss") or "cross_entropy" in loss.name or loss.name == "kl_div":
                    reason = f"{loss.name}: {loss.reason}"
                    if before and before.name in CASTS and before.output == loss.inputs[0]:
                        return {before.inputs[0]: 1}, f"cast to {before.output} by the code, for {loss.name}", reason
                    return {loss.inputs[0]: 1}, f"given to {loss.name}", reason
        missing = "no loss operator was seen"
        return Counter(filter(is_floating, self._latest)), f"output of the last module; {missing}", missing


def _is_recomputed() -> bool:
    """Whether a backward is running: a forward that activation checkpointing repeats is not a call of the step."""
    return torch._C._current_graph_task_id() != -1
