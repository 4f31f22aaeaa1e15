"""A plan: which blocks to compute again, in which micro-batches, so that a model trains in the given memory in the
least time.

A few fake steps of a few blocks tell what one block adds to the memory and to the work of each part of a step. From
these the peak of any recipe follows by walking through the blocks, forward and backward. Works without torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, TypeVar

from msgspec import Struct
from msgspec.structs import replace

from lmbench.configs import may_run, read_yaml
from lmbench.errors import UsageError
from lmbench.masking import leaves
from lmbench.memory.blocks import held_bytes, rounded_bytes
from lmbench.memory.forecast import TargetGpu, ask, gpu_of
from lmbench.memory.predictor import Allocation, frame_of
from lmbench.progress import progress
from lmbench.records.load import StoredRun, find_runs, load_known
from lmbench.records.run import RunRecord
from lmbench.records.schema import value_at
from lmbench.records.vocabulary import PHASES, Values, recompute_words
from lmbench.sizes import runs_again

#: What may be done to a block, as settings of `--trainer.recompute`.
TREATMENTS: dict[str, Values] = {
    "none": {},
    "matmuls": {"keep": "matmuls"},
    "attention": {"keep": "attention"},
    "inputs": {"keep": "inputs"},
    "inputs on the host": {"keep": "inputs", "offload": True},
}
#: The treatment of which several blocks can be computed again together.
_IN_GROUPS = "inputs"
#: At most so many numbers of treated blocks are tried.
_MOST_PORTIONS = 48
#: Few blocks, whose steps tell what each block adds; the second of them stands for all others.
FEW_BLOCKS = (3, 6)
#: FLOPs that take as long as moving a byte, chosen for a GPU that multiplies at 400 TFLOP/s and moves 2.5 TB/s, and
#: 50 GB/s to and from its host. They only rank recipes, where no times of a block were measured.
FLOPS_PER_BYTE, FLOPS_PER_HOST_BYTE = 160, 8000
#: An eager operator reads about twice as much as it writes.
_MOVED_PER_WRITTEN = 3


class BlockFacts(NamedTuple):
    """What a block adds, in bytes.

    `kept` is held after its forward, `saved` of that until the backward; `change` is that over its backward. The peaks
    are above what is held before.
    """

    forward_peak: float
    kept: float
    saved: float
    backward_peak: float
    change: float


class ChainFacts(NamedTuple):
    """What is held besides the blocks' activations, in bytes: before the first block; at peaks of the parts of a step,
    and changes over them: until the backward begins, until the last block's backward begins, and after the first
    block's; and all gradients."""

    entry: float
    head_peak: float
    head_change: float
    loss_peak: float
    loss_change: float
    tail_peak: float
    gradients: float


Facts = TypeVar("Facts", BlockFacts, ChainFacts)


def between(a: Facts, b: Facts, share: float) -> Facts:
    """The facts on the line through two, at a share of the way from the first to the second."""
    return type(a)(*(x + share * (y - x) for x, y in zip(a, b, strict=True)))


class BlockBorders(Struct):
    """The tracker's events in the last step: at the borders of blocks, by the block's index, and of the backward."""

    enter: dict[int, int] = {}
    leave: dict[int, int] = {}
    backward: dict[int, int] = {}
    first_backward_end: int = 0
    backward_start: int = 0


class Chain(Struct):
    """The facts of a micro-batch of one size: of the chain of `count` alike blocks, and of a block by treatment.

    `work` is in FLOPs or seconds: `rest` is that of a micro-batch without blocks, `forward` that of a block's forward,
    and the name of a treatment that of a block's both passes; `adding` is that of adding a micro-batch's gradients to
    others, and `update` that of the optimizer, in seconds alone.
    """

    batch_size: int
    is_chunked: bool
    count: int
    facts: ChainFacts
    blocks: dict[str, BlockFacts]
    work: dict[str, float]

    def at(self, batch_size: int, other: Chain) -> Chain:
        """The facts of another size of the micro-batch, on the line through these and the other chain's.

        A way to treat blocks that was timed for one of them alone is left out.
        """
        span = other.batch_size - self.batch_size
        share = (batch_size - self.batch_size) / span if span else 0.0
        blocks = {
            name: between(facts, other.blocks[name], share)
            for name, facts in self.blocks.items()
            if name in other.blocks
        }
        work = {
            name: amount + share * (other.work[name] - amount)
            for name, amount in self.work.items()
            if name in other.work
        }
        facts = between(self.facts, other.facts, share)
        return replace(self, batch_size=batch_size, facts=facts, blocks=blocks, work=work)


