"""Numbers that a callback or the module's `self.log` logs reach the steps, the summary, loggers, columns and `list`."""

from __future__ import annotations

import math

import pytest
import torch
from fit_process import measure_here
from refusals import usage_error
from runs import make_sweep, section_of, table_rows
from strangers import Data, Regression
from tables import cases

from lmbench.callbacks import MeasurementSession, Observer
from lmbench.instruments.window import Schedule
from lmbench.report.logged import of_run, of_step

from conftest import measure


class Logging(Observer):
    """Logs a host number and a device scalar by two sources, and replaces the first number."""

    def __init__(self, name):
        self.name = name

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        self.session.log_scalar(self.name, 99, source="first")
        self.session.log_scalar(self.name, 3, source="first")
        self.session.log_scalar(self.name, torch.full((1,), 4.0, requires_grad=True), "m", source="second")


def test_a_declared_scalar_is_folded_over_its_sources_as_it_is_declared_and_any_other_is_their_mean(sleeper):
    steps, session = measure(sleeper, Logging("gradient_norm"), Logging("tread.depth"))
    assert [step.gradient_norm for step in steps] == [5.0] * 8
    assert [step.scalars for step in steps] == [{"tread/depth": 3.5}] * 8
    assert session.run.scalar_units["tread/depth"] == "m"


@cases("value | kind", (torch.ones(3), "Tensor"), ("fast", "str"))
def test_what_is_no_single_number_is_refused_where_it_is_logged(value, kind):
    with usage_error(rf"log_scalar\('speed'\) was given a {kind}; give one number"):
        MeasurementSession().log_scalar("speed", value)


class Logs(Regression):
    """Logs a value now and then, one for the epoch alone, and one that is not finite; a scheduler changes the rate."""

    def training_step(self, batch, batch_idx):
        if self.global_step % 2:
            self.log("odd.step", torch.tensor(float(self.global_step)))
        self.log("gradient_norm", 7.0)
        self.log("of_epoch", 1.0, on_step=False, on_epoch=True)
        self.log("both", torch.tensor(math.nan), on_step=True, on_epoch=True)
        self.seen = [*getattr(self, "seen", []), self.optimizers().param_groups[0]["lr"]]
        return super().training_step(batch, batch_idx)


@pytest.fixture(scope="module")
def logs():
    module = Logs()
    return module, measure_here(module, Data(), steps=8)


def test_a_logged_value_is_in_the_steps_that_logged_it_unless_it_is_of_the_epoch_or_has_a_name_of_lmbenchs_own(logs):
    _, run = logs
    assert [step.scalars.get("odd/step") for step in run.steps] == [s.step if s.step % 2 else None for s in run.steps]
    assert all(step.scalars["train_loss"] == pytest.approx(step.loss) for step in run.steps)
    assert all(math.isnan(step.scalars["both"]) for step in run.steps)

    assert {*run.record.scalars} == {"odd/step", "both", "train_loss", "learning_rate"}
    assert {step.gradient_norm for step in run.steps} == {None}


def test_a_scheduled_learning_rate_is_the_rate_that_the_step_updated_with(logs):
    module, run = logs
    assert [step.scalars["learning_rate"] for step in run.steps] == module.seen[: len(run.steps)]
    assert len({*module.seen}) > 8


class TensorRate(Regression):
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=torch.tensor(1.0), foreach=False)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


def test_a_learning_rate_that_is_a_tensor_is_the_one_before_its_scheduler_changed_it():
    run = measure_here(TensorRate(), Data(), steps=3, warmup_steps=0, probe_steps=0)
    assert [step.scalars["learning_rate"] for step in run.steps] == [1.0, 0.5, 0.25]


def test_the_summary_and_the_loggers_have_the_means_of_the_window(logs):
    _, run = logs
    window = [step.loss for step in run.steps if step.stage == "window"]
    assert run.record.scalars["train_loss"] == pytest.approx(sum(window) / len(window))
    assert of_step(run.steps[0], run.record)["scalars/train_loss"] == run.steps[0].scalars["train_loss"]
    assert of_run(run.record)["scalars/train_loss"] == run.record.scalars["train_loss"]


class LogsLoss(Regression):
    """Logs its loss as `loss`, plus a number that it does not train with."""

    def __init__(self, more):
        super().__init__()
        self.more = more

    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss + self.more)
        return loss


@cases("more", 0.0, 1.0)
def test_a_logged_loss_is_a_number_beside_the_loss_of_the_step_only_where_it_is_another_one(more):
    record = measure_here(LogsLoss(more), Data(), probe_steps=0).record
    expected = {"loss": pytest.approx(record.loss.mean + more)} if more else {}
    assert {name: mean for name, mean in record.scalars.items() if name == "loss"} == expected


class Many(Observer):
    """Logs more values in a flush's steps than the ring of scalars holds."""

    def batch_ended(self, outputs, batch):
        for number in range(300):
            self.session.log_scalar(f"value_{number}", torch.tensor(float(number)))


def test_hundreds_of_scalars_a_step_are_read_before_they_are_overwritten(sleeper):
    sleeper.forward_s = sleeper.backward_s = sleeper.optimizer_s = 0.0
    steps, _ = measure(sleeper, Many(), schedule=Schedule(2, 40))
    assert all(step.scalars[f"value_{number}"] == number for step in steps for number in range(300))


def test_a_scalar_is_a_column_in_its_unit_and_a_condition_of_list(tmp_path, printed):
    def change(run, _repeat):
        return {"scalars": {"tread/depth": run["data"]["batch_size"] / 2}, "scalar_units": {"tread/depth": "m"}}

    table = {"title": "Depth", "rows": ["batch"], "columns": ["scalars.tread/depth"]}
    view = {"title": "Depth", "tables": [table]}
    home = make_sweep(tmp_path / "s", {"data.batch_size": [1, 5]}, view=view, change=change)
    assert [row["mean tread/depth"] for row in table_rows(section_of(home).tables[0])] == ["0.5", "2.5"]
    assert "mean tread/depth (m)" in printed("report", home)
    assert "batch 5" in printed("list", home, "--where", "scalars.tread/depth=2.5")
