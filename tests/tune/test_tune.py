"""`lmbench tune`: finds the planted best, refuses what does not train, and measures nothing twice."""

from __future__ import annotations

import io
import json
import shutil
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from pathlib import Path

import pytest
import yaml
from msgspec.structs import replace
from paths import SUPPORT
from runs import make_run
from tables import cases
from warm_servers import warm_servers

from lmbench.campaign.trainings import training_options
from lmbench.campaign.tuning import Tuner
from lmbench.cli import main
from lmbench.errors import UsageError
from lmbench.memory.block_times import with_times
from lmbench.memory.chain import BlockFacts, Chain, ChainFacts
from lmbench.memory.forecast import CONTEXT_BYTES, TargetGpu
from lmbench.memory.plan import MemoryPlan, PlanPoint
from lmbench.memory.recipe import Recipe, predicted_work
from lmbench.records.load import load_run
from lmbench.tune.search import Candidate, Trial, goal_of

AXES = "{model.breaks: [true], model.delay_ms: [54, many, 12], model.learns_nothing: [true]}"
OWN = """
model: {class_path: own_blocks.OwnBlocks, init_args: {width: 16}}
data: {batch_size: 2, context_length: 8}
trainer: {accelerator: cpu}
"""
GIVEN = "model: {class_path: planted_tuning.Planted}\ntrainer: {accelerator: cpu}\n"
WORDS = (
    "--space=space.yaml", "--budget=4m", "--measure.warmup_steps=1", "--measure.steps=5", "--measure.min_window_s=0.05",
    "--json",
)  # fmt: skip
TUNED = Path("results/tune-given")


@pytest.fixture(scope="module")
def servers(tmp_path_factory):
    """One warm server, in whose working directory all tests tune."""
    folder = tmp_path_factory.mktemp("tunings")
    for name in ("planted_tuning.py", "own_blocks.py"):
        shutil.copy(SUPPORT / name, folder)
    with pytest.MonkeyPatch.context() as patch, warm_servers() as servers:
        patch.chdir(folder)
        patch.syspath_prepend(str(folder))
        patch.setattr("lmbench.campaign.trainings.MOST_STEPS", 25)
        patch.setattr("lmbench.campaign.tuning._ROUNDS", 2)
        for place in ("sweep", "stages"):
            patch.setattr(f"lmbench.campaign.{place}.LocalExecutor", lambda *_, **__: servers)
        Path("given.yaml").write_text(GIVEN)
        yield servers


@pytest.fixture(scope="module")
def tune(servers):
    """Runs the command; returns its exit code, its answer and its standard error."""

    def run(*words, axes=AXES, config="given.yaml", options=WORDS):
        Path("space.yaml").write_text(f"only: true\naxes: {axes}\n")
        with redirect_stdout(io.StringIO()) as out, redirect_stderr(io.StringIO()) as err:
            code = main(["tune", config, *options, *words])
        return code, json.loads(out.getvalue()) if out.getvalue() else None, err.getvalue()

    return run


@pytest.fixture(scope="module")
def tuned(tune):
    """The answer of a whole tuning, whose folder is TUNED."""
    code, answer, err = tune()
    assert code == 0, err
    return {**answer, "plan": plan_in(err)}


def plan_in(err):
    """The line that says how many runs each trial of the search gets."""
    (line,) = (line for line in err.splitlines() if " runs each, " in line)
    return line


def test_the_fastest_that_trains_is_found(tuned):
    assert tuned["options"] == {"model.delay_ms": 12}
    assert 1 < tuned["gain"] < 4
    assert tuned["gain_low"] < tuned["gain"] < tuned["gain_high"]
    assert "delay_ms 12; learns_nothing" in tuned["refused"]
    assert tuned["spent_s"] <= 1.05 * tuned["budget_s"] == 252
    rows = {row["choice"]: row for row in tuned["tables"]["choices"]}
    assert rows["breaks"]["outcome"] == "outcome error in forward: planted"
    # A value that the command line refuses; its other run is skipped.
    assert rows["delay_ms many"]["outcome"].startswith("outcome error in setup: ")
    assert rows["delay_ms 54"]["gain"] < 1 < rows["learns_nothing"]["gain"]
    assert 1 < rows["delay_ms 12"]["gain"] < 4
    # The second pass does not leave out what gained much.
    assert "without delay_ms 12" not in rows
    # A stage's folder has the command that repeats the tuning.
    (given,) = TUNED.glob("given-*/sweep.json")
    assert json.loads(given.read_text())["command"].startswith("lmbench tune given.yaml --measure.warmup_steps=1 ")
    model = yaml.safe_load((TUNED / "tuned.yaml").read_text())["model"]
    assert model == {"class_path": "planted_tuning.Planted", "init_args": {"delay_ms": 12}}


