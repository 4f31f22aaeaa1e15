"""The best rates of a device, measured on this CPU, and the rates that kernels attain, against figures by hand."""

from __future__ import annotations

import json
import math
import time
from dataclasses import replace

import msgspec
import pandas as pd
import pytest
import torch
import yaml
from comparison_runs import make_run
from refusals import usage_error
from tables import cases
from torch.utils.flop_counter import FlopCounterMode
from trace_events import examined

from lmbench.kernels.ceiling import CeilingRecord, attained_bus, find_ceiling, roofline, store_ceiling
from lmbench.kernels.recording import ceiling
from lmbench.records.codec import as_dict, decode
from lmbench.records.run import RunEnvironment, RunRecord

CPU = torch.device("cpu")


def test_a_rate_is_the_amount_of_work_over_its_time():
    spent_s = []

    def work():
        begun = time.perf_counter()
        time.sleep(0.002)
        spent_s.append(time.perf_counter() - begun)

    rate = ceiling.measure_rate("sleep", work, 3.0, CPU, 0.1)
    for per_s in (rate.burst_per_s, rate.sustained_per_s):
        assert 0.8 * 3.0 / max(spent_s) < per_s < 1.01 * 3.0 / min(spent_s)
    assert rate.seconds >= 0.1


def test_a_product_counts_the_operations_that_pytorch_counts_and_a_copy_its_bytes(monkeypatch):
    measured = []
    monkeypatch.setattr(ceiling, "measure_rate", lambda name, work, amount, *_: measured.append((work, amount)))
    before = torch.get_float32_matmul_precision()
    ceiling.matmul_rate("tf32", CPU, 0.1)
    assert torch.get_float32_matmul_precision() == before
    ceiling.copy_rate(CPU, 0.1)
    (product, flops), (copy, moved) = measured
    with FlopCounterMode(display=False) as counter:
        product()
    assert flops == counter.get_total_flops()
    assert moved == 2 * copy().nbytes == 2 * ceiling.CPU_COPY_BYTES


def test_the_command_prints_a_table_and_stores_the_record(tmp_path, capsys, answered, monkeypatch):
    # A product in bfloat16 takes seconds on a CPU without instructions for it.
    monkeypatch.setattr(ceiling, "CPU_MATMUL_SIZE", 64)
    monkeypatch.setattr(ceiling, "CPU_COPY_BYTES", 2**20)
    words = ["--sustained_s=0.01", f"--results_dir={tmp_path}", "--collectives", "--ranks=2", "--budget=0.1s"]
    rates = answered("ceiling", *words)["rates"]
    (path,) = tmp_path.glob("ceiling_*")
    record = decode(path.read_bytes(), CeilingRecord)
    assert rates == as_dict(record)["rates"]
    assert [rate.name for rate in record.rates] == ["bf16", "fp32", "copy"]
    # Bandwidths are those of nccl-tests: (n - 1) / n is a half between two ranks, and an all-reduce counts twice.
    factors = {"all-reduce": 1, "all-gather": 0.5, "reduce-scatter": 0.5, "all-to-all": 0.5, "broadcast": 1}
    assert [rate.collective for rate in record.collectives if rate.message_bytes == 10**6] == [*factors]
    for rate in record.collectives:
        assert rate.bus_bytes_per_s == pytest.approx(factors[rate.collective] * rate.message_bytes / rate.seconds)
    # What runs side by side takes no less time than the longer of the two takes alone, but for noise.
    alone_s = sum(max(rate.seconds, rate.compute_s) for rate in record.collectives)
    assert sum(rate.together_s for rate in record.collectives) > alone_s / 3
    # If the folder cannot be written, the record is printed.
    with usage_error("cannot be written"):
        store_ceiling(record, path / "x")
    assert json.loads(capsys.readouterr().err) == json.loads(path.read_text())


# The size `small`, at batch 4 and context 512.
WIDTH, WIDE, LAYERS, VOCABULARY, TOKENS, CONTEXT = 768, 3072, 12, 10_000, 2048, 512
RUNS = yaml.safe_load("""
h200: &h200 {gpu: {name: NVIDIA H200, power_limit_w: 700.0}}
full:
  flops: {per_token_flops: 260726784, causal_per_token_flops: 251289600, multiplier: 1, reason: null}
  window: {tokens: 4096, steps: 2}
  environment: *h200
  world_size: 1
of_four_ranks:
  flops: {per_token_flops: 6000000000, multiplier: 3}
  environment: *h200
  world_size: 4
  model: {trainable_parameter_count: 1000000000, d_model: 1000, num_layers: 10}
  window__tokens: 40000
  window__steps: 1
  precision: bf16-mixed
  phases: {backward: {mean_s: 0.5}}
""")


