"""Plan a configuration's training on fake tensors: facts of a few blocks, the recipes that they tell, and checks."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

from msgspec.structs import replace

from lmbench.errors import UsageError, tell
from lmbench.fit.fake.training import FakeTraining
from lmbench.fit_options import option_words
from lmbench.memory.block_times import MeasuredStep, with_times
from lmbench.memory.chain import FEW_BLOCKS, FLOPS_PER_HOST_BYTE, Chain, ChainSample, at_sizes, chain_of, sample_of
from lmbench.memory.plan import MemoryPlan, PlanPoint, PlanRequest, frontier
from lmbench.memory.recipe import TREATMENTS, Recipe, predicted_peak, predicted_work, recipes_of
from lmbench.records.vocabulary import Values

#: The optimizer steps of a watched run.
_STEPS = 2
#: The ratio of reserved to allocated bytes before a check tells it.
_RESERVED_RATIO = 1.06
#: The ratio of measured to predicted work above which the host is taken to have set the step.
_HOST_RATIO = 1.05
#: A recipe of a kind that was not checked yet is, if it is predicted to miss the memory by less than this.
_NEAR_FRACTION = 0.02

#: What recipes share whose predictions are off alike: the micro-batch, the treatment, whether it is in groups, nested.
Kind = tuple[int, str, bool, bool]


class Planner:
    """Predicts any recipe for a configuration.

    Args:
        words: the configuration, as options of `lmbench fit`.
        make: makes a FakeTraining of words.

    Raises:
        UsageError: the words are wrong.
    """

    def __init__(self, words: list[str], make: Callable[[list[str]], Any]) -> None:
        self._words, self._make = words, make
        given = make(words)
        # Hooks that move tensors to the host would break a compiled graph.
        self._treatments = [name for name, kept in TREATMENTS.items() if not (given.is_compiled and "offload" in kept)]
        self._options, self._shape = given.options, given.shape
        self.samples = given.shape.batch_size * given.micro_batches
        #: Ratios of checked to predicted peaks, and of reserved to allocated bytes, by kind of recipe.
        self._ratios = dict[Kind, tuple[float, float]]()
        #: Ratios of measured to predicted work.
        self._work_ratios = dict[Kind, float]()
        #: Measured steps that the host set, each with the seconds of a micro-batch.
        self._host_bound = list[tuple[Recipe, float]]()
        #: Bytes that measured steps reserved above their predictions; recipes for one memory miss it alike.
        self._missed_bytes = 0.0

    def chains(self) -> list[Chain]:
        """The chain of each size of the micro-batch, with the loss whole and in chunks; two sizes tell those of all."""
        sizes = [size for size in range(self.samples, 0, -1) if self.samples % size == 0]
        if "data.batch_size" not in self._options:
            sizes = [self._shape.batch_size]
        known = [self._chain(size, self._treatments) for size in sizes[:2]]
        chains = at_sizes(known, sizes)
        if self._options.get("model.loss") == "whole":
            chunked = [self._chain(size, ["none"], is_chunked=True) for size in sizes[:2]]
            for chain, whole in zip(chunked, known, strict=True):
                chain.blocks, chain.work = whole.blocks, {**whole.work, "rest": chain.work["rest"]}
            chains += at_sizes(chunked, sizes)
        return chains

    def _chain(self, batch_size: int, treatments: list[str], is_chunked: bool = False) -> Chain:
        """The chain of one size of the micro-batch, from steps with each treatment, of few blocks if these are alike.

        The steps are eager where a graph goes beyond a block. Checks tell how much less the graph takes.
        """
        fewer, more = FEW_BLOCKS
        samples, kinds = dict[tuple[str, int], ChainSample](), list[int]()
        for name, kept in [("none", more), *((name, fewer) for name in treatments)]:
            tell(f"a step of batch {batch_size}, recomputed with {name} kept")
            options = self._options_of(Recipe(batch_size, 1, name, is_chunked=is_chunked))
            training = self._make([*self._words, *option_words(options)])
            tracker, watch = training.run(self._shape._replace(batch_size=batch_size), kept, needs_borders=True)
            kinds, borders = watch.blocks.kinds, watch.borders
            if not kinds:
                raise UsageError(
                    "nothing to plan with: the module has no list of six or more blocks of one class; a smaller batch, "
                    "accumulated, takes less memory (`lmbench memory` without --fit tells the largest that fits)"
                )
            if borders.leave[max(borders.leave)] > borders.backward_start:
                raise UsageError(
                    "nothing to plan with: the module optimizes by hand, and Lightning accumulates no micro-batches "
                    "for it; `lmbench memory` without --fit predicts it, also with --trainer.recompute.keep inputs"
                )
            work = (tracker.flops + 2 * FLOPS_PER_HOST_BYTE * tracker.host_bytes) / _STEPS
            samples[name, kept] = sample_of(tracker.allocations, borders, work, _STEPS)
        return chain_of(batch_size, is_chunked, kinds, samples)

    def _options_of(self, recipe: Recipe) -> Values:
        """The options that make a recipe, of those that the configuration has."""
        return {name: value for name, value in recipe.options.items() if name in self._options}

    def doubt(self, point: PlanPoint) -> float:
        """The fraction of its memory that a point may take less than is told of it."""
        return 0.0 if _kind_of(point.recipe) in self._ratios else _NEAR_FRACTION

    def estimate(self, chain: Chain, recipe: Recipe) -> PlanPoint:
        """A point by a walk through the blocks, corrected by what checks of the same kind told."""
        ratio, reserved_ratio = self._ratios.get(_kind_of(recipe), (1.0, _RESERVED_RATIO))
        peak = predicted_peak(chain, recipe) * ratio
        work = predicted_work(chain, recipe) * self._work_ratios.get(_kind_of(recipe), 1.0)
        for measured, micro_batch_s in self._host_bound:
            computes_less = recipe.blocks_again(chain.count) < measured.blocks_again(chain.count)
            # The host takes longest where blocks keep operators.
            is_alike = measured.treatment in ("none", "inputs", recipe.treatment)
            if recipe.batch_size <= measured.batch_size and is_alike and not computes_less:
                work = max(work, recipe.micro_batches * micro_batch_s)
        return PlanPoint(recipe, self._options_of(recipe), peak, peak * reserved_ratio, work)

    def check(self, chain: Chain, point: PlanPoint) -> PlanPoint:
        """The point with the peak of a fake step of all blocks."""
        recipe = point.recipe
        tell(f"checking batch {recipe.batch_size}, recomputed: {recipe.words}")
        predictor = self._make([*self._words, *option_words(point.options)]).predictor()
        peak, reserved = predictor.run_peak_bytes, predictor.reserved_bytes + self._missed_bytes
        self._ratios[_kind_of(recipe)] = peak / predicted_peak(chain, recipe), reserved / peak
        return replace(point, peak_bytes=peak, reserved_bytes=reserved, is_checked=True)

    def learn(self, chain: Chain, step: MeasuredStep) -> PlanPoint:
        """The point of a measured step, by which recipes of the same kind are predicted from now on.

        Times of few blocks do not tell a step that the host sets, as with matrix products kept in many blocks. If it
        does, no smaller micro-batch takes less, unless fewer blocks are computed again.
        """
        kind = _kind_of(step.recipe)
        self._work_ratios[kind] = ratio = step.step_s / predicted_work(chain, step.recipe)
        if ratio > _HOST_RATIO:
            self._host_bound.append((step.recipe, step.step_s / step.recipe.micro_batches))
        # The plan before had the bytes that earlier steps missed.
        self._missed_bytes += max(step.missed_bytes, 0.0)
        if step.peak_bytes:
            peak_ratio = step.peak_bytes / predicted_peak(chain, step.recipe)
            self._ratios[kind] = peak_ratio, step.reserved_bytes / step.peak_bytes
        return replace(self.estimate(chain, step.recipe), work=step.step_s, is_checked=step.peak_bytes > 0)


def _kind_of(recipe: Recipe) -> Kind:
    return recipe.batch_size, recipe.treatment, recipe.group > 1, recipe.is_nested


def make_plan(words: list[str], request: PlanRequest, make: Callable[..., Any] = FakeTraining) -> MemoryPlan:
    """The frontier of work against memory, and the recipes of least work that fit, which are checked.

    Raises:
        UsageError: the words are wrong, the module has no list of blocks, or it cannot run on fake tensors.
    """
    started, gpu = time.perf_counter(), request.gpu
    planner = Planner(words, partial(make, workspace_bytes=gpu.workspace_bytes))
    chains = request.chains or planner.chains()
    timed = with_times(chains, request.times) if request.times else chains
    recipes = {
        recipe: chain
        for chain in timed
        for recipe in recipes_of(chain, planner.samples)
        if recipe not in request.failed
    }
    checked = dict[Recipe, PlanPoint]()
    for step in request.steps if request.times else ():
        # A loader of the user's own has one size.
        recipe = replace(step.recipe, batch_size=step.recipe.batch_size or chains[0].batch_size)
        if recipe in recipes:
            checked[recipe] = planner.learn(recipes[recipe], replace(step, recipe=recipe))
    while True:
        points = [checked.get(recipe) or planner.estimate(chain, recipe) for recipe, chain in recipes.items()]
        near = [point for point in points if gpu.fits(point.reserved_bytes * (1 - planner.doubt(point)))]
        fitting = frontier(near)[: request.checks]
        unchecked = next((point for point in fitting if not point.is_checked), None)
        if unchecked is None:
            break
        checked[unchecked.recipe] = planner.check(recipes[unchecked.recipe], unchecked)
    least = min(point.work for point in points)
    for point in points:
        point.extra_fraction = point.work / least - 1
    took_s = time.perf_counter() - started
    return MemoryPlan(frontier(points), fitting, gpu, bool(request.times), chains, len(recipes), took_s)