def test_a_kill_costs_only_what_ran(tuned, tune):
    runs = {path: path.stat().st_mtime_ns for path in TUNED.glob("*/runs/*/run.json")}
    (lost,) = TUNED.glob("training-1-*")
    shutil.rmtree(lost)
    _, again, err = tune()
    assert (again["options"], again["refused"]) == (tuned["options"], tuned["refused"]), err
    assert plan_in(err) == tuned["plan"]
    for path, written_ns in runs.items():
        assert (path.stat().st_mtime_ns == written_ns) == (lost not in path.parents), path


@cases("""
    words | code | said
    --at_most=1MiB | 3 | as given: too much memory
    --for=joules_per_token | 2 | lmbench: --for joules_per_token: this device does not tell it; give another goal
    --model.breaks=true --name=broken | 2 | the configuration as given does not run: planted
    """)
def test_a_configuration_that_cannot_be_tuned_says_why(words, code, said, tuned, tune):
    exit_code, answer, err = tune(*words.split())
    # A mistake is told in the last line, and what was measured in the answer.
    told = err.splitlines()[-1] if answer is None else str(answer)
    assert (exit_code, answer is None, said in told) == (int(code), code == "2", True), err


def test_a_verdict_that_has_no_time_for_its_rounds_is_not_begun_and_that_is_said(tune, monkeypatch):
    monkeypatch.setattr("lmbench.campaign.tuning._VERDICT", 0.0)
    # As if the finals left open whether the second one is slower.
    monkeypatch.setattr("lmbench.campaign.tuning.standing", lambda tried, *_: (tried[:1], tried[1:2]))
    code, answer, err = tune("--name=verdict", axes="{model.delay_ms: [12], model.dealy_ms: [12]}")
    assert (code, [*Path("results/verdict").glob("verdict-*")]) == (0, []), err
    assert ": no time for its 5 rounds" in str(answer)
    # What is not shown to be faster than the given configuration is no answer.
    assert (answer.get("options"), "no choice is shown to be better" in str(answer)) == (None, True)
    assert "tune: left out: model.dealy_ms: this configuration has no such option, or the value already" in err


def test_a_trial_whose_proof_the_budget_has_no_time_for_gives_way_to_others(tune, monkeypatch):
    """As one whose compiling takes minutes in each process."""
    monkeypatch.setattr("lmbench.campaign.tuning._SEARCH", 1.0)
    code, answer, err = tune("--name=slow", axes="{model.delay_ms: [12]}")
    assert (code, answer.get("options")) == (0, None), err
    assert answer["tables"]["choices"][1]["outcome"].startswith("too slow to start: a proof takes ")
    assert "delay_ms 12: too slow to start" in str(answer["headline"])


def test_a_proof_starts_with_compiled_code_that_is_kept(tmp_path, monkeypatch):
    """As on an H200, where the whole network took 120 of 127 s to compile; 15 minutes have time for its proof."""
    monkeypatch.setattr("lmbench.campaign.tuning._ROUNDS", 3)
    tuner = Tuner(tmp_path, {}, 900.0, None, goal=goal_of("tokens_per_s"))
    lines = []
    for first_step_s in (None, 120.2):
        folder = tmp_path / f"first-step-{first_step_s}"
        make_run(folder, {}, {"sweep.cost.total_s": 126.8, "compile.first_step_s": first_step_s})
        lines.append([*tuner.refuse_unprovable([Candidate(Trial(), runs=[load_run(folder)])], [])])
    assert lines == [["as given: too slow to start: a proof takes 13 min; a larger --budget has time for it"], []]


