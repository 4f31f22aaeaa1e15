"""`lmbench board`: what it would make, what W&B is asked to make of it, and that there are never two."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from wandb_loopback import Server
from wandb_results import write_result

from lmbench.cli import main
from lmbench.configs import shipped_studies
from lmbench.kernels.trace.kinds import KINDS, PARTS
from lmbench.report.view import read_view
from lmbench.wandb.board import Board, Panel, Request, Section, board_of, board_of_all
from lmbench.wandb.board_child import BoardProblem, _reason
from lmbench.wandb.publish import save_boards

OWN = """
matrix: {model.size: [tiny]}
view:
  title: Mine
  question: Is https://me:secret@host/x fast?
  tables: [{title: T, rows: [size, attention], columns: [step_s, speedup, window.steps, throughput.mfu_fraction]}]
  charts: [{title: S, kind: lines, y: tokens_per_s, x: batch, is_log: true}, {title: F, kind: bars, y: speedup}]
"""


pytestmark = pytest.mark.usefixtures("planted_key")


def test_a_dry_run_prints_a_board_for_each_study_and_one_for_all_runs(capsys, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY")
    assert main(["board", "--dry_run", "--project", "speed"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["project"], told["entity"], told["kinds"]) == ("speed", None, ["board"])
    studies = [name for name in shipped_studies() if not name.startswith("tiny_")]
    assert [board["study"] for board in told["boards"]] == [None, *studies]
    for board in told["boards"]:
        assert sum(len(section["panels"]) for section in board["sections"]) >= 4, board["name"]
        assert len(board["columns"]) == len(set(board["columns"]))
        for section in board["sections"]:
            titles = [panel["title"] for panel in section["panels"]]
            assert sorted(set(titles)) == sorted(titles), board["name"]


def test_the_shared_sections_answer_what_every_study_is_asked():
    panels = {panel.title: panel for section in board_of_all().sections for panel in section.panels}
    kinds = {panel.kind for panel in panels.values()}
    assert kinds == {"bars", "stacked_bars", "stacked_area", "series", "scatter", "parallel", "differences"}
    assert panels["Each phase"].y[0] == "summary:time/data_ms"
    assert panels["Tokens/s against parameters"].x == "config:parameters"
    assert panels["Eager against compiled, mean step of the runs shown"].group == "config:compile"
    assert {"config:precision", "summary:memory/peak_allocated_gib"} <= set(panels["Everything at once"].y)
    (board,) = _boards("convergence")
    assert [panel.y for panel in board.sections[0].panels] == [("series:train/loss",), ("series:train/gradient_norm",)]


def test_a_study_of_ones_own_has_its_charts_its_columns_and_no_secret(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(OWN)
    assert main(["board", "--dry_run", str(tmp_path / "mine.yaml")]) == 0
    output = capsys.readouterr().out
    assert "secret" not in output
    (board,) = json.loads(output)["boards"]
    answer = board["sections"][0]
    # W&B has no ratio of two cells.
    assert [panel["title"] for panel in answer["panels"]] == ["S"]
    assert (answer["panels"][0]["x"], answer["panels"][0]["y"]) == ("config:batch", ["summary:throughput/tokens_per_s"])
    assert board["columns"][:3] == ["summary:outcome", "config:size", "config:attention"]
    assert {"summary:window/steps", "summary:throughput/mfu_percent"} <= set(board["columns"])
    assert (board["name"], board["study"]) == ("lmbench mine", "mine")


def _boards(*studies: str) -> tuple[Board, ...]:
    return tuple(board_of(read_view(study), KINDS, PARTS) for study in studies)


def _texts(spec: Any) -> set[str]:
    """Every text within a specification of W&B's."""
    if isinstance(spec, dict):
        return {text for key, value in spec.items() for text in (key, *_texts(value))}
    if isinstance(spec, list):
        return {text for value in spec for text in _texts(value)}
    return {spec} if isinstance(spec, str) else set()


def _panels(spec: dict[str, Any]) -> list[dict[str, Any]]:
    return [panel for section in spec["section"]["panelBankConfig"]["sections"] for panel in section["panels"]]