class ChainSample(NamedTuple):
    """A fake step of few blocks: the bytes held after each event, its allocations, its blocks' borders, its work."""

    held: Any
    allocations: Any
    borders: BlockBorders
    work: float


def sample_of(allocations: Sequence[Allocation], borders: BlockBorders, work: float, steps: int) -> ChainSample:
    """A sample from the log of so many equal steps, and the work of a step besides moving bytes on the device."""
    count = max(allocation.end or allocation.start for allocation in allocations) + 2
    blocks = frame_of(allocations, count)
    blocks["size_bytes"] = rounded_bytes(blocks["size_bytes"])
    written = int(blocks["size_bytes"][blocks["category"] != "parameters"].sum())
    work += FLOPS_PER_BYTE * _MOVED_PER_WRITTEN * written / steps
    return ChainSample(held_bytes(blocks, count), blocks, borders, work)


def block_facts(sample: ChainSample) -> BlockFacts:
    """The facts of the second block."""
    held, borders = sample.held, sample.borders
    enter, leave, start, end = borders.enter[1], borders.leave[1], borders.backward[1], borders.backward[0]
    saved = sample.allocations.query(f"{enter} < start <= {leave} and end > {borders.backward_start}")
    figures = (
        held[enter : leave + 1].max() - held[enter],
        held[borders.enter[2]] - held[enter],
        saved["size_bytes"].sum(),
        held[start : end + 1].max() - held[start],
        held[end] - held[start],
    )
    return BlockFacts(*map(float, figures))


def chain_facts(sample: ChainSample, none: BlockFacts) -> ChainFacts:
    """The facts of a chain of as many blocks as the sample has, whose facts are `none`."""
    held, borders = sample.held, sample.borders
    last = max(borders.leave)
    leave, backward, start, end = (
        borders.leave[last], borders.backward_start, borders.backward[last], borders.first_backward_end
    )  # fmt: skip
    made = sample.allocations.query(f"category == 'gradients' and start >= {backward}")
    figures = (
        held[borders.enter[0]],
        held[leave : backward + 1].max() - held[leave],
        held[backward] - held[leave] + (last + 1) * (none.kept - none.saved),
        held[backward : start + 1].max() - held[backward], held[start] - held[backward],
        held[end:].max() - held[end],
        made["size_bytes"].sum(),
    )  # fmt: skip
    return ChainFacts(*map(float, figures))


def chain_of(batch_size: int, is_chunked: bool, count: int, samples: Mapping[tuple[str, int], ChainSample]) -> Chain:
    """The facts of a chain of `count` blocks.

    Args:
        samples: by treatment and number of blocks: `none` of both numbers of FEW_BLOCKS, others of the first.
    """
    fewer, more = FEW_BLOCKS
    blocks = {name: block_facts(sample) for (name, kept), sample in samples.items() if kept == fewer}
    # Recomputing saves nothing where a module recomputes its blocks itself.
    least = blocks["none"].kept
    blocks = {name: facts for name, facts in blocks.items() if name == "none" or facts.kept < least}
    few, many = (chain_facts(samples["none", kept], blocks["none"]) for kept in FEW_BLOCKS)
    facts = between(few, many, (count - fewer) / (more - fewer))
    works = {key: sample.work for key, sample in samples.items()}
    work = {**work_of(works, works), "adding": FLOPS_PER_BYTE * _MOVED_PER_WRITTEN * facts.gradients}
    return Chain(batch_size, is_chunked, count, facts, blocks, work)


class Recipe(Struct, frozen=True):
    """One way to train: the micro-batch, and the treatment of the first blocks (None: of all), in groups."""

    batch_size: int
    micro_batches: int
    treatment: str = "none"
    first: int | None = None
    group: int = 1
    is_nested: bool = False
    is_chunked: bool = False

    def treated(self, count: int) -> int:
        """The number of treated blocks, of `count`."""
        return 0 if self.treatment == "none" else self.first or count

    def blocks_again(self, count: int) -> int:
        """How many runs of blocks are added, of `count` blocks."""
        return sum(runs_again(self.treated(count), self.group, self.is_nested))

    @property
    def recompute(self) -> Values | None:
        """The settings of `--trainer.recompute`; None where nothing is computed again."""
        if self.treatment == "none":
            return None
        first = {} if self.first is None else {"first": self.first}
        group = {"group": self.group, "nested": self.is_nested} if self.group > 1 else {}
        return {**first, **group, **TREATMENTS[self.treatment]}

    @property
    def options(self) -> Values:
        """The options of `lmbench fit` that make this recipe."""
        return {
            "data.batch_size": self.batch_size,
            "trainer.accumulate_grad_batches": self.micro_batches,
            **({"model.loss": "chunked"} if self.is_chunked else {}),
            "trainer.recompute": self.recompute,
        }

    @property
    def words(self) -> str:
        """The recipe in words, without its micro-batch."""
        words = "nothing" if self.recompute is None else recompute_words(**self.recompute)
        return f"{words}; loss in chunks" if self.is_chunked else words


