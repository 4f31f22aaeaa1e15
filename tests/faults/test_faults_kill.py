"""SIGKILL at any instant of a real `lmbench fit`: the result loads, and at most a second or 50 steps are missing."""

from __future__ import annotations

import random
import signal
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import psutil
from fit_process import sound_result, start_fit

from lmbench.callbacks.phase_timer import FLUSH_S, FLUSH_STEPS
from lmbench.files import ScratchFolder

WARMUP, STEPS = 3, 120
SEEN = WARMUP + STEPS
WORDS = (f"--measure.warmup_steps={WARMUP}", f"--measure.steps={STEPS}", "--measure.probe_steps=3")


def check_killed(fit, code):
    """What a process that was killed has left, against the times at which its steps really ended."""
    done = fit.ticks[:SEEN]
    run = sound_result(fit)
    if run is None:
        assert not done
        return "nothing yet"
    assert run.outcome in (("killed", "ok") if code else ("ok",))
    missing = done[len(run.steps) :]
    if missing:
        longest = max((b - a for a, b in pairwise(done)), default=0)
        assert len(missing) <= FLUSH_STEPS + 1
        assert missing[-1] - missing[0] <= FLUSH_S * 1e9 + longest
    return run.outcome


def test_a_kill_at_any_of_14_instants_loses_at_most_a_second_or_50_steps(tmp_path):
    def kill(number, instant):
        step, seconds = instant
        fit = start_fit(tmp_path / str(number), *WORDS, ticks=True)
        fit.wait_for_step(step)
        fit.signal_after(seconds, signal.SIGKILL)
        return check_killed(fit, fit.wait()), len(fit.ticks)

    # Seconds after the end of a step, so that most of them meet the window on a machine of any speed.
    before = [(0, seconds) for seconds in (0.0, 0.15)]
    within = [(SEEN * index // 10, 0.01 * random.random()) for index in range(10)]
    after = [(SEEN, 0.2 * random.random()) for _ in range(2)]
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(kill, range(14), [*before, *within, *after]))
    outcomes = [outcome for outcome, _ in found]
    assert outcomes.count("killed") > 6
    assert "nothing yet" in outcomes
    # They did meet the run everywhere: each quarter of its steps holds some.
    met = [4 * done // SEEN for _, done in found[2:12]]
    assert all(met.count(quarter) for quarter in range(4)), met


def test_a_kill_while_w_and_b_writes_ends_its_process_and_the_next_one_clears_what_it_left(tmp_path, monkeypatch):
    (tmp_path / "site").mkdir()
    slow = "import os, time; open(os.environ['PID_FILE'], 'w').write(str(os.getpid())); time.sleep(600)"
    (tmp_path / "site" / "wandb.py").write_text(slow)
    monkeypatch.setenv("PID_FILE", str(tmp_path / "pid"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.delenv("WANDB_MODE")
    fit = start_fit(tmp_path / "fit", "--measure.steps=4", "--wandb.mode=offline")
    fit.wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    child = psutil.Process(int((tmp_path / "pid").read_text()))
    (left,) = tmp_path.glob("lmbench-wandb-*")
    fit.send_signal(signal.SIGKILL)
    fit.wait()
    child.wait(timeout=10)
    assert fit.results[0].outcome == "ok"
    (tmp_path / "lmbench-of-mine").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", None)
    with ScratchFolder("first") as first, ScratchFolder("second"):
        assert (left.exists(), Path(first).exists()) == (False, True)
    assert [path.name for path in tmp_path.glob("lmbench-*")] == ["lmbench-of-mine"]
