"""`lmbench overhead`: the arms do the same work; intervals, answers and tables are right."""

from __future__ import annotations

import gc
import json
import math
import shlex
import time
from contextlib import nullcontext
from functools import partial
from itertools import product
from statistics import fmean, stdev

import msgspec
import pytest
import torch
from fit_process import run_here
from msgspec.structs import replace
from strangers import Data, Regression
from tables import cases, rows
from torch.utils.data import DataLoader

from lmbench.cli import main
from lmbench.data.datamodule import TokenData
from lmbench.errors import ExitCode
from lmbench.fit.ranks import run_ranks
from lmbench.overhead import ArmWindow, measure_arm, measure_overhead, overhead_answer, pair_of
from lmbench.overhead.control import leave_result, measure_control
from lmbench.python_process import ProcessFailed, run_python
from lmbench.records.measured import Loss, Window
from lmbench.records.run import RunRecord

WINDOW = shlex.split("""
--trainer.accelerator=cpu --measure.warmup_steps=1 --measure.steps=4 --measure.min_window_s=0 --measure.probe_steps=0
""")
TINY = WINDOW + shlex.split("""
--model.size=tiny --model.d_model=16 --model.vocab_size=64 --data.batch_size=2 --data.context_length=8
--model.num_layers=1
""")
SCHEDULED = f"--model={__name__}.Scheduled"
OPTIONS = """
--trainer.max_epochs=-1
--measure.zero_grad=native --trainer.precision=bf16-true
--trainer.gradient_clip_val=0.01 --trainer.precision=bf16-mixed --trainer.accumulate_grad_batches=3
--trainer.gradient_clip_val=0.001 --trainer.gradient_clip_algorithm=value --trainer.precision=64-true
--measure.mode=forward_backward --data.placement=pinned
--measure.mode=forward --measure.warmup_steps=0
--trainer.compile.backend=aot_eager
"""


class Named(Regression):
    def training_step(self, batch, batch_idx):
        return self.net(batch["x"]).pow(2).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Scheduled(Named):
    """Has loaders of its own, made from what `setup` reads, and halves its learning rate after each step."""

    def setup(self, stage):
        self.samples = [{"x": torch.full((16,), float(row))} for row in range(12)]

    def train_dataloader(self):
        return DataLoader(self.samples, 4)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class FewNamed(Data):
    """Epochs of three batches, each a mapping."""

    def train_dataloader(self):
        return DataLoader([{"x": torch.ones(self.width)}] * 12, self.batch_size)


def losses(measured):
    assert measured.steps == 4
    return pytest.approx((measured.first_loss, measured.last_loss), rel=1e-6)


@cases("options", *rows(OPTIONS))
def test_the_bare_loop_trains_the_same_weights_as_the_trainer(options):
    (bare, module), (trainer, trained) = (
        measure_control(arm, [*TINY, *options.split()]) for arm in ("bare", "trainer")
    )
    assert losses(bare) == (trainer.first_loss, trainer.last_loss)
    torch.testing.assert_close(module.state_dict(), trained.state_dict(), rtol=0, atol=0)
    assert (torch.get_default_dtype(), gc.isenabled()) == (torch.float32, True)


@cases("words", [f"--model={__name__}.Named", f"--data={__name__}.FewNamed"], [SCHEDULED])
def test_the_bare_loop_takes_mappings_loaders_and_schedules_and_goes_on_with_the_next_epoch(words):
    words = [*WINDOW, *words]
    (bare, _), (trainer, _) = (measure_control(arm, words) for arm in ("bare", "trainer"))
    assert losses(bare) == (trainer.first_loss, trainer.last_loss)


