"""Predicted memory, against exact counts by hand and against measurements on an H200."""

from __future__ import annotations

import json
import re
from functools import partial
from types import SimpleNamespace

import pytest
from fake_steps import in_fork, predict
from fit_process import bench
from memory_plans import MODELS
from memory_prediction_table import cells, errors, words_of
from paths import RUNS
from refusals import usage_error
from tables import cases, stored

from lmbench.fit.prediction import forecast
from lmbench.memory.answer import forecast_answer
from lmbench.memory.blocks import CATEGORIES
from lmbench.memory.forecast import CONTEXT_BYTES, PhasePeak, TargetGpu
from lmbench.memory.predictor import SHARED, FakeStep, Predictor, Shape, largest_that_fits
from lmbench.model.transformer import LOSS_CHUNKS

ROOM = TargetGpu("test", 100 * 2**30, 0)
TINY = ("--model.size=tiny", "--data.batch_size=2", "--data.context_length=16")


def peak_of(forecast, phase):
    peak = next(peak for peak in forecast.phases if peak.phase == phase)
    return SimpleNamespace(**peak.peak, total_bytes=peak.total_bytes)


# against an H200


def test_every_phase_agrees_with_an_h200_to_a_few_thousandths():
    measured = json.loads((RUNS / "h200_run.json").read_text())["memory"]
    forecast = predict("--config=small_fp32", "--model.attention=naive", gpu="H200")
    for phase in ("forward", "backward", "optimizer"):
        predicted_bytes = peak_of(forecast, phase).total_bytes
        assert predicted_bytes == pytest.approx(measured["phase_peak_allocated_bytes"][phase], rel=0.002)
    assert forecast.reserved_bytes == pytest.approx(measured["steady_peak_reserved_bytes"], rel=0.005)
    assert forecast.method == "every block"


def test_forwards_in_bf16_are_within_a_percent_of_an_h200s():
    # memory_prediction_table.py has all rows.
    row = cells()["xl bf16-true sdpa forward eager"]
    relative = errors(row, predict(*words_of(row), gpu="H200"))
    assert abs(relative["peak"]) <= 0.01
    assert relative.keys() == {"peak", "reserved", "forward", "backward"}
    assert max(map(abs, relative.values())) <= 0.02


def test_a_llama_with_grouped_queries_is_within_a_thousandth_of_an_h200s(tmp_path):
    pytest.importorskip("transformers")
    # One H200, torch 2.11.0, transformers 5.17.0, 2026-11-28: 15 of 22 blocks recomputed, 16 x 1024.
    path = tmp_path / "llama.json"
    path.write_text(json.dumps(MODELS["llama"][0]["model.config"]))
    forecast = predict(
        "--config=large_bf16", "--model=lmbench.HuggingFace", f"--model.config={path}", "--data.batch_size=16",
        "--measure.zero_grad=after_step", "--data.context_length=1024",
        '--trainer.recompute={"keep": "inputs", "first": 15}', gpu="H200",
    )  # fmt: skip
    assert forecast.run_peak_bytes == pytest.approx(32.60215616 * 2**30, rel=0.001)


