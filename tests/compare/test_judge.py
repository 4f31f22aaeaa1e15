"""`lmbench judge` judges planted changes for what they are, in its last line and its exit code."""

from __future__ import annotations

import io
import json
import os
import random
import re
import shutil
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import ClassVar
from unittest import mock

import torch
import warm_server
from runs import make_record, write_run
from simulated_cells import SimulatedServers
from tables import cases

from lmbench.campaign.judging import other_work, worse_guards
from lmbench.cli import main
from lmbench.instruments.originals import replaced_functions
from lmbench.records.load import load_run
from lmbench.sweep.outcome import End

BASE = """
trainer: {accelerator: cpu}
model: planted_changes.Changed
measure: {warmup_steps: 2, probe_steps: 1, steps: 20, min_window_s: 0}
wandb: {mode: disabled}
"""


class Forks(SimulatedServers):
    """Real processes, whose step times are claimed at a noise of 0.5 %, so that a busy machine does not decide.

    `effect` is the claimed change of B's step time. A process that was there already is not run again, and rounds after
    the first repeat its records.
    """

    #: Folders of results by the options of their processes.
    earlier: ClassVar[dict[tuple[tuple[str, str], ...], Path]] = {}
    kept: ClassVar = tempfile.TemporaryDirectory()

    def __init__(self, effect):
        super().__init__(lambda name: name)
        self.effect, self.noise = effect, random.Random(0)

    def end(self, name, launch, folder, options):
        side, _, repeat = name.rpartition("-r")
        is_training = folder.parents[1].name.endswith("-training")
        # A process is the same again if its options are; the configuration is the same text in every folder.
        places = ("config", "measure.probe_steps", "measure.results_dir", "measure.run_id")
        key = tuple(option for option in options.items() if option[0] not in places)
        if not is_training and repeat != "0":
            shutil.copytree(folder.with_name(f"{side}-r0"), folder)
        elif key in self.earlier:
            shutil.copytree(self.earlier[key], folder)
        else:
            done = warm_server.run(*launch.words, variables={**os.environ, **launch.variables})
            assert done.returncode == 0, done.stderr
            self.earlier[key] = shutil.copytree(folder, Path(tempfile.mkdtemp(dir=self.kept.name), "run"))
        record = json.loads((folder / "run.json").read_text())
        self.claim(record, name, 1 + self.effect * (side[0] == "B"))
        (folder / "run.json").write_text(json.dumps(record))
        return End(0, "itself", 1.0)

    def claim(self, record, name, scale):
        """Give a record step times of its own, and an identity."""
        step_s = 0.02 * scale * self.noise.lognormvariate(0, 0.005)
        record["run_id"], record["pid"] = name, self.noise.randrange(1 << 22)
        record["phases"]["step"].update(p25_s=step_s, median_s=step_s, p75_s=step_s, mean_s=step_s)
        record["window"]["wall_s"] = record["window"]["steps_sum_s"] = step_s * record["window"]["steps"]


def judge(change, effect, folder, servers=Forks, budget="10m"):
    """The judgement on a change, as its JSON."""
    base = folder / "base.yaml"
    base.write_text(BASE)
    with (
        mock.patch("lmbench.campaign.trainings.MOST_STEPS", 50),
        mock.patch("secrets.randbits", return_value=0),
        mock.patch("lmbench.campaign.judging.LocalExecutor", return_value=servers(effect)),
        redirect_stdout(io.StringIO()) as out,
        redirect_stderr(io.StringIO()) as err,
    ):
        main(["judge", str(base), f"{base}@model.change={change}", "--budget", budget, "--results_dir", str(folder)])
    assert out.getvalue(), err.getvalue()
    return json.loads(out.getvalue().splitlines()[-1])


