"""`lmbench board`: what it would make, what W&B is asked to make of it, and that there are never two."""

from __future__ import annotations

import json
from typing import Any

import pytest
from wandb_loopback import Server

from lmbench.cli import main
from lmbench.configs import shipped_studies
from lmbench.kernels.kinds import KINDS
from lmbench.kernels.parts import PARTS
from lmbench.report.view import read_view
from lmbench.wandb.board import BoardProblem, Request, board_of, board_of_all, reason_of
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


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main(["board", "--dry_run", "--json", *words]) == 0
    told: dict[str, Any] = json.loads(capsys.readouterr().out)["request"]
    return told


def test_a_dry_run_has_a_board_for_each_study_and_one_for_all_runs(capsys, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY")
    told = dry_run(capsys, "--project", "speed")
    assert (told["project"], told["entity"]) == ("speed", None)
    studies = [name for name in shipped_studies() if not name.startswith("tiny_")]
    assert [board["study"] for board in told["boards"]] == [None, *studies]
    for board in told["boards"]:
        assert sum(len(section["panels"]) for section in board["sections"]) >= 4, board["name"]
        assert len(board["columns"]) == len(set(board["columns"]))
        for section in board["sections"]:
            titles = [panel["title"] for panel in section["panels"]]
            assert sorted(set(titles)) == sorted(titles), board["name"]


def test_a_study_of_ones_own_has_its_charts_its_columns_and_no_secret(tmp_path, capsys):
    (tmp_path / "mine.yaml").write_text(OWN)
    told = dry_run(capsys, str(tmp_path / "mine.yaml"))
    assert "secret" not in str(told)
    (board,) = told["boards"]
    # W&B has no ratio of two cells.
    (panel,) = board["sections"][0]["panels"]
    assert (panel["title"], panel["x"], panel["y"]) == ("S", "config:batch", ["summary:throughput/tokens_per_s"])
    assert board["columns"][:3] == ["summary:outcome", "config:size", "config:attention"]
    assert {"summary:window/steps", "summary:throughput/mfu_percent"} <= set(board["columns"])
    assert (board["name"], board["study"]) == ("lmbench mine", "mine")


def texts(spec: Any) -> set[str]:
    """Every text within a specification of W&B's."""
    if isinstance(spec, dict):
        return {text for key, value in spec.items() for text in (key, *texts(value))}
    if isinstance(spec, list):
        return {text for value in spec for text in texts(value)}
    return {spec} if isinstance(spec, str) else set()


def test_boards_are_made_once_and_then_updated(monkeypatch, capsys):
    boards = (board_of_all(), *(board_of(read_view(study), KINDS, PARTS) for study in ("precision", "kernels")))
    with Server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        saved = list(save_boards(Request("lmbench", None, boards), 60))
        assert [(each.name, each.what) for each in saved] == [(board.name, "created") for board in boards]
        for board, view in zip(boards, server.views, strict=True):
            section = view["spec"]["section"]
            named = {key.partition(":")[2] for key in board.keys}
            assert not [name for name in named if name not in " ".join(texts(view["spec"]))]
            (runs,) = section["runSets"]
            filters = {item["key"]["name"]: item["value"] for item in runs["filters"]["filters"]}
            # Times of profiled runs are no times.
            assert filters["pass"] == ("kernels" if board.study == "kernels" else "timing")
            assert filters.get("study") == board.study
            assert [part["name"] for part in section["panelBankConfig"]["sections"]] == [
                part.title for part in board.sections
            ]
        assert f"{server.url}/me/lmbench?nw={server.views[0]['name'][3:-2]}" == saved[0].address

        # Somebody gave it another title.
        server.views[1]["displayName"], was = "ours", [(view["id"], view["name"]) for view in server.views]
        again = list(save_boards(Request("lmbench", "me", boards), 60))
        assert {each.what for each in again} == {"updated"}
        assert [(view["id"], view["name"]) for view in server.views] == was
        assert [each.address for each in again] == [each.address for each in saved]

        assert main(["board", "precision", "--project", "other"]) == 1
        error = capsys.readouterr().err
        assert error.startswith("lmbench: board: me has no project 'other' that you may see; upload runs to it first")
        assert error.count("\n") == 1
        assert len(server.views) == 3


def test_mistakes_are_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "it's.yaml").write_text(OWN)
    monkeypatch.delenv("WANDB_API_KEY")
    for words, code, told in (
        (["precision"], 1, "board: no API key configured; give one by WANDB_API_KEY or `wandb login`"),
        (["no_study"], 2, "view 'no_study' is unknown"),
        (["precision", "--timeout_s", "0"], 2, "it must be above 0"),
        (["--dry_run", str(tmp_path / "it's.yaml")], 2, "rename the file: only letters, digits and '_.-'"),
    ):
        assert main(["board", *words]) == code
        assert told in capsys.readouterr().err


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
    assert said in reason_of(error)
    assert "\n" not in reason_of(error)
