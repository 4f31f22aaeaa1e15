"""A disk that fills up under a real run: what fits is written, what is lost is told."""

from __future__ import annotations

import resource
from functools import partial

from fit_process import sound_result, start_fit
from tables import cases

from lmbench.records.store import RESERVE_FILE

WORDS = ("--measure.steps=150", "--measure.probe_steps=3")
SEEN = 3 + 150


def limit_files(size_bytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, size_bytes))


@cases("size_kib", 128, None)
def test_a_full_disk_keeps_what_fits_and_the_run_measures_to_its_end(size_kib, small_disk, tmp_path):
    """On disks of a few KiB, and without one under a limit on the size of a file."""
    if size_kib is not None:
        small_disk(size_kib)
    fit = start_fit(tmp_path, *WORDS, before=partial(limit_files, 40 * 1024) if size_kib is None else None)
    # On a busy machine a log is told of progress, too.
    assert (fit.wait(), fit.err.count("measuring goes on")) == (1, 1)
    assert "150 steps after 3 of warm-up" in fit.out
    assert "error in recording" in fit.out
    run = sound_result(fit)
    assert run.outcome == "error"
    assert run.record.unwritten_step_count == SEEN - len(run.steps) > 0
    assert (run.record.exit_code, run.record.error.phase, run.record.phases.step.n) == (1, "recording", 150)
    assert not (run.path / RESERVE_FILE).exists()


def test_a_disk_that_is_full_before_the_start_is_refused(small_disk, tmp_path):
    results = small_disk(4)
    fit = start_fit(tmp_path, *WORDS)
    assert (fit.wait(), fit.err.count("\n"), list(results.iterdir())) == (2, 1, [])
    assert "cannot be written: No space left on device" in fit.err


def test_steps_that_waited_are_written_once_there_is_room_again(small_disk, tmp_path):
    ballast = small_disk(1024) / "ballast"
    ballast.write_bytes(bytes(900 * 1024))
    fit = start_fit(tmp_path, "--measure.steps=400", "--measure.probe_steps=0")
    fit.wait_until(lambda: "No space left" in fit.err)
    ballast.unlink()
    assert fit.wait() == 0
    run = sound_result(fit)
    assert (run.outcome, run.record.unwritten_step_count, len(run.steps)) == ("ok", 0, 403)
