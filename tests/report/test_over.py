"""Figures over commits and over time: planted change points are found, and none where nothing was planted."""

from __future__ import annotations

import itertools
import math
import random
import re
from pathlib import Path

import numpy as np
import pytest
import yaml
from repository import git
from runs import BASE, make_run, make_sweep
from tables import cases, csv_of, flat

from lmbench.records.statistics import level_changes


@cases("levels", *yaml.safe_load("[[[5, 1.0], [5, 1.05]], [[4, 1.0], [4, 1.05], [4, 1.0]], [[9, 1.0], [1, 1.2]]]"))
def test_planted_levels_are_found_with_their_size(levels):
    rng = random.Random(2)
    changes = level_changes([level * rng.gauss(1, 0.004) for count, level in levels for _ in range(count)])
    assert [change.index for change in changes] == list(itertools.accumulate(count for count, _ in levels))[:-1]
    for change, (before, after) in zip(changes, itertools.pairwise(level for _, level in levels), strict=True):
        assert change.low < change.point < change.high
        assert change.point == pytest.approx(after / before, abs=0.02)


@cases("tails", "normal", "heavy")
def test_at_most_a_few_in_a_hundred_series_of_noise_show_a_change(tails):
    rng = np.random.default_rng(3)
    for count in (4, 8, 30):
        draws = rng.normal(size=(300, count)) if tails == "normal" else rng.standard_t(3, size=(300, count))
        # 15 of 300 is 5 %; 11 more are three standard deviations.
        assert sum(bool(level_changes(np.exp(0.01 * series))) for series in draws) <= 26


def test_equal_values_have_no_change_and_an_exact_one_has_no_width():
    assert level_changes([3.0] * 9) == []
    assert level_changes([1.0, 2.0, 2.0]) == []
    # A single deviating value is an outlier, unless it is the newest.
    noisy = [1 + 0.001 * (index % 3) for index in range(12)]
    assert level_changes([*noisy[:6], 1.2, *noisy[6:]]) == []
    assert [change.index for change in level_changes([*noisy, 1.2])] == [12]
    (change,) = level_changes([1e9] * 4 + [2e9] * 4)
    assert (change.index, change.point, change.low, change.high) == (4, *[pytest.approx(2.0)] * 3)


def test_one_of_two_values_now_and_then_is_noise_and_a_change_is_still_found():
    """Without noise of its own such a series had a change in 88 of 100 cases, and a true one was found in 13."""
    rng = np.random.default_rng(5)
    series = 1 + 0.01 * (rng.random((100, 40)) < 0.2)
    # 5 % is 5; 6 more are three standard deviations.
    assert sum(bool(level_changes(values)) for values in series) <= 11
    series[:, 20:] *= 1.05
    found = [[change.index for change in level_changes(values)] for values in series]
    assert found.count([20]) > 90


