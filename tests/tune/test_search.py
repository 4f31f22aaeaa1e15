"""Axes, their values that apply, the search over them, and its intervals, against formulas written out here."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import scipy.stats
import yaml
from tables import cases

from lmbench.records.examined import KernelSummary
from lmbench.records.run import RunRecord
from lmbench.tune.answer import Tuning, tune_answer, tuned_config
from lmbench.tune.search import GOALS, Candidate, Choice, Trial, finalists, search, spread_of, standing
from lmbench.tune.space import Axis, applicable, micro_batches, read_space, settings_of, share_of

GIVEN = yaml.safe_load("""
trainer: {compile: false, precision: bf16-mixed, accumulate_grad_batches: 1, devices: 1}
model: {class_path: Mine, init_args: {attention: sdpa}}
data: {batch_size: 6}
measure: {matmul_precision: highest}
""")


#: Costs of trials by their choices, in the order in which they are tried: in the first pass A wins, B loses little, C
#: wins much, and D loses much; in the second one C wins alone, B wins beside it, and nothing is tried without C.
COSTS = {"as given": 1.0, "a": 0.95, "ab": 0.97, "ac": 0.8, "acd": 1.0, "c": 0.73, "bc": 0.7}


class Known(Candidate):
    """A candidate whose cost is known from its options."""

    @property
    def name(self):
        return "".join(sorted(self.trial.options)) or "as given"

    def cost(self, goal):
        return COSTS[self.name]


def test_a_second_pass_tries_what_lost_little_and_leaves_out_what_won_little(monkeypatch):
    monkeypatch.setattr("lmbench.tune.search.Candidate", Known)
    axes = [Axis(name, [{name: True}]) for name in "abcd"]
    candidates, best = search(axes, Known(Trial()), None, lambda axis, trials: None)
    assert [candidate.name for candidate in candidates] == [*COSTS]
    near = finalists(candidates, None, 4)
    assert [candidate.name for candidate in near] == ["bc", "c"]
    assert best is near[0]


def test_what_compiles_the_whole_network_is_tried_last_and_once(monkeypatch):
    monkeypatch.setattr("lmbench.tune.search.Candidate", Known)
    monkeypatch.setitem(COSTS, "trainer.compile", 0.9)
    values = {"graphs": {"mode": "reduce-overhead"}, "whole": True, "blocks": {"regional": True}}
    tried, axes = [], [Axis(name, [{"trainer.compile": value}]) for name, value in values.items()]
    search(axes, Known(Trial()), None, lambda axis, trials: tried.append(axis.name))
    assert tried == ["blocks", "graphs", "whole"]


def test_a_choice_takes_the_place_of_those_whose_options_it_sets():
    regional, other = Choice("parts", {"trainer.compile": {"regional": True}}), Choice("micro", {"data.batch_size": 1})
    whole = Choice("whole", {"trainer.compile": True})
    assert Trial((regional, other)).with_choice(whole) == Trial((other, whole))


def test_an_interval_is_that_of_students_test_on_logarithms():
    before, after = [1.0, 1.02, 0.99], [2.0, 2.1]
    spread = spread_of([before, after, [0.5]])
    interval = scipy.stats.ttest_ind(np.log(after), np.log(before)).confidence_interval()
    ratio = scipy.stats.gmean(after) / scipy.stats.gmean(before)
    assert np.allclose(spread.change(before, after), [ratio, *np.exp(interval)])
    assert spread_of([[1.0], [2.0]]).change([1.0], [2.0]) == (2.0, None, None)
    assert spread.change([], [1.0]) is None


def values_by_axis(space=None, config=GIVEN, optimizer=None, **has_gpu):
    record = RunRecord(1, "ok", config=config)
    record.model.optimizer = optimizer
    return {axis.name: axis.values for axis in applicable(read_space(space), settings_of(record), **has_gpu)}


def test_of_the_space_remains_what_a_configuration_has_options_for_and_is_not_already(tmp_path):
    axes = values_by_axis()
    precisions = [value["trainer.precision"] for value in axes["precision"]]
    assert "32-true" not in precisions
    assert "bf16-mixed" not in precisions
    assert "bf16-true" in precisions
    assert axes["micro_batch"] == [{"data.batch_size": 3, "trainer.accumulate_grad_batches": 2}]
    assert {"model.residual_dtype", "trainer.strategy"}.isdisjoint(axes)
    on_cpu = values_by_axis(has_gpu=False)
    assert axes.keys() - on_cpu.keys() == {"cuda_graphs"}
    assert "fp8-tensorwise" not in str(on_cpu["precision"])
    space = Path(tmp_path, "space.yaml")
    space.write_text("axes: {compile: null, model.attention: [sdpa, flex], data.placement: [pinned]}")
    changed = values_by_axis(space)
    assert "compile" not in changed
    assert "data.placement" not in changed
    assert changed["model.attention"] == [{"model.attention": "flex"}]
    space.write_text("axes: {trainer.compile.mode: [max-autotune]}")
    assert [*values_by_axis(space)][-1] == "trainer.compile.mode"


def test_the_variant_that_the_optimizer_has_by_default_is_not_tried():
    config = {"model": {"class_path": "Mine", "init_args": {"optimizer_variant": None}}}
    axes = values_by_axis(config=config, optimizer="AdamW fused")
    assert axes["model.optimizer_variant"] == [{"model.optimizer_variant": "foreach"}]


@cases("""
- [batch_size, accumulated, expected]
- [16, 1, [[8, 2]]]
- [4, 4, [[2, 8], [8, 2], [16, 1]]]
- [1, 1, []]
- [3, 2, [[1, 6], [6, 1]]]
""")
def test_micro_batches_keep_the_tokens_of_a_step(batch_size, accumulated, expected):
    assert sorted([*value.values()] for value in micro_batches(batch_size, accumulated)) == expected


def test_batches_that_a_loader_of_the_users_own_decides_are_not_split():
    assert "micro_batch" not in values_by_axis(config={**GIVEN, "data": {"batch_size": None}})


def test_an_axis_can_save_what_the_what_if_that_it_acts_on_saves():
    summary = KernelSummary(path_s=0.2, what_if={"attention=0": -0.04, "part:loss=0": -0.001, "launches=0": 0.002})
    run = RunRecord(1, "ok", kernels=summary)
    shares = {"attention=0": 0.2, "part:loss=0": 0.005, "launches=0": 0.0, "elsewhere=0": None, None: None}
    assert {name: share_of(Axis("", [], name), run) for name in shares} == pytest.approx(shares)
    assert share_of(Axis("", [], "part:loss=0"), None) is None


def test_choices_are_words_and_fallbacks_begin_with_those_of_a_dtype():
    compiled, narrow, batch = (
        Choice("compile", {"trainer.compile": True}),
        Choice("precision", {"trainer.precision": "bf16-true"}),
        Choice("micro", {"data.batch_size": 1, "trainer.accumulate_grad_batches": 8}),
    )
    trial = Trial().with_choice(compiled).with_choice(narrow).with_choice(batch)
    assert str(trial) == "compile; precision bf16-true; batch_size 1, accumulate_grad_batches 8"
    fallbacks = [fallback.choices for fallback in trial.fallbacks()]
    assert fallbacks[:3] == [(compiled, batch), (compiled, narrow), (narrow, batch)]
    assert str([*trial.fallbacks()][-1]) == "as given"


def test_options_are_set_in_a_configuration_as_it_is_written(tmp_path):
    content = {"model": {"class_path": "Mine", "init_args": {"width": 2}}, "trainer": {"compile": True}}
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    options = {
        "config": str(tmp_path / "mine.yaml"),
        "model.width": 4,
        "model.init_args.depth": 1,
        "trainer.compile": {"mode": "reduce-overhead"},
        "data": "Data",
        "data.size": 3,
    }
    assert tuned_config(options) == (
        "model:\n  class_path: Mine\n  init_args:\n    width: 4\n    depth: 1\n"
        "trainer:\n  compile:\n    mode: reduce-overhead\n"
        "data:\n  class_path: Data\n  init_args:\n    size: 3\n"
    )


def test_a_secret_of_the_command_line_is_not_written_into_the_configuration(tmp_path):
    (tmp_path / "mine.yaml").write_text("model: {class_path: Mine}")
    assert "hidden" not in tuned_config({"config": str(tmp_path / "mine.yaml"), "model.hf_token": "hidden"})


class Final(Candidate):
    """A candidate whose costs are an option."""

    def costs(self, goal):
        return self.trial.options.get("costs", [1.0, 1.1])


def final(*costs):
    return Final(Trial((Choice("axis", {"costs": costs}),)))


def test_a_candidate_with_one_choice_counts_once_in_the_spread():
    baseline, answer = Final(Trial()), final(0.5, 0.6, 0.55)
    tuning = Tuning("c", GOALS["tokens_per_s"], baseline, answer, [baseline, answer], alone={str(answer.trial): answer})
    assert "over 3 degrees of freedom" in tune_answer(tuning, Path()).notes[0].text


def test_a_trial_that_leaves_a_choice_out_is_named_after_it():
    baseline, answer = Final(Trial()), final(0.5, 0.6)
    candidates = [baseline, answer, Final(Trial(), answer, problem="refused")]
    table = tune_answer(Tuning("c", GOALS["tokens_per_s"], baseline, answer, candidates), Path()).tables[0]
    assert f"without {answer.trial}" in table.rows[2]


def test_of_the_finals_what_lies_within_the_gate_is_the_same_and_what_may_lie_there_is_unclear():
    best, same = final(1.000, 1.001, 0.999), final(1.002, 1.003, 1.001)
    near, slower, failed = final(1.008, 1.009, 1.010), final(1.05, 1.051, 1.049), final()
    assert standing([slower, near, same, failed, best], None, 0.01) == ([best, same], [near])
    # With one run each there is no spread, so the difference stays unclear.
    once = [final(1.0), final(1.001)]
    assert standing(once, None, 0.01) == (once[:1], once[1:])
