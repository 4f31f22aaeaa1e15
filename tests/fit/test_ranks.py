"""Several ranks of one measurement: gloo processes, forked from this one, on a tiny model."""

from __future__ import annotations

import faulthandler
import json
import multiprocessing
import os
import re
import signal
from pathlib import Path

import psutil
import pytest
import torch
import warm_server
from fit_process import start_fit
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from refusals import usage_error
from tables import cases, flat, stored
from uneven import Uneven

import lmbench
from lmbench.callbacks import RunRecorder
from lmbench.cli import main
from lmbench.instruments.compiling import CompileOptions
from lmbench.model.language_model import LanguageModel

from conftest import quiet_trainer

WORDS = [
    "--trainer.accelerator=cpu", "--trainer.devices=2", "--measure.warmup_steps=2", "--measure.steps=8",
    "--measure.min_window_s=0", "--measure.run_id=run", "--quiet",
]  # fmt: skip
TINY = [
    "--model={d_model: 32, d_ff: 64, num_layers: 2, num_heads: 2, vocab_size: 101}",
    "--data={batch_size: 2, context_length: 16}",
]


@pytest.fixture(autouse=True)
def _no_process_is_left(here):
    # The process for fake steps may be here from other tests.
    before = multiprocessing.active_children()
    yield
    assert multiprocessing.active_children() == before


def fit(*words):
    code = main(["fit", *WORDS, *words])
    return code, lmbench.load("results")[-1]


def added_by_libraries(record):
    """What Lightning and PyTorch add to a step, by the guards that warn of it."""
    names = {"sigterm_check", "bucket_copies", "bucket_splits"}
    return names & {guard.name for guard in record.guards if guard.status == "warn"}


def steps_of(path):
    return [json.loads(line) for line in (path / "steps.jsonl").read_text().splitlines()]


WITHOUT_PROBES = ["--measure.probe_steps=0"]
CLIPPED = "--trainer.accumulate_grad_batches=2 --trainer.gradient_clip_val=0.1"
PARALLEL = "--trainer.strategy=lmbench.ModelParallel"
WHOLE_GRADIENTS = f"{PARALLEL} --trainer.strategy.reduce_each_micro_batch=false"


@pytest.fixture(scope="module")
def first_figures():
    return {}


# Batches trained on at once, number of ranks, and the words for the strategy.
@cases(f"""
- [batches, count, line]
- [1, 1, --trainer.devices=1]
- [1, 2, --trainer.strategy=tensor_parallel]
- [2, 2, --trainer.strategy=ddp]
- [2, 2, --trainer.strategy=ddp {CLIPPED}]
- [2, 4, {PARALLEL} --trainer.strategy.tensor_parallel_size=2 --trainer.devices=4 {CLIPPED}]
- [2, 2, {WHOLE_GRADIENTS} {CLIPPED}]
- [2, 2, --trainer.strategy=ddp_zero1 {CLIPPED}]
- [2, 2, --trainer.strategy=fsdp2 --trainer.strategy.blocks_per_group=1 --trainer.strategy.prefetch=2]
- [2, 2, --trainer.strategy=lmbench.FlatDDP {CLIPPED}]
- [2, 2, --trainer.strategy=lmbench.BucketedDDP --trainer.strategy.bucket_cap_mb=0.02 {CLIPPED}]
""")
def test_every_strategy_measures_every_rank_and_trains_the_same(batches, count, line, first_figures):
    code, run = fit(*TINY, "--measure.gradient_norm=true", *WITHOUT_PROBES, *line.split())
    record, is_clipped = run.record, CLIPPED in line
    assert (code, run.outcome, record.world_size, record.window.micro_batches) == (0, "ok", count, 1 + is_clipped)
    ranks = [steps_of(run.path), *(steps_of(run.path / f"rank{rank}") for rank in range(1, count))]
    assert [len(steps) for steps in ranks] == [2 + 8] * count
    # Each batch has two sequences of 16 tokens.
    assert record.window.tokens == 8 * record.window.micro_batches * batches * 2 * 16
    assert added_by_libraries(record) == set()
    assert len({steps[0]["loss"] for steps in ranks}) == batches
    figures = [step[name] for step in ranks[0] for name in ("loss", "gradient_norm")]
    assert figures == pytest.approx(first_figures.setdefault((batches, is_clipped), figures), rel=1e-4)
    assert all([step["gradient_norm"] for step in steps] == figures[1::2] for steps in ranks)
    # The warm-up's norm is that of its last step, however ranks share the parameters.
    assert record.warmup.gradient_norm == pytest.approx(figures[3], rel=1e-4)


