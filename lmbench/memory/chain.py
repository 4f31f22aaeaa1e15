"""A chain of alike blocks: what a block adds to the memory and to the work of each part of a step, as a few fake
steps of a few blocks tell. Works without torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from lmbench.memory.allocator import Allocation, frame_of
from lmbench.memory.blocks import held_bytes, rounded_bytes

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


def between(a: Any, b: Any, share: float) -> Any:
    """What lies on the line through two alike things, at a share of the way from the first to the second.

    They are numbers, or tuples or mappings of such things; what only one of two mappings has is left out.
    """
    if isinstance(a, Mapping):
        return {name: between(value, b[name], share) for name, value in a.items() if name in b}
    if isinstance(a, tuple):
        return type(a)(*(between(x, y, share) for x, y in zip(a, b, strict=True)))
    return a + share * (b - a)


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
        line = partial(between, share=share)
        facts, blocks, work = map(line, (self.facts, self.blocks, self.work), (other.facts, other.blocks, other.work))
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
