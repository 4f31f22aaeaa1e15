"""Plan a configuration's training on fake tensors: facts of a few blocks, the recipes that they tell, and checks."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from lmbench.errors import UsageError, tell
from lmbench.fit.block_watch import BlockWatch
from lmbench.instruments.recomputing import RecomputeOptions
from lmbench.memory.plan import (
    FEW_BLOCKS,
    TREATMENTS,
    Chain,
    ChainSample,
    MemoryPlan,
    PlanPoint,
    PlanRequest,
    Recipe,
    chain_of,
    frontier,
    options_of,
    predicted_peak,
    predicted_work,
    recipes_of,
    sample_of,
    with_times,
)
from lmbench.records.vocabulary import Values

_BATCH_SIZE = "data.batch_size"
#: The optimizer steps of a watched run.
_STEPS = 2
#: The ratio of reserved to allocated bytes before a check tells it.
_RESERVED_RATIO = 1.06
#: Checks of recipes that turn out not to fit.
_MOST_MISSES = 5
#: A recipe that is predicted to miss the memory by less than this is checked.
_NEAR_FRACTION = 0.02


class Planner:
    """Predicts any recipe for a configuration.

    Args:
        words: the configuration, as options of `lmbench fit`.
        workspace_bytes: bytes that cuBLAS allocates once in each thread that multiplies matrices.
        predict: makes a Prediction of words.

    Raises:
        UsageError: the words are wrong.
    """

    def __init__(self, words: list[str], workspace_bytes: int, predict: Callable[[list[str]], Any]) -> None:
        self._words, self._workspace_bytes, self._predict = words, workspace_bytes, predict
        # Hooks that move tensors to the host would break a compiled graph.
        is_eager = not predict(words).is_compiled
        self._treatments = [name for name, kept in TREATMENTS.items() if is_eager or not kept.get("offload")]
        # The facts are those of eager blocks; checks tell how much less a compiled step takes.
        self._given = given = predict([*words, "--trainer.compile=false"])
        self._options = given.options
        self.samples = given.batch_size * given.micro_batches
        #: Ratios of checked to predicted peaks, and of reserved to allocated bytes, by treatment and whether in groups.
        self._ratios: dict[tuple[str, bool], tuple[float, float]] = {}

    def chains(self) -> list[Chain]:
        """The chain of each size of the micro-batch, with the loss whole and in chunks; two sizes tell those of all."""
        sizes = [size for size in range(self.samples, 0, -1) if self.samples % size == 0]
        if _BATCH_SIZE not in self._options:
            sizes = [self._given.batch_size]
        known = [self._chain(size) for size in sizes[:2]]
        chains = [known[0].at(size, known[-1]) for size in sizes]
        if self._options.get("model.loss") == "whole":
            chunked = [self._chain(size, chain) for size, chain in zip(sizes[:2], chains, strict=False)]
            chains += [chunked[0].at(size, chunked[-1]) for size in sizes]
        return chains

    def _chain(self, batch_size: int, whole: Chain | None = None) -> Chain:
        """The chain of one size; with the chain of the `whole` loss, that of the loss in chunks."""
        fewer, more = FEW_BLOCKS
        model: Values = {"checkpoint": "none", **({} if whole is None else {"loss": "chunked"})}
        samples, count = dict[tuple[str, int], ChainSample](), 0
        for name, kept in (
            ("none", more),
            *((name, fewer) for name in (self._treatments if whole is None else ["none"])),
        ):
            tell(f"a step of {kept} blocks, batch {batch_size}, recomputed with {name} kept")
            options = TREATMENTS[name]
            watch = BlockWatch(RecomputeOptions(**options) if options else None, model)
            length = self._given.context_length
            step = self._given.step(batch_size, length, kept, self._workspace_bytes, watch)
            if step.block_count is None:
                raise UsageError(
                    "nothing to plan with: the module has no list of six or more alike blocks; a smaller batch, "
                    "accumulated, takes less memory (`lmbench memory` without --fit tells the largest that fits)"
                )
            count = step.block_count
            samples[name, kept] = sample_of(
                watch.allocations, watch.borders, watch.counter.flops, _STEPS, watch.host_bytes
            )
        chain = chain_of(batch_size, whole is not None, count, samples)
        if whole is not None:
            chain.blocks = whole.blocks
        return chain

    def estimate(self, chain: Chain, recipe: Recipe) -> PlanPoint:
        """A point by a walk through the blocks, corrected by what checks of the same kind told."""
        ratio, reserved_ratio = self._ratios.get((recipe.treatment, recipe.group > 1), (1.0, _RESERVED_RATIO))
        peak = predicted_peak(chain, recipe) * ratio
        options = recipe.options(chain.count)
        options = {name: value for name, value in options.items() if name in self._options}
        work = predicted_work(chain, recipe)
        return PlanPoint(recipe, options, recipe.words(chain.count), peak, peak * reserved_ratio, work)

    def check(self, chain: Chain, point: PlanPoint) -> PlanPoint:
        """The point with the peak of a fake step of all blocks."""
        recipe = point.recipe
        tell(f"checking batch {recipe.batch_size}, recomputed: {point.words}")
        predictor = self._predict([*self._words, *options_of(point)]).predictor(self._workspace_bytes)
        peak, reserved = predictor.run_peak_bytes, predictor.reserved_bytes
        self._ratios[recipe.treatment, recipe.group > 1] = peak / predicted_peak(chain, recipe), reserved / peak
        return PlanPoint(recipe, point.options, point.words, peak, reserved, point.work, is_checked=True)


def make_plan(words: list[str], request: PlanRequest, predict: Callable[[list[str]], Any]) -> MemoryPlan:
    """The frontier of work against memory, and the recipes of least work that fit, which are checked.

    Raises:
        UsageError: the words are wrong, the module has no alike blocks, or it cannot run on fake tensors.
    """
    started, gpu = time.perf_counter(), request.gpu
    planner = Planner(words, gpu.workspace_bytes, predict)
    chains = request.chains or planner.chains()
    timed = with_times(chains, request.times) if request.times else chains
    recipes = {recipe: chain for chain in timed for recipe in recipes_of(chain, planner.samples)}
    checked = dict[Recipe, PlanPoint]()
    while True:
        points = [checked.get(recipe) or planner.estimate(chain, recipe) for recipe, chain in recipes.items()]
        near = [
            point for point in points
            if gpu.fits(round(point.reserved_bytes * (1 if point.is_checked else 1 - _NEAR_FRACTION)))
        ]  # fmt: skip
        fitting = frontier(near)[: request.checks]
        unchecked = next((point for point in fitting if not point.is_checked), None)
        misses = sum(not gpu.fits(round(point.reserved_bytes)) for point in checked.values())
        if unchecked is None or misses > _MOST_MISSES:
            break
        checked[unchecked.recipe] = planner.check(recipes[unchecked.recipe], unchecked)
    least = min(point.work for point in points)
    for point in points:
        point.extra_fraction = point.work / least - 1
    fitting = [point for point in fitting if point.is_checked]
    took_s = time.perf_counter() - started
    return MemoryPlan(frontier(points), fitting, gpu, bool(request.times), chains, len(recipes), took_s)
