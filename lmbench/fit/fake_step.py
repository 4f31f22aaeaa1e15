"""Parts of Lightning's own Trainer over fake tensors: batches, a callback that tells what is what, precisions, and the
peaks of the steady step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import HalfPrecision, Precision
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.utils._pytree import tree_leaves

from lmbench.callbacks.observer import LeanCallback
from lmbench.errors import UsageError
from lmbench.fit.trainer import RepairedMixedPrecision
from lmbench.instruments.compiling import CompileOptions, compile_targets
from lmbench.instruments.phases import PhaseTrack
from lmbench.memory.allocator import peaks_of
from lmbench.memory.compiled import simulate_compiled
from lmbench.memory.fake_gpu import Tracker
from lmbench.memory.predictor import EARLIER, Trial
from lmbench.precision import PRECISIONS, find_precision
from lmbench.records.vocabulary import PHASES

#: What further micro-batches do, the second one does.
MOST_MICRO_BATCHES = 2
#: With fewer alike blocks there is nothing to win by a step with few of them.
LEAST_BLOCKS = 6


class FakeBatches:
    """A fake copy of the batch for each micro-batch; of a known length, so that Lightning fetches none ahead.

    Args:
        resident_count: batches that lie on the device all the time; None where each is sent when its turn comes.
    """

    def __init__(self, batch: Any, count: int, tracker: Tracker, resident_count: int | None) -> None:
        self._batch, self._count, self._tracker = batch, count, tracker
        self._residents = [self._new() for _ in range(resident_count or 0)]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for index in range(self._count):
            yield self._residents[index % len(self._residents)] if self._residents else self._new()

    def _new(self) -> Any:
        def fake(tensor: torch.Tensor) -> torch.Tensor:
            copy = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._tracker.note(copy, "inputs")
            return copy

        return apply_to_collection(self._batch, torch.Tensor, fake)


class AlikeBlocks:
    """The outermost lists of a module whose members have parameters of the same names, shapes and types.

    They are cut to `keep_blocks` members now, or as soon as Lightning has the module build them; `count` is how many
    there were, None without such lists, or where they are of different lengths.
    """

    def __init__(self, module: LightningModule, keep_blocks: int | None) -> None:
        self.lists: list[nn.Sequential] = []
        self.count: int | None = None
        self._module, self._keep_blocks = module, keep_blocks
        self._cut()
        if type(module).configure_model is not LightningModule.configure_model:
            configure = module.configure_model

            def configure_model() -> None:
                configure()
                self._cut()

            module.configure_model = configure_model  # type: ignore[method-assign]

    def _cut(self) -> None:
        if self.count is not None:
            return
        lists: list[nn.Sequential] = []
        inside: set[nn.Module] = set()
        for child in self._module.modules():
            if not isinstance(child, nn.ModuleList | nn.Sequential) or child in inside or len(child) < LEAST_BLOCKS:
                continue
            kinds = {
                (type(block), tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in block.named_parameters()))
                for block in child
            }
            if len(kinds) == 1 and next(iter(kinds))[1]:
                lists.append(cast(nn.Sequential, child))
                inside |= set(child.modules())
        if len({len(blocks) for blocks in lists}) == 1:
            self.lists, self.count = lists, len(lists[0])
            for blocks in lists if self._keep_blocks is not None else []:
                del blocks[self._keep_blocks :]


class CategoryTeller(LeanCallback):
    """Tells the tracker what is a parameter, a gradient or optimizer state, and where the steady step begins."""

    def __init__(
        self, tracker: Tracker, track: PhaseTrack, blocks: AlikeBlocks, compile_options: CompileOptions | None
    ) -> None:
        self.steady_from = 0
        self._tracker, self._blocks, self._compile_options = tracker, blocks, compile_options
        self._last_block: set[int] = set()
        self._awaited: set[int] = set()
        track.listeners.append(self._border)

    def _border(self, phase: str) -> None:
        # The logits are alive for a part of the backward only, so its peak is at its begin or after that, which
        # depends on the number of blocks; the two are kept apart, and each is affine in that number.
        self._awaited = set(self._last_block)
        self._tracker.enter(phase, "first" if phase == "backward" else "")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._compile_options is not None:
            for target in compile_targets(pl_module, self._compile_options):
                simulate_compiled(target, self._tracker)
        # Of several lists the last one counts.
        for blocks in self._blocks.lists[-1:]:
            self._last_block = {id(p) for p in blocks[-1].parameters() if p.requires_grad}
        for tensor in (*pl_module.parameters(), *pl_module.buffers()):
            self._tracker.note(tensor, "parameters")
        for parameter in pl_module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._gradient)
        self._note_state(trainer)

    def _gradient(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._tracker.note(parameter.grad, "gradients")
        if id(parameter) in self._awaited:
            self._awaited.discard(id(parameter))
            if not self._awaited:
                self._tracker.enter(self._tracker.phase, "rest")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._note_state(trainer)
        # The last step is like every later one.
        if batch_idx + 1 == len(trainer.train_dataloader) - trainer.accumulate_grad_batches:  # type: ignore[arg-type]
            self.steady_from = self._tracker.now

    def _note_state(self, trainer: Trainer) -> None:
        for tensor in tree_leaves([list(optimizer.state.values()) for optimizer in trainer.optimizers]):
            if isinstance(tensor, torch.Tensor):
                self._tracker.note(tensor, "optimizer_state")


class _FakeHalfPrecision(HalfPrecision):
    """`HalfPrecision` that gives a module new parameters, where fake ones cannot change in place."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        lowered: dict[int, nn.Parameter] = {}
        dtype = self._desired_input_dtype

        def lower(child: nn.Module) -> None:
            for name, parameter in child._parameters.items():
                if parameter is not None and parameter.is_floating_point():
                    if id(parameter) not in lowered:
                        lowered[id(parameter)] = nn.Parameter(parameter.detach().to(dtype), parameter.requires_grad)
                    child._parameters[name] = lowered[id(parameter)]
            for name, buffer in child._buffers.items():
                if buffer is not None and buffer.is_floating_point():
                    child._buffers[name] = buffer.to(dtype)

        # In the order of `Module.to`, children first: what is freed when decides where later tensors lie.
        return module.apply(lower)