def predicted_peak(chain: Chain, recipe: Recipe) -> float:
    """The bytes at the peak of a steady step, by a walk through its blocks."""
    facts, none, treated = chain.facts, chain.blocks["none"], recipe.treated(chain.count)
    # The blocks as groups, each with its number of blocks and their treatment.
    sizes = [min(recipe.group, treated - start) for start in range(0, treated, recipe.group)]
    units = [*((size, recipe.treatment) for size in sizes), *[(1, "none")] * (chain.count - treated)]
    gradient = none.change + none.saved
    accumulates = recipe.micro_batches > 1
    level = facts.entry + (facts.gradients if accumulates else 0)
    peak, dropped = level, 0.0
    for size, name in units:
        block = chain.blocks[name]
        peak = max(peak, level + block.forward_peak + (block.saved if size > 1 else 0))
        level += block.saved + size * (block.kept - block.saved)
        dropped += size * (block.kept - block.saved)
    peak = max(peak, level + facts.head_peak)
    level += facts.head_change - dropped
    peak = max(peak, level + facts.loss_peak)
    level += facts.loss_change
    for size, name in reversed(units):
        block = chain.blocks[name]
        inner = block if recipe.is_nested or size == 1 else none
        if size > 1:
            level += size * inner.saved
            peak = max(peak, level - inner.saved + inner.forward_peak)
        for _ in range(size):
            peak = max(peak, level + inner.backward_peak)
            level += inner.change - (gradient if accumulates else 0)
        if size > 1:
            level -= block.saved
    return max(peak, level + facts.tail_peak)


def predicted_work(chain: Chain, recipe: Recipe) -> float:
    """The work of a step: of its micro-batches with what they compute again, and of the optimizer."""
    work = chain.work
    again = work[recipe.treatment] - work["none"]
    whole_runs, shorter_runs = runs_again(recipe.treated(chain.count), recipe.group, recipe.is_nested)
    # Noise may make a whole run shorter than one that ends earlier.
    recomputed = whole_runs * max(work["forward"], again) + shorter_runs * again
    micro_batch = work["rest"] + chain.count * work["none"] + recomputed
    if recipe.micro_batches > 1:
        micro_batch += work["adding"]
    return recipe.micro_batches * micro_batch + work.get("update", 0.0)


class BlockTime(Struct):
    """The measured seconds of a step of few blocks: of the micro-batch, of its forward, and of the optimizer.

    `batch_size` is None for loaders of the user's own, which have one size.
    """

    treatment: str
    blocks: int
    batch_size: int | None
    is_chunked: bool
    micro_batch_s: float
    forward_s: float
    update_s: float


#: The work of steps of few blocks, by treatment and number of blocks.
Works = Mapping[tuple[str, int], float]


def work_of(works: Works, whole: Works) -> dict[str, float]:
    """The work that steps of few blocks tell, as a chain has it; a forward is a third of the FLOPs of matrix products.

    Args:
        whole: works of steps whose loss is not in chunks, which tell of blocks.
    """
    fewer, more = FEW_BLOCKS
    few = whole["none", fewer]
    per_block = (whole["none", more] - few) / (more - fewer)
    blocks = {name: per_block + (work - few) / fewer for (name, kept), work in whole.items() if kept == fewer}
    return {**blocks, "rest": works["none", fewer] - per_block * fewer, "forward": per_block / 3}


