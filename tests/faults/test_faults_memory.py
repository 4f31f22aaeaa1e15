"""Memory that really runs out on the CPU, in every phase: outcome `oom`, exit code 3, what was measured is kept."""

from __future__ import annotations

from functools import partial

from fit_process import plant, start_fit, statuses
from planted_faults import leave_address_space, return_freed_memory
from tables import cases

from lmbench.fit.command_line import CommandLine

# So large that every phase asks for more than is left: logits of 40 MB, which malloc never keeps for a next time.
SIZE = ("--model.d_model=64", "--data.context_length=256", "--data.batch_size=4")
WORDS = (*SIZE, "--measure.steps=4", "--measure.probe_steps=3")
SEEN = 3 + 4


@cases("""
- [hook, calls, phase, steps]
- [setup, 0, setup, 0]
- [on_train_batch_start, 5, forward, 5]
- [on_before_backward, 5, backward, 5]
- [on_before_optimizer_step, 0, optimizer, 0]
- [on_train_batch_start, 8, forward, 7]
""")
def test_memory_that_runs_out_in_a_phase_is_told_with_phase_and_bytes(hook, calls, phase, steps, tmp_path):
    fit = start_fit(tmp_path, *WORDS, *plant(hook, "exhaust", calls), before=return_freed_memory)
    is_probe = calls > SEEN
    assert fit.wait() == (0 if is_probe else 3)
    (run,) = fit.results
    assert (run.outcome, run.damage, len(run.steps)) == ("ok" if is_probe else "oom", None, steps)
    if is_probe:
        assert (run.record.error, run.record.window.steps, run.record.probe.error.phase) == (None, 4, phase)
        assert statuses(run.record)["probe_steps"] == "warn"
        assert "out of memory in the probe steps" in fit.out
    else:
        assert (run.record.error.phase, run.record.error.where) == (phase, "host")
        assert run.record.error.requested_bytes > 1_000_000
        assert f"oom in {phase}" in fit.out
        assert "Traceback" not in fit.err


@cases("word", "--data.num_batches=1000000", "--model.d_model=4096")
def test_data_and_models_that_do_not_fit_leave_a_result(word, tmp_path):
    fit = start_fit(tmp_path, *WORDS, word, before=partial(leave_address_space, 400 * 1024**2))
    # On a busy machine a log is told of progress.
    assert (fit.wait(), "Traceback" in fit.err) == (3, False)
    (run,) = fit.results
    assert (run.outcome, run.record.error.phase, run.steps) == ("oom", "setup", [])


def refuse_to_parse():
    """Memory ends while the command line is read. A real end there becomes whatever jsonargparse makes of it."""

    def understand(*_):
        raise MemoryError

    CommandLine.__init__ = understand


def test_memory_that_is_short_from_the_start_gets_one_line(tmp_path):
    fit = start_fit(tmp_path, *WORDS, before=refuse_to_parse)
    assert (fit.wait(), fit.err.count("\n"), fit.results) == (3, 1, [])
    assert fit.err.startswith("lmbench: out of memory")