def test_the_last_batch_of_an_epoch_is_stepped_on_with_its_gradients():
    # Lightning steps after the batches 2, 4 and 5.
    words = [*WHOLE_GRADIENTS.split(), "--trainer.accumulate_grad_batches=2", "--trainer.limit_train_batches=5"]
    code, run = fit(*TINY, "--measure.gradient_norm=true", *WITHOUT_PROBES, *words)
    assert (code, {step.micro_batches for step in run.steps}) == (0, {1, 2})
    assert all(step.gradient_norm for step in run.steps)


class TellsState(LanguageModel):
    """Writes how many numbers of AdamW's first moments its rank holds."""

    def on_train_end(self):
        state = self.trainer.optimizers[0].state.values()
        Path(f"state{self.global_rank}").write_text(str(sum(values["exp_avg"].numel() for values in state)))


def test_zero_1_shards_the_optimizers_state_over_the_ranks(tmp_path):
    model = TINY[0].replace("{", "{class_path: test_ranks.TellsState, init_args: {") + "}"
    code, run = fit(model, TINY[1], "--trainer.strategy=ddp_zero1")
    shares = [int((tmp_path / f"state{rank}").read_text()) for rank in range(2)]
    assert (code, run.record.model.optimizer) == (0, "AdamW fused")
    assert sum(shares) == run.record.model.trainable_parameter_count
    assert min(shares) > 0.4 * sum(shares)


def test_in_fp8_shards_train_as_whole_layers_do():
    # Imports torchao once here, so that no rank has to.
    pytest.importorskip("torchao.float8")
    runs = {}
    for name in ("ddp", "fsdp2"):
        words = ["--trainer.precision=fp8-rowwise", f"--trainer.strategy={name}", f"--measure.run_id={name}"]
        code, runs[name] = fit(*TINY, *WITHOUT_PROBES, *words)
        assert (code, runs[name].record.model.fp8.converted_count) == (0, 14)
    losses, expected = ([step.loss for step in run.steps[:8]] for run in runs.values())
    assert losses == pytest.approx(expected, abs=0.01)


def test_a_module_in_shards_has_the_name_and_the_flops_of_the_whole_one(tmp_path):
    pytest.importorskip("transformers")
    path = tmp_path / "mixtral.json"
    path.write_text(json.dumps(stored("hugging_face")["mixtral"]))
    models = []
    for name in ("ddp", "fsdp2"):
        own = ["--model=lmbench.HuggingFace", f"--model.config={path}", "--data.context_length=16"]
        own += ["--trainer.recompute.keep=inputs", f"--trainer.strategy={name}", f"--measure.run_id={name}"]
        code, run = fit(*own, *WITHOUT_PROBES)
        flops = run.record.flops
        models.append((run.record.model.name, flops.per_token_flops, flops.recomputed_per_token_flops))
        assert code == 0
    assert models[0] == models[1]
    assert models[0][0] == "MixtralForCausalLM"
    assert models[0][1]


def test_a_users_class_in_shards_keeps_its_path_and_a_rank_may_have_no_row_of_a_parameter():
    code, run = fit("--model=uneven.Uneven", "--model.deed=nothing", "--trainer.strategy=fsdp2")
    training = run.record.probe.training
    assert (code, run.record.model.name) == (0, "uneven.Uneven")
    assert (training.parameters, training.missing_gradients, training.zero_gradients) == (2, [], [])


def test_a_straggler_is_seen_in_the_phase_of_its_own_work_and_ranks_agree_on_the_steps_of_a_window(capsys, printed):
    # Lightning takes `ddp` where no strategy is named.
    code, run = fit("--model=uneven.Uneven", "--model.deed=sleep", "--measure.min_window_s=0.2")
    (first, second), window = (rank.mean_s for rank in run.record.per_rank), run.record.window
    assert (code, second["forward"] - first["forward"] > 0.02, first["step"] > 0.03) == (0, True, True)
    # The window opens once the ranks have a steady pace, and lasts as long as was asked for at this pace.
    assert (window.pace_steps % 5, window.pace_steps >= 10, window.first_step) == (0, True, 2 + window.pace_steps)
    assert {rank.steps for rank in run.record.per_rank} == {window.steps}
    assert window.steps >= 8
    capsys.readouterr()
    shown = printed("show", run.path)
    assert "mean of each rank in ms" in shown
    assert re.search(r"^device +2 ranks on .*, ddp$", shown, re.M)
    assert "for other ranks: rank 1 takes longer in forward, and the others wait for it" in flat(shown)


