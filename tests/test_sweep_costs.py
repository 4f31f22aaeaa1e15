"""What a cell costs, where it goes, and how long a sweep will take."""

from __future__ import annotations

import os

import pytest

from lmbench.cli import main
from lmbench.measure.compiling import empty_cache
from lmbench.measure.milestones import MILESTONES, begin, clock_s, milestones, reach
from lmbench.records.fields import FIELD
from lmbench.records.load import find_runs, load_run
from lmbench.records.process import process_start_s
from lmbench.sweep.cost import cost_of
from lmbench.sweep.engine import ExecEngine
from lmbench.sweep.estimate import Estimate, duration
from lmbench.sweep.plan import make_plan
from lmbench.sweep.supervise import End
from lmbench.sweep.sweep_file import sweep_from


def run_of(**more):
    at = {f"{name}_s": float(index + 1) for index, name in enumerate(MILESTONES)}
    return {"process_start_s": 101.0, "milestones": at, "window": {"warmup_steps": 3}, **more}


def test_the_parts_of_a_cost_are_all_of_it():
    cost = cost_of(run_of(), End(0, "itself", 100.0, 114.0))
    parts = {name: value for name, value in cost.items() if name not in ("total_s", "overhead_s", "compile_s")}
    assert sum(parts.values()) == cost["total_s"] == 14
    assert (cost["start_s"], cost["exit_s"]) == (2, 2)
    # From `ready` to `window_closed` are three parts of a second each.
    assert cost["overhead_s"] == 14 - 3
    assert all(f"sweep.cost.{name}" in FIELD for name in cost)
    assert all(f"milestones.{name}_s" in FIELD for name in MILESTONES)


def test_without_warm_up_step_0_is_a_part_of_the_window():
    run = run_of(window={"warmup_steps": 0})
    at = run["milestones"]
    at["first_step_s"], at["window_opened_s"] = at["window_opened_s"], at["first_step_s"]
    cost = cost_of(run, End(0, "itself", 100.0, 114.0))
    parts = {name: value for name, value in cost.items() if name not in ("total_s", "overhead_s", "compile_s")}
    assert parts.pop("first_step_s") is None
    assert sum(parts.values()) == 14


def test_compiling_is_a_cost_and_no_step():
    more = {"compile": {"first_step_s": 0.9}, "phases": {"step": {"median_s": 0.1}}}
    cost = cost_of(run_of(**more), End(0, "itself", 100.0, 114.0))
    assert cost["compile_s"] == pytest.approx(0.8)
    assert cost["overhead_s"] == pytest.approx(14 - 3 + 0.8)


def test_a_run_that_came_to_nothing_has_its_total():
    cost = cost_of({}, End(-9, "timeout", 100.0, 104.0))
    assert cost["total_s"] == 4
    assert {value for name, value in cost.items() if name != "total_s"} == {None}


def test_milestones_are_dated_from_the_processs_beginning():
    before_s = clock_s()
    begin()
    reach("imported")
    reach("imported")
    found = milestones()
    assert list(found) == ["started_s", "imported_s"]
    assert 0 < found["started_s"] <= found["imported_s"]
    began_s = process_start_s(os.getpid())
    assert began_s is not None
    assert before_s - began_s <= found["started_s"] <= clock_s() - began_s


def test_a_run_passes_its_milestones_in_order(tmp_path):
    words = ["--measure.steps", "3", "--measure.min_window_s", "0", "--measure.results_dir", str(tmp_path), "--quiet"]
    assert main(["fit", "--config", "smoke", *words]) == 0
    (path,) = find_runs([tmp_path])
    found = load_run(path).run["milestones"]
    assert list(found) == [f"{name}_s" for name in MILESTONES]
    assert list(found.values()) == sorted(found.values())


def test_weights_are_not_copied_back_when_a_run_is_over(tmp_path, monkeypatch):
    from lmbench.model.language_model import LanguageModel

    monkeypatch.setattr(LanguageModel, "cpu", lambda self: pytest.fail("moved"))
    words = ["--measure.steps", "3", "--measure.min_window_s", "0", "--measure.results_dir", str(tmp_path), "--quiet"]
    assert main(["fit", "--config", "smoke", *words]) == 0


def ended(cost_s, outcome="ok"):
    return {"outcome": outcome, "sweep": {"cost": {"total_s": cost_s}}}


def test_the_time_left_follows_what_runs_took():
    plan = make_plan("x", sweep_from({"base": {"measure.min_window_s": 5}, "matrix": {"a.b": [1, 2]}, "repeats": 2}))
    engine = ExecEngine()
    estimate = Estimate(plan, engine)
    assert estimate.left_s() == 4 * (5 + engine.start_s)
    jobs = list(plan.jobs())
    estimate.done(jobs[0], ended(30.0))
    # The other cell is expected to take as many times its least as this one did.
    assert estimate.left_s() == pytest.approx(30 + 2 * 30)
    estimate.done(jobs[1], ended(10.0))
    assert estimate.left_s() == pytest.approx(30 + 10)
    assert estimate.left_s(elapsed_s=25) == pytest.approx(15)
    estimate.done(jobs[2], ended(20.0))
    estimate.done(jobs[3], ended(10.0))
    assert estimate.left_s() == pytest.approx(0)


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.04, "0.0 s"), (9.96, "10 s"), (99.4, "99 s"), (100, "2 min"), (3700, "1 h 2 min")]
)
def test_durations_are_short(seconds, text):
    assert duration(seconds) == text


def test_an_empty_folder_that_was_set_is_as_good_as_a_private_cache(tmp_path, monkeypatch):
    folder = tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(folder))
    assert empty_cache() == str(folder)
    folder.mkdir()
    assert empty_cache() == str(folder)
    (folder / "graph").touch()
    assert empty_cache() is None
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR")
    assert empty_cache() is None
