"""Parts that let Lightning's Trainer run a step on fake tensors, for a prediction of its memory.

These are batches, a callback that labels tensors, and the peaks of the steady step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, DeviceStatsMonitor, LearningRateMonitor, ModelSummary, ProgressBar
from lightning.pytorch.strategies import DDPStrategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import LBFGS
from torch.utils._pytree import tree_leaves

from lmbench.callbacks.events import LeanCallback
from lmbench.code_owners import is_own_object
from lmbench.errors import UsageError
from lmbench.fit.trainer import as_list
from lmbench.instruments.compiling import CompileOptions
from lmbench.instruments.module_parts import AlikeBlocks, compile_targets
from lmbench.instruments.phases import PhaseTrack
from lmbench.instruments.recomputing import first_of
from lmbench.instruments.subject import refuse_lazy
from lmbench.memory.allocator import peaks_of
from lmbench.memory.chain import BlockBorders
from lmbench.memory.compiled import simulate_compiled
from lmbench.memory.predictor import EARLIER, FakeStep
from lmbench.memory.tracker import Tracker
from lmbench.records.vocabulary import PHASES, Values

#: Micro-batches of a fake step at most: all later micro-batches allocate what the second one does.
MOST_MICRO_BATCHES = 2
#: Batches of a fake training that calls its optimizers by hand, at most; it ends once a step is like the one before.
MOST_MANUAL_BATCHES = 16


class FakeBatches:
    """A loader with a fake copy of the batch for each micro-batch; its length keeps Lightning from prefetching.

    Args:
        batch: a structure of tensors, whose shapes and dtypes are copied.
        count: micro-batches.
        tracker: notes the copies as `inputs`.
        resident_count: batches that stay on the device; with 0 each batch is copied there when it is needed.
    """

    def __init__(self, batch: Any, count: int, tracker: Tracker, resident_count: int) -> None:
        self._batch, self._count, self._tracker = batch, count, tracker
        self._residents = [self._new() for _ in range(resident_count)]

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


@contextmanager
def without_masks(is_unpadded: bool) -> Iterator[None]:
    """Within, models of transformers make no mask where they would make none with values.

    They look into the positions for packed sequences, and into a given mask for padding. Of fake tensors they assume
    both, and with a mask they expand keys and values: 0.14 of 1.7 GiB more a block of a Llama with grouped queries.
    """
    masks = sys.modules.get("transformers.masking_utils")
    changes: Values = {}
    if find := getattr(masks, "find_packed_sequence_indices", None):
        changes[find.__name__] = lambda position_ids: None
    if is_unpadded and (read := getattr(masks, "_preprocess_mask_arguments", None)):
        changes[read.__name__] = lambda config, embeddings, mask, *others: read(config, embeddings, None, *others)
    with patch.multiple(masks, **changes) if changes else nullcontext():
        yield


def leave_meta(module: nn.Module) -> None:
    """Give parameters on `meta` to the device: transformers leaves the bias of a tied head there, on fake tensors."""
    moved = dict[int, nn.Parameter]()
    for part in module.modules():
        for name, parameter in part.named_parameters(recurse=False):
            if parameter.device.type == "meta" and not is_lazy(parameter):
                if id(parameter) not in moved:
                    empty = torch.empty_like(parameter, device="cpu")
                    moved[id(parameter)] = nn.Parameter(empty, parameter.requires_grad)
                setattr(part, name, moved[id(parameter)])


class StepWatch(LeanCallback):
    """Tells the tracker which tensors are parameters, gradients and optimizer state, and notes where blocks begin.

    With `needs_borders` modules are eager where a graph would hide the borders of blocks.

    Attributes:
        blocks: the module's alike blocks.
        borders: those of the last list of blocks, in the last step.
        steady_from: the tracker's event at which the last step, the steady one, begins.
        is_unpadded: whether the mask that the data gives masks nothing.
    """

    def __init__(
        self,
        tracker: Tracker,
        track: PhaseTrack,
        blocks: AlikeBlocks,
        compile_options: CompileOptions | None,
        data: LightningDataModule | None,
        patches: ExitStack,
        needs_borders: bool,
    ) -> None:
        self.blocks, self.borders, self.steady_from = blocks, BlockBorders(), 0
        self.is_unpadded = False
        self._data, self._patches, self._needs_borders = data, patches, needs_borders
        self._stepped = set[int]()
        self._step_count, self._state_bytes = 0, 0
        self._tracker, self._compile_options = tracker, compile_options
        self._last_block = set[int]()
        self._awaited = set[int]()
        track.listen(self._enter_phase, patches)

    def _enter_phase(self, phase: str) -> None:
        # The backward is split in two regions, because the logits live in its first part only. Which part has the peak
        # depends on the number of blocks; the peak of each region is affine in that number.
        self._awaited = set(self._last_block)
        self._tracker.enter(phase, "first" if phase == "backward" else "")
        if phase == "backward":
            self.borders.backward_start = self._tracker.now
        elif phase in ("clip", "optimizer") and not self.borders.first_backward_end:
            # Without a gradient of the first block's input its backward ends with the phase.
            self.borders.first_backward_end = self._tracker.now

    def _enter_block(self, index: int, block: nn.Module, inputs: Any, named: Any) -> None:
        if self._tracker.phase != "forward":
            return
        self.borders.enter[index] = self._tracker.now
        if index == 0:
            self.borders.first_backward_end = 0
            hidden = first_of(inputs or (*named.values(), None))
            _call_in_backward(hidden, lambda: setattr(self.borders, "first_backward_end", self._tracker.now))

    def _leave_block(self, index: int, block: nn.Module, inputs: Any, output: Any) -> None:
        if self._tracker.phase == "forward":
            self.borders.leave[index] = self._tracker.now
            _call_in_backward(first_of(output), lambda: self.borders.backward.update({index: self._tracker.now}))

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # The user's module may ask its data for settings. Its loaders are not asked for batches.
        trainer.datamodule = self._data  # type: ignore[attr-defined]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._patches.enter_context(without_masks(self.is_unpadded))
        targets = [] if self._compile_options is None else compile_targets(pl_module, self._compile_options.regional)
        refuse_lazy(pl_module, "predicted")
        # The last list counts, since the backward reaches it first.
        for blocks in self.blocks.lists[-1:]:
            self._last_block = {id(p) for p in blocks[-1].parameters() if p.requires_grad}
            # TorchScript's modules accept no hooks.
            if self._needs_borders and not isinstance(blocks[0], torch.jit.ScriptModule):
                if any(blocks[0] in set(target.modules()) - {target} for target in targets):
                    # In a graph that goes beyond a block its borders do not show.
                    targets = []
                for index, block in enumerate(blocks):
                    block.register_forward_pre_hook(partial(self._enter_block, index), with_kwargs=True)
                    block.register_forward_hook(partial(self._leave_block, index))
        simulate_compiled(targets, self._tracker)
        for tensor in (*pl_module.parameters(), *pl_module.buffers()):
            self._tracker.note(tensor, "parameters")
        for parameter in pl_module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self._gradient)
        for optimizer in trainer.optimizers:
            if isinstance(optimizer, LBFGS):
                raise UsageError("cannot be predicted: LBFGS keeps a history whose length depends on values")
            optimizer.register_step_post_hook(lambda stepped, *_: self._stepped.add(id(stepped)))

    def _gradient(self, parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        self._tracker.note(parameter.grad, "gradients")
        if parameter.grad.layout is torch.sparse_coo:
            # A fake sparse tensor has new parts whenever it is asked for them, so nothing tells how long they last.
            self._tracker.assumed["sparse gradients take no memory after the backward"] = None
        if id(parameter) in self._awaited:
            self._awaited.discard(id(parameter))
            if not self._awaited:
                self._tracker.enter(self._tracker.phase, "rest")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if not outputs and pl_module.automatic_optimization:
            raise UsageError(f"cannot be predicted: training_step of {type(pl_module).__name__} returns no loss")
        state_bytes = 0
        for tensor in tree_leaves([list(optimizer.state.values()) for optimizer in trainer.optimizers]):
            if isinstance(tensor, torch.Tensor):
                state_bytes += self._tracker.note(tensor, "optimizer_state").size_bytes
        batches_left = len(trainer.train_dataloader) - batch_idx - 1  # type: ignore[arg-type]
        if pl_module.automatic_optimization:
            is_settled = batches_left != trainer.accumulate_grad_batches
        elif len(self._stepped) < len(trainer.optimizers):
            return
        else:
            # A module that optimizes by hand may update after several batches, and some optimizers more rarely.
            self._stepped.clear()
            self._step_count += 1
            settling_steps = 2 if isinstance(trainer.strategy, DDPStrategy) else 1
            is_settled = trainer.should_stop = self._step_count > settling_steps and state_bytes == self._state_bytes
        if not is_settled and batches_left:
            self.steady_from = self._tracker.now
        self._state_bytes = state_bytes


def _call_in_backward(hidden: Any, note: Callable[[], None]) -> None:
    """Call a function when the gradient of a block's input or output is there."""
    if isinstance(hidden, torch.Tensor) and hidden.requires_grad:
        hidden.register_hook(lambda _: note())


