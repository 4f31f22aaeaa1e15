"""The convergence study with real trainings, correct and broken ones, through sweep and report."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import yaml
from runs import ended, put, rows_of, section_of
from tables import texts_of
from warm_servers import warm_servers

from lmbench.cli import main
from lmbench.configs import shipped_studies

HERE = Path(__file__).parents[1] / "kernels"
FAULTS = ("scale", "nan", "still")
#: `tiny_convergence` is even smaller by this base, and has a module with a fault in bf16.
SMALLER = f"""
base:
  model: planted_trainings.Planted
  model.size: tiny
  model.vocab_size: 300
  model.learning_rate: 0.003
  data.text_files: ["{HERE}/test_*.py"]
  data.batch_size: 2
  data.context_length: 32
  data.num_batches: 45
  measure.steps: 40
  measure.probe_steps: 0
precision:
- {{trainer.precision: 32-true, measure.matmul_precision: highest}}
- &bf16 {{trainer.precision: bf16-mixed, measure.matmul_precision: highest}}
faults:
- {{<<: *bf16, model.fault: scale}}
- {{<<: *bf16, model.fault: nan}}
- {{<<: *bf16, model.fault: still}}
"""


def planted_study():
    study, smaller = yaml.safe_load(shipped_studies()["tiny_convergence"].read_text()), yaml.safe_load(SMALLER)
    study["base"] |= smaller["base"]
    study["matrix"]["precision"] = smaller["precision"]
    study["include"] = [*study["include"][:2], *smaller["faults"]]
    return study


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convergence")
    (folder / "planted.yaml").write_text(yaml.safe_dump(planted_study()))
    with pytest.MonkeyPatch.context() as patch, warm_servers() as servers:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.chdir(HERE.parent / "support")
        patch.setattr("lmbench.campaign.sweep.LocalExecutor", lambda mark: servers)
        assert main(["sweep", str(folder / "planted.yaml"), f"--results_dir={folder}"]) == 0
    return folder / "planted"


def test_what_is_broken_is_told_from_what_is_only_rounded(study):
    rows = {row["model.fault"] or "none": row for row in rows_of(study) if row["precision"] == "bf16-mixed"}
    assert {fault: row["trains_alike"] for fault, row in rows.items()} == {"none": 1, **dict.fromkeys(FAULTS, 0)}
    # Adam normalizes gradients, so that only the gradient norm shows their wrong length.
    scaled = rows["scale"]
    assert abs(scaled["tail_loss_difference"]) < scaled["tail_loss_limit"]
    assert scaled["tail_gradient_norm_difference_fraction"] == pytest.approx(2.0, rel=0.1)
    assert math.isinf(rows["still"]["time_to_loss_s"])
    assert rows["none"]["time_to_loss_s"] > 0
    section = section_of(study)
    assert [text.partition(":")[0] for text in texts_of(section.headline)] == [
        "Does not train like fp32 eager, whatever its speed", "Trains like fp32 eager",
    ]  # fmt: skip
    (chart,) = section.charts()
    assert chart.caption.startswith("Loss minus that of fp32 eager, same seed, mean of ")
    assert chart.spec["encoding"]["y"]["scale"]["domain"][1] == pytest.approx(10 * scaled["tail_loss_limit"])


def test_a_run_that_died_is_told_and_a_file_of_steps_that_is_gone_leaves_the_others(study, tmp_path):
    home = shutil.copytree(study, tmp_path / "planted")
    for path in home.glob("runs/*/run.json"):
        run = json.loads(path.read_text())
        axes = run["sweep"]["axes"]
        path.write_text(json.dumps(put(run, ended("oom", "backward") if axes.get("model.fault") == "scale" else {})))
        if axes.get("seed_everything") == 1:
            (path.parent / "steps.jsonl").unlink()
    text = " ".join(line.text for line in section_of(home).headline)
    assert "Did not end: bf16-mixed, fault scale (OOM (backward))." in text
    assert "the baseline has 2 of the 3 seeds" in text
