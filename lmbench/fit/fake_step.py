"""Lightning's own Trainer over fake tensors: two steps of one configuration, and what the second one allocates."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.plugins import HalfPrecision, Precision
from lightning.pytorch.profilers import PassThroughProfiler
from lightning_utilities.core.apply_func import apply_to_collection
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from lmbench.callbacks.observer import LeanCallback
from lmbench.errors import UsageError
from lmbench.fit.trainer import RepairedMixedPrecision
from lmbench.instruments.compiling import CompileOptions, compile_targets
from lmbench.instruments.phases import BorderProfiler, PhaseTrack
from lmbench.memory.allocator import peaks_of
from lmbench.memory.categories import CATEGORIES
from lmbench.memory.forecast import PhasePeak
from lmbench.memory.prediction.compiled import simulate_compiled
from lmbench.memory.prediction.cuda_on_cpu import CudaAttention
from lmbench.memory.prediction.tracker import Tracker
from lmbench.memory.predictor import Trial
from lmbench.precision import PRECISIONS, find_precision
from lmbench.records.vocabulary import PHASES, Phase

#: The first step makes the optimizer's state; the second is like every later one.
STEPS = 2
#: What further micro-batches do, the second one does.
MOST_MICRO_BATCHES = 2
#: With fewer alike blocks there is nothing to win by a step with few of them.
LEAST_BLOCKS = 6


class _Batches:
    """A fake copy of the batch for each micro-batch; of a known length, so that Lightning fetches none ahead."""

    def __init__(self, batch: Any, count: int, tracker: Tracker, resident_count: int | None) -> None:
        self._batch, self._count, self._tracker = batch, count, tracker
        self._residents = None if resident_count is None else [self._new() for _ in range(resident_count)]

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        for place in range(self._count):
            yield self._new() if self._residents is None else self._residents[place % len(self._residents)]

    def _new(self) -> Any:
        def fake(tensor: torch.Tensor) -> torch.Tensor:
            made = torch.empty(tensor.shape, dtype=tensor.dtype)
            self._tracker.note(made, "inputs")
            return made

        return apply_to_collection(self._batch, torch.Tensor, fake)


class _Watch(LeanCallback):
    """Tells the tracker what is a parameter, a gradient or optimizer state, and where the steady step begins.

    Args:
        blocks: of the lists of alike blocks, how many there were, once they were cut; empty without any.
    """

    def __init__(
        self, tracker: Tracker, track: PhaseTrack, blocks: list[tuple[list[nn.Sequential], int]],
        compile_options: CompileOptions | None,
    ) -> None:  # fmt: skip
        self.tracker = tracker
        self.steady_from = 0
        self._compile_options = compile_options
        self._blocks = blocks
        self._last_block: set[int] = set()
        self._awaited: set[int] = set()
        track.listeners.append(self._border)

    def _border(self, phase: str) -> None:
        # The logits are alive for a part of the backward only, so its peak is at its begin or after that, which
        # depends on the number of blocks; the two are kept apart, and each is affine in that number.
        self._awaited = set(self._last_block)
        self.tracker.enter(phase, "first" if phase == "backward" else "")

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trainer = trainer
        if self._compile_options is not None:
            for target in compile_targets(pl_module, self._compile_options):
                simulate_compiled(target, self.tracker)
        for lists, _ in self._blocks:
            self._last_block = {id(p) for blocks in lists for p in blocks[-1].parameters() if p.requires_grad}
        for tensor in (*pl_module.parameters(), *pl_module.buffers()):
            self.tracker.note(tensor, "parameters")
        for parameter in pl_module.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(self.gradient)
        self._note_state()

    def gradient(self, parameter: torch.Tensor) -> None:
        """A gradient is there."""
        assert parameter.grad is not None
        self.tracker.note(parameter.grad, "gradients")
        if id(parameter) in self._awaited:
            self._awaited.discard(id(parameter))
            if not self._awaited:
                self.tracker.enter_region("rest")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if batch_idx + 1 == len(trainer.train_dataloader) // STEPS:  # type: ignore[arg-type]
            self._note_state()
            self.steady_from = self.tracker.now

    def _note_state(self) -> None:
        for optimizer in self._trainer.optimizers:
            for tensor in tree_leaves(list(optimizer.state.values())):
                if isinstance(tensor, torch.Tensor):
                    self.tracker.note(tensor, "optimizer_state")


def run_fake_step(
    build: Callable[[], LightningModule],
    make_trainer: Callable[[list[Callback]], Trainer],
    make_batch: Callable[[LightningModule], Any],
    *,
    precision: str,
    micro_batches: int,
    compile_options: CompileOptions | None,
    resident_count: int | None,
    keep_blocks: int | None,
    workspace_bytes: int,
) -> Trial:
    """The peaks of a steady step of a module on fake tensors, by phase and region, and how many alike blocks it has.

    Args:
        build: makes the module; fake tensors are on by then.
        make_trainer: a Trainer on the CPU in float32, with callbacks.
        make_batch: a batch for the module, of which only shapes and types count.
        precision: Lightning's name.
        micro_batches: batches a step.
        compile_options: what is compiled, if anything is.
        resident_count: batches that lie on the device all the time; None where each is sent when its turn comes.
        keep_blocks: cut lists of alike blocks to so many.
        workspace_bytes: what a thread that multiplies matrices takes for it.
    """
    tracker, track = Tracker(workspace_bytes), PhaseTrack()
    blocks: list[tuple[list[nn.Sequential], int]] = []
    with FakeTensorMode(allow_non_fake_inputs=True), tracker, CudaAttention():
        module = build()
        _cut_when_built(module, blocks, keep_blocks)
        watch = _Watch(tracker, track, blocks, compile_options)
        trainer = make_trainer([watch])
        trainer.strategy.precision_plugin = _precision_plugin(precision)
        # It is where it shall be; and a fake parameter cannot be moved in place.
        trainer.strategy.model_to_device = lambda: None  # type: ignore[method-assign]
        trainer.profiler = BorderProfiler(PassThroughProfiler(), track)  # type: ignore[attr-defined]
        with tracker.paused():
            batch = make_batch(module)
        batches = _Batches(batch, STEPS * micro_batches, tracker, resident_count)
        trainer.fit(module, train_dataloaders=batches)
        tracker.finish()
    return _trial(tracker, watch.steady_from, blocks[0][1] if blocks else None)


def _cut_when_built(
    module: LightningModule, cut_blocks: list[tuple[list[nn.Sequential], int]], keep_blocks: int | None
) -> None:
    """Cut the lists of alike blocks now, or as soon as Lightning has the module build them."""

    def cut() -> None:
        lists = [] if cut_blocks else _alike_blocks(module)
        if len({len(blocks) for blocks in lists}) == 1:
            cut_blocks.append((lists, len(lists[0])))
            if keep_blocks is not None:
                for blocks in lists:
                    del blocks[keep_blocks:]

    cut()
    if type(module).configure_model is LightningModule.configure_model:
        return
    configure = module.configure_model

    def configure_model() -> None:
        configure()
        cut()

    module.configure_model = configure_model  # type: ignore[method-assign]


def _alike_blocks(module: nn.Module) -> list[nn.Sequential]:
    """The outermost lists whose members have parameters of the same names, shapes and types."""
    lists: list[nn.Sequential] = []
    inside: set[nn.Module] = set()
    for child in module.modules():
        if not isinstance(child, nn.ModuleList | nn.Sequential) or child in inside or len(child) < LEAST_BLOCKS:
            continue
        kinds = {
            (type(block), tuple((n, p.shape, p.dtype, p.requires_grad) for n, p in block.named_parameters()))
            for block in child
        }
        if len(kinds) == 1 and next(iter(kinds))[1]:
            lists.append(cast(nn.Sequential, child))
            inside |= set(child.modules())
    return lists


class _FakeHalfPrecision(HalfPrecision):
    """`HalfPrecision` that gives a module new parameters, where fake ones cannot change in place."""

    def convert_module(self, module: nn.Module) -> nn.Module:
        self._convert(module, {})
        return module

    def _convert(self, module: nn.Module, made: dict[int, nn.Parameter]) -> None:
        # In the order of `Module.to`: what is freed when decides where later tensors lie.
        for child in module.children():
            self._convert(child, made)
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                if id(parameter) not in made:
                    lower = parameter.detach().to(self._desired_input_dtype)
                    made[id(parameter)] = nn.Parameter(lower, requires_grad=parameter.requires_grad)
                module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point():
                module._buffers[name] = buffer.to(self._desired_input_dtype)


def _precision_plugin(name: str) -> Precision:
    """Lightning's plugin of a precision for a GPU, without the loss scaler, which has no memory worth naming."""
    precision = find_precision(name)
    if precision is None or name.startswith("transformer-engine"):
        allowed = ", ".join(known for known in PRECISIONS if not known.startswith("transformer-engine"))
        raise UsageError(f"precision {name} cannot be predicted; allowed: {allowed}")
    full_name = next(known for known, meaning in PRECISIONS.items() if meaning == precision)
    if precision.compute == precision.weights == "float32":
        return Precision()
    if not precision.is_mixed:
        half = _FakeHalfPrecision()
        half._desired_input_dtype = precision.weight_dtype()
        half.precision = cast(Any, full_name)
        return half
    mixed = RepairedMixedPrecision("bf16-mixed", "cpu")
    mixed.precision = cast(Any, full_name)
    return mixed


