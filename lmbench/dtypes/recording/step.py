"""The dtypes of one step: instruments put on a module, taken away again, and what they saw put together."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lmbench.dtypes.reasons import (
    NEVER_RAN,
    UNSEEN,
    batch_reason,
    buffer_reason,
    gradient_reason,
    is_floating,
    module_reason,
    operator_reason,
    parameter_reason,
    plain_name,
    state_reason,
)
from lmbench.dtypes.recorded import DtypeNotes, NotedModule, NotedOperator
from lmbench.dtypes.recording.autocast import Asking, listed, name_of
from lmbench.dtypes.recording.modules import ModuleWatch, counted, takes_hooks, tensors_in
from lmbench.dtypes.recording.operators import OperatorCall, OperatorRecording
from lmbench.records.instruments import NotedTensors

#: What has its lists told apart from those of the run's device, where they differ.
_OTHER_DEVICES = {"cpu": "cuda", "cuda": "cpu"}


@dataclass(frozen=True)
class Findings:
    """What was found: for the run's record, and notes for a file of their own."""

    autocast_dtype: str | None
    tensors: list[NotedTensors]
    unused_modules: list[str]
    notes: DtypeNotes


class StepDtypes:
    """Notes the dtypes of one step of a module on a device, from `start` to `stop`."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._module, self._device = module, device
        self.is_compiled = any(_is_compiled(child) for child in module.modules())
        takes_all = not getattr(module, "automatic_optimization", True)
        self._operators = OperatorRecording(module, listed(device.type), takes_all)
        self._batch: list[Tensor] = []
        self._gradients: dict[str, str] = {}
        self._loss: Any = None

    def start(self, step: int, phase: str) -> None:
        """The step begins, in `phase`. Raises RuntimeError where somebody else's profiler is on."""
        self._operators.start(step, phase)
        self._watch = ModuleWatch(self._module, self._device.type)
        # Compiled code runs without hooks, or would be compiled anew with them.
        self._stance = torch.compiler.set_stance("force_eager")

    def border(self, phase: str) -> None:
        """Within the step a phase begins."""
        self._operators.border(phase)

    def note_batch(self, batch: Any) -> None:
        self._batch = [tensor.detach().to("meta") for tensor in tensors_in(batch)]

    def note_gradients(self) -> None:
        """Those that parameters have now."""
        self._gradients = {
            name: name_of(p.grad.dtype) for name, p in self._module.named_parameters() if p.grad is not None
        }

    def note_loss(self, outputs: Any) -> None:
        """Of what a step returned, or of what its backward began with."""
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self._loss = self._loss if loss is None else loss

    def stop(self) -> None:
        """Take the instruments away."""
        self._stance.__exit__(None, None, None)
        self._watch.remove()
        self._calls = self._operators.stop()

    def findings(self, precision: str, mode: str, scale: float | None, optimizers: Iterable[Optimizer]) -> Findings:
        """What the step showed; asks PyTorch for the reasons."""
        operators = self._noted_operators(Asking(self._device, self._watch.autocast_dtype))
        modules = self._noted_modules(operators)
        parameters = counted(self._module.parameters())
        state = [tensor for each in optimizers for values in each.state.values() for tensor in tensors_in(values)]
        kinds = [
            NotedTensors("parameters", parameters, parameter_reason(precision, parameters)),
            NotedTensors("batch", counted(self._batch), batch_reason(precision, counted(self._batch))),
            *self._loss_and_logits(operators),
            NotedTensors(
                "gradients",
                _tally(self._gradients.values()),
                gradient_reason(set(self._gradients.values()), parameters, scale, mode),
            ),
            NotedTensors("optimizer_state", counted(state), state_reason(counted(state), parameters, mode)),
        ]
        if buffers := counted(self._module.buffers()):
            kinds.insert(1, NotedTensors("buffers", buffers, buffer_reason(precision)))
        lower = self._watch.autocast_dtype
        return Findings(
            autocast_dtype=None if lower is None else name_of(lower),
            tensors=kinds,
            unused_modules=[each.path for each in modules if each.reason == NEVER_RAN],
            notes=DtypeNotes(torch=str(torch.__version__), device_type=self._device.type, modules=modules),
        )

    def _noted_operators(self, asking: Asking) -> dict[str, list[NotedOperator]]:
        """By the path of the module that called them."""
        kind, found = self._device.type, dict[str, list[NotedOperator]]()
        for call, count in self._calls.items():
            if not any(map(is_floating, (*call.inputs, call.cast_to or ""))):
                # Whole numbers have no precision to lose.
                continue
            found.setdefault(call.path, []).append(_noted(call, count, asking, kind))
        return found

    def _noted_modules(self, operators: Mapping[str, list[NotedOperator]]) -> list[NotedModule]:
        calls, found = self._watch.calls(), []
        for path, module in self._module.named_modules():
            own, called = list(module.named_parameters(recurse=False)), calls.get(path, [])
            if (path and not own and not called and not _has_forward(module)) or not (path or operators.get("")):
                # A list of modules, which nobody calls; a step without code of its own.
                continue
            has_gradients = any(_join(path, name) in self._gradients for name, _ in module.named_parameters())
            has_children = next(module.children(), None) is not None
            reason = module_reason(operators.get(path, []), bool(called) or not path, has_gradients, has_children)
            found.append(
                NotedModule(
                    path=path,
                    class_name=type(module).__name__,
                    reason=reason if takes_hooks(module) else UNSEEN,
                    parameters=counted(parameter for _, parameter in own),
                    buffers=counted(buffer for _, buffer in module.named_buffers(recurse=False)),
                    calls=called,
                    operators=operators.get(path, []),
                )
            )
        return found

    def _loss_and_logits(self, operators: Mapping[str, list[NotedOperator]]) -> list[NotedTensors]:
        losses = [each for own in operators.values() for each in own if _is_loss(each.name)]
        if losses:
            logits = _logits(losses[-1], next(own for own in operators.values() if losses[-1] in own))
            reason = f"{plain_name(losses[-1].name)}: {losses[-1].reason}"
        else:
            latest = [dtype for dtype in self._watch.latest_outputs if is_floating(dtype)]
            logits = NotedTensors("logits", _tally(latest), "what the last module returned; no loss operator was seen")
            reason = "no loss operator was seen"
        return [logits, NotedTensors("loss", counted(tensors_in(self._loss)), reason)]


