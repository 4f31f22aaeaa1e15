"""Steps and summary reach the loggers of a user's own Trainer."""

from __future__ import annotations

import csv
import re

from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import DummyLogger

from lmbench.callbacks import PhaseTimer, RunRecorder

from conftest import SlowBatches, quiet_trainer


class Kept(DummyLogger):
    """Keeps the logged metrics, and the global steps at which they were logged."""

    def __init__(self):
        super().__init__()
        self.metrics, self.logged_at = [], set()

    def log_metrics(self, metrics, step=None):
        self.metrics.append((step, metrics))
        self.logged_at.add(self.trainer.global_step)

    @property
    def steps(self):
        return [
            step
            for step, metrics in self.metrics
            if {"lmbench/warmup/time/step_ms", "lmbench/time/step_ms"} & {*metrics}
        ]


class Broken(DummyLogger):
    def log_metrics(self, metrics, step=None):
        raise ConnectionError("its server\nis gone")


def logged(*others, **flags):
    logger = Kept()
    logger.trainer = quiet_trainer(PhaseTimer(), logger=[*others, logger], **flags)
    return logger


def test_every_logger_has_every_step_and_the_summary(tmp_path, sleeper):
    logger, recorder = logged(CSVLogger(tmp_path), max_steps=9), RunRecorder(str(tmp_path / "results"))
    timer = logger.trainer.callbacks[0]
    logger.trainer.callbacks.append(recorder)
    logger.trainer.fit(sleeper, SlowBatches())
    (file,) = tmp_path.glob("lightning_logs/version_0/metrics.csv")
    rows = list(csv.DictReader(file.open()))
    assert [int(row["step"]) for row in rows] == [*range(9), 8]
    forward_ms = [record.forward_s * 1e3 for record in timer.records]
    keys = ["lmbench/warmup/time/forward_ms"] * 5 + ["lmbench/time/forward_ms"] * 4
    assert [float(row[key]) for key, row in zip(keys, rows[:9], strict=True)] == forward_ms
    assert not any(row["lmbench/time/forward_ms"] for row in rows[:5])
    assert [float(row["lmbench/train/is_warmup"]) for row in rows[:9]] == [1.0] * 5 + [0.0] * 4
    assert float(rows[9]["lmbench/summary/time/backward_ms"]) == recorder.run.phases.backward.mean_s * 1e3
    assert float(rows[9]["lmbench/summary/window/wall_s"]) == recorder.run.window.wall_s
    assert logger.steps == list(range(9))


def test_a_timer_alone_is_enough_and_nothing_is_told_before_training_is_over(sleeper):
    logger = logged(max_steps=8)
    logger.trainer.fit(sleeper, SlowBatches())
    assert logger.steps == list(range(8))
    assert logger.metrics[-1][1]["lmbench/summary/time/step_ms"] > 0
    assert re.match(r"PhaseTimer, mean of 3 steps in ms: step [\d.]+, data [\d.]+, ", repr(logger.trainer.callbacks[0]))
    assert logger.logged_at == {8}
    # A second fit logs its own steps only, at their global steps.
    logger.metrics.clear()
    logger.trainer.fit_loop.epoch_loop.max_steps = 14
    logger.trainer.fit(sleeper, SlowBatches())
    assert logger.steps == list(range(8, 14))


def test_a_logger_that_fails_costs_one_line_and_not_the_run(sleeper, capsys):
    logger = logged(Broken(), max_steps=7)
    logger.trainer.fit(sleeper, SlowBatches())
    line = "lmbench: Broken did not take what was measured: ConnectionError: its server is gone\n"
    assert line in capsys.readouterr().err
    assert len(logger.metrics) == 8
