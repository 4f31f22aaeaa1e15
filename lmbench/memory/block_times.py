"""What runs measured for a plan: the times of few blocks, and whole steps."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from msgspec import Struct
from msgspec.structs import replace

from lmbench.errors import UsageError
from lmbench.memory.chain import FEW_BLOCKS, Chain, at_sizes, work_of
from lmbench.memory.recipe import Recipe, recipe_of
from lmbench.records.load import StoredRun, find_runs, load_known
from lmbench.records.schema import value_at
from lmbench.records.vocabulary import PHASES


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


class MeasuredStep(Struct):
    """What a step of all blocks took on the GPU; `missed_bytes` were reserved above what a plan had predicted."""

    recipe: Recipe
    step_s: float
    peak_bytes: int
    reserved_bytes: int
    missed_bytes: float = 0.0


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
        whole = seconds[chain.batch_size, False]
        few, many = (whole.get(("none", count)) for count in FEW_BLOCKS)
        own = seconds[chain.batch_size, chain.is_chunked].get(("none", fewer))
        if few is None or many is None or own is None or not chain.is_alike:
            continue
        if many.micro_batch_s <= few.micro_batch_s:
            raise UsageError(
                f"{more} blocks took no longer than {fewer}, so that the time of one is unknown: the machine was busy; "
                "measure them again, in another --results_dir"
            )
        work = work_of({kind: row.micro_batch_s for kind, row in whole.items()}, own.micro_batch_s)
        work |= {
            "forward": FEW_BLOCKS.each(few.forward_s, many.forward_s),
            "adding": chain.work["adding"] * work["none"] / chain.work["none"],
            "update": FEW_BLOCKS.at(chain.count, few.update_s, many.update_s),
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
        smaller = ends[-1]
        for chain in at_sizes(ends, sizes):
            share = min(1.0, chain.batch_size / smaller.batch_size)
            chain.work = {name: max(work_s, share * smaller.work[name]) for name, work_s in chain.work.items()}
            timed_chains.append(chain)
    return timed_chains


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


def measured_step(run: StoredRun, predicted_bytes: float | None = None) -> MeasuredStep | None:
    """What a run of all blocks, or of a plan's point, measured; None for another run, or one that failed.

    Args:
        run: the run.
        predicted_bytes: what a plan had predicted that the allocator reserves.
    """
    recipe, memory, step = recipe_of(run), run.record.memory, run.record.step
    has_few_blocks = value_at(run.record, "config.measure.blocks") is not None
    if recipe is None or has_few_blocks or run.outcome != "ok" or not step.median_s:
        return None
    peak_bytes, reserved_bytes = memory.run_peak_allocated_bytes or 0, memory.run_peak_reserved_bytes or 0
    missed_bytes = reserved_bytes - predicted_bytes if predicted_bytes is not None and reserved_bytes else 0.0
    return MeasuredStep(recipe, step.median_s, peak_bytes, reserved_bytes, missed_bytes)
