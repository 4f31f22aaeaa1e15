"""`lmbench compare` from the command line: verdicts, exit codes, output formats and lines for many cells."""

from __future__ import annotations

import json

import pytest
from comparison_runs import TIMES, make_sides, make_sweep
from tables import cases, csv_of, flat

from lmbench.cli import main


def sides(tmp_path, factor=1.0, **changes):
    return make_sides(tmp_path, [value * factor for value in TIMES], **changes)


@pytest.fixture
def run_compare(capsys):
    """Runs `lmbench compare`; returns its exit code and its output with single spaces."""

    def run(*words):
        code = main(["compare", *map(str, words)])
        return code, flat(capsys.readouterr().out)

    return run


@cases("""
- [changes, gate, code, verdict]
- [{}, 1%, 0, "SAME: "]
- [{factor: 0.9}, 1%, 0, "FASTER: "]
- [{factor: 1.015}, 1%, 10, "SLOWER: "]
- [{factor: 1.015}, 2%, 0, "SAME: "]
- [{}, 0.1%, 11, "UNDECIDED: "]
- [{precision: 32-true}, 1%, 12, "INVALID: precision differs: A bf16-mixed, B 32-true"]
""")
def test_the_exit_code_is_the_verdicts(tmp_path, run_compare, changes, gate, code, verdict):
    exit_code, out = run_compare(*sides(tmp_path, **changes), "--gate", gate)
    assert (exit_code, out.startswith(f"verdict {verdict}")) == (code, True)


@cases("""
- [outcome, code]
- [error, 12]
- [oom, 12]
- [interrupted, 11]
""")
def test_sides_whose_runs_all_failed_are_invalid_and_those_that_were_stopped_undecided(
    tmp_path, run_compare, outcome, code
):
    exit_code, out = run_compare(*make_sides(tmp_path, common={"outcome": outcome}))
    assert (exit_code, f"no run of B counts: outcome {outcome}" in out) == (code, True)


def test_json_and_csv_are_in_si_units_and_the_table_in_those_of_people(tmp_path, run_compare, capsys):
    folders = sides(tmp_path, 1.1)
    record = json.loads(run_compare(*folders, "--json")[1])
    assert (record["verdict"], record["exit_code"], record["tolerance_fraction"]) == ("slower", 10, 0.01)
    step, *others = record["cells"][0]["metrics"]
    assert (step["name"], step["unit"], step["finding"]) == ("step_s", "s", "slower")
    assert (step["a"], step["ratio"]["point"]) == pytest.approx((0.05, 1.1), rel=1e-3)
    text = run_compare(*folders)[1]
    for line in ("verdict SLOWER: +10.00 %", "step 50.00 ms 55.00 ms 1.1000", "run peak 5.00 GiB"):
        assert line in text
    main(["compare", *folders, "--format", "csv"])
    rows = csv_of(capsys.readouterr().out)
    assert [row["figure"] for row in rows] == [metric["name"] for metric in (step, *others)]
    ends = [float(rows[0][f"change_{end}fraction"]) + 1 for end in ("low_", "", "high_")]
    assert ends == pytest.approx([step["ratio"][end] for end in ("low", "point", "high")])


def test_many_cells_are_one_table_and_what_changed_another(tmp_path, run_compare):
    make_sweep(tmp_path / "a", {"small": TIMES, "medium": TIMES})
    slow = [value * 1.05 for value in TIMES]
    make_sweep(tmp_path / "b", {"small": TIMES, "medium": slow}, environment__code__project__commit="bbbb")
    folders = [tmp_path / "a", tmp_path / "b"]
    code, out = run_compare(*folders)
    assert code == 10
    assert out.startswith("verdict SLOWER: of 2 cells 1 slower, 1 same")
    assert "tables cells, changes; --table" in out
    assert run_compare(*folders, "--table", "changes")[1].startswith("Phases and memory: ")
    everything = run_compare(*folders, "--all")[1]
    assert "verdicts after Holm's correction over 2 cells" in everything
    assert "size medium 50.00 ms 52.50 ms 1.0500" in everything
    assert "size medium forward 15.00 ms 15.75 ms" in everything
    # Cells that cannot be judged are under no correction.
    make_sweep(tmp_path / "c", {"small": TIMES, "medium": TIMES}, precision="32-true")
    code, out = run_compare(tmp_path / "a", tmp_path / "c")
    assert (code, "over 0 cells" in out) == (12, False)


def test_reasons_and_notes_of_several_cells_are_numbered_below_their_table(tmp_path, run_compare):
    spread = [{"name": "spread", "status": "warn", "message": ""}]
    for side in "ab":
        make_sweep(tmp_path / side, {"small": [0.04, 0.05, 0.06], "medium": [0.04, 0.05, 0.06]}, guards=spread)
    code, out = run_compare(tmp_path / "a", tmp_path / "b")
    assert (code, out.count("undecided [1] [2]"), out.count("guards that warned: spread")) == (11, 2, 1)