def test_a_proof_has_the_time_that_the_search_has_left(tmp_path, monkeypatch):
    """On an H200 a network that was compiled as a whole in 185 of 192 s left 236 of 900 s for its proof of 321 s."""
    monkeypatch.setattr("lmbench.campaign.tuning._ROUNDS", 3)
    tuner = Tuner(tmp_path, {}, 900.0, None, goal=goal_of("tokens_per_s"))
    whole, given = tmp_path / "search-compile_whole-fbc/runs/fit", tmp_path / "given-19b/runs/fit"
    make_run(whole, {}, {"sweep.cost.total_s": 192.2, "compile.first_step_s": 185.0})
    make_run(given, {}, {"sweep.cost.total_s": 472.0})
    # Of an earlier start, which the search that goes on has not reached.
    make_run(tmp_path / "finals-46f/runs/fit", {}, {"sweep.cost.total_s": 472.0})
    candidate, baseline = Candidate(Trial(), runs=[load_run(whole)]), Candidate(Trial(), runs=[load_run(given)])
    assert [*tuner.refuse_unprovable([candidate], [])] == []
    (line,) = tuner.refuse_unprovable([candidate], [baseline])
    assert "too slow to start: a proof takes 5.3 min" in line


def test_a_network_is_compiled_whole_only_where_that_leaves_the_time_of_the_proof(tune, monkeypatch):
    # As much as the search has in all.
    monkeypatch.setattr("lmbench.campaign.tuning.MOST_OF_ONE", 0.55)
    code, answer, err = tune("--name=whole", axes="{compile_whole: [{trainer.compile: true}]}")
    assert (code, [*Path("results/whole").glob("search-compile_whole-*")]) == (0, []), err
    assert "compile_whole: compiling it may take 2.2 min; a larger --budget has time for it" in str(answer["headline"])


def test_a_training_leaves_data_of_the_users_own_as_they_are(tmp_path):
    """Their class may have a `source` that is called `random`, as lmbench's has, whose tokens teach nothing."""
    for name, source in (("mine.Data", None), ("lmbench.data.datamodule.TokenData", "text")):
        make_run(tmp_path / name, {}, {"data.name": name, "data.source": "random"})
        assert training_options(load_run(tmp_path / name).record, 30).get("data.source") == source


def test_a_copy_of_a_tuning_is_asked_about_and_a_damaged_one_is_a_line(tuned, tune):
    folder = Path(shutil.copytree(TUNED, "results/copy"))
    code, _, err = tune("--name=copy")
    assert (code, "was not begun here by you" in err) == (2, True)
    (folder / "tuned.yaml").unlink()
    (folder / "tuned.yaml").mkdir()
    code, _, err = tune("--name=copy", "--trust")
    assert (code, "cannot be written" in err.splitlines()[-1]) == (2, True), err


def test_a_prediction_that_is_refused_is_left_out_with_its_reason_and_the_trial_runs(tune, monkeypatch):
    def refuse(*_):
        raise UsageError("the module has an operator without a fake")

    # Half of its memory is less than this process has.
    monkeypatch.setattr("lmbench.campaign.tuning.gpu_for", lambda name: TargetGpu("a GPU", CONTEXT_BYTES + 2**20, 0))
    monkeypatch.setattr("lmbench.campaign.tuning.ask", refuse)
    code, answer, err = tune("--name=other", axes="{model.delay_ms: [54]}")
    left_out = "left out: a prediction of the memory: the module has an operator without a fake"
    assert (code, err.count(left_out)) == (0, 1)
    assert [row["choice"] for row in answer["tables"]["choices"] if row["gain"]] == ["delay_ms 54"], err


def test_no_memory_is_predicted_where_the_given_configuration_takes_less_than_half_of_it(tune, monkeypatch):
    asked = []
    monkeypatch.setattr("lmbench.campaign.tuning.gpu_for", lambda name: TargetGpu("NVIDIA H200", 150 * 10**9, 0))
    monkeypatch.setattr("lmbench.campaign.tuning.ask", lambda *words: asked.append(words))
    code, _, _ = tune("--name=roomy", axes="{model.delay_ms: [54]}")
    assert (code, asked) == (0, [])