def test_boards_and_reports_are_made_once_and_then_updated(monkeypatch, capsys):
    boards = (board_of_all(), *_boards("precision", "kernels"))
    request = Request("lmbench", None, ("board", "report"), boards)
    with Server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        made = list(save_boards(request, 60))
        assert [(saved.kind, saved.name) for saved in made] == [
            (kind, board.name) for board in boards for kind in ("board", "report")
        ]
        assert {saved.what for saved in made} == {"created"}
        workspaces = [view for view in server.views if view["type"] == "project-view"]
        reports = [view for view in server.views if view["type"] == "runs"]
        for board, workspace, report in zip(boards, workspaces, reports, strict=True):
            section = workspace["spec"]["section"]
            names = {key.partition(":")[2] for key in board.keys}
            for spec in (workspace["spec"], report["spec"]):
                told = " ".join(_texts(spec))
                assert not [name for name in names if name not in told]
            (runs,) = section["runSets"]
            filters = {item["key"]["name"]: item["value"] for item in runs["filters"]["filters"]}
            # Times of profiled runs are no times.
            expected = {"pass": "kernels" if board.study == "kernels" else "timing"}
            assert filters == expected | ({} if board.study is None else {"study": board.study})
            titles = [part["name"] for part in section["panelBankConfig"]["sections"]]
            assert titles == [part.title for part in board.sections]
            assert report["description"] == board.question
        assert f"{server.url}/me/lmbench?nw={workspaces[0]['name'][3:-2]}" == made[0].told

        # What the stacked bars are drawn by is W&B's to know, once.
        ((chart, drawn),) = server.charts.items()
        assert chart in _texts(workspaces[1]["spec"])
        fields = set(re.findall(r"\$\{field:(\w+)\}", json.dumps(drawn)))
        (panel,) = (found for found in _panels(workspaces[1]["spec"]) if found["viewType"] == "Vega2")
        assert set(panel["config"]["fieldSettings"]) == fields
        assert set(panel["config"]["fieldSettings"].values()) == {"phase", "mean_ms"}

        # Somebody gave it another title; somebody else has one of the same title in the other project.
        workspaces[1]["displayName"], was = "ours", [(view["id"], view["name"]) for view in server.views]
        workspaces[1]["spec"] = None
        again = list(save_boards(Request("lmbench", "me", ("board", "report"), boards), 60))
        assert {saved.what for saved in again} == {"updated"}
        assert [(view["id"], view["name"]) for view in server.views] == was
        assert workspaces[1]["spec"]["section"]
        assert [saved.told for saved in again] == [saved.told for saved in made]

        assert main(["board", "precision", "--project", "other"]) == 1
        error = capsys.readouterr().err
        assert error.startswith("lmbench: board: me has no project 'other' that you may see; upload runs to it first")
        assert error.count("\n") == 1
        assert len(server.views) == 6


def test_a_report_takes_the_tables_that_lmbench_report_prints(tmp_path, capsys):
    write_result(tmp_path / "results")
    tables = ["--tables", str(tmp_path / "results")]
    assert main(["board", "--dry-run", "--report", "precision", *tables]) == 0
    (board,) = json.loads(capsys.readouterr().out)["boards"]
    assert "step (ms)" in board["text"]
    assert board["question"] in board["text"]
    assert main(["board", "--dry-run", "precision", *tables]) == 2
    assert capsys.readouterr().err == "lmbench: --tables goes into a report; give --report, too\n"


def test_a_name_that_wandb_would_refuse_is_the_users_to_change(tmp_path, capsys):
    (tmp_path / "it's.yaml").write_text(OWN)
    assert main(["board", "--dry-run", str(tmp_path / "it's.yaml")]) == 2
    assert "rename the file: only letters, digits and '_.-'" in capsys.readouterr().err
    assert main(["board", "--dry-run", "sweep", "precision", "tiny_precision"]) == 0
    assert [board["study"] for board in json.loads(capsys.readouterr().out)["boards"]] == [None, "precision"]


def test_what_cannot_be_had_is_one_line(monkeypatch, capsys):
    monkeypatch.delenv("WANDB_API_KEY")
    assert main(["board", "precision"]) == 1
    error = capsys.readouterr().err
    assert error == "lmbench: board: no API key configured; give one by WANDB_API_KEY or `wandb login`\n"
    assert main(["board", "no_study"]) == 2
    assert "view 'no_study' is unknown" in capsys.readouterr().err
    assert main(["board", "precision", "--timeout_s", "0"]) == 2
    assert "it must be above 0" in capsys.readouterr().err


class AuthenticationError(Exception):
    """Called as wandb's own."""


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("no", name="wandb_workspaces"), "install it with `pip install 'lmbench[boards]'`"),
        (AuthenticationError("Failed to verify: returned error 403: {}"), "is the key right?"),
        (AuthenticationError("Failed to verify: did not respond in time"), "the server does not answer"),
        (BoardProblem("no entity"), "no entity"),
        (ValueError("two\nlines"), "wandb failed with ValueError: two lines"),
    ],
)
def test_a_fault_says_what_to_do(error, said):
    assert said in _reason(error)
    assert "\n" not in _reason(error)


def test_a_board_s_keys_are_all_that_it_names():
    panel = Panel("scatter", "x", ("summary:a",), "config:b", "config:c")
    assert Board("b", (Section("s", (panel,)),), ("config:d",), "study").keys == {
        "summary:a", "config:b", "config:c", "config:d", "config:study", "config:pass"
    }  # fmt: skip