def with_run(name, **changes):
    """The findings of a trace with the record of a full run, some of its fields changed."""
    findings = examined(name)
    run = {**as_dict(findings.run), **RUNS["full"]}
    for field, value in changes.items():
        run[field] = {**run.get(field, {}), **value} if isinstance(value, dict) else value
    return replace(findings, run=msgspec.convert(run, RunRecord))


def compiled(**changes):
    return with_run("small_bf16_compiled", **changes)


def below(folder, findings):
    """The findings of a trace that lies two folders below a folder."""
    return replace(findings, trace=replace(findings.trace, path=folder / "run" / "trace.json.gz"))


def rows(findings):
    (table,) = roofline(findings).tables
    return {row["name"]: row for row in table.records()}


def ceiling_record(gpu="NVIDIA H200", day=1, collectives=(), torch_version="2.11.0"):
    """A stored ceiling with collectives of a kind, ranks, bytes and bytes/s."""
    record = yaml.safe_load(f"""
schema_version: 1
measured_at: '2026-11-0{day}'
environment: {{gpu: {{name: {gpu}, power_limit_w: 700.0}}, versions: {{torch: {torch_version}}}}}
rates:
- {{name: bf16, burst_per_s: 8.0e+14, sustained_per_s: 6.6e+14, seconds: 3.0}}
- {{name: fp32, burst_per_s: 5.08e+13, sustained_per_s: 5.0e+13, seconds: 3.0}}
- {{name: tf32, burst_per_s: 3.0e+14, sustained_per_s: 2.5e+14, seconds: 3.0}}
- {{name: copy, burst_per_s: 4.4e+12, sustained_per_s: 4.3e+12, seconds: 3.0}}
""")
    names = ("collective", "ranks", "message_bytes", "bus_bytes_per_s")
    times = dict.fromkeys(("seconds", "compute_s", "together_s"), 1.0)
    return record | {"collectives": [{**times, **dict(zip(names, values, strict=True))} for values in collectives]}


def test_rates_measured_again_keep_the_collectives_of_the_same_versions(tmp_path):
    of_ranks = [("all-reduce", 2, 10**6, 1e9)]
    for options, kept in (({"collectives": of_ranks}, 1), ({}, 1), ({"torch_version": "another"}, 0)):
        path = store_ceiling(msgspec.convert(ceiling_record(**options), CeilingRecord), tmp_path)
        assert len(decode(path.read_bytes(), CeilingRecord).collectives) == kept


def test_products_by_hand_attain_shares_of_datasheet_and_ceiling(tmp_path):
    (tmp_path / "ceiling_NVIDIA_H200.json").write_text(json.dumps(ceiling_record()))
    products = rows(below(tmp_path, with_run("small_fp32_inference")))["matmul forward"]
    # q, k, v and output; gate, up and down; scores and values; then the head. Each weight costs two FLOPs.
    per_layer = 4 * WIDTH * WIDTH + 3 * WIDTH * WIDE + 2 * CONTEXT * WIDTH
    assert products["work"] == 2 * TOKENS * (LAYERS * per_layer + WIDTH * VOCABULARY)
    assert products["seconds"] == pytest.approx(13.45e-3, rel=1e-3)
    shares = [products[f"{limit}_fraction"] for limit in ("datasheet", "burst", "sustained")]
    assert shares == pytest.approx([0.593, 0.782, 0.794], abs=1e-3)


def test_backward_has_twice_the_products_and_adamw_moves_seven_numbers_per_parameter():
    training = {"per_token_flops": 3 * 260726784, "causal_per_token_flops": 3 * 251289600, "multiplier": 3}
    adamw = {"optimizer": "AdamW fused", "trainable_parameter_count": 128_625_408}
    by_name = rows(compiled(flops=training, model=adamw))
    assert [by_name[f"matmul {name}"]["work"] / 260726784 / TOKENS for name in ("forward", "backward")] == [1, 2]
    assert by_name["optimizer"]["work"] == 128_625_408 * 28
    assert by_name["optimizer"]["per_s"] == pytest.approx(3.45e12, rel=2e-3)
    assert rows(compiled(model=adamw, precision="bf16-true"))["optimizer"]["work"] == 128_625_408 * 14


def test_unknown_figures_of_a_foreign_model_have_reasons():
    flops = {"per_token_flops": None, "causal_per_token_flops": None, "reason": "it has an operator without a formula"}
    findings = compiled(flops=flops, model={"optimizer": "Adafactor"})
    assert {row["per_s"] for row in rows(findings).values()} == {None}
    reasons = " ".join(line.text for line in roofline(findings).notes)
    assert "products: it has an operator without a formula" in reasons
    assert "reads and writes of Adafactor are unknown" in reasons
    # With checkpointing the backward recomputes an unknown part of the forward.
    recomputed = rows(compiled(flops={"recomputed_per_token_flops": 10**6}))
    assert [recomputed[f"matmul {name}"]["work"] is None for name in ("forward", "backward")] == [False, True]


