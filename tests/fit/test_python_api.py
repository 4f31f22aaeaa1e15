"""`lmbench.measure`, `load` and `to_frame`: the command's measurement, in the caller's own process."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import os
import random
import re
import signal
import tempfile
import warnings
import weakref
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch
from fit_process import measure_here as measure
from lightning.pytorch import Callback
from refusals import usage_error
from strangers import Data, Failing, OwnLoaders, Regression, TokenModel
from tables import cases
from torch.utils.data import DataLoader

import lmbench
from lmbench.data.datamodule import TokenData
from lmbench.model.language_model import LanguageModel
from lmbench.records.schema import value_at


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A kept run with probe steps, and its folder of results."""
    results = tmp_path_factory.mktemp("api") / "results"
    return measure(probe_steps=1, results_dir=results), results


def test_a_run_equals_the_stored_result_and_makes_a_row_or_steps_of_a_frame(kept, printed):
    run, results = kept
    (loaded,) = lmbench.load(results)
    assert (loaded.path, loaded.record, loaded.steps) == (run.path, run.record, run.steps)
    assert (run.outcome, run.record.window.steps, len(run.steps)) == ("ok", 3, 4)
    assert run.record.probe.training.parameters == 4
    assert str(run) == printed("show", run.path).strip("\n")
    assert repr(run).startswith(f"<lmbench.Run {run.run_id}: ok, ")
    row = lmbench.to_frame([loaded]).loc[0]
    assert (row["run_id"], row["phases.step.mean_s"]) == (run.run_id, run.record.phases.step.mean_s)
    assert list(lmbench.to_frame(run, steps=True)["step_s"]) == [step.step_s for step in run.steps]


def test_nothing_is_kept_without_a_results_dir(here, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(here))
    run = measure()
    assert run.outcome == "ok"
    assert "result " not in str(run)
    assert list(here.iterdir()) == []


def test_in_a_notebook_a_run_is_html_without_script_and_escaped(kept):
    run = lmbench.load(kept[0].path)[0]
    run.record.model.name = "<script>alert(1)</script>"
    html = run._repr_html_()
    assert "&lt;script&gt;alert(1)&lt;/script&gt;, 577 parameters" in html
    assert not re.findall(r"<(?!/?(?:div|table|caption|strong|thead|tbody|tr|th|td)\b)", html)


def test_data_is_a_data_module_a_loader_or_a_batch():
    batch = torch.randn(4, 16)
    for data in (Data(), (batch,), [batch], [(batch,)] * 9):
        run = measure(Regression(), data)
        source = None if isinstance(data, Data) else "loaders without a data module"
        assert (run.outcome, run.record.data.source) == ("ok", source)


def test_lmbenchs_own_modules_get_their_data_and_zero_gradients_after_the_step():
    module = LanguageModel(size="tiny", num_layers=1, vocab_size=50, context_length=8)
    record = measure(module).record
    assert (record.data.batch_size, record.data.context_length, record.zero_grad) == (4, 8, "after_step")
    assert record.throughput.tokens_per_s > 0
    # The first measurement trained its weights.
    assert (record.model.is_fresh, measure(module, mode="inference").record.model.is_fresh) == (True, False)
    layer = lmbench.AttentionLayer(heads=2, head_dim=8, batch_size=3, context_length=16)
    record = measure(layer).record
    assert (record.mode, record.data.batch_size, record.data.context_length) == ("forward_backward", 3, 16)


@cases("""
- [instrument, part]
- [dtypes, dtypes.tensors]
- [kernels, kernels]
""")
def test_a_notebook_has_the_instruments_and_the_gradient_norm_of_the_command(instrument, part):
    run = measure(instrument=instrument, gradient_norm=True, probe_steps=1)
    assert value_at(run.record, part)
    assert run.steps[-1].gradient_norm > 0


