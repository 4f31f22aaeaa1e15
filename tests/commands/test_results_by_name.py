"""`lmbench list`, and names for results in every command that takes results."""

from __future__ import annotations

import shutil

import pytest
from runs import ended, make_run, make_sweep
from tables import cases, rows

import lmbench
from lmbench.cli import main
from lmbench.records.named import find_result

STEP = "phases.step.mean_s"


@pytest.fixture
def results(here, monkeypatch):
    """Runs of three days, and between the last two a sweep of four cells with two repeats. One of its runs is out of
    memory."""
    monkeypatch.setenv("COLUMNS", "90")
    folder = here / "results"
    for day, precision in ((3, "bf16-mixed"), (1, "32-true"), (2, "32-true")):
        changes = {"started_at": f"2026-11-0{day}T10:00:00+00:00", "run_id": f"day{day}", "pid": day, STEP: day / 10}
        make_run(folder / f"day{day}", {"model.size": "small", "trainer.precision": precision}, changes)
    make_sweep(
        folder / "grid",
        {"model.size": ["small", "medium"], "trainer.precision": ["32-true", "bf16-mixed"]},
        repeats=2,
        change=lambda run, repeat: {
            "started_at": "2026-11-02T12:00:00+00:00",
            "pid": 10 + hash(run["run_id"]) % 1000,
            **(ended("oom", "forward") if run["run_id"] == "medium-32-true-r0" else {}),
        },
    )
    return folder


#: Commands, and a part of their output.
NAMED = rows("""
show | results/day3
show baseline last~3 | results/day1
show results/last~3 | results/day1
show day2 | results/day2
kernels day3 | results/day3
report last~1 | grid
compare baseline last | UNDECIDED
compare last~1@precision=32-true,model.size=small last~1/small-bf16-mixed | results/grid/small-bf
kernels last | day3
memory last | day3
dtypes last | day3
noise last | repeats that count: 1
""")


@pytest.fixture
def listed(answered):
    return lambda *words: answered("list", *words)["tables"]["results"]


def test_a_line_for_each_run_or_sweep_the_newest_first(results, listed, printed):
    runs = listed()
    assert [[row["name"], row["path"], row["outcome"]] for row in runs] == rows("""
last | results/day3 | ok
last~1 | results/grid | 1 oom
last~2 | results/day2 | ok
last~3 | results/day1 | ok
""")
    assert [row["step_s"] for row in runs] == [0.3, None, 0.2, 0.1]
    assert runs[1]["what"].startswith("4 cells, ")
    # A person reads the names that the user chose, also where the paths have no room.
    lines = printed("list").splitlines()
    assert [line.split()[0] for line in lines if "11-" in line] == ["day3", "grid", "day2", "day1"]
    # The heading holds for the sweep, too, whose cells differ in precision and context.
    make_sweep(
        results / "contexts", {"trainer.precision": ["32-true", "bf16-mixed"], "data.context_length": [256, 512]}
    )
    heading = printed("list").split("name ")[0]
    assert ("batch" in heading, "context" in heading) == (True, False)


def test_lines_show_the_facts_in_which_runs_differ(results, listed):
    changes = {"world_size": 2, "model.checkpoint": "all blocks", "started_at": "2026-11-09T10:00:00+00:00"}
    make_run(results / "new", {"model.size": "small", "trainer.strategy": "ddp"}, changes)
    assert listed("--limit=1")[0]["what"] == "small, fp32"
    assert listed()[0]["what"] == "small, fp32, checkpoint all blocks, ranks 2, ddp"


def test_runs_of_a_sweep_are_told_apart_by_axes_that_are_no_facts(here, listed):
    axes = {"model.width": [64, 128], "data.batch_size": [4]}
    make_sweep(here / "results" / "widths", axes, change=lambda run, _: {"pid": int(run["run_id"].split("-")[0])})
    assert {row["what"] for row in listed("results/widths")} == {"small, fp32, width 64", "small, fp32, width 128"}


def test_of_many_the_newest_and_how_to_see_the_others(results, listed, printed):
    assert [row["name"] for row in listed("--limit=2")] == ["last", "last~1"]
    assert "2 older; --limit 4 looks at them too" in printed("list", "--limit=2")