RATES = """
- [all-reduce, 2, 1000000, 1.0e+10]
- [all-reduce, 2, 100000000, 3.0e+10]
- [all-reduce, 8, 1000000, 5.0e+9]
"""
CALLS = """
- {collective: all-reduce, calls: 2.0, message_bytes: 2.0e+7, bus_bytes_per_s: 1.5e+10}
- {collective: broadcast, calls: 1.0, message_bytes: 1.0e+6, bus_bytes_per_s: 1.0e+9}
"""


def test_bus_bandwidth_is_interpolated_between_sizes_at_the_nearest_number_of_ranks(tmp_path):
    text = json.dumps(ceiling_record(collectives=yaml.safe_load(RATES)))
    record = decode(text.encode(), CeilingRecord)
    bus = [record.bus_bytes_per_s("all-reduce", *at) for at in ((2, 10**7), (3, 10**9), (7, 10**7))]
    assert bus == pytest.approx([20e9, 30e9, 5e9])
    # A collective of a trace is compared with the same one of the ceiling, if that has it.
    calls = pd.DataFrame(yaml.safe_load(CALLS))
    findings = below(tmp_path, compiled())
    assert "bus_fraction" not in attained_bus(findings, calls)
    (tmp_path / "ceiling_x.json").write_text(text)
    fractions = attained_bus(findings, calls).bus_fraction
    assert (fractions[0], math.isnan(fractions[1])) == (pytest.approx(0.75), True)


def bounds_of(folder, answered, strategy, **changes):
    """The rows of `lmbench ceiling RUN` for a run with this strategy, beside a ceiling of collectives."""
    rates = [(kind, 4, 10**8, 100e9) for kind in ("all-reduce", "all-gather", "reduce-scatter")]
    (folder / "ceiling_x.json").write_text(json.dumps(ceiling_record(collectives=rates)))
    run = make_run(folder / "runs", **{**RUNS["of_four_ranks"], **changes}, config={"trainer": {"strategy": strategy}})
    return answered("ceiling", run)["tables"]["bounds"]


def test_what_bounds_parallel_training_follows_from_products_and_collectives_by_hand(tmp_path, answered):
    rows = bounds_of(tmp_path, answered, "ddp")
    # 10 000 tokens a rank; 4 GB of gradients, 2 GB of gathered parameters, 20 MB of activations.
    forward_s = 10_000 * 2e9 / 6.6e14
    ddp, gathering, scattering, tensor, _ = rows
    assert [row["compute_s"] for row in rows] == pytest.approx(
        [2 * forward_s, forward_s, 2 * forward_s, forward_s / 4, forward_s / 2]
    )
    assert [row["communication_s"] for row in rows] == pytest.approx(
        [4 * 1.5 / 100, 2 * 0.75 / 100, 6 * 0.75 / 100, 20 * 0.02 * 1.5 / 100, 20 * 0.02 * 1.5 / 100]
    )
    assert tensor["most_ranks"] == math.floor(1 + 3 * forward_s / 4 / 0.006)
    assert (ddp["measured_s"], gathering["measured_s"], tensor["least_tokens"]) == (0.5, None, None)
    assert scattering["least_tokens"] == pytest.approx(10_000 * 0.045 / (2 * forward_s))


@cases("""
    matmul  | rate
    highest | 5.0e13
    high    | 2.5e14
    medium  | 2.5e14
""")
def test_products_of_float32_take_the_rate_that_their_precision_allows(matmul, rate, tmp_path, answered):
    ddp, *_ = bounds_of(tmp_path, answered, "ddp", precision="32-true", matmul_precision=matmul)
    assert ddp["compute_s"] == pytest.approx(2 * 10_000 * 2e9 / float(rate))


@cases("""
- [options, measured]
- [{prefetch: 2}, [0.5]]
- [{tensor_parallel_size: 2}, []]
""")
def test_a_run_is_measured_beside_its_strategy_whatever_its_options(options, measured, tmp_path, answered):
    rows = bounds_of(tmp_path, answered, {"class_path": "lmbench.ModelParallel", "init_args": options})
    assert [row["measured_s"] for row in rows if row["strategy"] == "fsdp2" and row["measured_s"]] == measured


def test_the_newest_ceiling_of_the_same_gpu_above_the_run_is_used(tmp_path):
    records = [ceiling_record(day=1), ceiling_record(day=3), ceiling_record("NVIDIA A100-SXM4-80GB", day=9)]
    for number, text in enumerate([*map(json.dumps, records), "", "{}", "[1]", "[" * 100_000]):
        (tmp_path / f"ceiling_{number}.json").write_text(text)
    path, _ = find_ceiling(tmp_path / "study" / "runs" / "cell-r0", msgspec.convert(RUNS["h200"], RunEnvironment))
    assert path.name == "ceiling_1.json"
    assert find_ceiling(tmp_path / "run", msgspec.convert({"gpu": {"name": "NVIDIA L4"}}, RunEnvironment)) is None
