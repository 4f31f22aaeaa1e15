"""A sweep finds the largest value that fits, from whatever it begins with, and its table has one row for each cell."""

from __future__ import annotations

import re

import pytest
from simulated_cells import SimulatedServers, records, sweep

from lmbench.cli import main
from lmbench.errors import UsageError
from lmbench.sweep.file import LargestSpec, sweep_from
from lmbench.sweep.largest import next_value

BATCH = "data.batch_size"
SEARCH = {"matrix": {"model.num_layers": [1, 2]}, "repeats": 1, "largest": BATCH}


def tried_by(script, where, content=SEARCH, predict=lambda cell, option: None):
    """The values tried for each cell in order, and what the runs' records say of the search."""
    servers = SimulatedServers(script)
    sweep(where, servers, content, predict=predict)
    values = {}
    for name in servers.started:
        cell, value, repeat = re.fullmatch(r"num_layers-(\d)-\w+-batch_size-(\d+)-r(\d)", name).groups()
        values.setdefault(int(cell), []).append((int(value), int(repeat)))
    return values, {name: run.sweep.search for name, run in records(where).items()}


def room_for(limit, beyond="oom"):
    """A script by which a batch fits up to a limit for each number of layers."""

    def script(name):
        layers, batch = map(int, re.fullmatch(r"num_layers-(\d)-\w+-batch_size-(\d+)-r\d", name).groups())
        return "ok" if batch <= limit[layers] else beyond

    return script


@pytest.mark.parametrize("unit", [1, 8])
@pytest.mark.parametrize("first", [1, 7, 64, 500, 10_000])
@pytest.mark.parametrize("border", [0, 1, 8, 63, 64, 100, 999, 1000])
def test_the_border_is_found_from_any_start(border, first, unit):
    spec, fits = LargestSpec(BATCH, unit, most=1000), {}
    while (value := next_value(fits, first, spec)) is not None:
        assert value not in fits
        assert value % unit == 0
        assert unit <= value <= 1000
        fits[value] = value <= border
    assert max((value for value, does in fits.items() if does), default=0) == border // unit * unit
    assert len(fits) <= 25


def test_a_good_guess_needs_few_trials():
    fits = {}
    while (value := next_value(fits, 64, LargestSpec(BATCH))) is not None:
        fits[value] = value <= 65
    assert list(fits) == [64, 68, 66, 65]


@pytest.mark.parametrize("beyond", ["oom", "retries"])
def test_each_cell_finds_its_own_border_by_running_into_it(beyond, tmp_path):
    values, searches = tried_by(room_for({1: 12, 2: 5}, beyond), tmp_path, predict=lambda cell, option: 8)
    assert [value for value, _ in values[1]][:2] == [8, 9]
    largest = {re.search(r"num_layers-(\d).*batch_size-(\d+)", name).groups() for name in searches
               if searches[name] == "largest"}  # fmt: skip
    assert largest == {("1", "12"), ("2", "5")}
    assert set(searches.values()) == {"trial", "largest"}


def test_what_was_found_is_measured_as_often_as_asked(tmp_path):
    values, _ = tried_by(room_for({1: 3, 2: 3}), tmp_path, {**SEARCH, "repeats": 3})
    assert [value for value, repeat in values[2] if repeat] == [3, 3]


def test_a_restart_goes_on_where_it_was(tmp_path):
    def dies_at_once(name):
        raise KeyboardInterrupt if "batch_size-4-" in name else AssertionError

    first = SimulatedServers(lambda name: "ok" if "batch_size-4-" not in name else dies_at_once(name))
    with pytest.raises(KeyboardInterrupt):
        sweep(tmp_path, first, SEARCH)
    values, searches = tried_by(room_for({1: 5, 2: 5}), tmp_path)
    assert 1 not in [value for value, _ in values[1]]
    assert [name for name, search in searches.items() if search is None] == []


def test_an_error_ends_a_cells_search_and_is_its_row(tmp_path):
    _, searches = tried_by(lambda name: "error" if "num_layers-1" in name else room_for({2: 2})(name), tmp_path)
    told = [name for name, search in searches.items() if search == "largest"]
    assert [name for name in told if "num_layers-1" in name] == [name for name in searches if "num_layers-1" in name]


def test_the_table_has_a_row_for_each_cell_and_says_how_many_tried(tmp_path, capsys):
    tried_by(room_for({1: 3, 2: 0}), tmp_path)
    main(["report", str(tmp_path / "sim")])
    out = capsys.readouterr().out
    assert "more runs tried what fits, and more than that" in out
    assert "have no run yet" not in out
    assert len(re.findall(r"^\d ", out, re.M)) <= 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"largest": "model.num_layers"}, "largest: model.num_layers is an axis of this sweep"),
        ({"passes": ["timing", "kernels"]}, "largest goes with neither passes"),
        ({"largest": {"option": BATCH, "unit": 0}}, "largest.unit: expected a whole number >= 1"),
        ({"base": {BATCH: "many"}}, "begins at 'many' in base; it must be a whole number"),
    ],
)
def test_what_cannot_be_looked_for_is_refused(change, message):
    with pytest.raises(UsageError, match=re.escape(message)):
        sweep_from({**SEARCH, **change})
