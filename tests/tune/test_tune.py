"""`lmbench tune`: finds the planted best, refuses what does not train, and measures nothing twice."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import yaml
from paths import SUPPORT
from warm_servers import warm_servers

from lmbench.cli import main
from lmbench.memory.forecast import TargetGpu
from lmbench.memory.plan import (
    BlockFacts,
    Chain,
    ChainFacts,
    MemoryPlan,
    PlanPoint,
    Recipe,
    predicted_work,
    with_times,
)

SPACE = """
only: true
axes:
  model.breaks: [true]
  model.delay_ms: [54, 12]
  model.learns_nothing: [true]
"""
GIVEN = "model: {class_path: planted_tuning.Planted}\ntrainer: {accelerator: cpu}\n"
WORDS = ("--space=space.yaml", "--budget=4m", "--measure.warmup_steps=1", "--measure.min_window_s=0.1", "--json")


@pytest.fixture
def tune(tmp_path, monkeypatch, capfd):
    """Runs the command in processes of one warm server; returns its exit code, its answer and its standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr("lmbench.campaign.trainings.MOST_STEPS", 60)
    shutil.copy(SUPPORT / "planted_tuning.py", tmp_path)
    Path("given.yaml").write_text(GIVEN)
    Path("space.yaml").write_text(SPACE)
    with warm_servers() as servers:
        monkeypatch.setattr("lmbench.campaign.sweep.LocalExecutor", lambda mark: servers)

        def run(*words):
            code = main(["tune", *words])
            out, err = capfd.readouterr()
            return code, json.loads(out) if out else None, err

        yield run


def test_the_fastest_that_trains_is_found_and_a_kill_costs_only_what_ran(tune, monkeypatch):
    code, answer, err = tune("given.yaml", *WORDS)
    assert code == 0, err
    assert answer["options"] == {"model.delay_ms": 12}
    assert 1 < answer["gain"] < 4
    assert answer["gain_low"] < answer["gain"] < answer["gain_high"]
    assert "delay_ms 12; learns_nothing" in answer["refused"]
    assert answer["spent_s"] <= 1.05 * answer["budget_s"] == 252
    rows = {row["choice"]: row for row in answer["tables"]["choices"]}
    assert rows["breaks"]["outcome"] == "outcome error in forward"
    assert rows["delay_ms 54"]["gain"] < 1 < rows["learns_nothing"]["gain"]
    assert 1 < rows["delay_ms 12"]["gain"] < 4
    # The second pass tries the best of the first without its other choice.
    assert rows["whole: learns_nothing"]["gain"] < 1
    tuned = yaml.safe_load(Path("results/tune-given/tuned.yaml").read_text())
    assert tuned["model"] == {"class_path": "planted_tuning.Planted", "init_args": {"delay_ms": 12}}
    runs = {path: path.stat().st_mtime_ns for path in Path("results").glob("*/*/runs/*/run.json")}
    (lost,) = Path("results/tune-given").glob("training-1-*")
    shutil.rmtree(lost)
    _, again, err = tune("given.yaml", *WORDS)
    assert again["options"] == answer["options"]
    assert again["refused"] == answer["refused"]
    for path, written_ns in runs.items():
        assert (path.stat().st_mtime_ns == written_ns) == (lost not in path.parents), path
    _, small, _ = tune("given.yaml", *WORDS, "--at_most=1MiB")
    assert "as given: too much memory" in str(small)
    # With a larger budget and a smaller space, trials that were measured before are not measured again.
    Path("space.yaml").write_text(SPACE.replace("  model.breaks: [true]\n", ""))
    # New trainings could now have more steps, but those that are there keep theirs.
    monkeypatch.setattr("lmbench.campaign.trainings.MOST_STEPS", 70)
    code, other, err = tune("given.yaml", *WORDS, "--budget=6m")
    assert code == 0, err
    assert (other["options"], other["refused"]) == (answer["options"], answer["refused"]), err
    assert all(path.stat().st_mtime_ns == written_ns for path, written_ns in runs.items() if lost not in path.parents)


def test_a_verdict_that_has_no_time_for_its_rounds_is_not_begun_and_that_is_said(tune, monkeypatch):
    monkeypatch.setattr("lmbench.campaign.tuning._VERDICT", 0.0)
    # As if the finals left open whether the second one is slower.
    monkeypatch.setattr("lmbench.campaign.tuning.standing", lambda tried, *_: (tried[:1], tried[1:2]))
    Path("space.yaml").write_text("only: true\naxes: {model.delay_ms: [12], model.dealy_ms: [12]}\n")
    code, answer, err = tune("given.yaml", *WORDS)
    assert (code, [*Path("results/tune-given").glob("verdict-*")]) == (0, []), err
    assert ": no time for its 5 rounds" in str(answer)
    # What is not shown to be faster than the given configuration is no answer.
    assert (answer.get("options"), "no choice is shown to be better" in str(answer)) == (None, True)
    assert "tune: left out: model.dealy_ms: this configuration has no such option, or the value already" in err


DAMAGES = [
    ("predicted_bytes.json", "[]", "Expected object"),
    ("predicted_bytes.json", "{", "it is no JSON"),
    ("predicted_bytes.json", '{"as given": "x"}', "Expected int"),
    ("predicted_bytes.json", None, "it is no regular file"),
    ("given-*/runs/*/config.yaml", "", "has no settings"),
    ("given-*/runs/*/config.yaml", "[", "is no YAML"),
    ("given-*/runs/*/config.yaml", None, "it is no regular file"),
    ("tuned.yaml", None, "cannot be written"),
]