def process_state():
    return {
        "random": (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()),
        "dtype": (torch.get_default_dtype(), torch.get_float32_matmul_precision()),
        "cudnn": (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic),
        "determinism": (torch.get_deterministic_debug_mode(), torch.is_anomaly_enabled()),
        "gc": (gc.isenabled(), gc.get_threshold(), gc.get_freeze_count() > 0),
        "signals": {signum: signal.getsignal(signum) for signum in signal.valid_signals()},
        "warnings": list(warnings.filters),
        "logging": [logging.getLogger(name).level for name in ("lightning.pytorch", "torchao", "torch.utils._pytree")],
        "process": (Path.cwd(), dict(os.environ)),
    }


@cases("module", OwnLoaders, Failing)
def test_the_process_is_left_as_it_was(module):
    flags = {"deterministic": True, "benchmark": True, "detect_anomaly": True}
    instance, before = module(), process_state()
    with suppress(ArithmeticError):
        measure(instance, matmul_precision="high", seed=7, trainer=flags)
    assert process_state() == before


@cases("options", {"mode": "forward", "precision": "bf16-true"}, {"zero_grad": "after_step"})
def test_the_module_is_left_as_it_was_but_for_its_weights(options):
    def state():
        return vars(module).keys(), module._trainer, {name: part.training for name, part in module.named_modules()}

    module = OwnLoaders().eval()
    module.net[0].train()
    before = state()
    measure(module, **options)
    assert state() == before
    assert {parameter.dtype for parameter in module.parameters()} == {module.dtype} == {torch.float32}
    assert all(parameter.grad is None for parameter in module.parameters())
    # It can still be trained.
    assert measure(module).record.phases.optimizer.mean_s > 0


@cases("is_failing", False, True)
def test_buffers_gradients_and_what_is_frozen_come_back(is_failing):
    class Freezing(OwnLoaders):
        def training_step(self, batch, batch_idx):
            # As `toggle_optimizer` does.
            self.net[0].requires_grad_(False)
            if is_failing:
                raise ArithmeticError
            return super().training_step(batch, batch_idx)

    module = Freezing()
    module.register_buffer("table", torch.ones(2, dtype=torch.float64))
    module.net[2].weight.grad = gradient = torch.full((1, 32), 7.0)
    with suppress(ArithmeticError):
        measure(module, precision="bf16-true")
    assert module.table.dtype == torch.float64
    assert [parameter.requires_grad for parameter in module.parameters()] == [True] * 4
    assert module.net[2].weight.grad is gradient
    assert (gradient == 7).all()


def test_a_module_keeps_the_blocks_that_the_measurement_leaves_out():
    module = OwnLoaders()
    module.blocks = torch.nn.ModuleList(torch.nn.Linear(16, 16) for _ in range(6))
    # The weights of four blocks are left out.
    counts = [measure(module, **options).record.model.parameter_count for options in ({"blocks": 2}, {})]
    assert counts[1] - counts[0] == 4 * (16 * 16 + 16)
    assert (len(module.blocks), hasattr(module, "flops_per_token")) == (6, False)


def test_a_copy_leaves_the_weights_alone():
    module = OwnLoaders()
    before = module.net[0].weight.clone()
    for copy in (True, False):
        measure(module, copy=copy)
        assert torch.equal(module.net[0].weight, before) == copy


def test_layers_that_are_left_in_eval_mode_are_told():
    module = OwnLoaders()
    module.net.eval()
    with pytest.warns(match="in eval mode"):
        measure(module)


def test_measure_works_in_a_thread_and_beside_a_running_event_loop():
    async def notebook_cell():
        return await asyncio.to_thread(measure), measure()

    assert [run.outcome for run in asyncio.run(notebook_cell())] == ["ok", "ok"]


def test_a_measurement_within_another_is_refused():
    class Nested(Callback):
        def on_train_start(self, *_):
            measure()

    with usage_error("another measurement runs in this process"):
        measure(trainer={"callbacks": [Nested()]})
    assert measure().outcome == "ok"