def precision_plugin(name: str) -> Precision:
    """Lightning's plugin of a precision for a GPU, without the loss scaler, which has no memory worth naming.

    Raises:
        UsageError: Transformer Engine's, which replace layers.
    """
    precision = find_precision(name)
    if precision is None or not precision.runs_on_cpu:
        allowed = ", ".join(known for known, meaning in PRECISIONS.items() if meaning.runs_on_cpu)
        raise UsageError(f"precision {name} cannot be predicted; allowed: {allowed}")
    if precision.compute == precision.weights == "float32":
        return Precision()
    plugin = RepairedMixedPrecision("bf16-mixed", "cpu") if precision.is_mixed else _FakeHalfPrecision()
    if isinstance(plugin, _FakeHalfPrecision):
        plugin._desired_input_dtype = precision.weight_dtype()
    plugin.precision = cast(Any, next(known for known, meaning in PRECISIONS.items() if meaning == precision))
    return plugin


def trial_of(tracker: Tracker, steady_from: int, block_count: int | None) -> Trial:
    """The peak of each phase and region of the step from an event on and of those before it, in their order."""
    _tell_categories(tracker)
    stretches = [
        stretch if stretch.start >= steady_from else stretch._replace(region=EARLIER + stretch.region)
        for stretch in tracker.stretches
        if stretch.phase in PHASES
    ]
    return Trial(*peaks_of(tracker.allocations, stretches), block_count)


def _tell_categories(tracker: Tracker) -> None:
    """What nobody told of, by when it came and went: activations are what outlives the forward that made it."""
    forwards = [(s.start, s.end) for s in tracker.stretches if s.phase == "forward"]
    for piece in tracker.allocations:
        if piece.category is not None:
            continue
        if piece.numel == tracker.logits_numel:
            piece.category = "logits"
        elif piece.start <= tracker.stretches[0].end:
            # Of the setup.
            piece.category = "unknown"
        else:
            outlives = any(a <= piece.start <= b and (piece.end is None or piece.end > b) for a, b in forwards)
            piece.category = "activations" if outlives else "temporaries"
