"""What a cell costs, and where it goes."""

from __future__ import annotations

import os

import pytest

from lmbench.instruments.compiling import empty_cache
from lmbench.instruments.milestones import begin, clock_s, milestones, reach
from lmbench.records.codec import as_dict
from lmbench.records.field import PerPhase
from lmbench.records.measured import PhaseSummary, Window
from lmbench.records.process import process_start_s
from lmbench.records.run import SCHEMA_VERSION, Compile, Milestones, RunRecord
from lmbench.sweep.executor import End
from lmbench.sweep.outcome import cost_of


def run_of(warmup_steps=3, **more):
    """A run that reached a milestone each second."""
    at = Milestones(**{name: float(index + 1) for index, name in enumerate(Milestones.__struct_fields__)})
    window = Window(warmup_steps=warmup_steps)
    return RunRecord(SCHEMA_VERSION, "ok", process_start_s=101.0, milestones=at, window=window, **more)


def parts_of(cost):
    """The parts that a total is made of."""
    return {name: value for name, value in as_dict(cost).items() if name not in ("total_s", "overhead_s", "compile_s")}


END = End(0, "itself", 100.0, 114.0)


def test_the_parts_of_a_cost_are_all_of_it():
    cost = cost_of(run_of(), END)
    assert sum(parts_of(cost).values()) == cost.total_s == 14
    assert (cost.start_s, cost.exit_s) == (2, 2)
    # From `ready` to `window_closed` are three parts of a second each.
    assert cost.overhead_s == 14 - 3
    # Compiling is a cost and no step.
    cost = cost_of(run_of(compile=Compile(first_step_s=0.9), phases=PerPhase(step=PhaseSummary(median_s=0.1))), END)
    assert (cost.compile_s, cost.overhead_s) == pytest.approx((0.8, 14 - 3 + 0.8))
    # Without warm-up step 0 is a part of the window.
    run = run_of(warmup_steps=0)
    reached = run.milestones
    reached.first_step_s, reached.window_opened_s = reached.window_opened_s, reached.first_step_s
    parts = parts_of(cost_of(run, END))
    assert (parts.pop("first_step_s"), sum(parts.values())) == (None, 14)
    # A run that came to nothing has its total.
    cost = as_dict(cost_of(RunRecord(SCHEMA_VERSION, "error"), End(-9, "timeout", 100.0, 104.0)))
    assert (cost.pop("total_s"), set(cost.values())) == (4, {None})


def test_milestones_are_dated_from_the_processs_beginning():
    before_s = clock_s()
    begin()
    reach("imported")
    reach("imported")
    found = milestones()
    assert found == Milestones(started_s=found.started_s, imported_s=found.imported_s)
    assert 0 < found.started_s <= found.imported_s
    began_s = process_start_s(os.getpid())
    assert began_s is not None
    assert before_s - began_s <= found.started_s <= clock_s() - began_s


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
