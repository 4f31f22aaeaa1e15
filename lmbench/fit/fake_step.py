"""Parts of Lightning's own Trainer over fake tensors: batches, a callback that tells what is what, precisions, the
peaks of the steady step; and rank 0 of a group whose other ranks do not exist.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any, cast
from unittest.mock import patch

import torch
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import HalfPrecision, Precision
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, Strategy
from lightning.pytorch.trainer.connectors import data_connector
from lightning_utilities.core.apply_func import apply_to_collection
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from lmbench.callbacks.observer import LeanCallback
from lmbench.errors import UsageError
from lmbench.fit.mixed_precision import RepairedMixedPrecision, fp8_precision
from lmbench.instruments.compiling import CompileOptions, compile_targets
from lmbench.instruments.phases import PhaseTrack
from lmbench.memory.blocks import Category
from lmbench.memory.compiled import simulate_compiled
from lmbench.memory.fake_gpu import Tracker
from lmbench.memory.predictor import EARLIER, Allocation, Trial, peaks_of
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


def precision_plugin(name: str, strategy: Strategy) -> Precision:
    """Lightning's plugin of a precision for a GPU, without the loss scaler, which has no memory worth naming.

    Raises:
        UsageError: Transformer Engine's, which replace layers; fp8 without torchao, or with another strategy than DDP.
    """
    precision = find_precision(name)
    if precision is None or not precision.runs_on_cpu:
        allowed = ", ".join(known for known, meaning in PRECISIONS.items() if meaning.runs_on_cpu)
        raise UsageError(f"precision {name} cannot be predicted; allowed: {allowed}")
    if precision.compute == precision.weights == "float32":
        return Precision()
    if precision.peak == "fp8":
        return fp8_precision(name, strategy)
    plugin = RepairedMixedPrecision("bf16-mixed", "cpu") if precision.is_mixed else _FakeHalfPrecision()
    if isinstance(plugin, _FakeHalfPrecision):
        plugin._desired_input_dtype = precision.weight_dtype()
    plugin.precision = cast(Any, next(known for known, meaning in PRECISIONS.items() if meaning == precision))
    return plugin


def trial_of(tracker: Tracker, steady_from: int, block_count: int | None) -> Trial:
    """The peak of each phase and region of the step from an event on and of those before it, in their order."""
    # What nobody told of, by when it came and went: activations are what outlives the forward that made it.
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
    stretches = [
        stretch if stretch.start >= steady_from else stretch._replace(region=EARLIER + stretch.region)
        for stretch in tracker.stretches
        if stretch.phase in PHASES
    ]
    return Trial(*peaks_of(tracker.allocations, stretches), block_count)


#: Where FSDP2 allocates, and what for.
_FSDP2: tuple[tuple[Any, str, Category], ...] = (
    (FSDPParamGroup, "unshard", "gathered"),
    (FSDPParamGroup, "wait_for_unshard", "gathered"),
    (_fsdp_param_group, "foreach_reduce", "buckets"),
)


class FirstRank(LightningEnvironment):
    """Rank 0 on node 0, started by somebody else, whatever launcher this process has."""

    creates_processes_externally = True

    def local_rank(self) -> int:
        return 0

    def node_rank(self) -> int:
        return 0


@contextmanager
def fake_ranks(world_size: int, tracker: Tracker) -> Iterator[None]:
    """A process group of so many ranks, and FSDP2 and DTensor as the tracker has to see them."""
    propagate = ShardingPropagator._propagate_tensor_meta_non_cached

    def unseen(*args: Any) -> Any:
        # It makes tensors of the whole size, to learn what an operator returns.
        with tracker.paused():
            return propagate(*args)

    # A mesh of devices reads its values.
    coordinates = DeviceMesh._compute_coordinate_on_dim

    def with_values(mesh: DeviceMesh) -> Any:
        with _disable_current_modes():
            return coordinates(mesh)

    with ExitStack() as stack:
        distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=world_size)
        stack.callback(distributed.destroy_process_group)
        stack.enter_context(tracker.resizing())
        stack.enter_context(patch.object(ShardingPropagator, propagate.__name__, unseen))
        stack.enter_context(patch.object(DeviceMesh, coordinates.__name__, with_values))
        # It would make a group of gloo's.
        stack.enter_context(patch.object(data_connector, "_InfiniteBarrier", nullcontext))
        for owner, name, category in _FSDP2:
            function = tracker.making(category)(getattr(owner, name))
            stack.enter_context(patch.object(owner, name, function))
        yield


def act_as_one_rank(strategy: ParallelStrategy, tracker: Tracker) -> None:
    """Make a strategy that is not yet set up one of fake tensors in `fake_ranks`."""
    changed: Any = strategy
    changed.setup_environment = _disable_current_modes()(strategy.setup_environment)
    changed.broadcast = lambda value, src=0: value
    changed.barrier = lambda *_: None
    if isinstance(strategy, DDPStrategy):
        options = strategy._ddp_kwargs
        rebuilds = options.get("static_graph") or not options.get("find_unused_parameters")
        # These read values; what they change is when gradients are reduced, and not what that takes.
        options.update(init_sync=False, static_graph=False, find_unused_parameters=False)
        configure = strategy.configure_ddp

        def configure_ddp() -> None:
            with tracker.making("buckets"):
                configure()
            _Buckets(strategy.model, tracker, bool(rebuilds))

        changed.configure_ddp = configure_ddp


class _Buckets:
    """DDP's reducer, whose own way to new buckets reads values.

    From what the first synchronized backward tells of the order of gradients it makes all buckets anew before the next
    forward. NCCL holds the old ones until its watchdog has seen their reduction end and a collective is called again.
    Here that is the second step's first all-reduce: an H200 (torch 2.11, one rank) took those 69.90 GiB in one run of
    the large model, in another 66.29, without the old buckets, and with steps of 20 ms they were there up to the third.
    """

    def __init__(self, module: Any, tracker: Tracker, rebuilds: bool) -> None:
        self._reducer, self._tracker = module.reducer, tracker
        self._gradient_bytes = sum(p.numel() * p.element_size() for p in module.parameters() if p.requires_grad)
        self._is_rebuilt = not rebuilds
        self._has_reduced = False
        self._old: Allocation | None = None
        module.reducer = self
        # By the annotations of a hook DDP would take it for none of its kind.
        module.register_comm_hook(None, lambda _, bucket: self._reduce(bucket))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reducer, name)

    def _rebuild_buckets(self) -> bool:
        if self._has_reduced and not self._is_rebuilt:
            self._is_rebuilt = True
            self._old = self._tracker.allocate(self._gradient_bytes, "buckets", "DDP's first buckets")
        return False

    def _reduce(self, bucket: Any) -> Any:
        self._has_reduced = True
        if self._old is not None:
            self._tracker.free(self._old)
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future
