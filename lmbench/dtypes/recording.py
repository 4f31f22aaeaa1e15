"""The dtypes of one step: hooks on modules, and a mode that sees every function of PyTorch that Python code calls."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode

from lmbench.dtypes.notes import DtypeNotes, NotedCall, NotedModule, NotedOperator
from lmbench.dtypes.reasons import NEVER_RAN, UNSEEN, is_floating, module_reason, operator_reason, tensor_reasons
from lmbench.records.instruments import DtypeRecord, NotedTensors

#: Deeper than any batch or output is nested; what leads back into itself ends here.
_MAX_DEPTH = 12
_CASTS = frozenset(["to", "type", "type_as", "float", "double", "half", "bfloat16"])


def name_of(dtype: torch.dtype) -> str:
    """A dtype as records have it: `float32`."""
    return str(dtype).removeprefix("torch.")


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """The tensors of a value, in their order: of tuples, lists, sets, mappings and dataclasses, however nested."""
    if isinstance(value, Tensor):
        yield value
    elif depth < _MAX_DEPTH:
        try:
            if isinstance(value, Mapping):
                items = list(value.values())
            elif isinstance(value, tuple | list | set | frozenset):
                items = list(value)
            else:
                is_record = is_dataclass(value) and not isinstance(value, type)
                items = [getattr(value, field.name) for field in fields(value)] if is_record else []
        except Exception:
            # Somebody's own container that cannot be looked into; the step goes on.
            return
        for item in items:
            yield from tensors_in(item, depth + 1)


def dtypes_in(value: Any) -> tuple[str, ...]:
    """The dtypes of the tensors of a value, in their order."""
    return tuple(name_of(tensor.dtype) for tensor in tensors_in(value))


def counted(tensors: Iterable[Tensor]) -> dict[str, int]:
    """How many tensors there are of each dtype, the most frequent first."""
    return dict(Counter(name_of(tensor.dtype) for tensor in tensors).most_common())


class _Call:
    """One call of a module: what went in and came out, and what gradients came back."""

    def __init__(self, inputs: tuple[str, ...]) -> None:
        self.inputs = inputs
        self.outputs: tuple[str, ...] = ()
        self.gradients: dict[int, str] = {}


class _Operator(NamedTuple):
    """Calls of an operator within a module that are alike; `under_autocast` says that autocast was on."""

    path: str
    name: str
    inputs: tuple[str, ...]
    output: str
    under_autocast: bool


class StepDtypes(TorchFunctionMode):
    """Notes the dtypes of one step of a module on a device, from `start` to `stop`.

    Operators are noted as Python calls them, with what the code gave them and what came back; what autocast did lies
    between the two. Code in C++ is one operator. Gradients are noted by hooks on the tensors that a module returns:
    hooks of its backward would put views into the graph.
    """

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()
        self._module, self._device = module, device
        self.is_compiled = any(
            getattr(child, "_compiled_call_impl", None) is not None or hasattr(child, "_orig_mod")
            for child in module.modules()
        )
        # A module that optimizes by hand has no phases.
        self._phases = {"forward"} if getattr(module, "automatic_optimization", True) else {"forward", "other"}
        self._autocast_dtype: str | None = None
        self._operators: Counter[_Operator] = Counter()
        self._calls: dict[str, list[_Call]] = {}
        self._running: list[tuple[str, _Call]] = []
        self._latest_outputs: tuple[str, ...] = ()
        self._batch: dict[str, int] = {}
        self._gradients: dict[str, str] = {}
        self._loss: Any = None

    def start(self, phase: str) -> None:
        """The step begins, in `phase`."""
        self._phase = phase
        self._handles = []
        for path, child in self._module.named_modules():
            if path and not isinstance(child, torch.jit.ScriptModule):
                self._calls[path] = []
                # In front of other hooks, and behind them: what the caller gave, and what it gets.
                begin, end = self._hooks(path)
                self._handles.append(child.register_forward_pre_hook(begin, prepend=True, with_kwargs=True))
                self._handles.append(child.register_forward_hook(end))
        # Compiled code runs without hooks, or would be compiled anew with them.
        self._stance = torch.compiler.set_stance("force_eager")
        self.__enter__()  # type: ignore[no-untyped-call]

    def border(self, phase: str) -> None:
        """Within the step a phase begins."""
        self._phase = phase

    def stop(self) -> None:
        """Take the instruments away."""
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self._stance.__exit__(None, None, None)
        for handle in self._handles:
            handle.remove()

    def _hooks(self, path: str) -> tuple[Any, Any]:
        def begin(module: nn.Module, inputs: Any, named: Any) -> None:
            if not _is_recomputed():
                call = _Call(dtypes_in((inputs, named)))
                self._calls[path].append(call)
                self._running.append((path, call))

        def end(module: nn.Module, inputs: Any, output: Any) -> None:
            if _is_recomputed() or not self._running:
                return
            call = self._running.pop()[1]
            self._latest_outputs = call.outputs = dtypes_in(output)
            for place, tensor in enumerate(tensors_in(output)):
                if tensor.requires_grad:
                    tensor.register_hook(
                        lambda gradient, place=place: call.gradients.update({place: name_of(gradient.dtype)})
                    )

        return begin, end

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        name = getattr(function, "__name__", "")
        if self._phase in self._phases and name not in ("__get__", "__set__") and not _is_recomputed():
            self._note(name.strip("_"), (args, kwargs), result)
        return result

    def _note(self, name: str, arguments: Any, result: Any) -> None:
        returned = [tensor for tensor in tensors_in(result) if not tensor._is_view()]
        tensors = list(tensors_in(arguments))
        # Tensors without dimensions beside others do not decide what comes out.
        inputs = dtypes_in([tensor for tensor in tensors if tensor.ndim] or tensors)
        if not (returned and inputs):
            return
        output = name_of(returned[0].dtype)
        if not any(map(is_floating, (*inputs, output))) or (name in _CASTS and output == inputs[0]):
            return
        inputs = inputs[:1] if name in _CASTS else inputs
        under_autocast = torch.is_autocast_enabled(self._device.type)
        if under_autocast:
            self._autocast_dtype = name_of(torch.get_autocast_dtype(self._device.type))
        path = self._running[-1][0] if self._running else ""
        self._operators[_Operator(path, name, inputs, output, under_autocast)] += 1

    def note_batch(self, batch: Any) -> None:
        self._batch = counted(tensors_in(batch))

    def note_gradients(self) -> None:
        """Those that parameters have now."""
        parameters = self._module.named_parameters()
        self._gradients = {name: name_of(p.grad.dtype) for name, p in parameters if p.grad is not None}

    def note_loss(self, outputs: Any) -> None:
        """Of what a step returned, or of what its backward began with."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._loss = self._loss if loss is None else loss

    def fill_in(self, record: DtypeRecord, precision: str, mode: str, optimizers: Iterable[Optimizer]) -> DtypeNotes:
        """Complete the record by what the step showed; returns the notes for a file of their own."""
        operators = self._noted_operators()
        modules = self._noted_modules(operators)
        kinds = {
            "parameters": counted(self._module.parameters()),
            "buffers": counted(self._module.buffers()),
            "batch": self._batch,
            "logits": dict[str, int](),
            "loss": counted(tensors_in(self._loss)),
            "gradients": dict(Counter(self._gradients.values())),
            "optimizer_state": counted(tensors_in([list(each.state.values()) for each in optimizers])),
        }
        reasons = tensor_reasons(precision, mode, record.loss_scale, kinds)
        kinds["logits"], reasons["logits"], reasons["loss"] = self._logits(operators)
        record.autocast_dtype = self._autocast_dtype
        record.tensors = [
            NotedTensors(kind, dtypes, reasons[kind]) for kind, dtypes in kinds.items() if dtypes or kind != "buffers"
        ]
        record.unused_modules = [module.path for module in modules if module.reason == NEVER_RAN]
        return DtypeNotes(torch=str(torch.__version__), device_type=self._device.type, modules=modules)

    def _noted_operators(self) -> dict[str, list[NotedOperator]]:
        """By the path of the module that called them."""
        operators: dict[str, list[NotedOperator]] = {}
        uses_autocast = self._autocast_dtype is not None
        for (path, name, inputs, output, under_autocast), count in self._operators.items():
            if name in _CASTS:
                reason = f"the code casts to {output}"
            else:
                reason = operator_reason(name, inputs, output, self._device.type, under_autocast, uses_autocast)
            operators.setdefault(path, []).append(NotedOperator(name, count, list(inputs), output, reason))
        return operators

    def _noted_modules(self, operators: Mapping[str, list[NotedOperator]]) -> list[NotedModule]:
        modules = []
        for path, module in self._module.named_modules():
            parameters, calls = list(module.parameters(recurse=False)), self._noted_calls(path)
            has_forward = getattr(type(module), "forward", None) is not nn.Module.forward
            if not (parameters or calls or has_forward) if path else "" not in operators:
                # A list of modules, which nobody calls; a step without code of its own.
                continue
            prefix = f"{path}." if path else ""
            has_gradients = any(prefix + name in self._gradients for name, _ in module.named_parameters())
            has_children = next(module.children(), None) is not None
            reason = module_reason(operators.get(path, []), bool(calls) or not path, has_gradients, has_children)
            modules.append(
                NotedModule(
                    path=path,
                    class_name=type(module).__name__,
                    reason=UNSEEN if isinstance(module, torch.jit.ScriptModule) else reason,
                    parameters=counted(parameters),
                    buffers=counted(module.buffers(recurse=False)),
                    calls=calls,
                    operators=operators.get(path, []),
                )
            )
        return modules

    def _noted_calls(self, path: str) -> list[NotedCall]:
        """The calls of a module, those that are alike together; none of a module that never ran."""
        alike = Counter(
            (call.inputs, call.outputs, tuple(dtype for _, dtype in sorted(call.gradients.items())))
            for call in self._calls.get(path, [])
        )
        return [NotedCall(count, *map(list, dtypes)) for dtypes, count in alike.items()]

    def _logits(self, operators: Mapping[str, list[NotedOperator]]) -> tuple[dict[str, int], str, str]:
        """The dtypes of what the loss is made of (before a cast that the code makes only for the loss), the reason for
        them, and the reason for the loss's dtype."""
        for called in operators.values():
            for place, loss in enumerate(called):
                if loss.name.endswith("_loss") or "cross_entropy" in loss.name or loss.name == "kl_div":
                    reason = f"{loss.name}: {loss.reason}"
                    before = called[place - 1] if place else None
                    if before and before.name in _CASTS and before.output == loss.inputs[0]:
                        return {before.inputs[0]: 1}, f"cast to {before.output} by the code, for {loss.name}", reason
                    return {loss.inputs[0]: 1}, f"given to {loss.name}", reason
        missing = "no loss operator was seen"
        latest = Counter(filter(is_floating, self._latest_outputs))
        return dict(latest), f"what the last module returned; {missing}", missing


def _is_recomputed() -> bool:
    """Whether this is within a backward: a forward that activation checkpointing repeats is no call of the step."""
    return torch._C._current_graph_task_id() != -1
