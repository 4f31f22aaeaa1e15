"""Facts in the words in which people say them: a strategy, and a precision with and without its float32 matmul."""

from __future__ import annotations

import pytest
from runs import make_sweep, section_of

from lmbench.records.run import RunRecord
from lmbench.records.settings import differences
from lmbench.report.facts import describe, read_facts

DDP = "lightning.pytorch.strategies.DDPStrategy"
USUAL = {"timeout": "0:30:00", "start_method": "popen", "process_group_backend": None}


@pytest.mark.parametrize(("strategy", "words"), [
    ("fsdp2", "fsdp2"),
    ({"class_path": DDP, "init_args": USUAL}, "ddp"),
    ({"class_path": DDP, "init_args": {**USUAL, "find_unused_parameters": True}}, "ddp (find_unused_parameters true)"),
    ({"class_path": "mine.RingStrategy", "init_args": None}, "Ring"),
])  # fmt: skip
def test_a_strategy_is_its_name_and_the_options_that_somebody_set(strategy, words):
    run = RunRecord(1, "ok", world_size=2, config={"trainer": {"strategy": strategy}})
    assert read_facts(run)["strategy"] == words


def test_a_precision_alone_can_be_called_as_in_its_table():
    facts = {"precision": "32-true", "matmul": "highest (fp32)"}
    assert describe(facts, ["precision"]) == describe(facts, ["precision", "matmul"]) == "fp32"
    assert describe(facts, ["precision"], has_matmul=False) == "32-true"


@pytest.mark.parametrize(("matmuls", "names"), [
    (["highest"], ["32-true", "bf16-mixed"]), (["highest", "high"], ["fp32", "TF32", "bf16-mixed"]),
])  # fmt: skip
def test_a_legend_names_a_precision_as_the_table_beside_it(matmuls, names, tmp_path):
    axes = {
        "model.size": ["small", "large"],
        "trainer.precision": ["32-true", "bf16-mixed"],
        "measure.matmul_precision": matmuls,
    }
    section = section_of(make_sweep(tmp_path / "s", axes, view="precision"))
    legend = {point["series"] for point in section.charts()[0].spec["data"]["values"]}
    assert legend == set(names)


def test_a_setting_left_to_its_default_is_compared_by_its_record():
    sides = []
    for precision in (None, "bf16-mixed"):
        run = RunRecord(1, "ok", precision=precision or "32-true", config={"trainer": {"precision": precision}})
        sides.append(run)
    assert list(map(str, differences(*sides))) == ["trainer.precision: 32-true -> bf16-mixed"]