def test_exposed_communication_is_the_step_minus_the_step_without_synchronizing_gradients(capsys, printed):
    code, run = fit("--model=uneven.Uneven", "--model.deed=reduce slowly", "--trainer.strategy=ddp")
    probe = run.record.probe
    assert (code, probe.is_complete) == (0, True)
    # A sleep may last longer than asked for, but not shorter.
    assert probe.synchronized_step_s >= 0.02
    assert probe.synchronized_step_s - probe.unsynchronized_step_s > 0.01
    capsys.readouterr()
    assert "without synchronizing gradients" in flat(printed("show", run.path))


def test_what_lightning_and_pytorch_add_to_a_step_is_a_warning():
    words = ["--trainer.strategy=lightning.pytorch.strategies.DDPStrategy", "--measure.sigterm_broadcast=true"]
    code, run = fit(*TINY, *WITHOUT_PROBES, *words)
    assert (code, added_by_libraries(run.record)) == (0, {"sigterm_check", "bucket_copies"})
    assert run.record.communication.sigterm_check_s > 0


def test_blocks_that_are_split_at_buckets_are_counted_and_by_default_they_are_not_split():
    words = ["--model={d_model: 512, d_ff: 512, num_layers: 1, num_heads: 2, vocab_size: 101}", *TINY[1:]]
    words += [*WITHOUT_PROBES, "--measure.steps=2", "--trainer.strategy=ddp", "--trainer.strategy.bucket_cap_mb=1"]
    code, run = fit(*words, "--trainer.compile={regional: true, backend: aot_eager, split_at_buckets: true}")
    assert (code, run.record.communication.bucket_split_count > 0) == (0, True)
    for is_regional in (True, False):
        with CompileOptions(regional=is_regional).splitting():
            assert torch._dynamo.config.optimize_ddp is not is_regional


def test_in_a_trainer_of_the_users_own_the_check_stays_and_its_cost_is_told():
    quiet_trainer(RunRecorder("results"), devices=2, strategy="ddp_fork", max_steps=20).fit(Uneven("nothing"))
    (run,) = lmbench.load("results")
    told = {guard.name: guard.message for guard in run.record.guards if guard.status == "warn"}
    assert re.match(r"Lightning's SIGTERM check .*: training_epoch_loop.py:\d+, \d+\.\d\d ms", told["sigterm_check"])
    assert "bucket_copies" in told


def test_a_rank_that_hangs_is_named_with_its_line_and_the_collective_that_the_others_wait_in(capfd, monkeypatch):
    monkeypatch.setattr("lmbench.fit.ranks.GRACE_OF_RANKS_S", 1.0)
    # As after a rank of another launcher in this process: its Trainer puts back the signals that Python knows of.
    faulthandler.register(signal.SIGURG)
    signal.signal(signal.SIGURG, signal.SIG_DFL)
    words = ["--model=uneven.Uneven", "--model.deed=hang", "--trainer.strategy=ddp"]
    code, run = fit(*words, "--measure.collective_timeout_s=1")
    assert (code, run.outcome) == (5, "error")
    told = [line for line in capfd.readouterr().err.splitlines() if "hung" in line or "yours" in line]
    assert told == [f"lmbench: {run.record.error.message}"]
    waited = r"rank 0: (?!\[).*[Tt]ime.?.?out.*\(in gloo:all_reduce, number \d+ of its group, of 9 elements\)"
    assert re.fullmatch(rf"rank 1 hung in hang at .*uneven.py:\d+; {waited}", run.record.error.message)
    assert min(len(run.steps), len(steps_of(run.path / "rank1"))) >= 8