def callbacks_with_memory(callbacks: Any) -> list[Callback]:
    """The callbacks that may take memory on the device: not lmbench's own, displays, and those that write.

    Args:
        callbacks: one, several or None, as the Trainer and `configure_callbacks` take them.
    """
    without = Checkpoint | ProgressBar | ModelSummary | LearningRateMonitor | DeviceStatsMonitor
    return [
        callback for callback in as_list(callbacks) if not isinstance(callback, without) and not is_own_object(callback)
    ]


def trial_of(tracker: Tracker, steady_from: int, block_count: int | None) -> FakeStep:
    """The peak of each phase and region, in order, of the step that begins at event `steady_from` and of earlier steps.

    Allocations that no callback labelled get their category here, from their size and lifetime: an allocation that
    outlives the forward that made it is an activation.
    """
    forwards = [(stretch.start, stretch.end) for stretch in tracker.stretches if stretch.phase == "forward"]
    for piece in tracker.allocations:
        if piece.category is not None:
            continue
        if piece.numel == tracker.logits_numel:
            piece.category = "logits"
        elif piece.start <= tracker.stretches[0].end:
            # Allocated during the setup, before the first phase.
            piece.category = "unknown"
        else:
            outlives = any(
                begin <= piece.start <= end and (piece.end is None or piece.end > end) for begin, end in forwards
            )
            piece.category = "activations" if outlives else "temporaries"
    stretches = [
        stretch if stretch.start >= steady_from else stretch._replace(region=EARLIER + stretch.region)
        for stretch in tracker.stretches
        if stretch.phase in PHASES
    ]
    return FakeStep(*peaks_of(tracker.allocations, stretches), block_count)
