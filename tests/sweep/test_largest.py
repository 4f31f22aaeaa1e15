"""A sweep finds the largest value that fits, from any first value."""

from __future__ import annotations

import re

import pytest
from simulated_cells import SimulatedServers, records, sweep
from tables import cases

from lmbench.report.groups import read_groups
from lmbench.sweep.execute import seek

BATCH = "data.batch_size"
SEARCH = {"matrix": {"model.num_layers": [1, 2]}, "repeats": 1, "largest": BATCH}


def search(where, limit, beyond="oom", predict=lambda cell, option: None, **content):
    """Sweep cells whose batch fits up to a limit, given for each number of layers.

    Returns the runs (value, repeat) of each cell in order, and the `search` of the records by (layers, value).
    """

    def parts(name):
        return tuple(map(int, re.fullmatch(r"num_layers-(\d)-\w+-batch_size-(\d+)-r(\d)", name).groups()))

    servers = SimulatedServers(lambda name: "ok" if parts(name)[1] <= limit[parts(name)[0]] else beyond)
    sweep(where, servers, {**SEARCH, **content}, predict=predict)
    tried = {layers: [parts(name)[1:] for name in servers.started if parts(name)[0] == layers] for layers in limit}
    return tried, {parts(name)[:2]: run.sweep.search for name, run in records(where).items() if name.endswith("r0")}


@cases("first", 1, 7, 64, 10_000)
@cases("border", 0, 1, 63, 64, 999, 1000)
def test_the_border_is_found_to_a_hundredth_from_any_start_and_soon_from_a_good_one(border, first):
    fits = {}

    def try_value(value):
        assert value not in fits
        assert 1 <= value <= 1000
        fits[value] = value <= border
        return fits[value]

    assert max(border, 1) * 0.99 <= seek(first, 1000, try_value) <= max(border, 1)
    assert len(fits) <= (2 if first == 64 and border in (63, 64) else 25)


@cases("beyond", "oom", "retries")
def test_each_cell_finds_its_own_border_and_is_measured_there_as_often_as_asked(beyond, tmp_path):
    tried, states = search(tmp_path, {1: 12, 2: 5}, beyond, lambda cell, option: 8, repeats=3)
    assert [value for value, _ in tried[1]][:2] == [8, 9]
    assert [value for value, repeat in tried[2] if repeat] == [5, 5]
    assert {place for place, state in states.items() if state == "largest"} == {(1, 12), (2, 5)}
    assert set(states.values()) == {"trial", "largest"}


def test_a_report_leaves_out_what_was_the_largest_before_the_search_went_further(tmp_path):
    for most in (4, 6):
        search(tmp_path, {1: 9, 2: 5}, repeats=2, largest={"option": BATCH, "most": most})
        (group,) = read_groups([tmp_path], is_by_sweep=True)
        assert sorted(run.facts["batch"] for run in group.runs) == ([5, 5, 6, 6] if most == 6 else [4] * 4)


def test_a_cell_whose_largest_is_known_is_not_predicted_again(tmp_path):
    asked = []
    for _ in range(2):
        search(tmp_path, {1: 12, 2: 5}, predict=lambda cell, option: asked.append(cell.id) or 8)
    assert len(asked) == 2


def test_a_restart_goes_on_where_it_was_and_an_error_ends_a_cells_search(tmp_path):
    def stop(name):
        if "batch_size-4-" in name:
            raise KeyboardInterrupt
        return "ok"

    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path, SimulatedServers(stop), SEARCH)
    tried, states = search(tmp_path, {1: 5, 2: 0}, "error")
    assert 1 not in [value for value, _ in tried[1]]
    assert {place for place, state in states.items() if state == "largest"} == {(1, 8), (2, 1)}
    assert None not in states.values()
