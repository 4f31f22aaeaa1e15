"""What happens around a run: other runs, clocks, outputs that go away, a results folder that is taken away."""

from __future__ import annotations

import os
import pty
import shutil

from fit_process import QUICK, start_fit
from refusals import usage_error
from tables import cases

from lmbench.cli import main
from lmbench.fit.trainer import BenchTrainer


def test_runs_that_start_at_the_same_moment_get_folders_of_their_own(tmp_path):
    fits = [start_fit(tmp_path, *QUICK) for _ in range(3)]
    assert [fit.wait() for fit in fits] == [0] * 3
    runs = fits[0].results
    assert [(run.outcome, len(run.steps)) for run in runs] == [("ok", 9)] * 3
    assert len({run.record.pid for run in runs}) == 3


def test_a_results_folder_that_is_taken_away_does_not_end_the_measurement(tmp_path):
    fit = start_fit(tmp_path, "--measure.steps=100", "--measure.probe_steps=0")
    fit.wait_until(lambda: list(tmp_path.glob("results/*/steps.jsonl")))
    shutil.rmtree(tmp_path / "results")
    assert fit.wait() == 1
    assert "100 steps after 3 of warm-up" in fit.out
    assert "error in recording" in fit.out
    assert fit.err.count("No such file or directory; measuring goes on") == 1


def test_a_reader_that_goes_away_neither_ends_the_run_nor_is_complained_about(tmp_path):
    read, write = os.pipe()
    os.close(read)
    fit = start_fit(tmp_path, *QUICK, stdout=write)
    os.close(write)
    assert (fit.wait(), fit.err) == (0, "")
    assert [(run.outcome, len(run.steps)) for run in fit.results] == [("ok", 9)]


def test_a_terminal_that_goes_away_does_not_end_a_run_that_ignores_it(tmp_path):
    terminal, stream = pty.openpty()
    fit = start_fit(tmp_path, "--measure.steps=60", streams=(stream,) * 3, has_own_session=True)
    os.close(stream)
    fit.wait_until(lambda: list(tmp_path.glob("results/*/steps.jsonl")))
    os.close(terminal)
    fit.wait()
    assert [(run.outcome, len(run.steps), run.record.exit_code) for run in fit.results] == [("ok", 63, 0)]


@cases("variable", "SLURM_NTASKS=2", "WORLD_SIZE=2", "LOCAL_RANK=1", "RANK=x", "PMI_SIZE=1.5")
def test_one_process_of_several_is_refused_in_one_line_whatever_measures(variable, here, monkeypatch, refused):
    name, _, value = variable.partition("=")
    monkeypatch.setenv(name, value)
    for words in (["fit", "smoke"], ["validate", "smoke"], ["sweep", "step_times"], ["compare", "--run", "smoke"]):
        line = refused(*words)
        assert (line.startswith(f"lmbench: {name} is "), "unset" in line, line.count("\n")) == (True, True, 1)
    with usage_error(name):
        BenchTrainer()
    assert list(here.iterdir()) == []
    assert main(["fit", "-h"]) == 0


def test_a_rank_without_the_address_of_the_others_is_refused_and_does_not_wait(here, monkeypatch, refused):
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert refused("fit", "smoke", "--trainer.devices=2", "--trainer.strategy=ddp").startswith(
        "lmbench: LOCAL_RANK is set, and MASTER_ADDR is not"
    )
