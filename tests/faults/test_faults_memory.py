"""Memory that really runs out on the CPU, in every phase: outcome `oom`, exit code 3, what was measured is kept."""

from __future__ import annotations

from functools import partial

import pytest
from fit_process import plant, start_fit
from planted_faults import leave_address_space, return_freed_memory

from lmbench.fit.cli import BenchCLI

# So large that every phase asks for more than is left: logits of 40 MB, which malloc never keeps for a next time.
SIZE = ("--model.d_model", "64", "--data.context_length", "256", "--data.batch_size", "4")
WORDS = (*SIZE, "--measure.steps", "20", "--measure.probe_steps", "3")
SEEN = 3 + 20

PHASES = {
    # what runs out: hook of a user's callback, how many times it was called before, phase, steps kept
    "before the first step": ("setup", 0, "setup", 0),
    "forward": ("on_train_batch_start", 8, "forward", 8),
    "backward": ("on_before_backward", 8, "backward", 8),
    "optimizer's state": ("on_before_optimizer_step", 0, "optimizer", 0),
}


@pytest.mark.parametrize("phase", PHASES)
def test_memory_that_runs_out_in_a_phase_is_told_with_phase_and_bytes(phase, tmp_path):
    hook, at, told, kept = PHASES[phase]
    fit = start_fit(tmp_path, *WORDS, *plant(hook, "exhaust", at), before=return_freed_memory)
    assert fit.wait() == 3
    (run,) = fit.results
    assert (run.outcome, run.record.exit_code, run.damage) == ("oom", 3, None)
    error = run.record.error
    assert (error.phase, error.where) == (told, "host")
    assert error.requested_bytes > 1_000_000
    assert len(run.steps) == kept
    assert f"oom in {told}" in fit.out
    assert fit.err == ""


@pytest.mark.parametrize("words", [("--data.num_batches", "1000000"), ("--model.d_model", "4096")])
def test_data_and_models_that_do_not_fit_leave_a_result(words, tmp_path):
    fit = start_fit(tmp_path, *WORDS, *words, before=partial(leave_address_space, 400 * 1024**2))
    assert fit.wait() == 3
    (run,) = fit.results
    assert (run.outcome, run.record.error.phase, run.steps) == ("oom", "setup", [])
    assert fit.err == ""


@pytest.mark.parametrize(("hook", "phase"), [("on_train_batch_start", "forward"), ("on_before_backward", "backward")])
def test_memory_that_runs_out_in_the_probe_steps_leaves_the_window_valid_and_says_so(hook, phase, tmp_path):
    fit = start_fit(tmp_path, *WORDS, *plant(hook, "exhaust", SEEN + 1), before=return_freed_memory)
    assert fit.wait() == 0
    (run,) = fit.results
    assert (run.outcome, run.record.error) == ("ok", None)
    assert (run.record.window.steps, len(run.steps)) == (20, SEEN)
    assert run.record.probe.error.phase == phase
    assert {guard.name: guard.status for guard in run.record.guards}["probe_steps"] == "warn"
    assert "out of memory in the probe steps" in fit.out


def refuse_to_parse():
    """Memory ends while the command line is read. A real end there becomes whatever jsonargparse makes of it."""

    def parse_arguments(*_):
        raise MemoryError

    BenchCLI.parse_arguments = parse_arguments


def test_memory_that_is_short_from_the_start_gets_one_line(tmp_path):
    fit = start_fit(tmp_path, *WORDS, before=refuse_to_parse)
    assert fit.wait() == 3
    assert fit.err.startswith("lmbench: out of memory")
    assert fit.err.count("\n") == 1
    assert fit.results == []