def test_other_tokens_a_step_are_another_training(tune):
    _, answer, err = tune("--data.batch_size=4", axes="{data.batch_size: [4, 8]}", config="smoke")
    baseline, other = answer["tables"]["choices"]
    assert other["outcome"] == "other tokens a step: another training", err
    assert (baseline["choice"], answer.get("options")) == ("as given", None)
    assert not [*Path("results/tune-smoke").glob("finals-*")]


def test_micro_batches_of_a_module_that_optimizes_by_hand_are_left_out_with_the_reason(tune):
    Path("manual.yaml").write_text(OWN.replace("OwnBlocks", "TwoBackwards"))
    _, answer, err = tune(axes="{micro_batch: []}", config="manual.yaml")
    assert "tune: left out: micro-batches: the module optimizes by hand" in err
    assert [row["choice"] for row in answer["tables"]["choices"]] == ["as given"]


def test_a_memory_plan_is_ranked_by_measured_blocks_and_its_points_are_measured(tune, monkeypatch):
    blocks = {"none": {0: BlockFacts(30, 30, 30, 5, -20)}, "inputs": {0: BlockFacts(30, 2, 2, 5, -20)}}
    work = {"rest": 50, "forward": 0, "none": 30, "inputs": 40, "adding": 3}
    chain = Chain(2, False, [0] * 6, ChainFacts(*[0.0] * 7), blocks, work)

    def plan_for(words, request):
        """A plan as its process makes it, for a chain that is known."""
        chains = with_times([chain], request.times) if request.times else [chain]
        points = [
            PlanPoint(recipe, recipe.options, 2**20, 2**20, work)
            for recipe in (Recipe(2, 1), Recipe(2, 1, "inputs"))
            if (work := predicted_work(chains[0], recipe))
        ]
        points.sort(key=lambda point: point.work)
        return MemoryPlan(points, points[: request.checks], request.gpu, bool(request.times), [chain], 2)

    monkeypatch.setattr("lmbench.campaign.planning.ask_plan", plan_for)
    Path("own.yaml").write_text(OWN)
    words = ["--for=memory", "--at_most=1GiB", "--measure.warmup_steps=1", "--measure.min_window_s=0.1", "--json"]
    plan = partial(tune, config="own.yaml", options=words)
    code, answer, err = plan()
    assert code == 0, err
    rows = answer["tables"]["proof"]
    assert [row["predicted_step_s"] for row in rows] == sorted(row["predicted_step_s"] for row in rows)
    (best,) = [row for row in rows if row["outcome"] == "the answer"]
    assert best["step_s"] == min(row["step_s"] for row in rows)
    # A CPU has no memory of a device to measure.
    assert ["peak", "1.0 MiB predicted"] in answer["headline"]
    # Times of blocks predict the time of the whole.
    assert all(0.3 < row["predicted_step_s"] / row["step_s"] < 3 for row in rows)
    tuned = yaml.safe_load(Path("results/tune-own/tuned.yaml").read_text())
    recomputed = {"nothing": None, "all blocks": {"keep": "inputs"}}
    assert tuned["trainer"]["recompute"] == recomputed[best["recomputed"]]
    with monkeypatch.context() as patch:
        patch.setattr("lmbench.campaign.planning.Stages.is_allowed", lambda stages, peak_bytes: False)
        code, answer, _ = plan()
        assert (code, answer["headline"]) == (3, [["proven", "no point: what was measured takes more than 1.00 GiB"]])
        patch.setattr("lmbench.campaign.planning.ask_plan", lambda *asked: replace(plan_for(*asked), fitting=[]))
        code, _, err = plan()
        nothing = "lmbench: tune: nothing fits 1.00 GiB: the least is 1.0 MiB reserved, as predicted"
        assert (code, err.splitlines()[-1]) == (3, nothing)
        smaller = TargetGpu("a smaller GPU", CONTEXT_BYTES + 2**29, 0)
        patch.setattr("lmbench.campaign.planning.gpu_for", lambda name: smaller)
        assert "nothing fits a smaller GPU" in plan()[2]
    monkeypatch.setattr("lmbench.campaign.planning.block_times", lambda runs: [])
    for more, said in (([], "there are no times of blocks"), (["--name=short", "--budget=1s"], "a larger --budget")):
        code, _, err = plan(*more)
        assert (code, said in err.splitlines()[-1]) == (2, True)