@cases("strategy", "ddp", "fsdp2")
def test_the_bare_loop_of_several_ranks_trains_as_the_trainer_does(strategy, tmp_path):
    words = [*TINY, "--trainer.devices=2", f"--trainer.strategy={strategy}"]
    words += ["--trainer.accumulate_grad_batches=2", "--trainer.gradient_clip_val=0.01"]
    results = []
    for arm in ("bare", "trainer"):
        measure = partial(leave_result, arm, str(tmp_path / arm), words)
        ends, _ = run_ranks(tmp_path, 2, measure, measure, patience_s=100)
        assert [end.code for end in ends] == [0, 0]
        results.append(msgspec.json.decode((tmp_path / arm).read_bytes(), type=ArmWindow))
    assert losses(results[0]) == (results[1].first_loss, results[1].last_loss)


def test_the_harness_trains_the_same_as_the_bare_loop(tmp_path):
    (bare, _), harness = measure_control("bare", TINY), run_here(tmp_path, "fit", *TINY).record
    assert losses(bare) == (harness.loss.first, harness.loss.last)


def test_do_bench_trains_the_same_and_leaves_out_the_time_between_steps(monkeypatch):
    loader = TokenData.train_dataloader

    def slow_batches(data):
        for batch in loader(data):
            time.sleep(0.15)
            yield batch

    monkeypatch.setattr(TokenData, "train_dataloader", slow_batches)
    (bare, _), (spans, _) = (measure_control(arm, TINY) for arm in ("bare", "do_bench"))
    assert losses(bare) == (spans.first_loss, spans.last_loss)
    assert 0 < spans.step_s < 0.15 <= bare.step_s


BARE = ArmWindow(10, 0.010, 4.0, 3.0)


@pytest.fixture
def _fitted(monkeypatch):
    """Every `lmbench fit` leaves a record of the same steps as BARE, with pauses."""
    window, loss = Window(steps=10, wall_s=0.075, excluded_s=0.025), Loss(first=4.0, last=3.0)
    record = RunRecord(1, "ok", world_size=1, window=window, loss=loss)
    monkeypatch.setattr("lmbench.overhead.run_fit", lambda *_, **__: record)


def test_differences_are_paired_by_round_and_compared_with_bares():
    """All arms drift by 1 ms a round. The drift cancels in pairs, so the intervals in seconds have no width."""
    rounds = []
    for index, (arm, more_s) in product(range(4), [("trainer", 0.4e-3), ("harness", 0.6e-3)]):
        bare = replace(BARE, step_s=0.010 + 1e-3 * index)
        rounds.append(pair_of(arm, index, bare, replace(bare, step_s=bare.step_s + more_s)))
    (table,) = overhead_answer(RunRecord(1, "ok", device_type="cuda"), rounds, "lmbench overhead").tables
    trainer, harness = rows = table.records()
    assert [row["over_bare_s"] for row in rows] == pytest.approx([0.4e-3, 0.6e-3])
    assert all(row["over_bare_high_s"] - row["over_bare_low_s"] < 1e-9 for row in rows)
    # Student's t for 0.975 and 3 degrees of freedom is 3.1824; the steps of bare take 10, 11, 12 and 13 ms.
    logs = [math.log1p(0.6 / step_ms) for step_ms in (10, 11, 12, 13)]
    half = 3.1824 * stdev(logs) / 2
    interval = [harness[f"over_bare{part}_fraction"] for part in ("", "_low", "_high")]
    assert interval == pytest.approx([math.expm1(fmean(logs) + part) for part in (0, -half, half)], rel=1e-4)
    assert trainer["over_bare_fraction"] < harness["over_bare_fraction"]


def test_where_both_took_turns_these_tell_the_steps_without_the_first_turn_and_pauses_of_the_host():
    turns_s = [(1.0, 1.0), (0.010, 0.012), (0.020, 0.022), (0.015, 0.017), (0.015, 9.0), (0.013, 0.015)]
    bare, other = replace(BARE, turns_s=turns_s), replace(BARE, step_s=0.011)
    pair = pair_of("harness", 0, bare, other)
    assert (pair.bare_s, pair.step_s - pair.bare_s) == (pytest.approx(0.0430 / 3), pytest.approx(0.002))
    assert (pair.turns, pair_of("do_bench", 0, bare, other).step_s) == (5, 0.011)


