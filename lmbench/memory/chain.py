"""A chain of blocks: what a block adds to the memory and to the work of each part of a step, as a few fake
steps of a few blocks tell. Works without torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lmbench.memory.allocator import Allocation, frame_of
from lmbench.memory.blocks import held_at, held_bytes, rounded_bytes

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
    block's; all gradients; and those of the step before that are held at entry, until the backward begins."""

    entry: float
    head_peak: float
    head_change: float
    loss_peak: float
    loss_change: float
    tail_peak: float
    gradients: float
    old_gradients: float = 0.0


def between(a: Any, b: Any, share: float) -> Any:
    """What lies on the line through two alike things, at a share of the way from the first to the second.

    They are numbers, or tuples or mappings of such things; what only one of two mappings has is left out.
    """
    if isinstance(a, Mapping):
        return {name: between(value, b[name], share) for name, value in a.items() if name in b}
    if isinstance(a, tuple):
        return type(a)(*(between(x, y, share) for x, y in zip(a, b, strict=True)))
    return a + share * (b - a)


class FewBlocks(NamedTuple):
    """Two numbers of alike blocks, whose steps tell those of any number: both memory and work are linear in it.

    A forecast takes 2 and 4 of them, or of the groups that are sharded together, compiled as in the run, for the peaks
    of one configuration. A plan takes FEW_BLOCKS, whose borders tell what each block adds, for the peaks of any recipe:
    in three blocks there is one that is neither the first nor the last.
    """

    fewer: int
    more: int

    def each(self, few: float, many: float) -> float:
        """What a block adds to a number, which is `few` with fewer blocks, and `many` with more."""
        return (many - few) / (self.more - self.fewer)

    def at(self, count: int, few: Any, many: Any) -> Any:
        """What `count` blocks have, on the line `between` what fewer and more of them have."""
        return between(few, many, (count - self.fewer) / (self.more - self.fewer))


#: The blocks of a plan's steps; the second one of the fewer stands for all others.
FEW_BLOCKS = FewBlocks(3, 6)


class BlockBorders(Struct):
    """The tracker's events in the last step: at the borders of blocks, by the block's index, and of the backward."""

    enter: dict[int, int] = {}
    leave: dict[int, int] = {}
    backward: dict[int, int] = {}
    first_backward_end: int = 0
    backward_start: int = 0


class Chain(Struct):
    """The facts of a micro-batch of one size: of the chain of blocks, and of a block by treatment and kind.

    `kinds` has the kind of each block. `work` is in FLOPs or seconds: `rest` is that of a micro-batch without blocks,
    `forward` that of a block's forward, and the name of a treatment that of a block's both passes, as a mean over the
    blocks; `adding` is that of adding a micro-batch's gradients to others, and `update` that of the optimizer, in
    seconds alone.
    """

    batch_size: int
    is_chunked: bool
    kinds: list[int]
    facts: ChainFacts
    blocks: dict[str, dict[int, BlockFacts]]
    work: dict[str, float]

    @property
    def count(self) -> int:
        """The number of blocks."""
        return len(self.kinds)

    @property
    def is_alike(self) -> bool:
        """Whether all blocks are of one kind."""
        return len(set(self.kinds)) == 1


def at_sizes(known: Sequence[Chain], batch_sizes: Iterable[int]) -> list[Chain]:
    """The chains of sizes of the micro-batch, on the lines through the first and the last of the known chains.

    A way to treat blocks that was timed for one of them alone is left out.
    """
    first, last = known[0], known[-1]
    span = last.batch_size - first.batch_size
    chains = []
    for batch_size in batch_sizes:
        line = partial(between, share=(batch_size - first.batch_size) / span if span else 0.0)
        facts, blocks, work = map(line, (first.facts, first.blocks, first.work), (last.facts, last.blocks, last.work))
        chains.append(replace(first, batch_size=batch_size, facts=facts, blocks=blocks, work=work))
    return chains


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


