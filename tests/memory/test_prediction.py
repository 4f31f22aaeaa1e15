"""Predicted memory: exact where it can be counted by hand, and near what an H200 measured."""

from __future__ import annotations

import json
import multiprocessing
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from memory_prediction_table import Cell, cells, errors
from paths import RUNS

from lmbench.cli import main
from lmbench.errors import UsageError
from lmbench.memory.allocator import Allocation, CachingAllocator, Stretch, peaks_of
from lmbench.memory.forecast import Forecast, Gpu, Request, gpu_for
from lmbench.memory.predictor import Predictor, by_phase, largest_that_fits

ROOM = Gpu("test", 100 * 2**30, 0, is_here=True)
TINY = ("--model.size", "tiny", "--data.batch_size", "2", "--data.context_length", "16")


def _forecast(words: list[str], gpu: str | None, finds_largest: bool) -> Forecast:
    from lmbench.fit.prediction import forecast

    return forecast(words, Request(gpu_for(gpu) if gpu else None, finds_largest))


def predict(*words: str, gpu: str | None = None, finds_largest: bool = False) -> Forecast:
    """A forecast in a fork of this process, which the prediction changes for good."""
    import lmbench.fit.prediction  # noqa: F401  (the forks shall not import it each)

    made: Forecast = _forked(_forecast, list(words), gpu, finds_largest)
    return made


def _forked(work: Callable[..., Any], *given: Any) -> Any:
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(work, given)


def peak_of(made: Forecast, phase: str) -> SimpleNamespace:
    peak = next(one for one in made.phases if one.phase == phase)
    return SimpleNamespace(**peak.peak, total_bytes=peak.total_bytes)


# against an H200

COMPILED: list[tuple[list[str], float, str]] = [
    (["--config", "large_bf16", "--data.batch_size", "16", "--data.context_length", "1024"], 45.59, "README, flagship"),
]

#: Those that take a few seconds, of each precision, attention and mode; memory_prediction_table.py has all.
QUICK = (
    "large 32-true sdpa forward eager",
    "large bf16-mixed naive forward eager",
    "large bf16-mixed sdpa train_step eager",
    "xl bf16-true sdpa forward eager",
)


def test_every_phase_is_what_an_h200_measured_to_a_few_thousandths() -> None:
    measured = json.loads((RUNS / "h200_run.json").read_text())["memory"]
    made = predict("--config", "small_fp32", "--model.attention", "naive", gpu="H200")
    for phase in ("forward", "backward", "optimizer"):
        told = peak_of(made, phase).total_bytes
        assert told == pytest.approx(measured["phase_peak_allocated_bytes"][phase], rel=0.002)
    assert made.reserved_bytes == pytest.approx(measured["steady_peak_reserved_bytes"], rel=0.005)


@pytest.mark.parametrize("cell", [cell for cell in cells() if cell.name in QUICK], ids=lambda cell: cell.name)
def test_eager_peaks_are_within_a_percent_of_an_h200s_and_phases_within_two(cell: Cell) -> None:
    told = errors(cell, predict(*cell.words, gpu="H200"))
    assert told.peak == pytest.approx(0, abs=0.01)
    assert told.reserved == pytest.approx(0, abs=0.02)
    expected = {"forward", "backward", "optimizer"} if "train_step" in cell.name else {"forward", "backward"}
    assert set(told.phases) == expected
    assert all(abs(error) <= 0.02 for error in told.phases.values())


def test_the_efficient_kernel_writes_values_so_that_none_are_copied() -> None:
    def kept(kernel: str, precision: str) -> int:
        made = predict(*TINY, "--model.attention", f"sdpa_{kernel}", "--trainer.precision", precision)
        return peak_of(made, "forward").activations

    tensor_bytes, blocks = 2 * 16 * 64 * 2, 2
    assert kept("flash", "bf16-mixed") - kept("efficient", "bf16-mixed") == tensor_bytes * blocks
    # Of float32 it is the only one.
    assert kept("efficient", "32-true") == kept("flash", "32-true")


@pytest.mark.parametrize(("words", "measured_gib", "source"), COMPILED)
def test_compiled_peaks_are_within_five_percent_of_an_h200s(words: list[str], measured_gib: float, source: str) -> None:
    made = predict(*words, "--trainer.compile", "true", gpu="H200")
    assert made.highest.total_bytes / 2**30 == pytest.approx(measured_gib, rel=0.05), source