def test_a_folder_of_a_tuning_is_asked_about_and_a_damaged_one_is_a_line(tune):
    Path("space.yaml").write_text("only: true\naxes: {model.delay_ms: [54]}\n")
    words = ("given.yaml", *WORDS, "--budget=60s")
    assert tune(*words)[0] == 0
    folder = Path("results/tune-given")
    Path("results/tune-given").rename("sound")
    shutil.copytree("sound", folder)
    code, _, err = tune(*words)
    assert (code, "was not begun here by you" in err) == (2, True)
    for pattern, text, message in DAMAGES:
        shutil.rmtree(folder)
        shutil.copytree("sound", folder)
        for path in [*folder.glob(pattern)] or [folder / pattern]:
            path.unlink(missing_ok=True)
            path.mkdir() if text is None else path.write_text(text)
        code, _, err = tune(*words, "--trust")
        assert (code, message in err.splitlines()[-1]) == (2, True), err
    # A cost below zero would be a budget without an end.
    shutil.rmtree(folder)
    shutil.copytree("sound", folder)
    for path in folder.glob("*/runs/*/run.json"):
        record = json.loads(path.read_text())
        record["sweep"]["cost"]["total_s"] = -1e6
        path.write_text(json.dumps(record))
    _, _, err = tune(*words, "--trust")
    assert "-1,000,000" not in err.replace("-1000000", "-1,000,000")


#: An operator of one's own without a version for fake tensors.
UNPREDICTABLE = """
import torch
from planted_tuning import Planted

@torch.library.custom_op("planted::scale", mutates_args=())
def scale(inputs: torch.Tensor) -> torch.Tensor:
    return inputs * 1.0

class Unpredictable(Planted):
    def training_step(self, batch, batch_idx):
        return super().training_step((scale(batch[0]), batch[1]), batch_idx)
"""


def test_a_prediction_that_is_refused_is_left_out_with_its_reason_and_the_trial_runs(tune, monkeypatch):
    monkeypatch.setattr(
        "lmbench.campaign.tuning.gpu_for", lambda name: TargetGpu("NVIDIA H200", 150 * 10**9, 33 * 2**20)
    )
    Path("unpredictable.py").write_text(UNPREDICTABLE)
    Path("space.yaml").write_text("only: true\naxes: {model.delay_ms: [54]}\n")
    code, answer, err = tune("given.yaml", *WORDS, "--budget=90s", "--model=unpredictable.Unpredictable")
    (line,) = [line for line in err.splitlines() if "tune: left out: a prediction of the memory: " in line]
    assert (code, "no fake impl registered" in line, "unpredictable.py:" in line) == (0, True, True)
    assert [row["choice"] for row in answer["tables"]["choices"] if row["gain"]] == ["delay_ms 54"], err


def test_other_tokens_a_step_are_another_training(tune):
    Path("space.yaml").write_text("only: true\naxes: {data.batch_size: [4, 8]}\n")
    _, answer, err = tune("smoke", "--data.batch_size=4", *WORDS)
    baseline, other = answer["tables"]["choices"]
    assert other["outcome"] == "other tokens a step: another training", err
    assert (baseline["choice"], answer.get("options")) == ("as given", None)
    assert not [*Path("results/tune-smoke").glob("finals-*")]


def test_a_configuration_that_does_not_run_is_one_line(tune):
    code, answer, err = tune("given.yaml", "--model.breaks=true")
    assert (code, answer) == (2, None)
    assert "the configuration as given does not run: planted" in err.splitlines()[-1]


OWN = """
model: {class_path: own_blocks.OwnBlocks, init_args: {width: 16}}
data: {batch_size: 2, context_length: 8}
trainer: {accelerator: cpu}
"""


def test_a_memory_plan_is_ranked_by_measured_blocks_and_its_points_are_measured(tune, monkeypatch):
    block = BlockFacts(30, 30, 30, 5, -20, work=30)
    facts = ChainFacts(*[0.0] * 7, work=50, adding_work=3)
    chain = Chain(2, False, 6, facts, {"none": block, "inputs": block._replace(kept=2, saved=2, work=40)})

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

    monkeypatch.setattr("lmbench.campaign.proving.ask_plan", plan_for)
    shutil.copy(SUPPORT / "own_blocks.py", ".")
    Path("own.yaml").write_text(OWN)
    words = ("--for=memory", "--at_most=1GiB", "--measure.warmup_steps=1", "--measure.min_window_s=0.1", "--json")
    code, answer, err = tune("own.yaml", *words)
    assert code == 0, err
    rows = answer["tables"]["proof"]
    assert [row["predicted_step_s"] for row in rows] == sorted(row["predicted_step_s"] for row in rows)
    (best,) = [row for row in rows if row["outcome"] == "the answer"]
    assert best["step_s"] == min(row["step_s"] for row in rows)
    # Times of blocks predict the time of the whole.
    assert all(0.3 < row["predicted_step_s"] / row["step_s"] < 3 for row in rows)
    tuned = yaml.safe_load(Path("results/tune-own/tuned.yaml").read_text())
    recomputed = {"nothing": None, "all blocks": {"keep": "inputs"}}
    assert tuned["trainer"]["recompute"] == recomputed[best["recomputed"]]
    code, _, err = tune("own.yaml", *words[:1], "--name=other")
    assert (code, "--for memory needs a GPU" in err) == (2, True)