def block_facts(sample: ChainSample, index: int) -> BlockFacts:
    """The facts of a block."""
    held, borders = sample.held, sample.borders
    enter, leave, start = borders.enter[index], borders.leave[index], borders.backward[index]
    end = borders.backward.get(index - 1, borders.first_backward_end)
    saved = sample.allocations.query(f"{enter} < start <= {leave} and end > {borders.backward_start}")
    figures = (
        held[enter : leave + 1].max() - held[enter],
        held[borders.enter.get(index + 1, leave)] - held[enter],
        saved["size_bytes"].sum(),
        held[start : end + 1].max() - held[start],
        held[end] - held[start],
    )
    return BlockFacts(*map(float, figures))


def chain_facts(sample: ChainSample, none: Sequence[BlockFacts]) -> ChainFacts:
    """The facts of a chain of as many blocks as the sample has; `none` are the facts of each block of the module."""
    held, borders = sample.held, sample.borders
    last = max(borders.leave)
    leave, backward, start, end = (
        borders.leave[last], borders.backward_start, borders.backward[last], borders.first_backward_end
    )  # fmt: skip
    gradients = sample.allocations.query("category == 'gradients'")
    figures = (
        held[borders.enter[0]],
        held[leave : backward + 1].max() - held[leave],
        held[backward] - held[leave] + sum(block.kept - block.saved for block in none[: last + 1]),
        held[backward : start + 1].max() - held[backward], held[start] - held[backward],
        held[end:].max() - held[end],
        gradients.query(f"start >= {backward}")["size_bytes"].sum(),
        held_at(gradients, borders.enter[0])["size_bytes"].sum(),
    )  # fmt: skip
    return ChainFacts(*map(float, figures))


def work_of(works: Mapping[tuple[str, int], float], own: float, treated: int = FEW_BLOCKS.fewer) -> dict[str, float]:
    """The work that steps of few blocks tell, as a chain has it; a forward is a third of the FLOPs of matrix products.

    Args:
        works: works of steps by treatment and number of blocks, with the loss whole.
        own: the work of the smallest step without a treatment, with the chain's own loss.
        treated: the number of blocks in steps with a treatment.
    """
    fewer, more = FEW_BLOCKS
    few = works["none", fewer]
    per_block = FEW_BLOCKS.each(few, works["none", more])
    blocks = {name: per_block + (work - few) / treated for (name, kept), work in works.items() if kept == fewer}
    return {**blocks, "rest": own - per_block * fewer, "forward": per_block / 3}


def chain_of(
    batch_size: int, is_chunked: bool, kinds: list[int], samples: Mapping[tuple[str, int], ChainSample]
) -> Chain:
    """The facts of a chain of blocks of these kinds.

    Args:
        samples: by treatment and number of blocks: `none` of both numbers of FEW_BLOCKS, others of the first. Those of
            blocks of several kinds are of all blocks, whatever the number; their work counts as that of the rest,
            except for what treatments add.
    """
    fewer = FEW_BLOCKS.fewer
    treated = len(samples["none", fewer].borders.leave)
    # Other parts of a step are beside the first and the last block: these stand for their kind only if no other does.
    standing = {kinds[index]: index for index in (treated - 1, 0, *range(treated - 2, 0, -1))}
    blocks = {
        name: {kind: block_facts(sample, index) for kind, index in standing.items()}
        for (name, kept), sample in samples.items()
        if kept == fewer
    }
    # Recomputing saves nothing where a module recomputes its blocks itself.
    kept_bytes = {name: sum(facts[kind].kept for kind in kinds) for name, facts in blocks.items()}
    blocks = {name: facts for name, facts in blocks.items() if name == "none" or kept_bytes[name] < kept_bytes["none"]}
    none = [blocks["none"][kind] for kind in kinds]
    few, many = (chain_facts(samples["none", kept], none) for kept in FEW_BLOCKS)
    facts = FEW_BLOCKS.at(len(kinds), few, many)
    works = {key: sample.work for key, sample in samples.items()}
    work = {
        **work_of(works, works["none", fewer], treated),
        "adding": FLOPS_PER_BYTE * _MOVED_PER_WRITTEN * facts.gradients,
    }
    return Chain(batch_size, is_chunked, kinds, facts, blocks, work)
