"""A memory plan: its walk through the blocks against fake steps of all of them, and its choice among the recipes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from fake_steps import in_fork
from msgspec.structs import replace
from refusals import usage_error
from runs import make_run
from tables import cases, stored

from lmbench.campaign.planning import few_blocks
from lmbench.fit.fake.training import FakeTraining
from lmbench.fit.planning import Planner, make_plan
from lmbench.memory.answer import plan_answer
from lmbench.memory.block_times import BlockTime, MeasuredStep, times_of, with_times
from lmbench.memory.chain import FEW_BLOCKS, BlockFacts, Chain, ChainFacts
from lmbench.memory.forecast import CONTEXT_BYTES, TargetGpu
from lmbench.memory.plan import MemoryPlan, PlanPoint, PlanRequest, frontier
from lmbench.memory.predictor import Shape
from lmbench.memory.recipe import Recipe, predicted_peak, predicted_work, recipes_of

MIB = 2**20
#: Six blocks, large enough that the allocator's rounding is small.
WORDS = [
    "--model.size=tiny", "--model.num_layers=6", "--model.d_model=256", "--model.d_ff=1024", "--model.vocab_size=512",
    "--data.batch_size=4", "--data.context_length=256", "--trainer.precision=bf16-mixed",
]  # fmt: skip
REGIONAL = ["--trainer.compile.regional=true"]
OWN = ["--model=own_blocks.OwnBlocks", "--model.width=256", "--data.context_length=1024"]


def _compared(recipes, *words):
    """The words of recipes, with their peaks by the walk and by fake steps of all blocks."""
    planner = Planner(list(words), FakeTraining)
    by_size = {(chain.batch_size, chain.is_chunked): chain for chain in planner.chains()}
    peaks = []
    for recipe in recipes:
        chain = by_size[recipe.batch_size, recipe.is_chunked]
        point = planner.check(chain, planner.estimate(chain, recipe))
        peaks.append((recipe.words, predicted_peak(chain, recipe), point.peak_bytes))
    return peaks


def planned(budget_mib, *words):
    request = PlanRequest(TargetGpu("a budget", budget_mib * MIB + CONTEXT_BYTES, 0))
    return in_fork(make_plan, [*words, "--data.batch_size=1"], request)


def test_the_walk_is_within_two_percent_of_a_step_of_all_blocks():
    recipes = [
        Recipe(1, 4, "matmuls", 4),
        Recipe(4, 1, "inputs", None, 3, is_nested=True, is_chunked=True),
        Recipe(4, 1, "inputs on the host"),
    ]
    for words, walked, stepped in in_fork(_compared, recipes, *WORDS):
        assert walked == pytest.approx(stepped, rel=0.02), words


def test_the_walk_through_compiled_blocks_is_that_of_a_compiled_step():
    recipes = [Recipe(4, 1), Recipe(1, 4, "matmuls", 4), Recipe(4, 1, "inputs", 3, is_chunked=True)]
    for words, walked, stepped in in_fork(_compared, recipes, *WORDS, *REGIONAL):
        assert walked == pytest.approx(stepped, rel=0.005), words


def test_the_walk_through_blocks_of_several_kinds_is_that_of_a_step_which_keeps_its_gradients():
    recipes = [Recipe(2, 1, "inputs", 3), Recipe(1, 2, "matmuls", 4)]
    words = ["--model=own_blocks.Mixed", *OWN[1:], "--data.batch_size=2", "--measure.zero_grad=native"]
    for recipe, walked, stepped in in_fork(_compared, recipes, *words):
        assert walked == pytest.approx(stepped, rel=0.02), recipe


def test_a_users_module_is_planned_by_its_alike_blocks_and_the_plan_fits():
    plan = planned(150, *OWN)
    best = plan.best
    assert best.is_checked
    assert "model.loss" not in best.options
    assert best.reserved_bytes <= 150 * MIB
    # Less work takes more memory than there is.
    assert all(point.reserved_bytes > 150 * MIB for point in plan.points if point.work < best.work)


def test_a_graph_that_goes_beyond_a_block_is_planned_by_eager_blocks_and_checked_compiled():
    compiled, eager = (planned(1000, "--model=own_blocks.Staged", *OWN[1:], *words) for words in (REGIONAL, []))
    # Nothing is offloaded from a graph, so that the chains differ in treatments alone.
    facts = ([(chain.facts, chain.blocks["none"]) for chain in plan.chains] for plan in (compiled, eager))
    assert next(facts) == next(facts)
    assert compiled.best.is_checked
    assert compiled.best.peak_bytes != eager.best.peak_bytes


def test_a_module_that_recomputes_its_blocks_itself_is_offered_no_recomputing_that_saves_nothing():
    plan = planned(1000, *OWN, "--model.checkpoints=true")
    assert plan.best.recipe.treatment == "none"
    assert all("inputs" not in chain.blocks for chain in plan.chains)


def test_a_module_that_optimizes_by_hand_is_refused_in_a_line():
    with usage_error("nothing to plan with: the module optimizes by hand"):
        planned(1000, "--model=own_blocks.TwoBackwards")


# by formulas

FACTS = ChainFacts(200, 0, 0, 0, 0, 0, 105)
BLOCKS = {"none": {0: BlockFacts(30, 30, 30, 5, -20)}, "inputs": {0: BlockFacts(30, 2, 2, 33, 8)}}
#: Ten blocks whose activations are 30 bytes, or 2 where they are computed again, and whose gradients are 10.
CHAIN = Chain(4, False, [0] * 10, FACTS, BLOCKS, {"rest": 50, "forward": 11, "none": 30, "inputs": 40, "adding": 3})


@cases(
    "recipe | peak | work",
    # Parameters and inputs, all activations, then one block's backward.
    (Recipe(4, 1), 200 + 300 + 5, 50 + 300),
    # All inputs, and at the last block's backward the gradients of the others and its own activations.
    (Recipe(4, 1, "inputs", 10), 200 + 20 + 9 * 8 + 33, 50 + 300 + 100),
    # The gradients are there from the start.
    (Recipe(4, 2), 200 + 105 + 300 + 5, 2 * (50 + 300 + 3)),
    # Of a block's forward 1 is after all that its backward needs, which is left out in the last block of a group.
    (Recipe(4, 1, "inputs", 10, 10), 200 + 2 + 300 + 5, 50 + 300 + 10 * 10 + 9 * 1),
    # The outer group leaves the last block out.
    (Recipe(4, 1, "inputs", 10, 10, True), 200 + 2 + 20 + 9 * 8 + 33, 50 + 300 + 10 * 10 + 9 * 11),
)
def test_a_peak_is_a_sum_over_blocks(recipe, peak, work):
    assert (predicted_peak(CHAIN, recipe), predicted_work(CHAIN, recipe)) == (peak, work)


def time_of(name, blocks, size, seconds, is_chunked=False):
    return BlockTime(name, blocks, size, is_chunked, seconds, 0.3 * blocks, 0.01 * blocks)


def test_times_of_few_blocks_become_times_of_a_step():
    fewer, more = FEW_BLOCKS
    times = [
        time_of("none", fewer, 4, 1 + fewer), time_of("none", more, 4, 1 + more),
        time_of("none", fewer, 2, 0.7 + fewer / 2), time_of("none", more, 2, 0.7 + more / 2),
        time_of("inputs", fewer, 4, 1 + 1.25 * fewer), time_of("inputs", fewer, 2, 0.7 + 0.75 * fewer),
    ]  # fmt: skip
    chains = [CHAIN, *(replace(CHAIN, batch_size=size) for size in (3, 2, 1)), replace(CHAIN, is_chunked=True)]
    timed = with_times(chains, times[::-1])
    # Without a time the loss in chunks is left out.
    assert [(chain.batch_size, chain.is_chunked) for chain in timed] == [(size, False) for size in (4, 3, 2, 1)]
    assert predicted_work(timed[0], Recipe(4, 1, "inputs", 10)) == pytest.approx(1 + 12.5 + 0.1)
    assert predicted_work(timed[0], Recipe(4, 1, "inputs", 10, 2)) == pytest.approx(1 + 12.5 + 5 * 0.05 + 0.1)
    # On the line through both sizes, also below them.
    assert predicted_work(timed[1], Recipe(3, 1)) == pytest.approx(0.85 + 7.5 + 0.1)
    assert predicted_work(timed[3], Recipe(1, 1)) == pytest.approx(0.55 + 2.5 + 0.1)
    # Noise makes no size faster than its share of the smaller one: half of 0.2 beside blocks, and in each.
    quick = [*times[:2], time_of("none", fewer, 2, 0.2 + 0.2 * fewer), time_of("none", more, 2, 0.2 + 0.2 * more)]
    assert predicted_work(with_times(chains, quick)[3], Recipe(1, 1)) == pytest.approx(0.1 + 10 * 0.1 + 0.1)
    # The time ran out, or a run failed: the second size has no time of recomputed blocks.
    assert all(set(chain.blocks) == {"none"} for chain in with_times(chains, times[:-1]))
    with usage_error("no times of blocks"):
        with_times(chains, times[2:3])
    # Loaders of the user's own have one size, which their runs do not tell.
    own = [replace(row, batch_size=None) for row in times if row.batch_size == 4]
    (chain,) = with_times([CHAIN], own)
    assert predicted_work(chain, Recipe(4, 1, "inputs", 10)) == pytest.approx(1 + 12.5 + 0.1)
    with usage_error("blocks took no longer than"):
        with_times([CHAIN], [time_of("none", fewer, 4, 9), time_of("none", more, 4, 8)])


def planted_plan(reserved, **request):
    """A plan for 400 bytes, whose checks tell what is `reserved` one after the other, and then 399."""

    def predict(words, workspace_bytes):
        def predictor():
            return SimpleNamespace(run_peak_bytes=380, reserved_bytes=next(reserved, 399))

        options, shape = dict.fromkeys(("data.batch_size", "trainer.recompute")), Shape(4, None)
        return SimpleNamespace(is_compiled=False, options=options, shape=shape, micro_batches=1, predictor=predictor)

    return make_plan([], PlanRequest(TargetGpu("a budget", 400 + CONTEXT_BYTES, 0), **request), predict)


def test_a_plan_is_found_after_any_number_of_recipes_that_just_miss():
    small = {name: {0: BlockFacts(*(figure / 10 for figure in facts[0]))} for name, facts in BLOCKS.items()}
    reserved = iter([401] * 9)
    plan = planted_plan(reserved, chains=[replace(CHAIN, kinds=[0] * 100, blocks=small)])
    assert (plan.best.is_checked, plan.best.reserved_bytes, next(reserved, None)) == (True, 399, None)


@cases("""
- [missed_bytes, best_bytes]
- [[0], 399]
- [[1], 400]
- [[2], null]
- [[1, -1], 400]
- [[1, 1], null]
""")
def test_what_steps_reserved_above_their_predictions_is_expected_of_other_recipes_too(missed_bytes, best_bytes):
    fewer, more = FEW_BLOCKS
    times = [time_of("none", fewer, 4, fewer), time_of("none", more, 4, more), time_of("inputs", fewer, 4, 2 * fewer)]
    steps = [MeasuredStep(Recipe(4, 1), 10, 380, 420, missed) for missed in missed_bytes]
    best = planted_plan(iter(()), times=times, chains=[CHAIN], steps=steps).best
    assert (best and best.reserved_bytes) == best_bytes


def test_a_plan_beside_a_faster_one_that_just_misses_has_a_row_of_its_own():
    near = [PlanPoint(Recipe(4, 1, "inputs", first), {}, 0.0, size, work, size) for first, size, work in
            ((None, 1000, 1.0), (9, 995, 1.1), (5, 500, 2.0))]  # fmt: skip
    plan = MemoryPlan(frontier(near), near[1:], TargetGpu("a budget", 999 + CONTEXT_BYTES, 0), False, [CHAIN], 3)
    notes = [row[-1] for row in plan_answer(plan, []).tables[0].rows]
    assert notes == ["", "the plan", ""]


def test_blocks_timed_on_an_h200_tell_the_steps_measured_there():
    measured = stored("memory/plan_h200")
    blocks = {name: {0: BlockFacts(*[0] * 5)} for name in ("none", "inputs", "attention")}
    untimed = Chain(16, False, [0] * 36, FACTS, blocks, {"none": 1, "adding": 3})
    (chain,) = with_times([untimed], [BlockTime(*row) for row in measured["blocks"]])
    for treatment, first, group, is_nested, step_s in measured["steps"]:
        recipe = Recipe(16, 1, treatment, first, group, is_nested)
        assert predicted_work(chain, recipe) == pytest.approx(step_s, rel=0.015), recipe


def test_a_step_that_took_longer_than_its_blocks_told_leaves_the_plan_to_other_recipes():
    """As where the host sets the step, which no time of few blocks has."""
    fewer, more = FEW_BLOCKS
    blocks_s = {("none", more): 6, ("none", fewer): 3, ("matmuls", fewer): 3.1, ("inputs", fewer): 4}
    times = [BlockTime(*kind, 4, False, step_s, 1, 0) for kind, step_s in blocks_s.items()]
    chain = replace(CHAIN, blocks={**BLOCKS, "matmuls": {0: BlockFacts(30, 3, 3, 33, 7)}})

    def points(**seen):
        request = PlanRequest(TargetGpu("a budget", 2**30, 0), times, [chain], **seen, checks=0)
        plan = in_fork(make_plan, [*OWN, "--data.batch_size=4"], request)
        return {point.recipe: point for point in plan.points}

    first = points()
    assert {recipe.treatment for recipe in first} == {"none", "matmuls"}
    step = MeasuredStep(Recipe(4, 1, "matmuls", 7), 20, 330, 660)
    # Runs with a loader of the user's own do not tell its size.
    for seen in (step, replace(step, recipe=replace(step.recipe, batch_size=0))):
        assert {recipe.treatment for recipe in points(steps=[seen])} == {"none", "inputs"}
    assert step.recipe not in points(failed=[step.recipe])


@cases("""
- [room, sizes]
- [10000, [4, 2]]
- [360, [2, 1]]
- [1, [4, 2]]
""")
def test_blocks_are_timed_in_the_two_largest_micro_batches_of_which_anything_fits(room, sizes):
    chains = [replace(CHAIN, batch_size=size, facts=FACTS._replace(entry=100 * size)) for size in (4, 2, 1)]
    plan = MemoryPlan(points_of([Recipe(4, 1)]), [], TargetGpu("a budget", room + CONTEXT_BYTES, 0), False, chains, 1)
    plan.points[0].options = {"data.batch_size": 4}
    runs = few_blocks(plan).values()
    assert {run["data.batch_size"] for run in runs} == {*sizes}
    assert {run["measure.blocks"] for run in runs} == {*FEW_BLOCKS}


def test_no_smaller_micro_batch_that_computes_as_much_again_is_faster_than_one_that_the_host_set():
    fewer, _ = FEW_BLOCKS
    times = [time_of("none", count, size, size * count) for count in FEW_BLOCKS for size in (4, 2)]
    times += [time_of("inputs", fewer, size, 1.5 * size * fewer) for size in (4, 2)]
    chains = [
        replace(CHAIN, batch_size=size, blocks={
            name: {0: BlockFacts(*(figure * size / 4 for figure in facts[0]))} for name, facts in BLOCKS.items()
        })
        for size in (4, 2, 1)
    ]  # fmt: skip
    slow = MeasuredStep(Recipe(2, 2, "inputs", 5), 2 * 100, 300, 300)

    def works(*steps):
        points = planted_plan(iter(()), times=times, chains=chains, steps=steps).points
        return {p.recipe.blocks_again(10): p.work for p in points if p.recipe.batch_size == 1}

    as_predicted, after = works(), works(slow)
    assert max(as_predicted) > 5
    assert as_predicted[max(as_predicted)] < 100
    # They would take 400 now, and larger micro-batches take less.
    assert after == {again: work for again, work in as_predicted.items() if again < 5}
    # A measured step takes its own time.
    quick = MeasuredStep(Recipe(1, 4, "inputs", max(as_predicted)), 4, 100, 100)
    assert works(slow, quick)[max(as_predicted)] == 4


def test_a_run_that_recomputes_as_no_plan_does_has_no_times_of_blocks(tmp_path):
    make_run(tmp_path / "run", {}, {"config.trainer.recompute": "inputs", "config.measure.blocks": 3})
    with usage_error("has no times of blocks"):
        times_of(tmp_path)


def points_of(recipes):
    return [
        PlanPoint(recipe, {}, 0.0, predicted_peak(CHAIN, recipe), predicted_work(CHAIN, recipe)) for recipe in recipes
    ]


def test_the_frontier_has_no_point_that_another_beats():
    points = points_of(recipes_of(CHAIN, 4))
    kept = frontier(points)
    assert [point.work for point in kept] == sorted(point.work for point in kept)
    for point in points:
        assert any(
            other.work <= point.work and other.reserved_bytes * 0.97 <= point.reserved_bytes for other in kept
        ), point.recipe


def test_a_plan_with_other_settings_is_beside_the_given_one():
    points = points_of([Recipe(4, 1), Recipe(4, 1, "inputs", 10)])
    fits = MemoryPlan(points, points[1:], TargetGpu("40GiB", 40, 0), False, [CHAIN], 2)
    fits_not = replace(fits, fitting=[])
    answer = plan_answer(fits_not, [], {"trainer.precision=bf16-true": fits})
    given, other = answer.tables[1].rows
    assert given[:3] == ["as given", "no", points[1].recipe.words]
    assert other[:3] == ["trainer.precision=bf16-true", "yes", points[1].recipe.words]