@pytest.mark.usefixtures("_fitted")
def test_the_harness_costs_its_pauses_too(tmp_path):
    assert measure_arm("harness", [], tmp_path) == replace(BARE, step_s=pytest.approx(0.010))


@cases("""
- [change, message]
- [{first_loss: 4.1}, first loss]
- [{first_loss: null}, first loss]
- [{steps: 9}, 9 steps where bare]
""")
def test_arms_that_did_different_work_are_not_compared(change, message):
    with pytest.raises(ProcessFailed, match=message):
        pair_of("harness", 0, BARE, replace(BARE, **change))


def test_a_failing_process_is_one_line_with_the_end_of_its_standard_error():
    program = "import sys; print('first\\n\\nlast but one\\nlast', file=sys.stderr); sys.exit(7)"
    with pytest.raises(ProcessFailed, match=r"^failed with exit code 7: first \| last but one \| last$"):
        run_python("-c", program)


@pytest.mark.usefixtures("_fitted")
@cases("""
- [round_index, rounds]
- [1, null]
- [2, 2]
""")
def test_an_interruption_leaves_the_answer_of_complete_rounds(round_index, rounds, monkeypatch, tmp_path):
    def measure(arm, options, folder, heard):
        if (folder.name, arm) == (f"harness-{round_index}", "harness"):
            raise KeyboardInterrupt
        return BARE, BARE

    monkeypatch.setattr("lmbench.overhead._in_turns", measure)
    monkeypatch.setattr("lmbench.overhead._one_by_one", lambda *words, **_: measure(*words))
    with nullcontext() if rounds else pytest.raises(KeyboardInterrupt):
        answer = measure_overhead([], 5, tmp_path, "lmbench overhead", with_do_bench=False)
        assert answer.figures["rounds"] == rounds
        assert any(line.text.startswith(f"{rounds}, of ") for line in answer.headline if line.label == "rounds")


def test_running_out_of_memory_is_one_line_and_an_exit_code(capsys):
    assert main(["overhead", *TINY, f"--model.vocab_size={10**13}"]) == ExitCode.OUT_OF_MEMORY
    out, err = capsys.readouterr()
    assert (out, err.splitlines()[-1].startswith("lmbench: overhead: harness: ")) == ("", True)


def test_the_harness_and_a_bare_loop_are_measured_in_turns(monkeypatch, answered):
    monkeypatch.setattr("lmbench.overhead.ARMS", {"bare": "", "harness": ""})
    answer = answered("overhead", "--rounds=2", *TINY, "--measure.steps=6")
    assert [(pair["round"], pair["arm"]) for pair in answer["measurements"]] == [(0, "harness"), (1, "harness")]
    assert all(pair["turns"] >= 3 and pair["bare_s"] > 0 for pair in answer["measurements"])


@pytest.mark.usefixtures("_fitted")
def test_processes_that_do_not_run_together_are_measured_one_by_one(monkeypatch, capsys):
    order = []

    def measure(arm, *_, **process):
        if "pipe" in process:
            raise ProcessFailed("out of memory")
        order.append(arm)
        return BARE

    monkeypatch.setattr("lmbench.overhead.measure_arm", measure)
    assert main(["overhead", "--rounds=2", "--json", "--do_bench", *TINY]) == 0
    out, err = capsys.readouterr()
    answer, arms = json.loads(out), ["trainer", "harness", "do_bench"]
    assert [(pair["round"], pair["arm"]) for pair in answer["measurements"]] == [*product(range(2), arms)]
    assert answer["measurements"][-1]["turns"] == 0
    assert "two processes do not run together (out of memory): they are measured one by one" in err
    assert " ".join(order) == "trainer bare harness bare do_bench bare bare trainer bare harness bare do_bench"
