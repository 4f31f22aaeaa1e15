"""Every mistake a user can make gets one line, exit code 2, no traceback and no half-made result folder."""

from __future__ import annotations

import re
import shlex

import pytest
from comparison_runs import make_run, make_sides, make_sweep
from paths import TRACES
from tables import cases, stored

from lmbench.cli import COMMANDS, main

MISTAKES = stored("mistakes")
WRONG = MISTAKES["mistakes"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mistakes")
    for name, text in MISTAKES["files"].items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    make_sides(folder)
    make_sweep(folder / "sizes", {"small": [0.1] * 3, "medium": [0.2] * 3})
    make_run(folder, run_id="future", schema_version=99)
    make_run(folder / "results", run_id="day1")
    make_run(folder / "results", run_id="day2", config__trainer__precision="32-true", precision="32-true")
    (folder / "results" / "gone").symlink_to("day0")
    (folder / "traces").symlink_to(TRACES)
    return folder


@cases(
    "words | message",
    *WRONG,
    *([f"{words} --dry_run", message] for words, message in WRONG if words.startswith("sweep ")),
    *([f"{name} --bogus", ""] for name in COMMANDS if name != "overhead"),
    *([f"{name} /nope/nope", ""] for name in COMMANDS if name not in ("overhead", "compare")),
)
def test_a_mistake_gets_one_line_and_exit_code_2_and_leaves_nothing(words, message, folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    before = sorted([*folder.iterdir(), *(folder / "results").iterdir()])
    assert main(shlex.split(words)) == 2
    printed = capsys.readouterr()
    assert (printed.out, message in printed.err) == ("", True), printed.err
    # On a busy machine there may be progress lines.
    assert re.fullmatch(r"(lmbench: .+ so far\n)*lmbench: .+\n", printed.err)
    assert sorted([*folder.iterdir(), *(folder / "results").iterdir()]) == before