@cases("""
where | names
precision=bf16-mixed | last last~1
size=medium,precision=bf16-mixed | last~1
matmul=highest | last last~1 last~2 last~3
trainer.precision=32-true | last~1 last~2 last~3
run_id=day1 | last~3
outcome=oom | last~1
""")
def test_where_picks_by_fact_option_or_field(where, names, results, listed):
    assert [row["name"] for row in listed("--where", where)] == names.split()


def test_where_takes_an_argument_of_ones_own_module_by_its_option(results, listed):
    own = {"config.model": {"class_path": "mine.Net", "init_args": {"width": 64}}}
    make_run(results / "own", {}, own | {"started_at": "2026-11-09T10:00:00+00:00"})
    assert [row["name"] for row in listed("--where", "model=mine.Net,model.width=64")] == ["last"]


def test_every_command_takes_names_for_results(results, listed, printed, capsys):
    printed("list", "--name=baseline", "last~3")
    assert "was          results/day1" in printed("list", "--name=baseline", "results/day2")
    assert [row["name"] for row in listed()] == ["last", "last~1", "baseline", "last~3"]
    for line, output in NAMED:
        assert main(line.split()) in (0, 2, 11)
        assert output in "".join(capsys.readouterr()), line
    assert [run.run_id for run in lmbench.load("baseline")] == ["day2"]
    # A name is a link, and `load` of a folder returns each run once.
    assert len(lmbench.load("results")) == 11


def test_names_and_folders_of_results_that_are_links_or_have_an_at_sign(results, listed, printed):
    far, outside = results.parent / "disk" / "of" / "me@site" / "results", results.parent / "elsewhere" / "other"
    far.parent.mkdir(parents=True)
    results.rename(far)
    results.symlink_to(far)
    make_run(outside, {}, {"run_id": "other"})
    for name, path in (("baseline", "last"), ("baseline", "results/baseline"), ("reference", str(outside))):
        printed("list", f"--name={name}", path)
        assert printed("show", name) == printed("show", path)
    (results / "loop").symlink_to("loop")
    assert listed()[0]["name"] == "baseline"
    assert printed("show", f"{far}/last") == printed("show", "last")


def test_a_sweep_with_fewer_runs_than_planned_says_so_and_its_rate_is_that_of_its_mean_step(results, listed):
    shutil.rmtree(results / "grid" / "runs" / "medium-bf16-mixed-r1")
    assert listed()[1]["outcome"] == "1 oom, 7 of 8 runs measured"
    make_sweep(results / "uneven", {"model.size": ["small"]}, repeats=2, change=lambda run, repeat: {
        "started_at": "2026-11-09T12:00:00+00:00", "pid": 7 + repeat, "throughput.tokens_per_s": [100.0, 300.0][repeat],
    })  # fmt: skip
    assert listed()[0]["tokens_per_s"] == pytest.approx(150)


def test_show_of_a_folder_of_many_is_their_list(results, printed):
    assert "see one      lmbench show last" in printed("show", "results")
    assert printed("show", "results/grid").count("grid/last") == 9
    assert "results/grid" in printed("show", "results/grid/last~2")


def test_the_name_of_a_shipped_file_stays_its_own_beside_a_result_of_that_name(results):
    for name in ("smoke", "precision", "mine"):
        (results / name).mkdir()
    assert [find_result(name) for name in ("smoke", "precision", "mine")] == ["smoke", "precision", "results/mine"]


def test_damaged_runs_and_runs_of_another_lmbench_are_lines_too(results, listed):
    (results / "day1" / "run.json").write_text("{")
    (results / "day2" / "run.json").write_text('{"schema_version": 99, "started_at": "soon"}')
    rows = {row["path"]: row for row in listed()}
    assert rows["results/day1"]["outcome"] == "damaged"
    assert "this lmbench reads" in rows["results/day2"]["what"]
    # A fact that is unknown for these runs is not shown as a difference.
    assert rows["results/day3"]["what"] == "small, bf16-mixed"