def with_times(chains: Sequence[Chain], times: Sequence[BlockTime]) -> list[Chain]:
    """The chains with seconds as work, on the lines through one or two sizes of the micro-batch that were measured.

    Below them a size takes at least its share of the smaller one. Where the host sets the step it takes longer, which
    a measured step tells.

    Raises:
        UsageError: no size has times of blocks that are not recomputed, or more blocks took less time.
    """
    fewer, more = FEW_BLOCKS
    seconds = defaultdict[tuple[int, bool], dict[tuple[str, int], BlockTime]](dict)
    # Of several times of the same the least is the least disturbed one.
    for row in sorted(times, key=lambda row: row.micro_batch_s, reverse=True):
        seconds[row.batch_size or chains[0].batch_size, row.is_chunked][row.treatment, row.blocks] = row
    known = defaultdict[bool, list[Chain]](list)
    for chain in chains:
        whole, own = (seconds[chain.batch_size, is_chunked] for is_chunked in (False, chain.is_chunked))
        if not {("none", fewer), ("none", more)} <= whole.keys() or ("none", fewer) not in own:
            continue
        works, own_works = ({key: row.micro_batch_s for key, row in rows.items()} for rows in (whole, own))
        few, many = (whole["none", count] for count in FEW_BLOCKS)
        if many.micro_batch_s <= few.micro_batch_s:
            raise UsageError(
                f"{more} blocks took no longer than {fewer}, so that the time of one is unknown: the machine was busy; "
                "measure them again, in another --results_dir"
            )
        work = work_of(own_works, works)
        work |= {
            "forward": (many.forward_s - few.forward_s) / (more - fewer),
            "adding": chain.work["adding"] * work["none"] / chain.work["none"],
            "update": few.update_s + (many.update_s - few.update_s) / (more - fewer) * (chain.count - fewer),
        }
        blocks = {name: block for name, block in chain.blocks.items() if name in work}
        known[chain.is_chunked].append(replace(chain, blocks=blocks, work=work))
    if not known:
        raise UsageError(
            "there are no times of blocks that are not recomputed; the runs of `lmbench tune CONFIG --for memory` have "
            "them, or say why not"
        )
    sizes = dict.fromkeys(chain.batch_size for chain in chains)
    timed_chains = []
    for ends in known.values():
        larger, smaller = ends[0], ends[-1]
        for chain in (larger.at(size, smaller) for size in sizes):
            share = min(1.0, chain.batch_size / smaller.batch_size)
            chain.work = {name: max(work_s, share * smaller.work[name]) for name, work_s in chain.work.items()}
            timed_chains.append(chain)
    return timed_chains


