"""A disk that fills up under a real run: measuring goes on, what fits is written, and the exit code tells."""

from __future__ import annotations

import resource
from functools import partial

import pytest
from fit_process import start_fit

from lmbench.records.store import RESERVE_FILE

WORDS = ("--measure.steps", "150", "--measure.probe_steps", "3")
SEEN = 3 + 150


def limit_files(size_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))


def check_lost(fit):
    """The run measured to its end, and says in one line, its result and its exit code what is lost."""
    assert fit.wait() == 1
    assert fit.err.count("\n") == 1
    assert "measuring goes on" in fit.err
    assert f"{150} steps after 3 of warm-up" in fit.out
    assert "error in recording" in fit.out
    (run,) = fit.results
    assert run.damage is None
    assert [step.step for step in run.steps] == list(range(len(run.steps)))
    assert len(run.steps) < SEEN
    return run


@pytest.mark.parametrize("size_kib", [48, 128])
def test_a_full_disk_keeps_what_fits_and_the_whole_summary(size_kib, small_disk, tmp_path):
    small_disk(size_kib)
    run = check_lost(start_fit(tmp_path, *WORDS))
    assert (run.outcome, run.record.exit_code) == ("error", 1)
    assert run.record.error.phase == "recording"
    assert run.record.unwritten_step_count == SEEN - len(run.steps)
    assert run.record.phases.step.n == 150
    assert not (run.path / RESERVE_FILE).exists()


def test_a_disk_with_room_for_no_summary_still_tells_how_the_run_ended(small_disk, tmp_path):
    small_disk(20)
    run = check_lost(start_fit(tmp_path, *WORDS))
    assert (run.outcome, run.record.unwritten_step_count) == ("error", SEEN - len(run.steps))


def test_a_disk_that_is_full_before_the_start_is_refused(small_disk, tmp_path):
    results = small_disk(4)
    fit = start_fit(tmp_path, *WORDS)
    assert fit.wait() == 2
    assert "cannot be written: No space left on device" in fit.err
    assert fit.err.count("\n") == 1
    assert list(results.iterdir()) == []


def test_steps_that_waited_are_written_once_there_is_room_again(small_disk, tmp_path):
    ballast = small_disk(1024) / "ballast"
    ballast.write_bytes(bytes(900 * 1024))
    fit = start_fit(tmp_path, "--measure.steps", "400", "--measure.probe_steps", "0")
    fit.wait_until(lambda: "No space left" in fit.err)
    ballast.unlink()
    assert fit.wait() == 0
    (run,) = fit.results
    assert (run.outcome, run.record.unwritten_step_count) == ("ok", 0)
    assert [step.step for step in run.steps] == list(range(403))


def test_a_limit_on_file_sizes_is_met_like_a_full_disk(tmp_path):
    run = check_lost(start_fit(tmp_path, *WORDS, before=partial(limit_files, 40 * 1024)))
    assert run.record.unwritten_step_count == SEEN - len(run.steps)
    assert run.record.phases.step.n == 150
