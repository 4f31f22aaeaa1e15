"""SIGKILL at any instant of a real `lmbench fit`: the result loads, and at most a second or 50 steps are missing."""

from __future__ import annotations

import random
import signal
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise

from fit_process import start_fit

from lmbench.callbacks.phase_timer import FLUSH_S, FLUSH_STEPS
from lmbench.records.store import RUN_FILE

WARMUP, STEPS = 3, 120
SEEN = WARMUP + STEPS
WORDS = ("--measure.warmup_steps", str(WARMUP), "--measure.steps", str(STEPS), "--measure.probe_steps", "3")


def check_killed(fit, code):
    """What a process that was killed has left, against the times at which its steps really ended."""
    done = fit.ticks[:SEEN]
    folders = list((fit.folder / "results").glob("*"))
    if not any((folder / RUN_FILE).exists() for folder in folders):
        assert not done
        return "nothing yet"
    (run,) = fit.results
    assert run.damage is None
    assert run.outcome in (("killed", "ok") if code else ("ok",))
    assert [step.step for step in run.steps] == list(range(len(run.steps)))
    missing = done[len(run.steps) :]
    if missing:
        longest = max((b - a for a, b in pairwise(done)), default=0)
        assert len(missing) <= FLUSH_STEPS + 1
        assert missing[-1] - missing[0] <= FLUSH_S * 1e9 + longest
    return run.outcome


def kill_at(instants, folder):
    """Kill a run at each of the instants: seconds after the end of a step, or after the start where it is None."""

    def kill(numbered):
        number, (step, seconds) = numbered
        fit = start_fit(folder / str(number), *WORDS, ticks=True)
        if step is not None:
            fit.wait_for_step(step)
        fit.signal_after(seconds, signal.SIGKILL)
        return check_killed(fit, fit.wait()), len(fit.ticks)

    with ThreadPoolExecutor(3) as pool:
        return list(pool.map(kill, enumerate(instants)))


def test_a_kill_at_any_of_100_instants_loses_at_most_a_second_or_50_steps(tmp_path):
    # Counted in steps, so that most of them meet the window on a machine of any speed.
    before = [(None, 0.3 * random.random()) for _ in range(15)]
    within = [(random.randrange(SEEN), 0.01 * random.random()) for _ in range(70)]
    after = [(SEEN, 0.2 * random.random()) for _ in range(15)]
    found = kill_at([*before, *within, *after], tmp_path)
    outcomes = [outcome for outcome, _ in found]
    assert outcomes.count("killed") > 50
    assert "nothing yet" in outcomes
    # They did meet the run everywhere: each quarter of its steps holds some.
    met = [4 * done // SEEN for _, done in found[15:85]]
    assert all(met.count(quarter) >= 3 for quarter in range(4)), met
