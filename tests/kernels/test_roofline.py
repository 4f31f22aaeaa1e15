"""What kernels attain, against figures worked out by hand from the model's shape."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
from paths import TRACES

from lmbench.cli import main
from lmbench.errors import UsageError
from lmbench.kernels.ceiling import find_ceiling
from lmbench.kernels.findings import Findings, examine
from lmbench.kernels.roofline import roofline
from lmbench.records.codec import as_dict
from lmbench.records.environment import Environment, Gpu
from lmbench.records.run import RunRecord
from lmbench.report.answer import Answer

EAGER, COMPILED = TRACES / "small_fp32_inference", TRACES / "small_bf16_compiled"
# small: width, feed-forward width, layers, vocabulary; batch 4 x context 512
WIDTH, WIDE, LAYERS, VOCABULARY, TOKENS, CONTEXT = 768, 3072, 12, 10_000, 2048, 512
FULL = {
    "flops": {"per_token_flops": 260726784, "causal_per_token_flops": 251289600, "multiplier": 1, "reason": None},
    "window": {"tokens": 2 * TOKENS, "steps": 2},
    "environment": {"gpu": {"name": "NVIDIA H200", "power_limit_w": 700.0}},
    "world_size": 1,
}


def with_run(path: Path, **changes: Any) -> Findings:
    """The trace with the facts that a real run's record has, some of them changed."""
    found = examine(path)
    assert found.run is not None
    run = {**as_dict(found.run), **FULL}
    for name, value in changes.items():
        run[name] = {**run.get(name, {}), **value} if isinstance(value, dict) else value
    return replace(found, run=msgspec.convert(run, RunRecord))


def rows(found: Answer | None) -> dict[str, Any]:
    assert found is not None
    return {row.name: row for row in found.figures["roofline"]["rows"]}


def on_gpu(name: str) -> RunRecord:
    return RunRecord(1, "ok", environment=Environment(gpu=Gpu(name=name, power_limit_w=700.0)))


def ceiling_record(gpu: str = "NVIDIA H200", day: int = 1, watt: float = 700.0) -> dict[str, Any]:
    rates = [("bf16", 8e14, 6.6e14), ("fp32", 5.08e13, 5.0e13), ("copy", 4.4e12, 4.3e12)]
    return {
        "schema_version": 1, "measured_at": f"2026-11-{day:02d}",
        "environment": {"gpu": {"name": gpu, "power_limit_w": watt}},
        "rates": [{"name": n, "burst_per_s": b, "sustained_per_s": held, "seconds": 3.0} for n, b, held in rates],
    }  # fmt: skip


def test_matrix_products_by_hand() -> None:
    own = rows(roofline(with_run(EAGER)))["matmul forward"]
    # q, k, v, output; gate, up, down; scores and values; the head. Two FLOPs each.
    per_layer = 4 * WIDTH * WIDTH + 3 * WIDTH * WIDE + 2 * CONTEXT * WIDTH
    assert own.work == 2 * TOKENS * (LAYERS * per_layer + WIDTH * VOCABULARY)
    assert own.seconds == pytest.approx(13.45e-3, rel=1e-3)
    assert own.per_s == pytest.approx(own.work / own.seconds)
    assert own.datasheet_per_s == 67e12
    assert own.per_s / 67e12 == pytest.approx(0.593, abs=1e-3)


def test_backward_has_twice_the_products_and_the_step_three_times() -> None:
    training = {"per_token_flops": 3 * 260726784, "causal_per_token_flops": 3 * 251289600, "multiplier": 3}
    own = rows(roofline(with_run(COMPILED, flops=training)))
    forward, backward, step = (own[f"matmul {name}"] for name in ("forward", "backward", "step"))
    assert (backward.work, step.work) == (2 * forward.work, 3 * forward.work)
    assert step.seconds == pytest.approx(forward.seconds + backward.seconds)
    assert forward.work == 260726784 * TOKENS
    assert forward.datasheet_per_s == 989.4e12


def test_norms_by_hand() -> None:
    own = rows(roofline(with_run(EAGER)))["norm forward"]
    assert own.work == 2 * (2 * LAYERS + 1) * TOKENS * WIDTH * 4
    assert own.datasheet_per_s == 4.8e12


def test_norms_that_are_fused_with_something_else_have_no_figure() -> None:
    own = rows(roofline(with_run(COMPILED)))["norm forward"]
    assert own.per_s is None
    assert "fused" in own.reason


def test_adamw_reads_four_numbers_a_parameter_and_writes_three() -> None:
    facts = {"optimizer": "AdamW fused", "trainable_parameter_count": 128_625_408}
    own = rows(roofline(with_run(COMPILED, model=facts)))["optimizer"]
    assert own.work == 128_625_408 * 28
    assert own.per_s == pytest.approx(3.45e12, rel=2e-3)
    halved = rows(roofline(with_run(COMPILED, model=facts, precision="bf16-true")))["optimizer"]
    assert halved.work == 128_625_408 * 14


