"""`lmbench.measure`, `load` and `to_frame`: the command's own measurement, in somebody else's process."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from contextlib import suppress
from html.parser import HTMLParser

import numpy as np
import pytest
import torch
from lightning.pytorch import Callback
from strangers import ByHand, Data, Failing, OwnLoaders, Regression, TokenModel
from torch.utils.data import TensorDataset

import lmbench
from lmbench.cli import main
from lmbench.model.language_model import LanguageModel

QUICK = {"steps": 3, "warmup_steps": 1, "min_window_s": 0.0, "probe_steps": 0, "trainer": {"accelerator": "cpu"}}


def measure(module, data=None, **given):
    return lmbench.measure(module, data, **{**QUICK, **given})


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A run that was kept, probes included, and the folder of results it is in."""
    results = tmp_path_factory.mktemp("api") / "results"
    return measure(OwnLoaders(), probe_steps=1, results_dir=results), results


# a run


def test_a_run_is_what_the_command_would_have_left(kept, capsys):
    run, results = kept
    (loaded,) = lmbench.load(results)
    assert (loaded.path, loaded.record, loaded.steps) == (run.path, run.record, run.steps)
    assert (run.outcome, run.record.window.steps, len(run.steps)) == ("ok", 3, 4)
    assert run.record.probe.training.parameters == 4
    assert main(["show", str(run.path)]) == 0
    assert str(run) == capsys.readouterr().out.strip("\n")
    assert repr(run).startswith(f"<lmbench.Run {run.run_id}: ok, ")


def test_nothing_is_kept_unless_it_is_asked_for(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    run = measure(OwnLoaders())
    assert run.outcome == "ok"
    assert "result " not in str(run)
    assert list(tmp_path.iterdir()) == []


class Reader(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.tags, self.text = set(), ""
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)

    def handle_data(self, data):
        self.text += data


def test_in_a_notebook_a_run_is_html_without_script_and_escaped(kept):
    run, _ = kept
    named = lmbench.load(run.path)[0]
    named.record.model.name = "<script>alert(1)</script>"
    read = Reader(named._repr_html_())
    assert read.tags <= {"div", "table", "caption", "strong", "thead", "tbody", "tr", "th", "td"}
    assert "<script>alert(1)</script>, 577 parameters" in read.text
    # Every figure of the printed table is in it.
    table = [line for line in str(run).splitlines() if line.startswith(("forward", "step  "))]
    assert all(word in read.text for line in table for word in line.split())


def test_runs_become_a_frame_of_runs_or_of_steps(kept):
    run, results = kept
    frame = lmbench.to_frame(lmbench.load(results))
    assert frame.loc[0, "phases.step.mean_s"] == run.record.phases.step.mean_s
    assert frame.loc[0, "run_id"] == run.run_id
    steps = lmbench.to_frame(run, steps=True)
    assert list(steps["step_s"]) == [step.step_s for step in run.steps]


def test_importing_and_loading_bring_no_torch():
    code = "import sys, lmbench; lmbench.load; lmbench.Run; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


# data


@pytest.mark.parametrize(
    ("data", "source"),
    [
        (Data, None),
        (lambda: Data().train_dataloader(), "loaders without a data module"),
        (lambda: (torch.randn(4, 16),), "loaders without a data module"),
        (lambda: [torch.randn(4, 16)], "loaders without a data module"),
        (lambda: [(torch.randn(4, 16),)] * 9, "loaders without a data module"),
    ],
    ids=["data module", "loader", "batch", "list of tensors", "list of batches"],
)
def test_data_is_a_data_module_a_loader_or_a_batch(data, source):
    run = measure(Regression(), data())
    assert (run.outcome, run.record.data.source) == ("ok", source)


def test_lmbenchs_own_model_gets_its_tokens():
    module = LanguageModel(size="tiny", num_layers=1, vocab_size=50, context_length=8)
    run = measure(module)
    assert (run.record.data.batch_size, run.record.data.context_length) == (4, 8)
    assert run.record.zero_grad == "after_step"
    assert run.record.throughput.tokens_per_s > 0
    # Its weights were trained by then.
    assert (run.record.model.is_fresh, measure(module).record.model.is_fresh) == (True, False)


def test_inference_is_a_mode():
    assert measure(OwnLoaders(), mode="inference").record.mode == "inference"


@pytest.mark.parametrize(
    ("instrument", "is_there"),
    [
        ("dtypes", lambda record: record.dtypes.tensors),
        ("kernels", lambda record: record.is_profiled and record.kernels),
        ("sync", lambda record: not record.is_profiled),
    ],
)
def test_a_notebook_has_the_instruments_and_the_gradient_norm_of_the_command(instrument, is_there):
    run = measure(OwnLoaders(), instrument=instrument, gradient_norm=True, probe_steps=1)
    assert is_there(run.record)
    assert run.steps[-1].gradient_norm > 0


def test_an_instrument_that_is_not_there_is_refused():
    with pytest.raises(lmbench.UsageError, match="the history is of a GPU's allocator"):
        measure(OwnLoaders(), instrument="memory")
    with pytest.raises(lmbench.UsageError, match="did you mean kernels"):
        measure(OwnLoaders(), instrument="kernel")


# the process and the module


def surroundings():
    return {
        "random": random.getstate(),
        "numpy": np.random.get_state()[1].tolist(),
        "torch": torch.get_rng_state().tolist(),
        "dtype": torch.get_default_dtype(),
        "matmul": torch.get_float32_matmul_precision(),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "anomaly": torch.is_anomaly_enabled(),
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0),
        "signals": {each: signal.getsignal(each) for each in signal.valid_signals()},
        "warnings": list(warnings.filters),
        "logging": [logging.getLogger(name).level for name in ("lightning.pytorch", "lightning.fabric")],
        "folder": os.getcwd(),  # noqa: PTH109
        "variables": dict(os.environ),
    }


