"""What is no result, damaged or foreign: one line each, nothing measured is lost."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from report_results import make_record, write_run, write_sweep

from lmbench.cli import main


def report(*words: str | Path) -> int:
    return main(["report", *map(str, words)])


def refused(capsys: pytest.CaptureFixture[str]) -> str:
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "'nowhere' does not exist"),
        (["."], "holds no lmbench result"),
        (["good", "--view", "step_time"], "did you mean step_times?"),
        (["good", "--baseline", "colour=red"], "'colour' is unknown here; choose among attention"),
        (["good", "--baseline", "precision=64-true"], "no run has it; choose among 32-true"),
        (["good", "--baseline", "precision"], "give fact=value"),
        (["good", "--html", "missing/page.html"], "cannot be written"),
        (["good", "--html", "."], "cannot be written"),
        (["good", "--format", "pdf"], "invalid choice"),
        ([], "required"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "empty").mkdir()
    folder = tmp_path / "empty" if words == ["."] else tmp_path
    write_run(tmp_path / "good", make_record({"model.size": "small"}))
    monkeypatch.chdir(folder)
    assert report(*words) == 2
    assert said in refused(capsys)


def test_only_results_of_another_schema_version_are_refused_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "a", make_record({}, edit=lambda run: run.update(schema_version=2)))
    assert report(tmp_path) == 2
    assert "schema version 2, this lmbench reads 1" in refused(capsys)


def test_a_record_that_does_not_fit_is_listed_as_damaged_with_the_field(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_run(tmp_path / "good", make_record({"model.size": "small"}))
    for name, changes in {"a": {"model": 5}, "b": {"phases": [1]}, "c": {"guards": "none"}, "d": {"sweep": 3}}.items():
        write_run(tmp_path / name, make_record({}))
        (tmp_path / name / "run.json").write_text(json.dumps({**make_record({}), **changes}))
    assert report(tmp_path) == 0
    out = capsys.readouterr().out
    assert "4 damaged" in out
    for what in ("got int - at model", "got array - at phases", "got str - at guards", "got int - at sweep"):
        assert what in out


def test_a_damaged_sweep_file_leaves_its_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = write_sweep(tmp_path, "batch", {"data.batch_size": [1, 2]}, view="batch", repeats=2)
    (home / "sweep.json").write_text('{"name": "batch", "vie')
    assert report(home) == 0
    assert "2 cells, 4 runs (4 ok)" in capsys.readouterr().out


def test_cells_that_have_no_run_yet_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    home = write_sweep(tmp_path, "batch", {"data.batch_size": [1, 2]}, view="batch")
    sweep = json.loads((home / "sweep.json").read_text())
    sweep["cells"] += [{"id": "4", "axes": {"data.batch_size": 4}}]
    (home / "sweep.json").write_text(json.dumps(sweep))
    assert report(home / "sweep.json") == 0
    assert "1 of 3 cells have no run yet" in capsys.readouterr().out


def test_an_unknown_view_in_a_sweep_is_said_and_the_sweep_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report(write_sweep(tmp_path, "new", {"data.batch_size": [1, 2]}, view="from_the_future")) == 0
    out = capsys.readouterr().out
    assert "view 'from_the_future' is unknown here" in out
    assert "tokens/s" in out


def test_a_run_that_died_before_it_could_tell_stands_in_its_own_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    axes = {"model.size": ["small", "medium"], "mode": ["inference", "train_step"]}
    home = write_sweep(tmp_path, "step_times", axes, view="step_times", fixed={"data.batch_size": 8})
    path = home / "runs" / "medium-train_step-r0" / "run.json"
    own = json.loads(path.read_text())["sweep"]
    told = {"schema_version": 1, "outcome": "error", "error": {"message": "killed by signal 9", "phase": None}}
    path.write_text(json.dumps({**told, "sweep": own}))
    assert report(home) == 0
    out = capsys.readouterr().out
    row = next(line for line in out.splitlines() if line.startswith("| medium | train_step"))
    assert "error" in row
    assert "device unknown" not in out
    assert "batch 8" in out


def test_text_from_a_result_cannot_break_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, size in (("a", "a|b"), ("b", "<b>*x*\n| y |")):
        write_run(tmp_path / name, make_record({}, edit=lambda run, size=size: run["model"].update(size=size)))
    assert report(tmp_path) == 0
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("|")]
    assert len(rows) == 4
    assert r"a\|b" in rows[3]
    assert r"&lt;b>\*x\*\\n\| y \|" in rows[2]


def test_show_goes_on_past_a_run_that_it_cannot_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_run(tmp_path / "a", make_record({}, edit=lambda run: run.update(schema_version=99)))
    write_run(tmp_path / "b", make_record({"model.size": "medium"}))
    assert main(["show", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "medium" in out
    assert "schema version 99" in err
    assert err.count("\n") == 1
    assert main(["show", str(tmp_path / "a")]) == 2
