"""Growth, the cost of checkpoints and changes of pace are found where they are planted, within their intervals."""

from __future__ import annotations

import numpy as np
import pytest
from tables import cases

from lmbench.records.endurance import Saving, leak_limit
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.trends import changes_of, growth_of, saving_of
from lmbench.report.beside import endurance_lines

MB = 1e6
COUNT = 120
NOISE = np.random.default_rng(0).normal(0, 1, COUNT)


@cases("""
- [mb_per_step, end, jump_mb, noise_mb, leaks]
- [31, 120, 0, 5, true]
- [31, 50, 0, 5, false]
- [0, 120, 400, 1, false]
- [0, 120, 0, 5, false]
- [0.002, 120, 0, 0, false]
""")
def test_memory_that_grows_to_the_end_leaks_by_so_much_a_step(mb_per_step, end, jump_mb, noise_mb, leaks):
    numbers = np.arange(COUNT)
    host_bytes = MB * (mb_per_step * numbers.clip(max=end) + jump_mb * (numbers > 55) + noise_mb * NOISE)
    steps = [StepRecord(step=step, host_bytes=int(size)) for step, size in enumerate(host_bytes)]
    growth = growth_of(steps, "host_bytes")
    assert (growth.low_bytes_per_step > leak_limit(COUNT)) == leaks
    if leaks or not noise_mb:
        assert growth.bytes_per_step == pytest.approx(MB * mb_per_step, rel=0.01)
    assert growth_of(steps[:11], "host_bytes").bytes_per_step is None


def saved(slower, blocked_s):
    """Steps with a checkpoint at every 20th, beside whose writing 8 steps are slower."""
    steps = [StepRecord(step=step, step_s=0.1 * (1 + 0.01 * noise)) for step, noise in enumerate(NOISE)]
    for save in range(20, COUNT, 20):
        steps[save].checkpoint_s = blocked_s
        for step in steps[save + 1 : save + 9]:
            step.is_saving, step.step_s = True, step.step_s * (1 + slower)
    return steps


@cases("""
- [slower, blocked_s]
- [0.1, 0.02]
- [0.0, 0.2]
- [4.0, 0.0001]
""")
def test_a_planted_interference_and_the_cost_of_saving_lie_in_their_intervals(slower, blocked_s):
    run = RunRecord(SCHEMA_VERSION, "ok", saving=Saving(checkpoint_bytes=10**9, written_s=0.5))
    saving_of(saved(slower, blocked_s), run.saving)
    saving = run.saving
    assert (saving.count, saving.interval_steps, saving.blocked_s) == (5, 20, pytest.approx(blocked_s))
    assert saving.written_bytes_per_s == 2 * 10**9
    low, high = saving.slowed_interval
    assert low < slower < high
    assert high - low < 0.03 * (1 + slower)
    assert (low > 0) == (slower > 0)
    cost = (blocked_s + 8 * slower * 0.1) / 2.0
    assert saving.cost_interval[0] < cost < saving.cost_interval[1]
    text = " ".join(line.text for line in endurance_lines(run))
    assert text.startswith(f"5 checkpoints of 0.93 GiB block {blocked_s * 1e3:.3g}"[:36])
    assert f"take {saving.slowed_fraction:+.1%} [{low:+.1%}, {high:+.1%}]" in text


def test_a_single_cycle_between_checkpoints_tells_no_cost():
    run = RunRecord(SCHEMA_VERSION, "ok")
    saving_of(saved(0.0, 0.02)[:50], run.saving)
    assert run.saving.count == 2
    assert not any("in all" in line.text for line in endurance_lines(run))


def test_a_change_of_pace_is_told_with_its_moment_and_what_changed_beside():
    steps = [
        StepRecord(
            step=step, step_s=(1.0 if step < 70 else 1.06) * (1 + 0.002 * NOISE[step]), reserved_bytes=2**30,
            excluded_s=0.0, sm_clock_hz=(1.98e9 if step < 70 else 1.7e9) if step % 10 == 0 else None,
        )
        for step in range(COUNT)
    ]  # fmt: skip
    (change,) = changes_of(steps)
    assert (change.step, change.after_s) == (70, pytest.approx(70, rel=0.01))
    assert change.low < 1.06 < change.high
    assert (change.before["sm_clock_hz"], change.after["sm_clock_hz"]) == (pytest.approx(1.98e9), pytest.approx(1.7e9))
    run = RunRecord(SCHEMA_VERSION, "ok")
    run.window.changes = [change]
    assert "SM clock 1980 -> 1700 MHz, reserved 1.00 -> 1.00 GiB" in endurance_lines(run)[0].text
    assert changes_of(steps[:70]) == []