@pytest.mark.parametrize("module", [OwnLoaders, Failing])
def test_the_process_is_left_as_it_was(module):
    given = {"deterministic": True, "benchmark": True, "detect_anomaly": True, "accelerator": "cpu"}
    built, before = module(), surroundings()
    with suppress(ArithmeticError):
        measure(built, matmul_precision="high", seed=7, trainer=given)
    assert surroundings() == before


@pytest.mark.parametrize("given", [{"mode": "forward"}, {"zero_grad": "after_step"}, {"precision": "bf16-true"}, {}])
def test_the_module_is_left_as_it_was_but_for_its_weights(given):
    module = OwnLoaders().eval()
    module.net[0].train()
    before = (vars(module).keys(), module._trainer, {name: part.training for name, part in module.named_modules()})
    first = measure(module, **given)
    assert (vars(module).keys(), module._trainer, {n: part.training for n, part in module.named_modules()}) == before
    assert {parameter.dtype for parameter in module.parameters()} == {module.dtype} == {torch.float32}
    assert all(parameter.grad is None for parameter in module.parameters())
    # As it is, it trains.
    again = measure(module)
    assert again.record.phases.optimizer.mean_s > 0
    assert first.record.run_id != again.record.run_id


def test_a_copy_leaves_the_weights_alone():
    module = OwnLoaders()
    before = {name: weight.clone() for name, weight in module.state_dict().items()}
    measure(module, copy=True)
    assert all(torch.equal(before[name], weight) for name, weight in module.state_dict().items())
    measure(module)
    assert not all(torch.equal(before[name], weight) for name, weight in module.state_dict().items())


def test_it_works_in_a_thread_and_beside_a_running_event_loop():
    found = []
    thread = threading.Thread(target=lambda: found.append(measure(OwnLoaders())))
    thread.start()
    thread.join()

    async def cell():
        return measure(OwnLoaders())

    found.append(asyncio.run(cell()))
    assert [run.outcome for run in found] == ["ok", "ok"]


def test_a_measurement_within_another_is_refused():
    class Nested(Callback):
        def on_train_start(self, trainer, pl_module):
            measure(OwnLoaders())

    with pytest.raises(lmbench.UsageError, match="another measurement runs in this process"):
        measure(OwnLoaders(), trainer={"accelerator": "cpu", "callbacks": [Nested()]})
    assert measure(OwnLoaders()).outcome == "ok"


# what can go wrong