def _trial(tracker: Tracker, steady_from: int, block_count: int | None) -> Trial:
    """The peak of each phase and region of the steps from an event on, in their order."""
    _tell_categories(tracker)
    steady = [s for s in tracker.stretches if s.start >= steady_from and s.phase in PHASES]
    highest: dict[tuple[str, str], PhasePeak] = {}
    peaks = peaks_of(tracker.allocations, steady)
    for stretch, peak in zip(steady, peaks, strict=True):
        key = (stretch.phase, stretch.region)
        if key not in highest or highest[key].total_bytes < peak.total_bytes:
            sizes = {category: peak.bytes_by_category.get(category, 0) for category in CATEGORIES}
            highest[key] = PhasePeak(cast(Phase, stretch.phase), sizes, peak.made_by, stretch.region)
    return Trial(list(highest.values()), peaks[-1].reserved_bytes, block_count)


def _tell_categories(tracker: Tracker) -> None:
    """What nobody told of, by when it came and went: activations are what outlives the forward that made it."""
    forwards = [(s.start, s.end) for s in tracker.stretches if s.phase == "forward"]
    setup_ends = next(s.end for s in tracker.stretches if s.phase == "setup")
    for piece in tracker.allocations:
        if piece.category is not None:
            continue
        if tracker.logits_numel is not None and tracker.numels[id(piece)] == tracker.logits_numel:
            piece.category = "logits"
        elif piece.born <= setup_ends:
            piece.category = "unknown"
        else:
            outlives = any(a <= piece.born <= b and (piece.died is None or piece.died > b) for a, b in forwards)
            piece.category = "activations" if outlives else "temporaries"