def test_running_out_of_memory_returns_a_run_and_keeps_no_batch_alive(tmp_path):
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


def test_a_measured_module_and_its_device_memory_go_with_their_last_owner():
    module = OwnLoaders()
    reference = weakref.ref(module)
    run = measure(module)
    del module
    gc.collect()
    assert run.outcome == "ok"
    assert reference() is None


class Lazy(OwnLoaders):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.LazyLinear(1)


@cases(
    "call | message",
    (lambda: measure(torch.nn.Linear(2, 2)), "Linear is no lightning.pytorch.LightningModule"),
    (lambda: measure(TokenModel()), r"has no train_dataloader\(\); give a DataLoader"),
    (lambda: measure(Regression(), Data), "data is Data; give a DataLoader, an instance"),
    (lambda: measure(Regression(), "corpus.txt"), "data is 'corpus.txt'; give a DataLoader"),
    (lambda: measure(instrument="kernel"), "did you mean kernels"),
    (lambda: measure(trainer={"acelerator": "cpu"}), "the Trainer refuses its flags"),
    (lambda: measure(trainer={"min_steps": 9}), "trainer.min_steps is 9"),
    (lambda: measure(min_window_s=math.nan), "measure.min_window_s is nan; it must be at least 0"),
    (lambda: measure(Lazy()), "cannot be measured: a lazy module has no sizes"),
    (lambda: measure(mode="backward"), "mode is 'backward'; allowed: inference, forward"),
    (lambda: measure(compile={"mod": "default"}), "did you mean --compile.mode?"),
)
def test_a_mistake_is_an_exception_of_one_line(call, message):
    with usage_error(message) as raised:
        call()
    assert "\n" not in str(raised.value)


@cases("signum | error", (signal.SIGINT, KeyboardInterrupt), (signal.SIGTERM, SystemExit))
def test_ctrl_c_is_a_keyboard_interrupt_and_sigterm_an_exit_and_they_leave_the_handlers(signum, error, tmp_path):
    class Impatient(Callback):
        def on_train_batch_end(self, *_):
            signal.raise_signal(signum)

    before = signal.getsignal(signum)
    with pytest.raises(error):
        measure(trainer={"callbacks": Impatient()}, results_dir=tmp_path)
    assert signal.getsignal(signum) is before
    (run,) = lmbench.load(tmp_path)
    assert run.outcome == "interrupted"
    assert measure().outcome == "ok"


def test_a_window_has_as_many_steps_as_were_asked_for_or_lasts_for_20_and_3_s():
    for asked, steps, requested in (({"steps": 7}, 7, (7, 0.0)), ({}, 8, (20, 3.0))):
        flags = {"accelerator": "cpu", "max_steps": 9}
        run = lmbench.measure(Regression(), Data(), warmup_steps=1, probe_steps=0, trainer=flags, **asked)
        window = run.record.window
        assert (window.steps, (window.requested_steps, window.requested_s)) == (steps, requested)


class Scheduled(TokenModel):
    """Its learning rate falls over all steps that its Trainer expects, and it reads them in each step."""

    def training_step(self, batch):
        self.log("total", float(self.trainer.estimated_stepping_batches))
        return super().training_step(batch)

    def configure_optimizers(self):
        optimizer = super().configure_optimizers()
        total = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1, 0, int(total))
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_a_schedule_over_all_steps_of_the_trainer_has_those_of_1000_epochs_which_end_no_window():
    ids = torch.arange(8)[None]
    loader = DataLoader([(ids[0], ids[0])])
    for data, total in ((loader, 1000), (TokenData(batch_size=2, context_length=4, vocab_size=50), 100_000)):
        scalars = measure(Scheduled(), data).record.scalars
        assert scalars == {"learning_rate": pytest.approx(1e-3, rel=0.01), "total": total}
    run = measure(TokenModel(), loader, steps=1100)
    assert (run.outcome, run.record.window.steps) == ("ok", 1100)