def test_a_lack_of_memory_is_a_run(tmp_path):
    batches = []

    class Hungry(OwnLoaders):
        def training_step(self, batch, batch_idx):
            batches.append(weakref.ref(batch[0]))
            if batch_idx == 2:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
            return super().training_step(batch, batch_idx)

    run = measure(Hungry(), results_dir=tmp_path)
    assert (run.outcome, run.record.error.requested_bytes, len(run.steps)) == ("oom", 2 * 2**30, 2)
    assert "oom in forward, 2.00 GiB asked for" in str(run)
    assert [batch() for batch in batches] == [None] * 3


MISTAKES = {
    "a plain module": (lambda: measure(torch.nn.Linear(2, 2)), "LightningModule but a torch.nn.Module; wrap it in one"),
    "a class": (lambda: measure(OwnLoaders), "OwnLoaders is a class; measure takes an instance"),
    "no data": (lambda: measure(TokenModel()), r"TokenModel has no train_dataloader\(\); give data"),
    "data's class": (lambda: measure(Regression(), Data), r"such as Data\(\)"),
    "a dataset": (lambda: measure(Regression(), TensorDataset(torch.ones(2))), "a Dataset, which has no batches"),
    "no number": (lambda: measure(OwnLoaders(), steps="many"), "measure.steps is 'many'; allowed: a whole number"),
    "empty data": (lambda: measure(Regression(), []), "nothing was measured: no batch was taken"),
    "too short": (lambda: measure(OwnLoaders(), trainer={"max_steps": 1}), "training ended at step 1, the window"),
    "a flag": (lambda: measure(OwnLoaders(), trainer={"acelerator": "cpu"}), "the Trainer refuses its flags"),
    "a flag twice": (lambda: measure(OwnLoaders(), trainer={"precision": 16}), "is an argument of measure"),
    "a limit": (lambda: measure(OwnLoaders(), trainer={"min_steps": 9}), "trainer.min_steps is 9"),
    "a mode": (lambda: measure(OwnLoaders(), mode="backward"), "mode is 'backward'; allowed: inference, forward"),
    "a precision": (lambda: measure(OwnLoaders(), precision="fp8"), "the Trainer refuses its flags"),
    "a number": (lambda: measure(OwnLoaders(), steps=0), "measure.steps is 0; it must be at least 1"),
    "compiling": (lambda: measure(OwnLoaders(), compile={"mod": "default"}), "did you mean --compile.mode?"),
    "by hand": (lambda: measure(ByHand(), Data(), mode="forward"), "allowed: train_step"),
    "no results": (lambda: lmbench.load("/nowhere"), "'/nowhere' does not exist"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_an_exception_of_one_line(mistake):
    call, told = MISTAKES[mistake]
    with pytest.raises(lmbench.UsageError, match=told) as raised:
        call()
    assert "\n" not in str(raised.value)


def test_attention_by_itself_gets_its_shape():
    layer = lmbench.AttentionLayer(heads=2, head_dim=8, batch_size=3, context_length=16)
    run = measure(layer, mode="forward_backward")
    assert (run.record.data.batch_size, run.record.data.context_length) == (3, 16)
    assert run.record.phases.backward.mean_s > 0


def test_ctrl_c_is_a_keyboard_interrupt_and_leaves_the_handlers(tmp_path):
    class Impatient(Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        measure(OwnLoaders(), trainer={"accelerator": "cpu", "callbacks": Impatient()}, results_dir=tmp_path)
    assert signal.getsignal(signal.SIGINT) is before
    (run,) = lmbench.load(tmp_path)
    assert run.outcome == "interrupted"
    assert measure(OwnLoaders()).outcome == "ok"


def test_a_report_does_not_pool_modules_of_other_sizes(tmp_path, capsys):
    for width in (8, 16):
        measure(OwnLoaders(width), results_dir=tmp_path)
    assert main(["report", str(tmp_path), "--format", "markdown"]) == 0
    printed = capsys.readouterr().out
    assert "2 cells, 2 runs (2 ok)" in printed
    assert "| parameter_count |" in printed
    assert all(any(count in line for line in printed.splitlines() if line.startswith("|")) for count in ("321", "577"))