@cases("""
- [count, most]
- [20, 45]
- [50, 12]
""")
def test_a_single_outlier_is_no_change_and_a_change_is_still_found(count, most):
    """Beside the 5 % of series that any noise may give; without the replacement 59 and 100 % of 300 show one."""
    rng = np.random.default_rng(977)
    series = rng.normal(0, 0.01, (300, count))
    series[np.arange(300), rng.integers(0, count - 1, 300)] += math.log(1.3)
    assert sum(bool(level_changes(np.exp(draw))) for draw in series) <= most
    series[:, count // 2 :] += 0.05
    found = [[change.index for change in level_changes(np.exp(draw))] for draw in series]
    assert sum(any(abs(index - count // 2) < 3 for index in indices) for indices in found) > 270


COMMITS = [f"{number:02x}" * 20 for number in range(1, 11)]


@pytest.fixture
def history(here, monkeypatch):
    """Ten commits with three runs each of two configurations; from the seventh on one is 6 % slower, and holds more."""
    monkeypatch.setenv("COLUMNS", "140")
    rng = random.Random(5)
    for index, commit in enumerate(COMMITS):
        for size, repeat in itertools.product(("small", "medium"), range(3)):
            is_slower = size == "small" and index >= 6
            changes = {
                "started_at": f"2026-11-{index + 1:02}T0{repeat}:00:00+00:00",
                "phases.step.mean_s": 0.1 * (1.06 if is_slower else 1.0) * rng.gauss(1, 0.003),
                "memory.run_peak_allocated_bytes": 2**31 if is_slower else 2**30,
                "environment.code.project.commit": commit,
                "environment.code.project.is_dirty": False,
                "environment.host.hostname": "new" if index >= 6 else "old",
                # An old record has none.
                "environment.variables": {} if index >= 6 else None,
            }
            # The length of the window makes no other configuration.
            settings = {"model.size": size, "measure.min_window_s": index + 1.0}
            make_run(here / "results" / f"{size}-{index}-{repeat}", settings, changes)
    # Neither of these has a time to show.
    make_run(here / "results" / "broken", {"model.size": "small"}, {"outcome": "error"})
    make_run(here / "results" / "profiled", {"model.size": "small"}, {"is_profiled": True})


def test_a_configuration_is_shown_over_commits_with_its_change_points(history, printed):
    text = flat(printed("report", "results", "--over=commit"))
    assert text.count("(+100.00 .. +100 %, host old -> new) at 070707070") == 1
    assert text.count("medium: no change over 10 points") == 1
    assert "code at" not in text
    rows = csv_of(printed("report", "results", "--over=commit", "--format=csv"))
    assert [row["commit"] for row in rows] == [commit[:9] for commit in COMMITS] * 2
    (marked,) = [row for row in rows if row["step_change_fraction"]]
    assert (marked["size"], marked["commit"], marked["ok_runs"]) == ("small", COMMITS[6][:9], "3")
    low, high = (float(marked[f"step_change_{end}_fraction"]) for end in ("low", "high"))
    assert 0.05 < low < 0.06 < high < 0.07
    assert float(marked["peak_change_fraction"]) == pytest.approx(1)
    make_run(Path("results/large"), {"model.size": "large"}, {"environment.code.project.commit": COMMITS[0]})
    text = flat(printed("report", "results", "--over=commit"))
    assert "1 of 3 configurations have fewer than the 4 points that a change takes" in text
    assert "large:" not in text


def test_revisions_of_one_sweep_are_followed_in_the_order_of_its_file(here, printed, refused):
    """The environments of a sweep are its commits; over time each of them is a configuration of its own."""
    names = ["bb", "dd", "aa", "cc"]

    def change(run, repeat):
        name = run["sweep"]["axes"]["environment"]
        # The third commit keeps more on the host; there is no other memory on a CPU.
        return {
            "started_at": f"2026-11-0{names.index(name) + 1}T00:00:00+00:00", "device_type": "cpu",
            "memory": {"host_peak_rss_bytes": (3 if name in "aacc" else 2) * 2**30}, "sweep.environment": name,
            "environment": BASE["environment"] | {"code": {"project": {"commit": name * 20, "is_dirty": False}}},
        }  # fmt: skip

    make_sweep(here / "s", [{"environment": name} for name in names], repeats=3, change=change)
    assert [row["environment"] for row in csv_of(printed("report", "s", "--format=csv"))] == names
    rows = csv_of(printed("report", "s", "--over=commit", "--format=csv"))
    assert [row["commit"] for row in rows] == [(name * 20)[:9] for name in names]
    assert [row["peak_change_fraction"][:4] for row in rows] == ["", "", "0.49", ""]
    assert "no configuration was measured at two of them" in refused("report", "s", "--over=time")


def test_commits_are_in_the_order_of_their_history(here, printed):
    git("init", "-q")
    for _ in range(3):
        # A rebase commits a whole series in one second.
        git("commit", "-q", "--allow-empty", "-m", "x", GIT_COMMITTER_DATE="2026-11-01T00:00:00Z")
    commits = git("rev-list", "--reverse", "--abbrev-commit", "--abbrev=9", "HEAD").split()
    # The oldest was measured last.
    for hour, commit in enumerate((commits[1], commits[2], commits[0])):
        revision = {"environment.code.project.commit": commit, "environment.code.project.is_dirty": False}
        make_run(here / "r" / str(hour), {}, {"started_at": f"2026-11-09T0{hour}:00:00+00:00", **revision})
    drawn = re.findall("|".join(commits), printed("report", "r", "--over=commit", "--format=svg"))
    assert drawn[:3] == commits


def test_a_trial_of_a_search_leaves_out_no_run_of_another_sweep(here, printed):
    for commit, name in zip(COMMITS, ("a_search", "b", "c"), strict=False):
        revision = {"environment.code.project": {"commit": commit, "is_dirty": False}}
        search = {"sweep.search": "trial"} if name == "a_search" else {}
        changes = revision | search
        make_sweep(here / "r" / name, {"data.batch_size": [4]}, change=lambda *_, changes=changes: changes)
    rows = csv_of(printed("report", "r", "--over=commit", "--format=csv"))
    assert [row["commit"] for row in rows] == [commit[:9] for commit in COMMITS[1:3]]