def _noted(call: OperatorCall, count: int, asking: Asking, device_type: str) -> NotedOperator:
    ran_on = list(call.ran_on if call.ran_on is not None else call.inputs)
    floating = [dtype for dtype in call.inputs if is_floating(dtype)]
    if call.cast_to is not None:
        reason = f"the code casts to {call.cast_to}"
        return NotedOperator(
            call.name, count, list(call.inputs), ran_on, call.cast_to, "none", reason, call.within, True
        )
    rule = asking.rule(call.name)
    gives = asking.gives(call.name, floating, call.ran_on is not None)
    if gives is None and rule in ("lower", "float32") and call.ran_on is not None:
        gives = "float32" if rule == "float32" else next(filter(is_floating, call.ran_on), None)
    other = _OTHER_DEVICES.get(device_type, "")
    other_has = other if call.name in listed(other) else None
    reason = operator_reason(call.inputs, call.ran_on, gives, rule, device_type, other_has)
    return NotedOperator(call.name, count, list(call.inputs), ran_on, gives, rule, reason, call.within)


def _logits(loss: NotedOperator, beside: list[NotedOperator]) -> NotedTensors:
    """What the loss is made of; before a cast that the code makes only for that."""
    name = plain_name(loss.name)
    before = beside[: beside.index(loss)]
    if before and before[-1].is_cast and before[-1].gives == loss.inputs[0]:
        return NotedTensors("logits", {before[-1].inputs[0]: 1}, f"cast to {before[-1].gives} by the code, for {name}")
    return NotedTensors("logits", {loss.inputs[0]: 1}, f"given to {name}")


def _is_loss(name: str) -> bool:
    plain = plain_name(name)
    return plain.endswith("_loss") or "cross_entropy" in plain or plain.startswith(("nll_loss", "kl_div"))


def _has_forward(module: nn.Module) -> bool:
    # TorchScript's classes have none to look at.
    return getattr(type(module), "forward", None) is not nn.Module.forward


def _is_compiled(module: nn.Module) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def _tally(dtypes: Iterable[str]) -> dict[str, int]:
    found: dict[str, int] = {}
    for dtype in dtypes:
        found[dtype] = found.get(dtype, 0) + 1
    return found


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
