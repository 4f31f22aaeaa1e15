"""A memory plan: its walk through the blocks against fake steps of all of them, and its choice among the recipes."""

from __future__ import annotations

import multiprocessing

import pytest
from msgspec.structs import replace
from paths import SUPPORT

from lmbench.errors import UsageError
from lmbench.memory.forecast import CONTEXT_BYTES, TargetGpu
from lmbench.memory.plan import (
    FEW_BLOCKS,
    BlockFacts,
    BlockTime,
    Chain,
    ChainFacts,
    PlanPoint,
    PlanRequest,
    Recipe,
    frontier,
    predicted_peak,
    predicted_work,
    recipes_of,
    with_times,
)

MIB = 2**20
#: Six blocks, large enough that the allocator's rounding is small.
WORDS = [
    "--model.size=tiny", "--model.num_layers=6", "--model.d_model=256", "--model.d_ff=1024", "--model.vocab_size=512",
    "--data.batch_size=4", "--data.context_length=256", "--trainer.precision=bf16-mixed",
]  # fmt: skip
OWN = ["--model=own_blocks.OwnBlocks", "--model.width=256", "--data.batch_size=4", "--data.context_length=256"]


def _compared(words, recipes, budget_bytes):
    """Peaks by the walk and by fake steps of all blocks, and the plan for a budget."""
    from lmbench.fit.planning import Planner, make_plan
    from lmbench.fit.prediction import Prediction
    from lmbench.memory.fake_gpu import act_like_cuda

    act_like_cuda()
    planner = Planner(words, 0, Prediction)
    chains = planner.chains()
    by_size = {(chain.batch_size, chain.is_chunked): chain for chain in chains}
    peaks = []
    for recipe in recipes:
        chain = by_size[recipe.batch_size, recipe.is_chunked]
        point = planner.estimate(chain, recipe)
        peaks.append((recipe.words, predicted_peak(chain, recipe), planner.check(chain, point).peak_bytes))
    gpu = TargetGpu("a budget", budget_bytes + CONTEXT_BYTES, 0)
    return peaks, make_plan(words, PlanRequest(gpu, chains=chains), Prediction)


def compared(words, recipes, budget_bytes):
    """In a fork: changes to PyTorch for fake steps cannot be undone."""
    import lmbench.fit.prediction  # noqa: F401  (import it once, not in each fork)

    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(_compared, (words, recipes, budget_bytes))


def far(peaks):
    """The peaks by the walk that are further than 2 % from those of all blocks."""
    return {words: walked / stepped - 1 for words, walked, stepped in peaks if abs(walked / stepped - 1) > 0.02}


def test_the_walk_is_within_two_percent_of_a_step_of_all_blocks_and_the_plan_fits():
    recipes = [
        Recipe(4, 1, "matmuls", 4),
        Recipe(4, 1, "attention", 6, is_chunked=True),
        Recipe(4, 1, "inputs", 6, 3, is_nested=True),
        Recipe(4, 1, "inputs on the host", 6),
        Recipe(1, 4, "inputs", 6, 2),
    ]
    peaks, plan = compared(WORDS, recipes, 150 * MIB)
    assert far(peaks) == {}
    best = plan.best
    assert best.is_checked
    assert best.reserved_bytes <= 150 * MIB
    # Less work takes more memory than there is.
    assert all(point.reserved_bytes > 150 * MIB for point in plan.points if point.work < best.work)


def test_a_users_module_is_planned_by_its_alike_blocks(monkeypatch):
    monkeypatch.syspath_prepend(SUPPORT)
    _, plan = compared(OWN, [], 150 * MIB)
    assert "data.batch_size" in plan.best.options
    assert "model.loss" not in plan.best.options
    assert plan.best.reserved_bytes <= 150 * MIB


# by formulas

FACTS = ChainFacts(100, 10, 0, 0, 0, 0, 0, 0, 5, work=50, adding_work=3)
NONE = BlockFacts(30, 30, 30, 5, -20, work=30)
#: Ten blocks whose activations are 30 bytes, or 2 where they are computed again, and whose gradients are 10.
CHAIN = Chain(4, False, 10, FACTS, {"none": NONE, "inputs": BlockFacts(30, 2, 2, 33, 8, work=40)})


@pytest.mark.parametrize(
    ("recipe", "peak", "work"),
    [
        # Entry, parameters, all activations, then one block's backward.
        (Recipe(4, 1), 100 + 100 + 300 + 5, 50 + 300),
        # All inputs, and at the last block's backward the gradients of the others and its own activations.
        (Recipe(4, 1, "inputs", 10), 200 + 20 + 9 * 8 + 33, 50 + 300 + 100),
        # The gradients are there from the start: 5 + 10 x 10.
        (Recipe(4, 2), 200 + 105 + 300 + 5, 2 * (50 + 300 + 3)),
        (Recipe(4, 1, "inputs", 10, 10), 200 + 2 + 300 + 5, 50 + 300 + 100),
        (Recipe(4, 1, "inputs", 10, 10, True), 200 + 2 + 20 + 9 * 8 + 33, 50 + 300 + 200),
    ],
)
def test_a_peak_is_a_sum_over_blocks(recipe, peak, work):
    assert (predicted_peak(CHAIN, recipe), predicted_work(CHAIN, recipe)) == (peak, work)


def time_of(name, blocks, size, seconds, is_chunked=False):
    return BlockTime(name, blocks, size, is_chunked, seconds, 0.01 * blocks)


def test_times_of_few_blocks_become_times_of_a_step():
    fewer, more = FEW_BLOCKS
    times = [
        time_of("none", fewer, 4, 1 + fewer), time_of("none", more, 4, 1 + more),
        time_of("none", fewer, 2, 0.7 + fewer / 2), time_of("none", more, 2, 0.7 + more / 2),
        time_of("inputs", fewer, 4, 1 + 1.25 * fewer), time_of("inputs", fewer, 2, 0.7 + 0.75 * fewer),
    ]  # fmt: skip
    chains = [CHAIN, *(replace(CHAIN, batch_size=size) for size in (2, 1)), replace(CHAIN, is_chunked=True)]
    timed = with_times(chains, times[::-1])
    # Without a time the loss in chunks is left out.
    assert [(chain.batch_size, chain.is_chunked) for chain in timed] == [(4, False), (2, False), (1, False)]
    assert predicted_work(timed[0], Recipe(4, 1, "inputs", 10)) == pytest.approx(1 + 12.5 + 0.1)
    # On the line through both sizes.
    assert predicted_work(timed[2], Recipe(1, 1)) == pytest.approx(0.55 + 2.5 + 0.1)
    with pytest.raises(UsageError, match="no times of blocks"):
        with_times(chains, times[2:3])


def test_the_frontier_has_no_point_that_another_beats():
    chains = [CHAIN, replace(CHAIN, batch_size=2, facts=FACTS._replace(entry=50, work=26))]
    points = [
        PlanPoint(recipe, {}, 0.0, predicted_peak(chain, recipe), predicted_work(chain, recipe))
        for chain in chains
        for recipe in recipes_of(chain, 4)
    ]
    kept = frontier(points)
    assert [point.work for point in kept] == sorted(point.work for point in kept)
    for point in points:
        assert any(
            other.work <= point.work and other.reserved_bytes * 0.97 <= point.reserved_bytes for other in kept
        ), point.recipe
