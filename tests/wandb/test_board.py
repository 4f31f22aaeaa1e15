"""`lmbench board`: the boards that it plans and makes at W&B, each of them once."""

from __future__ import annotations

import json

import msgspec
import pytest
from wandb_loopback import Server, keys_of

from lmbench.cli import main
from lmbench.configs import shipped_studies
from lmbench.wandb.board import BoardRequest

OWN = """
matrix: {model.size: [tiny]}
view:
  title: Mine
  tables: [{title: T, rows: [size, attention], columns: [step_s, speedup, window.steps, throughput.mfu_fraction]}]
  charts: [{title: S, kind: lines, y: tokens_per_s, x: batch}, {title: F, kind: bars, y: speedup}]
"""

pytestmark = pytest.mark.usefixtures("planted_key")


@pytest.fixture
def dry_run(answered):
    return lambda *words: answered("board", "--dry_run", *words)["request"]


def test_a_dry_run_has_a_board_for_each_study_and_one_for_all_runs(dry_run, monkeypatch):
    monkeypatch.delenv("WANDB_API_KEY")
    request = dry_run("--project=speed")
    assert (request["project"], request["entity"]) == ("speed", None)
    studies = [name for name in shipped_studies() if not name.startswith("tiny_")]
    assert [board["study"] for board in request["boards"]] == [None, *studies]
    timed = [board for board in request["boards"] if board["run_pass"] == "timing"]
    assert min(sum(map(len, board["sections"].values())) for board in timed) >= 3


def test_a_study_of_ones_own_has_its_charts_and_its_columns(tmp_path, dry_run):
    (tmp_path / "mine.yaml").write_text(OWN)
    (board,) = dry_run(tmp_path / "mine.yaml")["boards"]
    # W&B has no ratios of two cells.
    (panel,) = board["sections"]["Answer"]
    assert (panel["title"], panel["y"]) == ("S", ["summary:throughput/tokens_per_s"])
    assert board["columns"][:3] == ["summary:outcome", "config:size", "config:attention"]
    assert {"summary:window/steps", "summary:throughput/mfu_percent"} <= set(board["columns"])
    assert (board["name"], board["study"]) == ("lmbench mine", "mine")


def test_boards_are_made_once_and_then_updated(capsys, printed, dry_run):
    boards = ["sweep", "precision", "kernels"]
    request = msgspec.convert(dry_run(*boards), BoardRequest)
    with Server() as server:
        assert main(["board", *boards]) == 0
        output = capsys.readouterr()
        saved = output.out.splitlines()
        assert output.err == f"lmbench: sending 3 boards to {server.url}\n"
        assert [line.split()[:2] for line in saved] == [["created", "lmbench"]] * 3
        for board, view in zip(request.boards, server.views, strict=True):
            assert not [key for key in keys_of(board) if key.partition(":")[2] not in json.dumps(view["spec"])]
            (runs,) = view["spec"]["section"]["runSets"]
            filters = {item["key"]["name"]: item["value"] for item in runs["filters"]["filters"]}
            # A board shows either timed runs or profiled ones, whose times are not comparable.
            assert filters["pass"] == ("kernels" if board.study == "kernels" else "timing")
            assert filters.get("study") == board.study

        # A user renames a board.
        server.views[1]["displayName"], before = "ours", [(view["id"], view["name"]) for view in server.views]
        assert printed("board", *boards, "--entity=me").splitlines() == [
            line.replace("created", "updated") for line in saved
        ]
        assert [(view["id"], view["name"]) for view in server.views] == before


def test_without_a_key_a_line_says_so_before_anything_is_sent(monkeypatch, refused):
    monkeypatch.delenv("WANDB_API_KEY")
    assert "no key for W&B: set WANDB_API_KEY" in refused("board", "precision", code=6)


def test_without_wandb_workspaces_a_line_says_so(tmp_path, monkeypatch, refused):
    (tmp_path / "wandb_workspaces.py").write_text("raise ModuleNotFoundError('no', name='wandb_workspaces')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    line = refused("board", "precision", "--entity=me", code=6)
    assert "install it with `pip install 'wandb-workspaces<0.5'`" in line