def test_a_foreign_model_has_blanks_with_reasons() -> None:
    flops = {"per_token_flops": None, "causal_per_token_flops": None, "reason": "it has an operator without a formula"}
    model = {"num_layers": None, "d_model": None, "optimizer": "Adafactor"}
    own = rows(roofline(with_run(COMPILED, flops=flops, model=model)))
    assert {row.per_s for row in own.values()} == {None}
    assert own["matmul forward"].reason == "it has an operator without a formula"
    assert all(row.reason for row in own.values())


@pytest.mark.parametrize(
    ("precision", "matmul", "dtype", "peak"),
    [
        ("32-true", "highest", "fp32", 67e12),
        ("32-true", "high", "tf32", 494.7e12),
        ("bf16-mixed", "highest", "bf16", 989.4e12),
        ("16-mixed", "highest", "fp16", 989.4e12),
    ],
)
def test_the_peak_is_that_of_the_type_that_products_run_in(
    precision: str, matmul: str, dtype: str, peak: float
) -> None:
    found = roofline(with_run(EAGER, precision=precision, matmul_precision=matmul))
    assert found is not None
    assert found.figures["roofline"]["matmul_dtype"].startswith(f"{dtype}: ")
    assert rows(found)["matmul forward"].datasheet_per_s == peak


def test_a_bare_trace_or_one_of_a_cpu_has_no_roofline() -> None:
    assert roofline(replace(examine(EAGER), run=None)) is None
    assert roofline(replace(with_run(EAGER), why_no_kernels="a trace of a CPU")) is None


def test_the_newest_ceiling_of_the_same_gpu_above_the_run_is_taken(tmp_path: Path) -> None:
    run = tmp_path / "results" / "study" / "runs" / "cell-r0"
    run.mkdir(parents=True)
    results = tmp_path / "results"
    (results / "ceiling_A.json").write_text(json.dumps(ceiling_record(day=1)))
    (results / "ceiling_B.json").write_text(json.dumps(ceiling_record(day=3)))
    (results / "ceiling_C.json").write_text(json.dumps(ceiling_record("NVIDIA A100-SXM4-80GB", day=9)))
    for place, text in enumerate(["", "{}", "[1]", '{"rates": [{"name": "bf16"}]}', "[" * 100_000]):
        (results / f"ceiling_broken{place}.json").write_text(text)
    found = find_ceiling(run, on_gpu("NVIDIA H200"))
    assert found is not None
    assert found.path.name == "ceiling_B.json"
    assert found.rates("copy") == (4.4e12, 4.3e12)
    assert found.rates("tf32") == (None, None)
    assert find_ceiling(run, on_gpu("NVIDIA H100 PCIe")) is None


def test_a_named_ceiling_of_another_card_says_so(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    path.write_text(json.dumps(ceiling_record("NVIDIA A100-SXM4-80GB")))
    found = find_ceiling(tmp_path, on_gpu("NVIDIA H200"), path)
    assert found is not None
    assert "NVIDIA A100-SXM4-80GB" in found.note
    path.write_text(json.dumps(ceiling_record(watt=500.0)))
    assert "500 W" in (find_ceiling(tmp_path, on_gpu("NVIDIA H200"), path) or found).note
    path.write_text("{}")
    with pytest.raises(UsageError, match="no record of `lmbench ceiling`"):
        find_ceiling(tmp_path, on_gpu("NVIDIA H200"), path)


def full_run(folder: Path) -> Path:
    shutil.copytree(EAGER, folder)
    run = json.loads((folder / "run.json").read_text()) | FULL
    (folder / "run.json").write_text(json.dumps(run))
    return folder


def test_the_command_shows_it_and_json_has_it(tmp_path: Path, capsys: Any) -> None:
    run = full_run(tmp_path / "run")
    (tmp_path / "ceiling_NVIDIA_H200.json").write_text(json.dumps(ceiling_record()))
    assert main(["kernels", str(run), "--all"]) == 0
    out = capsys.readouterr().out
    assert "matmul forward  13.45  534 GFLOP" in out
    assert "78.2 %" in out
    assert "fp32: precision 32-true with float32 matmul highest, no TF32" in out
    assert max(len(line) for line in out.splitlines() if str(tmp_path) not in line) <= 80
    assert main(["kernels", str(run), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)["roofline"]
    assert record["ceiling"].endswith("ceiling_NVIDIA_H200.json")
    assert record["rows"][0]["burst_per_s"] == 5.08e13
    assert main(["kernels", str(run), "--ceiling", str(run / "run.json")]) == 2
    assert "--ceiling" in capsys.readouterr().err