@cases("""
- [change, effect, code, part, reason]
- [linear by hand, -0.1, 0, speed, excludes 0]
- [sgd, -0.1, 12, trains the same, pairs of seeds]
- [skipped steps, -0.3, 12, plausible, have exactly the loss of the step before]
- [patched clock, -0.3, 12, plausible, time.perf_counter_ns]
""")
def test_a_planted_change_is_judged_by_the_part_that_shows_it(change, effect, code, part, reason, tmp_path):
    judgement = judge(change, effect, tmp_path)
    parts = judgement["parts"]
    assert (judgement["exit_code"], reason in parts[part]["reason"]) == (code, True), parts
    if code == 12:
        assert (judgement["verdict"], parts[part]["word"]) == ("invalid", "NO")
        assert parts["speed"]["reason"].startswith("not measured further")
        assert len([*Path(judgement["runs"], "runs").iterdir()]) == 2
    else:
        assert [parts[name]["word"] for name in ("plausible", "trains the same", "numerics")] == ["yes", "yes", "same"]
        assert judgement["step"]["ratio"]["low"] < 1 + effect < judgement["step"]["ratio"]["high"]


def test_nothing_is_trained_when_the_budget_is_over_and_nothing_is_claimed(tmp_path, capfd):
    judgement = judge("linear by hand", -0.1, tmp_path, budget="0.001s")
    assert (judgement["verdict"], judgement["exit_code"]) == ("undecided", 11)
    training, speed = (judgement["parts"][name] for name in ("trains the same", "speed"))
    assert training == {"word": "undecided", "reason": "the budget ended before the trainings"}
    assert re.search(r"a change 6 \([+-][\d.]+ % so far\); about \d+ more rounds if it stays so$", speed["reason"])
    assert not Path(f"{judgement['runs']}-training").exists()


@cases("""
- [is_training, part, word, reason]
- [true, trains the same, "NO", "ran other code: A: environment.code.project.changes_digest is after or before; B:"]
- [false, memory, invalid, "host peak: runs of A are not repeats of one thing: environment.code.project.changes"]
""")
def test_a_tree_that_is_edited_between_rounds_or_before_the_trainings_is_refused(
    is_training, part, word, reason, tmp_path
):
    class Edited(Forks):
        def claim(self, record, name, scale):
            super().claim(record, name, scale)
            # Only trainings record gradient norms.
            does_train = record["config"]["measure"]["gradient_norm"]
            is_later = does_train if is_training else not does_train and not name.endswith("-r0")
            digest = "after" if is_later else "before"
            record["environment"]["code"]["project"].update(commit="c", is_dirty=True, changes_digest=digest)

    judgement = judge("linear by hand", -0.1, tmp_path, servers=Edited)
    assert (judgement["exit_code"], judgement["parts"][part]["word"]) == (12, word)
    assert reason in judgement["parts"][part]["reason"]


@cases("""
- [cut, doubts]
- [0, []]
- [10, [B has -2.94 % tokens a step]]
""")
def test_windows_of_other_lengths_over_batches_of_other_lengths_are_the_same_work(cut, doubts, tmp_path):
    runs = []
    for name, steps, less in (("a", 20, 0), ("b", 9, cut)):
        write_run(tmp_path / name, make_record({}), steps)
        path = tmp_path / name / "steps.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        path.write_text("".join(json.dumps(line | {"tokens": 300 + 10 * line["step"] - less}) + "\n" for line in lines))
        runs.append(load_run(tmp_path / name))
    assert [*other_work(*runs)] == doubts


def test_a_guard_that_checks_nothing_on_b_and_passes_on_a_is_named(tmp_path):
    runs = []
    for name, status in (("a", "pass"), ("b", "n/a")):
        guards = [{"name": guard, "status": status} for guard in ("trained", "spread")]
        write_run(tmp_path / name, make_record({"guards": guards}), 3)
        runs.append(load_run(tmp_path / name))
    assert [*worse_guards(*runs)] == ["B: guard trained is n/a, which passes on A"]


@cases("name", "time.perf_counter", "time.sleep", "torch.cuda.synchronize", "torch.cuda.Event.elapsed_time")
def test_a_clock_or_synchronize_that_something_else_stands_for_is_named(name, monkeypatch):
    assert replaced_functions() == []
    monkeypatch.setattr(name, lambda *_: 1.0)
    assert replaced_functions() == [name]
    # A decorator of PyTorch has code of PyTorch.
    monkeypatch.setattr(name, torch.no_grad()(lambda *_: 1.0))
    assert replaced_functions() == [name]
