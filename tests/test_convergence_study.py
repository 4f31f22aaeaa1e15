"""Does the faster one still train? Real trainings, honest and broken, through sweep and report."""

from __future__ import annotations

import csv
import io
import math
from pathlib import Path

import pytest
from browser import CHROMIUM, look
from planted_trainings import NAN_STEP
from warm_servers import warm_servers

from lmbench.cli import main

HERE = Path(__file__).parent
FAULTS = ("scale", "hot", "nan", "still")
#: Before the faults, and in front of their own baseline: the same study as `convergence` has, with one more fact.
STUDY = f"""
base:
  config: smoke
  model: planted_trainings.Planted
  model.size: tiny
  model.vocab_size: 300
  model.learning_rate: 3e-3
  data.source: text
  data.text_files: ["{HERE}/test_trace_*.py"]
  data.batch_size: 2
  data.context_length: 32
  data.num_batches: 60
  measure.steps: 55
  measure.min_window_s: 0
  measure.probe_steps: 0
  measure.gradient_norm: true
include:
  - {{trainer.precision: 32-true, model.fault: none}}
  - {{trainer.precision: 32-true, model.fault: none, seed_everything: 1}}
  - {{trainer.precision: 32-true, model.fault: none, seed_everything: 2}}
  - {{trainer.precision: bf16-mixed, model.fault: none}}
{"".join(f"  - {{trainer.precision: bf16-mixed, model.fault: {fault}}}" + chr(10) for fault in FAULTS)}
repeats: 1
view:
  title: Convergence
  question: Does the faster one still train?
  baseline: {{name: fp32, facts: {{precision: 32-true, model.fault: none}}}}
  tables:
    - title: Loss and gradient norm
      rows: [precision]
      columns: [trains_alike, speedup, tail_loss, tail_loss_difference, tail_loss_limit,
                tail_gradient_norm_difference_fraction, tail_gradient_norm_limit_fraction, skipped_count,
                time_to_loss_s, energy_to_loss_j]
  charts:
    - {{title: Loss, kind: curves, y: loss, x: precision, series: [precision, model.fault]}}
    - {{title: Loss against fp32, kind: curves, y: loss_difference, x: precision, series: [precision, model.fault]}}
    - {{title: Gradient norm, kind: curves, y: gradient_norm, x: precision, series: [precision, model.fault]}}
"""


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    folder = tmp_path_factory.mktemp("convergence")
    (folder / "planted.yaml").write_text(STUDY)
    with pytest.MonkeyPatch.context() as patch, warm_servers() as servers:
        patch.setenv("WANDB_MODE", "disabled")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        patch.chdir(HERE)
        patch.setattr("lmbench.commands.sweep.Servers", lambda say, mark: servers)
        assert main(["sweep", str(folder / "planted.yaml"), "--results_dir", str(folder)]) == 0
    return folder / "planted"


def shown(capsys, *words):
    assert main(["report", *map(str, words)]) == 0
    return capsys.readouterr().out


def test_what_is_broken_is_told_from_what_is_only_rounded(study, capsys):
    rows = {row["model.fault"]: row for row in csv.DictReader(io.StringIO(shown(capsys, study, "--format", "csv")))
            if row["precision"] == "bf16-mixed"}  # fmt: skip
    assert {fault: row["trains_alike"] for fault, row in rows.items()} == {
        "none": "1.0", **dict.fromkeys(FAULTS, "0.0"),
    }  # fmt: skip
    # Adam does not mind the length of gradients: only their norm tells.
    scaled = rows["scale"]
    assert abs(float(scaled["tail_loss_difference"])) < float(scaled["tail_loss_limit"])
    assert float(scaled["tail_gradient_norm_difference_fraction"]) == pytest.approx(2.0, rel=0.1)
    assert math.isinf(float(rows["still"]["time_to_loss_s"]))
    assert float(rows["none"]["time_to_loss_s"]) > 0


def test_the_table_and_the_answer_say_it_in_words(study, capsys):
    text = shown(capsys, study)
    answer = next(line for line in text.splitlines() if "Does not train like fp32" in line)
    assert f"the loss is not finite from step {NAN_STEP} on" in answer
    assert "nat above, limit" in answer
    assert "gradient norm x3" in answer
    assert all(f"bf16-mixed, fault {fault} (" in answer for fault in FAULTS)
    (honest,) = (line for line in text.splitlines() if "Trains like fp32:" in line)
    assert "bf16-mixed" in honest
    cells = [[cell.strip() for cell in line.split("|")] for line in text.splitlines() if line.startswith("| ")]
    words = {(row[1], row[2]): row[4] for row in cells}
    assert words["32-true", "none"] == "yardstick, 3 seeds"
    assert words["bf16-mixed", "none"].startswith("yes")
    assert words["bf16-mixed", "scale"] == "NO: gradient norm"
    assert words["bf16-mixed", "nan"].startswith(f"NO: not finite from step {NAN_STEP}")
    assert "loss" in words["bf16-mixed", "still"]
    assert "8 runs (8 ok)" in text


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")
def test_the_page_has_the_curves_and_the_answer(study, capsys, tmp_path):
    page = tmp_path / "page.html"
    shown(capsys, study, "--html", page)
    found = look(page, 400)
    assert found["charts"] == 3
    assert found["requests"] == []
    assert found["scroll_width"] <= found["client_width"]
    text = page.read_text()
    assert text.index('<p class="answer">Does not train like fp32') < text.index("<svg")
    assert "3 seeds of fp32" in text
    assert "not finite at step" in text