# by hand

HAND_MODULE = '''
import torch
from lightning.pytorch import LightningModule
from torch import nn


class TwoLayers(LightningModule):
    """Sizes that are multiples of 512 bytes, so that a count by hand is one of whole blocks."""

    def __init__(self, reads: bool = False) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(1024, 1024, bias=False) for _ in range(2))
        self.reads = reads

    def training_step(self, batch, batch_idx):
        loss = self.second(self.first(batch).relu()).sum()
        if self.reads:
            self.last = loss.item()
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), fused=True)

    def train_dataloader(self):
        return [torch.zeros(8, 1024)] * 4
'''


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "hand_module.py").write_text(HAND_MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "hand_module.TwoLayers"


def test_a_users_module_is_counted_to_the_byte(own_module: str) -> None:
    made = predict("--model", own_module, "--measure.zero_grad", "after_step")
    weights, rows = 2 * 4 * 1024**2, 4 * 8 * 1024
    forward, optimizer = peak_of(made, "forward"), peak_of(made, "optimizer")
    # A step count for each parameter, a block of its own.
    assert forward.parameters == weights
    assert forward.optimizer_state == 2 * weights + 2 * 512
    assert forward.inputs == rows
    assert forward.gradients == 0
    # At the sum: relu's output, which both layers' gradients need, the loss, and what is summed and not kept.
    assert forward.activations == rows + 512
    assert forward.temporaries == rows
    assert forward.total_bytes == 3 * weights + 2 * 512 + 3 * rows + 512
    assert optimizer.gradients == weights
    assert optimizer.activations == 0


def test_lightnings_order_keeps_gradients_through_the_forward(own_module: str) -> None:
    made = predict("--model", own_module, "--measure.zero_grad", "native")
    assert peak_of(made, "forward").gradients == 2 * 4 * 1024**2


def test_reading_a_value_is_refused_with_the_line(own_module: str) -> None:
    with pytest.raises(UsageError, match=r"cannot be predicted: hand_module.py:\d+ `self.last = loss.item\(\)`"):
        predict("--model", own_module, "--model.reads", "true")


def test_accumulated_gradients_are_there_in_the_forward() -> None:
    made = predict(*TINY, "--trainer.accumulate_grad_batches", "4")
    assert peak_of(made, "forward").gradients == peak_of(made, "forward").parameters - _buffers(made)


def _buffers(made: Forecast) -> int:
    """Tables and masks: what is no parameter but counted with them."""
    forward = peak_of(made, "forward")
    return forward.parameters - peak_of(made, "optimizer").gradients


def test_a_lower_true_precision_halves_everything_of_the_weights() -> None:
    full, half = (predict(*TINY, "--trainer.precision", name) for name in ("32-true", "bf16-true"))
    assert peak_of(half, "optimizer").gradients == pytest.approx(peak_of(full, "optimizer").gradients / 2, rel=0.01)


def test_double_precision_doubles_them_and_a_short_name_is_known() -> None:
    full, double = (predict(*TINY, "--trainer.precision", name) for name in ("32-true", "64-true"))
    # But for what the allocator does not split.
    assert peak_of(double, "optimizer").gradients == pytest.approx(2 * peak_of(full, "optimizer").gradients, rel=0.06)
    assert (
        predict(*TINY, "--trainer.precision", "bf16").phases
        == predict(*TINY, "--trainer.precision", "bf16-mixed").phases
    )


def test_a_precision_of_another_library_is_refused() -> None:
    with pytest.raises(UsageError, match="precision transformer-engine cannot be predicted; allowed: 64-true, 32-true"):
        predict(*TINY, "--trainer.precision", "transformer-engine")


def _with_a_strangers_operator() -> int:
    import torch

    strangers = torch.library.Library("strangers", "DEF")
    strangers.define("warp(Tensor x) -> Tensor")
    for key in ("AutocastCUDA", "AutocastCPU"):
        strangers.define(f"only_{key.lower()}(Tensor x) -> Tensor")
        strangers.impl(f"only_{key.lower()}", torch.library.fallthrough_kernel, key)
    strangers.impl("warp", torch.library.fallthrough_kernel, "AutocastCUDA")
    return _forecast([*TINY, "--trainer.precision", "bf16-mixed"], None, False).highest.total_bytes


def test_an_operator_of_another_library_in_autocasts_list_changes_nothing() -> None:
    import lmbench.fit.prediction  # noqa: F401

    alone = predict(*TINY, "--trainer.precision", "bf16-mixed")
    assert _forked(_with_a_strangers_operator) == alone.highest.total_bytes


def test_checkpointing_keeps_less() -> None:
    words = ["--model.size", "tiny", "--data.batch_size", "16"]
    kept, again = (predict(*words, "--model.checkpoint", how) for how in ("none", "block"))
    assert peak_of(again, "forward").activations < 0.5 * peak_of(kept, "forward").activations


def test_compiled_checkpoints_keep_less_each_in_its_way() -> None:
    def kept(checkpoint: str) -> int:
        made = predict(*TINY, "--trainer.compile", "true", "--model.checkpoint", checkpoint)
        return peak_of(made, "forward").activations

    assert kept("block") < kept("selective") < kept("none")


def test_the_mode_forward_has_no_optimizer_state() -> None:
    made = predict(*TINY, "--measure.mode", "forward")
    assert {one.phase for one in made.phases} >= {"forward"}
    assert peak_of(made, "forward").optimizer_state == 0
    assert peak_of(made, "forward").gradients == 0


# few blocks for many


def _few(words: list[str]) -> tuple[str, list[int], list[int]]:
    from lmbench.fit.prediction import Prediction
    from lmbench.memory.prediction.cuda_on_cpu import act_like_cuda

    act_like_cuda()
    plan = Prediction(words)
    predictor = Predictor(lambda b, c, k: plan.step(b, c, k, 0), 4, 512, is_slow=plan.compile_options is not None)
    whole = predictor.phases if predictor.method == "every block" else by_phase(plan.step(4, 512, None, 0).peaks)
    few = predictor.peaks(4, 512)
    return predictor.method, [one.total_bytes for one in few], [one.total_bytes for one in whole]


@pytest.mark.parametrize("compiled", ["false", "true"])
def test_few_blocks_tell_what_all_of_them_take(compiled: str) -> None:
    words = ["--model.size", "tiny", "--model.num_layers", "6", "--trainer.compile", compiled]
    method, few, whole = _forked(_few, words)
    assert method == ("2 and 4 of 6 alike blocks, checked by 3" if compiled == "true" else "every block")
    assert few == pytest.approx(whole, rel=0.01)


# what fits


@pytest.mark.parametrize(
    ("reserve", "start", "unit", "most_trials"),
    [
        pytest.param(lambda batch: 10 * 2**30 + batch * 777 * 2**20, 4, 1, 5, id="line"),
        pytest.param(lambda length: 10 * 2**30 + length * 3 * 2**20 + length**2 * 2**13, 512, 64, 7, id="parabola"),
        pytest.param(lambda batch: max(30 * 2**30 + batch * 2**27, 2**30 + batch * 2**30), 1, 1, 8, id="bent"),
        pytest.param(lambda batch: 10 * 2**30 + batch * 2**32 - (batch == 22) * 2**30, 4, 1, 5, id="rounded"),
        pytest.param(lambda batch: 90 * 2**30 + batch * 2**32, 512, 1, 4, id="far too large"),
    ],
)
def test_the_border_is_the_largest_that_fits(
    reserve: Callable[[int], int], start: int, unit: int, most_trials: int
) -> None:
    trials: list[int] = []

    def tried(value: int) -> int:
        trials.append(value)
        return reserve(value)

    border = largest_that_fits(tried, ROOM, start, unit, 2**20)
    assert border.value is not None
    assert border.value % unit == 0
    assert ROOM.fits(reserve(border.value))
    assert not ROOM.fits(reserve(border.value + unit))
    assert len(trials) <= most_trials


def test_where_nothing_fits_or_all_does_the_border_says_so() -> None:
    assert largest_that_fits(lambda batch: 200 * 2**30 + batch, ROOM, 8, 1, 2**16).value is None
    border = largest_that_fits(lambda batch: batch, ROOM, 8, 1, 2**16)
    assert (border.value, border.has_more) == (2**16, True)


def test_an_unknown_gpu_is_told_with_those_that_are_known() -> None:
    with pytest.raises(UsageError, match=r"no GPU is known as 'H9000'; known: B200, .*H100 PCIe"):
        gpu_for("H9000")


# the log


def test_what_lives_at_a_phases_begin_counts_in_its_peak() -> None:
    kept = Allocation(512, born=1, category="parameters", made_by="a")
    passing = Allocation(1024, born=2, category="temporaries", made_by="b", died=3)
    late = Allocation(2048, born=5, category="activations", made_by="c", died=9)
    found = peaks_of([kept, passing, late], [Stretch(1, 3, "forward", ""), Stretch(4, 8, "backward", "")])
    assert [one.total_bytes for one in found] == [1536, 2560]
    assert found[1].bytes_by_category == {"parameters": 512, "activations": 2048}
    assert found[1].made_by == "c"


def test_the_command_prints_a_table_and_a_verdict(capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", *TINY]) == 0
    out = capfd.readouterr().out
    assert "optimizer state" in out
    assert "verdict" in out


@pytest.mark.parametrize("words", [["validate", *TINY], [*TINY, "validate"]])
def test_inference_is_refused_in_one_line(words: list[str], capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["memory", *words]) == 2
    assert "training step, not validate's" in capfd.readouterr().err


def test_a_misspelt_word_is_the_users_mistake() -> None:
    with pytest.raises(UsageError, match=r"model\.siz"):
        predict("--model.siz", "tiny")


# beside a run


def test_a_run_keeps_its_prediction(tmp_path: Path) -> None:
    from lmbench.records.load import find_runs, load_run

    words = ["fit", "--config", "smoke", *TINY, "--measure.results_dir", str(tmp_path), "--measure.min_window_s", "0"]
    assert main([*words, "--memory.predict", "true", "--wandb.mode", "disabled", "--quiet"]) == 0
    found = load_run(find_runs([tmp_path])[0]).record.memory_prediction
    assert found is not None
    assert found.reason is None
    assert found.peak_allocated_bytes
    # On a CPU there is nothing that it could be held against.
    assert found.error_fraction is None


# the allocator


def test_a_large_block_stays_whole_where_little_would_be_left() -> None:
    allocator, mib = CachingAllocator(), 2**20
    assert allocator.allocate(15 * mib).size_bytes == 16 * mib
    assert allocator.allocate(14 * mib - 1).size_bytes == 14 * mib
    # A request under 10 MiB begins a segment of 20, whose rest serves the next.
    assert allocator.allocate(9 * mib).size_bytes == 9 * mib
    assert allocator.allocate(9 * mib).size_bytes == 9 * mib
    assert allocator.reserved_bytes == (16 + 14 + 20) * mib


def test_freed_neighbours_become_one_block_again() -> None:
    allocator, mib = CachingAllocator(), 2**20
    blocks = [allocator.allocate(5 * mib) for _ in range(4)]
    for place in (1, 3, 2, 0):
        allocator.free(blocks[place])
    assert allocator.allocated_bytes == 0
    allocator.allocate(20 * mib)
    assert allocator.reserved_bytes == 20 * mib


def test_small_requests_share_segments_and_are_rounded() -> None:
    allocator = CachingAllocator()
    assert [allocator.allocate(size).size_bytes for size in (1, 513, 2**20)] == [512, 1024, 2**20]
    assert allocator.reserved_bytes == 2 * 2**20


def test_attention_by_itself_is_predicted_by_its_shape() -> None:
    layer = ["--model", "lmbench.AttentionLayer", "--model.head_dim", "64", "--data.context_length", "1024"]
    made = predict(*layer, "--model.attention", "naive", "--data.batch_size", "8", gpu="H200", finds_largest=True)
    inputs, scores = 8 * 1024 * 64 * 4, 8 * 1024 * 1024 * 4
    forward, backward = peak_of(made, "forward"), peak_of(made, "backward")
    # q, k, v and the gradient of the output; the product and its scaled copy, then softmax's result beside one of them.
    assert forward.parameters == backward.parameters == 4 * inputs
    assert forward.temporaries == 2 * scores
    assert backward.activations == scores + inputs
    assert made.largest_batch_size is not None
    assert made.largest_batch_size.value > 8
    assert made.largest_context_length is not None
    with pytest.raises(UsageError, match="a prediction compiles nothing; predict sdpa"):
        predict(*layer, "--model.attention", "flex")