@cases("""
- [precision, weight_bytes]
- [bf16-true, 2]
- [bf16-mixed, 4]
- [32-true, 4]
""")
def test_experts_of_a_transformers_model_are_predicted_in_every_precision(precision, weight_bytes, tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "mixtral.json"
    path.write_text(json.dumps(stored("hugging_face")["mixtral"]))
    model = "--model=lmbench.HuggingFace", f"--model.config={path}"
    forecast = predict("--config=smoke", *model, "--data.context_length=16", f"--trainer.precision={precision}")
    experts, attention, norms = 4 * 3 * 32 * 64, 2 * 32 * 32 + 2 * 32 * 16, 2 * 32
    weights = 2 * (experts + attention + norms + 4 * 32) + 2 * 100 * 32 + 32
    assert peak_of(forecast, "optimizer").parameters == pytest.approx(weights * weight_bytes, rel=0.05)


def test_a_mask_of_a_transformers_model_takes_memory_where_it_masks_something():
    pytest.importorskip("transformers")
    kinds = ("none", "ones", "padded")
    words = ("--trainer.precision=bf16-mixed", "--model=hand_module.Masked")
    none, ones, padded = (peak_of(predict(*words, f"--model.mask={kind}"), "forward").total_bytes for kind in kinds)
    # The mask itself, of 64-bit integers.
    assert ones - none == 8 * 256 * 8
    # Keys and values of 8 heads in place of 2, in each of the two blocks: 2 x 2 x 6 heads of 32 bf16 numbers a token.
    assert padded - ones > 2 * 2 * 6 * 32 * 2 * 8 * 256


def test_a_batch_that_cannot_be_larger_fits_and_has_no_largest_size():
    (fit,) = predict("--model=hand_module.Packed", gpu="H200", finds_largest=True).on_gpus
    assert (fit.fits, fit.largest_batch_size, fit.largest_context_length) == (True, None, None)


def test_a_bert_from_a_folder_has_all_its_weights(tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 1024, "hidden_size": 128, "intermediate_size": 128}
    model = transformers.BertForMaskedLM(transformers.BertConfig(**sizes, num_hidden_layers=2, num_attention_heads=2))
    model.save_pretrained(tmp_path)
    forecast = predict("--model=hand_module.Pretrained", f"--model.folder={tmp_path}")
    # Positions and kinds of 512 tokens, of 64 bits, are buffers.
    weights = 4 * model.num_parameters() + 2 * 512 * 8
    assert peak_of(forecast, "forward").parameters == weights


#: Options with which blocks are sharded one by one, and buckets hold copies of gradients.
ONE_BY_ONE = {
    "fsdp2": "--trainer.strategy.blocks_per_group=1",
    "fsdp2_zero2": "--trainer.strategy.blocks_per_group=1",
    "ddp": "--trainer.strategy.gradient_as_bucket_view=false",
}


# Peaks of forward and backward in GiB on an H200 (torch 2.11), of one of several ranks or of a single rank with NCCL.
# Collectives of several ranks sent nothing: they were in PyTorch's `fake` process group.
@cases("""
- [batch, strategy, measured, words]
- [1, fsdp2, [1.9025, 2.0725], --trainer.devices=2 --trainer.accumulate_grad_batches=2]
- [1, fsdp2, [0.9846, 1.2081], --trainer.devices=4]
- [1, fsdp2, [0.9577, 1.1886], --trainer.devices=4 --trainer.compile.regional=true]
- [4, ddp, [3.9109, 3.9305], ""]
# Dynamo splits the graph of each block where a bucket of gradients is full.
- [4, ddp, [3.8471, 3.8671], --trainer.compile.regional=true --trainer.compile.split_at_buckets=true]
""")
def test_a_rank_of_wide_blocks_agrees_with_one_on_an_h200(batch, strategy, measured, words):
    model = "--model={d_model: 1600, d_ff: 6400, num_layers: 4, num_heads: 25}"
    data = ["--data.context_length=256", f"--data.batch_size={batch}", "--trainer.precision=bf16-mixed"]
    sharing = [f"--trainer.strategy={strategy}", ONE_BY_ONE[strategy]]
    forecast = predict(model, *data, *sharing, *words.split(), gpu="H200")
    predicted = [peak_of(forecast, phase).total_bytes / 2**30 for phase in ("forward", "backward")]
    assert predicted == pytest.approx(measured, rel=0.006)


def activations_of(*words):
    """Bytes that the tiny model's forward leaves for its backward."""
    return peak_of(predict(*TINY, *words), "forward").activations


def test_no_attention_kernel_has_its_values_copied():
    """Queries are laid out by tokens; every kernel writes its values like the queries, or by tokens."""
    by_kernel = [activations_of("--model.attention", f"sdpa_{kernel}") for kernel in ("flash", "efficient", "cudnn")]
    assert len(set(by_kernel)) == 1


def test_fp8_keeps_no_copies_of_weights():
    kept, in_fp8 = (activations_of("--trainer.precision", name) for name in ("bf16-mixed", "fp8-tensorwise"))
    assert kept - in_fp8 == 2 * 2 * (4 * 64 * 64 + 3 * 64 * 128)


def test_a_compiled_peak_is_within_two_percent_of_an_h200s_by_few_of_its_blocks():
    """The README's run."""
    forecast = predict("--config=flagship_bf16", gpu="H200")
    assert forecast.method == "2 and 4 of 36 alike blocks, checked by 3"
    assert forecast.highest.total_bytes / 2**30 == pytest.approx(127.10, rel=0.02)


# by hand

OWN = "--model=hand_module.TwoLayers"
EXTRA = "--model=hand_module.Extra --model.extra"


def test_a_users_module_is_counted_to_the_byte():
    forecast = predict(OWN, "--measure.zero_grad=after_step")
    weights, rows = 2 * 4 * 1024**2, 4 * 8 * 1024
    # Each parameter's step count has a block of its own. The peak is at the sum: relu's output, which the gradients of
    # both layers need, the loss, and the summed tensor, which is not kept.
    assert {name: size for name, size in vars(peak_of(forecast, "forward")).items() if size} == {
        "parameters": weights, "optimizer_state": 2 * weights + 2 * 512, "inputs": rows, "activations": rows + 512,
        "temporaries": rows, "total_bytes": 3 * weights + 2 * 512 + 3 * rows + 512,
    }  # fmt: skip
    optimizer = peak_of(forecast, "optimizer")
    assert (optimizer.gradients, optimizer.activations) == (weights, 0)


# Modules, and what they hold in the forward of a step in the native order, in matrices of 4 MiB: parameters, gradients,
# optimizer state, and what no category tells.
@cases("""
- [kind, held]
- [Averaged, [2, 2, 4, 2]]
- [TiedAndMoved, [0.5, 0.5, 1, 0]]
- [Viewed, [1, 1, 2, 0]]
- [ByHand, [2, 2, 4, 0]]
- [Rows, [1, 0, 0, 0]]
- [Lazy, [2, 2, 4, 0]]
- [NoneFirst, [2, 2, 4, 0]]
""")
def test_modules_of_kinds_that_people_write_are_counted(kind, held):
    forecast = predict(f"--model=hand_module.{kind}")
    forward = peak_of(forecast, "forward")
    assert ("sparse gradients take no memory after the backward" in forecast.assumed) == (kind == "Rows")
    sizes = (forward.parameters, forward.gradients, forward.optimizer_state, forward.unknown)
    assert [size / (4 * 1024**2) for size in sizes] == pytest.approx(held, abs=0.001)


def test_quantized_optimizer_state_takes_a_byte_a_number():
    pytest.importorskip("torchao")
    forward = peak_of(predict(OWN, "--optimizer=torchao.optim.AdamW8bit"), "forward")
    # Two states of a quarter of the weights' size each, with a float32 scale for each 256 numbers.
    assert forward.optimizer_state / forward.parameters == pytest.approx(2 * (1 / 4 + 1 / 256), rel=0.01)


def test_dropout_keeps_a_byte_for_each_element():
    extra, dropout = "self.first(batch).sin()", "nn.functional.dropout(self.first(batch), 0.5).sin()"
    without, kept = (
        peak_of(predict("--model=hand_module.Extra", "--model.extra", f"{value}.sum()"), "forward").activations
        for value in (extra, dropout)
    )
    assert kept - without == 8 * 1024


# What a training step does beside its loss, and what is assumed about values.
@cases("""
extra | assumed
self.log('loss', loss, prog_bar=True, on_step=True, on_epoch=True, sync_dist=True, reduce_fx='max') | -
self.log_dict({'loss': loss, 'count': (batch != 3).sum(), 'rate': 0.1}, on_epoch=True) | -
self.log('value', loss.item()) | its number taken as 1
self.log('mean', self.mean(loss)) | -
self.log('accuracy', self.accuracy(out, batch.argmax(-1)), on_epoch=True) | -
print(f'{loss:.3f} {out} {float(loss)}', torch.tensor([loss, loss]).tolist()) | its number taken as 1
exit() if loss.item() > 5 else None | its number taken as 1
torch.compile(lambda rows: rows.sin().sum(), fullgraph=True)(out) | -
(out.detach().argmax(-1).cpu().numpy().mean(), None)[1] | -
copy.deepcopy(self).second(batch).sum() * 0 + loss | -
self.trainer.is_global_zero and self.optimizers().param_groups[0]['lr'] and None | -
checkpoint(nn.functional.scaled_dot_product_attention, *[out] * 3, None, 0.1, use_reentrant=False).sum() | -
exit() if torch.isnan(loss) else None | its tensor taken as false
None if torch.isfinite(out).all() else exit() | its tensor taken as true
out[batch > 0].sum() | a mask that keeps everything
self.log('tokens', int((batch > 0).sum())) | a mask that keeps everything
self.log('changed', (out != batch).float().mean()) | -
(twice(out), None)[1] | its outputs alone take memory
""")
def test_a_step_that_logs_or_reads_values_is_predicted(extra, assumed):
    forecast = predict("--model=hand_module.Extra", "--model.extra", extra)
    assert forecast.highest.total_bytes > 4 * 4 * 1024**2
    assert [line.endswith(f": {assumed}") for line in forecast.assumed] == [True] * bool(assumed)


def test_each_expert_of_a_loop_holds_its_share_of_the_tokens():
    forecasts = [predict(f"--model=hand_module.{name}") for name in ("TwoLayers", "Experts")]
    without, looped = (peak_of(forecast, "forward").activations for forecast in forecasts)
    # The backward needs the rows of eight tokens once more, and their indices in blocks of 512 bytes.
    assert 8 * 4096 <= looped - without <= 8 * 4096 + 4 * 1024
    assert [line.partition(": ")[2] for line in forecasts[1].assumed] == ["the same number of tokens for each expert"]


@cases("save", "torch.save(self.state_dict(), {!r})", "self.trainer.save_checkpoint({!r})")
def test_a_prediction_leaves_the_checkpoints_that_a_step_writes(save, tmp_path):
    weights = tmp_path / "weights.pt"
    weights.write_text("kept")
    forecast = predict("--model=hand_module.Extra", "--model.extra", f"({save.format(str(weights))}, None)[1]")
    assert forecast.highest.total_bytes > 4 * 4 * 1024**2
    assert weights.read_text() == "kept"


def test_a_callback_that_only_logs_changes_no_prediction():
    plain, watched = predict(OWN), predict(OWN, "--trainer.callbacks=LearningRateMonitor")
    assert watched.highest.total_bytes == plain.highest.total_bytes


@cases("""
- [words, share]
- [--measure.zero_grad native, 1]
- [--trainer.accumulate_grad_batches 4, 1]
- [--measure.mode forward, 0]
""")
def test_gradients_are_held_in_the_forward_where_steps_keep_them(words, share):
    forward = peak_of(predict(OWN, *words.split()), "forward")
    assert forward.gradients == share * 2 * 4 * 1024**2
    assert (forward.optimizer_state > 0) == bool(share)


@cases(rf"""
line | message
{EXTRA}=torch.ones(int(batch.argmax())) | cannot be predicted: .*: this needs the values of a tensor; .* only shapes
{EXTRA}=self.log('x',self.trainer.nothing) | cannot be predicted: .*AttributeError: .* object has no attribute 'nothing'
{EXTRA}=nn.LSTM(1024,8)(batch)[0].sum() | cannot be predicted: .*: cuDNN runs this layer on a GPU
--model=hand_module.Newton | cannot be predicted: LBFGS keeps a history whose length depends on values
--model=hand_module.Unready | cannot be predicted: a lazy module has no sizes; run a batch
--trainer.precision=transformer-engine | precision transformer-engine cannot be predicted; allowed: 64-true, 32-true
--model.siz=tiny | model\.siz
--trainer.devices=[] | trainer.devices is \[\]; a prediction needs a number
--trainer.num_nodes=0 | trainer.num_nodes is 0; it must be at least 1
--trainer.devices=auto | trainer.devices is auto; a prediction needs a number
--trainer.devices=2 --trainer.strategy=fsdp | 'fsdp'; choose one of auto, ddp
""")
def test_a_configuration_that_cannot_be_predicted_is_refused_in_one_line(line, message):
    with usage_error(message):
        predict(*([] if "hand_module" in line else TINY), *line.split())


def test_blocks_that_are_computed_again_keep_less_in_eager_and_compiled_runs():
    words, keep = ["--data.batch_size=16", "--data.context_length=64"], "--trainer.recompute.keep"
    assert activations_of(*words, keep, "inputs") < 0.5 * activations_of(*words)
    compiled = "--trainer.compile.regional=true"
    inputs, matmuls = (activations_of(compiled, keep, name) for name in ("inputs", "matmuls"))
    assert inputs < matmuls < activations_of(compiled)


def test_compiled_blocks_that_are_not_computed_again_keep_what_they_keep():
    model = ("--model.num_layers=3", "--trainer.compile=true")
    nothing, first, every = (
        activations_of(*model, *words)
        for words in ([], ["--trainer.recompute.first=1"], ["--trainer.recompute.keep=inputs"])
    )
    assert nothing - first == pytest.approx((nothing - every) / 3, rel=0.1)


def test_a_chunked_loss_never_has_all_logits_in_memory():
    words = (TINY[0], "--model.vocab_size=50000", "--data.batch_size=16", "--data.context_length=64", "--model.loss")
    whole, chunked = (peak_of(predict(*words, loss), "backward") for loss in ("whole", "chunked"))
    assert chunked.logits == pytest.approx(whole.logits / LOSS_CHUNKS, rel=0.01)
    assert whole.total_bytes - chunked.total_bytes > 0.8 * whole.logits


# several ranks


# The strategy; the number of ranks that share parameters, gradients and state; sizes in blocks, of six; and options.
# The sizes are gathered in the forward, gathered in the backward, gradients in the forward, buckets in the backward.
# FSDP2 has in the forward a group of blocks and two flat gathers (its own, and the last group's); in the backward a
# group, the next one's flat gather, and the buckets of the last one's gradients.
@cases("""
- [strategy, ranks, blocks, words]
- [fsdp2, 4, [3, 2, 0, 1], --trainer.devices=4]
- [fsdp2, 4, [3, 2, 0, 1], --trainer.devices=4 --trainer.gradient_clip_val=1]
- [fsdp2, 4, [1.5, 1, 0, 1], --trainer.devices=2 --trainer.num_nodes=2 --trainer.precision=bf16-mixed]
- [fsdp2, 8, [3, 2, 0.75, 1], --trainer.devices=8 --trainer.accumulate_grad_batches=3]
- [fsdp2, 4, [3, 2, 0, 1], --trainer.devices=4 --trainer.compile=true]
- [fsdp2_zero2, 2, [8, 5, 0, 1], --trainer.devices=2]
- [fsdp2, 1, [1, 1, 0, 1], ""]
- [fsdp2, 4, [6, 4, 0, 2], --trainer.strategy.blocks_per_group=2 --trainer.devices=4]
- [ddp, 1, [0, 0, 0, 6], --trainer.devices=4]
- [ddp, 1, [0, 0, 6, 6], "--trainer.devices=[0,1] --trainer.accumulate_grad_batches=2"]
""")
def test_a_rank_holds_its_part_and_gathered_blocks_and_buckets(strategy, ranks, blocks, words):
    words = [f"--trainer.strategy={strategy}", ONE_BY_ONE[strategy], *words.split()]
    forecast = predict("--model=hand_module.Stack", "--measure.zero_grad=after_step", *words)
    weights = 6 * 4 * 1024**2
    forward, backward, optimizer = (peak_of(forecast, phase) for phase in ("forward", "backward", "optimizer"))
    assert forward.parameters == optimizer.parameters == optimizer.gradients == weights / ranks
    assert optimizer.optimizer_state == 2 * weights / ranks + 6 * 512
    sizes = [forward.gathered, backward.gathered, forward.gradients, backward.buckets]
    assert [size / weights * 6 for size in sizes] == blocks
    # In the second step DDP has its first buckets and new ones.
    first_bytes = weights if strategy == "ddp" else 0
    assert forecast.run_peak_bytes == pytest.approx(forecast.highest.total_bytes + first_bytes, rel=0.05)


def test_matrices_are_split_within_a_group_and_other_parameters_over_groups():
    words = [*TINY, "--trainer.devices=4", "--trainer.strategy"]
    options = "{class_path: lmbench.ModelParallel, init_args: {tensor_parallel_size: %s}}"
    split, both = (peak_of(predict(*words, options % size), "optimizer") for size in ("auto", "2"))
    whole, matrices = peak_of(predict(*TINY), "optimizer").parameters, 2 * (4 * 64 * 64 + 3 * 64 * 128) * 4
    assert whole - split.parameters == pytest.approx(matrices * 3 / 4, rel=0.02)
    # AdamW's two states are split over two groups.
    assert both.optimizer_state == pytest.approx(whole - matrices / 2, rel=0.02)


def test_buckets_that_are_the_gradients_are_always_held():
    options = "{class_path: lightning.pytorch.strategies.DDPStrategy, init_args: {%s: true}}"
    steps = ["--model=hand_module.Stack", "--measure.zero_grad=after_step", "--trainer.devices=2"]
    weights = 6 * 4 * 1024**2
    views = predict(*steps, "--trainer.strategy", options % "gradient_as_bucket_view")
    assert [peak_of(views, phase).buckets for phase in ("forward", "optimizer")] == [weights, weights]
    assert peak_of(views, "optimizer").gradients == 0
    unused = predict(*steps, "--trainer.strategy", options % "find_unused_parameters")
    # With unused parameters DDP does not rebuild its buckets after the first step.
    assert unused.run_peak_bytes == unused.highest.total_bytes


@cases("""
- [shared, rest, enough]
- [200, 50, 4]
- [140, 50, 3]
- [200, 100, null]
""")
def test_gpus_are_enough_where_their_part_of_the_shared_memory_fits(shared, rest, enough):
    """Sizes are in GiB; a GPU has 100."""
    sizes = {**dict.fromkeys(SHARED, 0), "gradients": shared // 2 * 2**30, "activations": rest * 2**30 - CONTEXT_BYTES}
    trial = FakeStep([PhasePeak("forward", sizes, "")], sum(sizes.values()), None)
    assert Predictor(lambda *_: trial, Shape(1, None)).fewest_ranks(2, ROOM) == enough


@cases("""
- [strategy, name, enough]
- [fsdp2_zero2, fsdp2_zero2, "; 1 is enough"]
- [ddp, ddp, ""]
- [fsdp2 --trainer.strategy.blocks_per_group=1, fsdp2 (blocks_per_group 1), "; 1 is enough"]
""")  # fmt: skip
def test_the_answer_names_the_strategy_and_the_number_of_gpus(strategy, name, enough):
    words = ["--model=hand_module.Stack", "--trainer.devices=2", *f"--trainer.strategy={strategy}".split()]
    forecast = predict(*words, gpu="H200", finds_largest=True)
    assert f"rank 0 of 2 ({name}), each" in str(forecast_answer(forecast).tables)
    assert f"fits on 2 H200 (138.88 GiB each){enough}'" in str(forecast_answer(forecast).notes)
    forecast.on_gpus[0].fits, forecast.fewest_gpus = False, None
    assert re.search("more GPUs change nothing|no number of GPUs", str(forecast_answer(forecast).notes))


# what fits


@cases(
    "reserve | start | unit",
    (lambda length: 10 * 2**30 + length * 3 * 2**20 + length**2 * 2**13, 512, 64),
    (lambda batch: max(30 * 2**30 + batch * 2**27, 2**30 + batch * 2**30), 1, 1),
    # Far from the border it falls.
    (lambda batch: 2**30 + batch * 2**32 - batch**2 * 2**21, 8, 1),
    (lambda batch: 90 * 2**30 + batch * 2**32, 512, 1),
)
def test_the_border_is_the_largest_that_fits(reserve, start, unit):
    border = largest_that_fits(reserve, ROOM.room_bytes, start, unit, 2**20)
    assert border % unit == 0
    assert ROOM.fits(reserve(border))
    assert not ROOM.fits(reserve(border + unit))
    assert largest_that_fits(lambda value: 200 * 2**30 + value, ROOM.room_bytes, start, unit, 2**16) is None
    assert largest_that_fits(lambda value: value, ROOM.room_bytes, start, unit, 2**16) == 2**16


def _reserved_bytes(batch, context):
    """The optimizer has the peak of small shapes. Every fourth byte that is allocated is reserved twice."""
    return 1.25 * max(batch * context * (2**17 + context * 3000), 2**34)


def test_one_prediction_tells_the_largest_shapes_of_each_gpu():
    def step(shape, blocks):
        batch, context = shape
        sizes = {"forward": batch * context * (2**17 + context * 3000), "optimizer": 2**34}
        peaks = [
            PhasePeak(phase, {**dict.fromkeys(CATEGORIES, 0), "activations": size}, "") for phase, size in sizes.items()
        ]
        return FakeStep(peaks, _reserved_bytes(*shape), None)

    predictor = Predictor(step, Shape(4, 512))
    none, *rows = predictor.fits_on([TargetGpu("", size * 10**9, 0) for size in (16, 80, 141)], has_context=True)
    assert (none.fits, none.largest_batch_size, none.largest_context_length) == (False, None, None)
    for row in rows:
        batch, context, fits = row.largest_batch_size, row.largest_context_length, row.gpu.fits
        assert row.fits == fits(predictor.reserved_bytes)
        assert fits(_reserved_bytes(batch, 512)) > fits(_reserved_bytes(batch + 1, 512))
        assert fits(_reserved_bytes(4, context)) > fits(_reserved_bytes(4, context + 64))


# beside a run


def test_a_run_keeps_its_prediction(tmp_path, monkeypatch):
    # The screen of `lmbench memory` is of a process of its own.
    monkeypatch.setattr("lmbench.fit.measurement.ask_forecast", partial(in_fork, forecast))
    prediction = bench(tmp_path, *TINY, "--memory.predict=true").record.memory_prediction
    assert prediction.peak_allocated_bytes
    # A CPU has no allocator to compare it with.
    assert (prediction.reason, prediction.error_fraction) == (None, None)


def test_an_attention_layer_alone_is_predicted_by_its_shape():
    layer = ["--model=lmbench.AttentionLayer", "--model.head_dim=64", "--data.context_length=1024"]
    forecast = predict(*layer, "--model.attention=naive", "--data.batch_size=8", gpu="H200", finds_largest=True)
    inputs, scores = 8 * 1024 * 64 * 4, 8 * 1024 * 1024 * 4
    forward, backward = peak_of(forecast, "forward"), peak_of(forecast, "backward")
    # Parameters are q, k, v and the output's gradient. The product and its scaled copy are temporaries, then softmax's
    # result is beside one of them.
    assert forward.parameters == backward.parameters == 4 * inputs
    assert (forward.temporaries, backward.activations) == (2 * scores, scores + inputs)
    assert forecast.on_gpus[0].largest_batch_size > 8
    assert forecast.on_gpus[0].largest_context_length >= 1024
    with usage_error("a prediction compiles nothing; predict sdpa"):
        predict(*layer, "--model.attention=flex")
