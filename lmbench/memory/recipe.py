"""Recipes of a plan: which blocks to compute again, in which micro-batches. The peak and the work of a recipe follow
by walking through the blocks of a chain, forward and backward.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product

from msgspec import Struct

from lmbench.memory.chain import Chain
from lmbench.records.load import StoredRun
from lmbench.records.schema import value_at
from lmbench.records.vocabulary import Values, recompute_words
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
    # Blocks of different kinds may take different arguments, with which they cannot run as a group.
    has_groups = _IN_GROUPS in treatments and chain.is_alike
    for size, is_nested in product(groups if has_groups else (), (False, True)):
        yield Recipe(**shape, treatment=_IN_GROUPS, group=size, is_nested=is_nested)


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


def predicted_peak(chain: Chain, recipe: Recipe) -> float:
    """The bytes at the peak of a steady step, by a walk through its blocks."""
    facts, treated = chain.facts, recipe.treated(chain.count)
    starts = range(0, treated, recipe.group)
    units = [(min(recipe.group, treated - start), recipe.treatment, chain.kinds[start]) for start in starts]
    units += [(1, "none", kind) for kind in chain.kinds[treated:]]
    # Each group of blocks: their number, what each of them adds, and what it would add without treatment.
    groups = [(size, chain.blocks[name][kind], chain.blocks["none"][kind]) for size, name, kind in units]
    accumulates = recipe.micro_batches > 1
    # Of several micro-batches the second one finds all gradients, and zeroes none.
    gradients = facts.gradients if accumulates else facts.old_gradients
    level = facts.entry - facts.old_gradients + gradients
    peak, dropped = level, 0.0
    for size, block, _ in groups:
        peak = max(peak, level + block.forward_peak + (block.saved if size > 1 else 0))
        level += block.saved + size * (block.kept - block.saved)
        dropped += size * (block.kept - block.saved)
    peak = max(peak, level + facts.head_peak)
    level += facts.head_change - dropped + (facts.old_gradients if accumulates else 0)
    peak = max(peak, level + facts.loss_peak)
    level += facts.loss_change
    for size, block, none in reversed(groups):
        inner = block if recipe.is_nested or size == 1 else none
        if size > 1:
            level += size * inner.saved
            peak = max(peak, level - inner.saved + inner.forward_peak)
        for _ in range(size):
            peak = max(peak, level + inner.backward_peak)
            level += inner.change - (none.change + none.saved if accumulates else 0)
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