@cases("""
- [deed, error]
- [late hang, 'rank 1 hung in hang at .*uneven.py:\\d+; the other ranks had ended']
- [late die, 'rank 1 was ended by SIGKILL, and the measurement with it']
""")
def test_a_rank_that_fails_after_the_measurement_ends_the_run_and_the_record_stays(deed, error, capfd):
    words = ["--model=uneven.Uneven", f"--model.deed={deed}", "--trainer.strategy=ddp"]
    code, run = fit(*words, "--measure.collective_timeout_s=1")
    assert (code, run.outcome, re.fullmatch(error, run.record.error.message) is not None) == (1, "error", True)
    assert capfd.readouterr().err.count(f"lmbench: {run.record.error.message}\n") == 1
    milestones = run.record.milestones
    assert milestones.first_step_s < milestones.window_opened_s < milestones.closed_s
    assert (run.record.phases.step.n, len(run.record.per_rank)) == (run.record.window.steps, 2)


@cases("steps", 5, 100, ids=["in probe steps", "in the window"])
def test_a_rank_that_runs_out_of_batches_before_the_others_is_named(steps, capfd):
    words = ["--model=uneven.Uneven", "--model.deed=run out", "--trainer.strategy=ddp", "--trainer.max_epochs=1"]
    code, run = fit(*words, f"--measure.steps={steps}", "--measure.collective_timeout_s=2")
    message = "rank 1: training ended after 12 steps, and other ranks go on: give every rank as many batches"
    assert (code, run.record.error.message) == (2, message)
    assert capfd.readouterr().err.count(f"lmbench: {message}\n") == 1
    assert run.record.phases.step.n >= 5


@cases("""
- [deed, status, message]
- [diverge, fail, "rank 1: 1 losses are nan or infinite, the first at step 9"]
- [switch, warn, "rank 1: .*thread_count 1 -> 3.*"]
""")
def test_what_a_guard_finds_on_another_rank_alone_is_told(deed, status, message, capfd):
    words = ["--model=uneven.Uneven", f"--model.deed={deed}", "--trainer.strategy=ddp"]
    code, run = fit(*words, *WITHOUT_PROBES)
    guards = [guard for guard in run.record.guards if re.fullmatch(message, guard.message)]
    assert (code, [guard.status for guard in guards]) == (0, [status])
    # The result, which is not printed here, has it, as it has the guards of a single rank.
    assert "lmbench: rank" not in capfd.readouterr().err


def test_a_summary_stays_that_of_all_steps_if_the_disk_is_full_and_then_a_rank_is_lost(small_disk):
    small_disk(256)
    words = ["--model=uneven.Uneven", "--model.deed=late die", "--trainer.strategy=ddp"]
    code, run = fit(*words, "--measure.steps=150", *WITHOUT_PROBES)
    window = run.record.window
    # Both ranks meet the full disk, and either may be the one that is told.
    assert (code, "No space left on device" in run.record.error.message) == (1, True)
    assert (window.steps, run.record.phases.step.n, run.record.unwritten_step_count > 0) == (150, 150, True)
    assert window.steps_sum_s == pytest.approx(window.wall_s, rel=0.05)


