"""Steps and summary reach the loggers of a user's own Trainer."""

from __future__ import annotations

import re

from lightning.pytorch.loggers.logger import DummyLogger

from lmbench.callbacks import PhaseTimer, RunRecorder

from conftest import SlowBatches, quiet_trainer


class Kept(DummyLogger):
    """Keeps what is logged: the step, the metrics, and the training's global step at that moment."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def log_metrics(self, metrics, step=None):
        self.calls.append((step, metrics, self.trainer.global_step))


class Broken(DummyLogger):
    def log_metrics(self, metrics, step=None):
        raise ConnectionError("its server\nis gone")


def test_every_logger_has_every_step_and_the_summary_and_one_that_fails_costs_a_line(tmp_path, sleeper, capsys):
    logger, timer, recorder = Kept(), PhaseTimer(), RunRecorder(str(tmp_path / "results"))
    logger.trainer = quiet_trainer(timer, recorder, logger=[Broken(), logger], max_steps=9)
    logger.trainer.fit(sleeper, SlowBatches())
    line = "lmbench: Broken did not take what was measured: ConnectionError: its server is gone\n"
    assert line in capsys.readouterr().err
    assert [step for step, *_ in logger.calls if step is not None][-10:] == [*range(9), 8]
    *steps, summary = [metrics for _, metrics, _ in logger.calls[-10:]]
    keys = ["lmbench/warmup/time/forward_ms"] * 5 + ["lmbench/time/forward_ms"] * 4
    expected_ms = [record.forward_s * 1e3 for record in timer.records]
    assert [metrics[key] for key, metrics in zip(keys, steps, strict=True)] == expected_ms
    assert not any("lmbench/time/forward_ms" in metrics for metrics in steps[:5])
    assert [metrics["lmbench/train/is_warmup"] for metrics in steps] == [1.0] * 5 + [0.0] * 4
    assert summary["lmbench/summary/time/backward_ms"] == recorder.run.phases.backward.mean_s * 1e3
    assert summary["lmbench/summary/window/wall_s"] == recorder.run.window.wall_s


def test_a_timer_alone_is_enough_and_nothing_is_told_before_training_is_over(sleeper):
    logger, timer = Kept(), PhaseTimer()
    logger.trainer = quiet_trainer(timer, logger=logger, max_steps=8)
    for last in (8, 14):
        logger.calls.clear()
        logger.trainer.fit_loop.epoch_loop.max_steps = last
        logger.trainer.fit(sleeper, SlowBatches())
        # Each fit logs its own steps, at their global steps.
        assert [step for step, *_ in logger.calls] == [*range(last - len(timer.records), last), last - 1]
        assert {reached for *_, reached in logger.calls} == {last}
    assert logger.calls[-1][1]["lmbench/summary/time/step_ms"] > 0
    assert re.match(r"PhaseTimer, mean of 1 steps in ms: step [\d.]+, data [\d.]+, ", repr(timer))