def recipes_of(chain: Chain, samples: int) -> Iterator[Recipe]:
    """Every recipe for a step of so many samples in the chain's micro-batches."""
    count, treatments = chain.count, [name for name in chain.blocks if name != "none"]
    shape: Values = {
        "batch_size": chain.batch_size, "micro_batches": samples // chain.batch_size, "is_chunked": chain.is_chunked,
    }  # fmt: skip
    yield Recipe(**shape)
    for name, first in product(treatments, range(count, 0, -(1 + count // _MOST_PORTIONS))):
        yield Recipe(**shape, treatment=name, first=None if first == count else first)
    groups = [size for size in range(2, count // 2 + 1) if size <= 4 or count % size == 0]
    for size, is_nested in product(groups if _IN_GROUPS in treatments else (), (False, True)):
        yield Recipe(**shape, treatment=_IN_GROUPS, group=size, is_nested=is_nested)


class PlanPoint(Struct):
    """A recipe with its predictions: the peak that the walk tells, and what the allocator reserves for it.

    `is_checked` says that a fake step of all blocks told both. `work` is that of a step; `extra_fraction` is that above
    the least of all recipes.
    """

    recipe: Recipe
    options: Values
    peak_bytes: float
    reserved_bytes: float
    work: float
    extra_fraction: float = 0.0
    is_checked: bool = False


class MeasuredStep(Struct):
    """What a step of all blocks took on the GPU; `missed_bytes` were reserved above what a plan had predicted."""

    recipe: Recipe
    step_s: float
    peak_bytes: int
    reserved_bytes: int
    missed_bytes: float = 0.0


class PlanRequest(Struct, tag=True):
    """What a planning process is asked: the GPU, and how many fitting points to check.

    `times` are measured times of blocks, `chains` those of an earlier plan for the same configuration and GPU. Recipes
    like those of `steps` are predicted by what these took; `failed` are those that did not run.
    """

    gpu: TargetGpu
    times: list[BlockTime] = []
    chains: list[Chain] = []
    steps: list[MeasuredStep] = []
    failed: list[Recipe] = []
    checks: int = 1


class MemoryPlan(Struct):
    """The points of least work for their memory, from the least work to the least memory.

    `fitting` are the first of them that fit, as far as they were checked; `chains` are the facts behind them.
    `is_timed` says that work is in seconds, by measured times of blocks, and not in FLOPs. `tried` counts recipes.
    """

    points: list[PlanPoint]
    fitting: list[PlanPoint]
    gpu: TargetGpu
    is_timed: bool
    chains: list[Chain]
    tried: int
    took_s: float = 0.0

    @property
    def best(self) -> PlanPoint | None:
        """The point of least work that fits; None if none does."""
        return self.fitting[0] if self.fitting else None


#: A point of the frontier takes at least so much less memory than the one before.
_STEP_FRACTION = 0.02


def frontier(points: Iterable[PlanPoint]) -> list[PlanPoint]:
    """The points that no other point beats in both memory and work, the least work first, without near ones."""
    kept = list[PlanPoint]()
    for point in sorted(points, key=lambda point: (point.work, point.reserved_bytes)):
        if not kept or point.reserved_bytes < kept[-1].reserved_bytes * (1 - _STEP_FRACTION):
            kept.append(point)
    return kept


def times_of(folder: Path) -> tuple[list[BlockTime], list[MeasuredStep]]:
    """The times of blocks, and the steps of all blocks, that runs below a folder measured.

    Raises:
        UsageError: no run of the folder has times of blocks.
    """
    runs = [load_known(path) for path in find_runs([folder])]
    if not (times := block_times(runs)):
        raise UsageError(f"{folder} has no times of blocks; `lmbench tune CONFIG --for memory` measures them")
    return times, [step for run in runs if (step := measured_step(run))]


def block_times(runs: Iterable[StoredRun]) -> list[BlockTime]:
    """The times of blocks that runs measured."""
    times = []
    for run in runs:
        record, recipe = run.record, recipe_of(run)
        blocks = value_at(record, "config.measure.blocks")
        if blocks is None or record.outcome != "ok" or recipe is None or recipe.group != 1:
            continue
        medians = {name: value_at(record, f"phases.{name}.median_s") or 0.0 for name in PHASES}
        update_s = medians["optimizer"] + medians["clip"] + medians["zero_grad"]
        micro_batch_s, forward_s = sum(medians.values()) - update_s, medians["forward"]
        size = record.data.batch_size
        times.append(BlockTime(recipe.treatment, blocks, size, recipe.is_chunked, micro_batch_s, forward_s, update_s))
    return times


def measured_step(run: StoredRun, point: PlanPoint | None = None) -> MeasuredStep | None:
    """What a run of all blocks, or of a plan's point, measured; None for another run, or one that failed."""
    recipe, memory, step = recipe_of(run), run.record.memory, run.record.phases.step
    has_few_blocks = value_at(run.record, "config.measure.blocks") is not None
    if recipe is None or has_few_blocks or run.outcome != "ok" or step is None or not step.median_s:
        return None
    peak_bytes, reserved_bytes = memory.run_peak_allocated_bytes or 0, memory.run_peak_reserved_bytes or 0
    missed_bytes = reserved_bytes - point.reserved_bytes if point is not None and reserved_bytes else 0.0
    return MeasuredStep(recipe, step.median_s, peak_bytes, reserved_bytes, missed_bytes)


def recipe_of(run: StoredRun) -> Recipe | None:
    """The recipe by which a run trained, of batch 0 from a loader of the user's own; None for one that no plan has."""
    settings = value_at(run.record, "config.trainer.recompute") or {}
    if not isinstance(settings, Mapping):
        return None
    kept = {name: value for name, value in settings.items() if name in ("keep", "offload") and value}
    treatment = next((name for name, treated in TREATMENTS.items() if treated == kept), None)
    if treatment is None:
        return None
    return Recipe(
        run.record.data.batch_size or 0, value_at(run.record, "config.trainer.accumulate_grad_batches") or 1, treatment,
        settings.get("first"), settings.get("group", 1), settings.get("nested", False),
        value_at(run.record, "config.model.loss") == "chunked",
    )  # fmt: skip


def ask_plan(words: list[str], request: PlanRequest) -> MemoryPlan:
    """The plan for a configuration, with its progress shown. Raises as `ask` does, also without alike blocks."""
    with progress("planning memory") as task:
        return ask(words, request, MemoryPlan, task.note)


def plan_after(run: RunRecord, config: Path) -> MemoryPlan:
    """The plan that fits for a run that ran out of memory; it takes about a minute.

    Nothing is planned for a configuration that may run code other than lmbench's own: the run may come from anywhere.

    Args:
        run: the run's record.
        config: the configuration in the run's folder.

    Raises:
        UsageError, ProcessFailed: there is no plan, for the reason in the message.
    """
    gpu = gpu_of(run)
    if run.error is not None and run.error.where == "host":
        raise UsageError("the host's memory ended, not the device's")
    if gpu is None:
        raise UsageError("the memory of the run's GPU is not known")
    for name, value in leaves(read_yaml(config, "config.yaml")[1], into_lists=True):
        if may_run(value, config.parent) and not name.startswith(("measure.", "wandb.")):
            command = f"lmbench memory --config {quote(str(config))} --fit {quote(gpu.name)}"
            raise UsageError(f"{name} may run code; if you trust it: {command}")
    return ask_plan([f"--config={config}"], PlanRequest(gpu))