def test_a_run_of_another_command_in_the_same_folder_stays_as_it_is(tmp_path, capfd):
    assert fit(*TINY, *WITHOUT_PROBES, "--measure.run_id=other", "--trainer.strategy=ddp")[0] == 0
    words = ["--model=uneven.Uneven", "--model.deed=find the folder taken", "--trainer.strategy=ddp"]
    assert fit(*words)[0] == 2
    (told,) = (line for line in capfd.readouterr().err.splitlines() if line.startswith("lmbench: "))
    assert "run 'run' exists already" in told
    other, run = (
        {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        for folder in (tmp_path / "results/other", tmp_path / "results/run")
    )
    assert run == other


def test_every_rank_records_its_trace_and_all_traces_are_read_together(printed):
    code, run = fit(*TINY, "--trainer.strategy=ddp", "--trainer.profiler=kernels")
    assert (code, (run.path / "rank1" / "trace.json.gz").is_file()) == (0, True)
    shown = printed("kernels", run.path)
    assert "ranks        2, without kernels: gloo's collectives run on the host" in shown
    # Its gradients are views of the buckets already.
    assert "gradient_as_bucket_view" not in shown


def test_ranks_that_call_other_collectives_are_told_with_both():
    words = ["--model=uneven.Uneven", "--model.deed=broadcast", "--trainer.strategy=ddp"]
    code, run = fit(*words, "--measure.collective_timeout_s=1")
    assert (code, run.outcome) == (5, "error")
    called = r"gloo:(all_reduce|broadcast), number \d+ of its group, of (9|1000) elements"
    assert re.fullmatch(rf"rank \d called {called}; rank \d: .+ \(in {called}\)", run.record.error.message)


@cases("""
- [deed, code, outcome, error]
- [leave, 5, error, "rank 1: somebody's code asked to exit with 0"]
- [end, 143, interrupted, "rank 1: stopped by SIGTERM"]
- [die, 1, error, "rank 1 was ended by SIGKILL, and the measurement with it"]
- [fail, 5, error, "rank 1: no luck with gloo"]
- [oom, 3, oom, "rank 1: CUDA out of memory. Tried to allocate 2.00 GiB"]
""")
def test_the_rank_that_failed_first_is_the_reason_and_the_steps_of_all_are_kept(deed, code, outcome, error, capfd):
    words = [word for word in WORDS if word != "--quiet"]
    ended = main(["fit", *words, "--model=uneven.Uneven", f"--model.deed={deed}", "--trainer.strategy=ddp"])
    (run,) = lmbench.load("results")
    assert (ended, run.outcome, run.record.error.message) == (code, outcome, error)
    assert len(run.steps) >= 8
    assert run.record.phases.step.n >= 6
    printed = capfd.readouterr()
    assert str(run.path.relative_to(Path.cwd())) in printed.out
    assert (printed.err.count(f"lmbench: {error}\n"), "Connection closed" in printed.err) == (1, False)


@cases(
    "words | message",
    (
        "uneven.Uneven --model.deed=sleep --trainer.strategy=tensor_parallel",
        "Uneven cannot be split over devices: it has no tensor_parallel_plan(size)",
    ),
    (
        "uneven.Uneven --model.deed=differ --trainer.strategy=ddp",
        "ranks must be alike: lmbench is '0.1.0' on rank 0 and '0' on rank 1",
    ),
)
def test_a_module_that_cannot_be_started_is_refused_in_one_line(words, message, refused):
    error = refused("fit", *WORDS, "--model", *words.split())
    assert (message in error, error.count("\n")) == (True, 1)


def test_one_process_of_srun_for_two_devices_is_refused(monkeypatch, refused):
    for name, value in {"NTASKS": "1", "NODEID": "0", "LOCALID": "0", "PROCID": "0", "JOB_ID": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("SLURM_NODELIST", "localhost")
    monkeypatch.setenv("SLURM_JOB_NAME", "training")
    assert "asked for, and the launcher started 1" in refused("fit", *WORDS, *TINY, "--trainer.strategy=ddp")


@pytest.mark.filterwarnings("error")
def test_in_a_notebook_several_devices_are_refused_without_a_warning_by_lightning(tmp_path, monkeypatch, capfd):
    (tmp_path / "srun").touch(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    with usage_error("several devices need a process each"):
        lmbench.measure(Uneven("sleep"), trainer={"accelerator": "cpu", "devices": 2})
    assert capfd.readouterr() == ("", "")


def test_a_signal_to_the_command_ends_all_ranks_and_is_recorded(tmp_path):
    words = ["--trainer.devices=2", "--trainer.strategy=ddp", "--measure.min_window_s=60"]
    command = start_fit(tmp_path, *words)
    command.wait_until(lambda: list(tmp_path.glob("results/*/rank1/steps.jsonl")))
    ranks = [child for child in psutil.Process(command.pid).children() if "guard" not in child.cmdline()]
    command.send_signal(signal.SIGTERM)
    assert (command.wait(), len(ranks)) == (143, 2)
    (run,) = command.results
    assert (run.outcome, run.record.exit_code, len(run.steps) > 0) == ("interrupted", 143, True)
    assert psutil.wait_procs(ranks, timeout=5)[1] == []


def launch(folder, *words):
    """Two ranks as torchrun starts them: once one has failed, the other one is ended by SIGTERM."""
    variables = {
        **os.environ, "TORCHELASTIC_RUN_ID": "1", "MASTER_ADDR": "127.0.0.1", "LOCAL_WORLD_SIZE": "2",
        "GROUP_RANK": "0", "MASTER_PORT": str(find_free_network_port()), "WORLD_SIZE": "2",
    }  # fmt: skip
    with (folder / "out").open("w") as out, (folder / "err").open("w") as err:
        streams, ranks = (None, out.fileno(), err.fileno()), []
        for rank in "01":
            own = {**variables, "RANK": rank, "LOCAL_RANK": rank}
            ranks.append(warm_server.start("fit", *WORDS, *words, folder=folder, variables=own, streams=streams))
    ranks[0].wait_until(lambda: ranks[1].poll() is not None)
    if any(rank.poll() for rank in ranks):
        for rank in ranks:
            rank.send_signal(signal.SIGTERM)
    return [rank.wait() for rank in ranks], lmbench.load("results")[0]


def test_ranks_of_a_launcher_leave_one_result_which_is_printed_once(tmp_path):
    codes, run = launch(tmp_path, *TINY)
    assert (codes, (tmp_path / "out").read_text().split()) == ([0, 0], [str(run.path)])
    assert (len(run.record.per_rank), (run.path / "rank1" / "run.json").is_file()) == (2, True)


@cases(
    "deed | error",
    ("die", "rank 1 left in the middle, and the measurement with it"),
    ("hang", r"rank 1 hung in hang at .*uneven.py:\d+; rank 0: .*in gloo:all_reduce.*"),
)
def test_under_a_launcher_the_rank_that_failed_is_the_reason_too(deed, error, tmp_path):
    words = ["--config=smoke", "--model=uneven.Uneven", "--measure.collective_timeout_s=1"]
    codes, run = launch(tmp_path, *words, f"--model.deed={deed}")
    assert 0 not in codes
    assert re.fullmatch(error, run.record.error.message)
    told = (tmp_path / "err").read_text()
    lines = [line for line in told.splitlines() if line.startswith("lmbench: ") and "in forward: " not in line]
    assert [line for line in lines if "ignored" not in line] == [f"lmbench: {run.record.error.message}"]
    assert told.count("ignored model.size") == 1


def test_an_unused_parameter_under_ddp_is_one_line_that_says_what_to_do():
    words = ["--model=uneven.Uneven", "--model.deed=spare"]
    code, run = fit(*words, "--trainer.strategy=ddp")
    message = run.record.error.message
    assert (code, "ddp_find_unused_parameters_true" in message) == (5, True)
    assert fit(*words, "--trainer.strategy=ddp_find_unused_parameters_true", "--measure.run_id=found")[0] == 0


def test_an_optimizer_that_cannot_shard_is_one_line_and_an_existing_result_is_not_overwritten(capsys, refused):
    code, run = fit(*TINY, "--trainer.strategy=fsdp2", "--model.optimizer=SGD")
    assert (code, "choose another optimizer, or ddp" in run.record.error.message) == (2, True)
    capsys.readouterr()
    assert "run 'run' exists already" in refused("fit", *WORDS, *TINY)
    assert lmbench.load("results")[0].record == run.record


@pytest.fixture
def gpu_in_use(monkeypatch):
    """As where importing the user's code has used the GPU, so that a fork of this process could not."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)


def test_ranks_start_anew_where_the_gpu_is_in_use_and_one_that_fails_is_told_with_its_line(gpu_in_use, capfd):
    code, run = fit(*(words := ["--model=uneven.Uneven", "--model.deed=fail", "--trainer.strategy=ddp"]))
    assert (code, run.record.error.message) == (5, "rank 1: no luck with gloo")
    told = capfd.readouterr().err
    assert (told.count("each rank imports it anew"), told.count(f"lmbench: {run.record.error.message}")) == (1, 1)
    assert (run.record.argv[-3:], run.record.world_size) == (words, 2)
    assert min(len(run.steps), len(steps_of(run.path / "rank1"))) >= 8


def test_a_rank_that_is_killed_while_it_imports_is_told(gpu_in_use, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("lmbench.fit.ranks.GRACE_OF_RANKS_S", 1.0)
    is_killed = 'import os, signal\nos.environ.get("LOCAL_RANK") == "1" and os.kill(os.getpid(), signal.SIGKILL)\n'
    (tmp_path / "early.py").write_text(f"{is_killed}from uneven import Uneven\n")
    assert main(["fit", "--model=early.Uneven", "--model.deed=none", *WORDS]) == 1
    assert "lmbench: rank 1 was ended by SIGKILL, and the measurement with it" in capfd.readouterr().err
