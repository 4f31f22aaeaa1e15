"""`lmbench upload` of a result that somebody else made: nothing is removed or sent that is not the result's, and it
goes nowhere that only the result asks for."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from wandb_results import write_result

from lmbench.cli import main
from lmbench.records.load import load_run
from lmbench.wandb import child, publish
from lmbench.wandb.publish import Ended

Sent = list[list[str]]


@pytest.fixture
def sent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sent:
    """The words for wandb's own programs, which are not run; an upload leaves wandb's mark."""
    found: Sent = []

    def run_module(module: str, words: list[str], timeout_s: float) -> Ended:
        found.append([module, *words])
        if module == "wandb":
            run = Path(words[-1]) / "offline-run-1"
            run.mkdir(parents=True, exist_ok=True)
            (run / "run-1.wandb.synced").touch()
        return Ended(0, [], 60)

    monkeypatch.setattr(publish, "run_module", run_module)
    for name in ("WANDB_PROJECT", "WANDB_ENTITY", "WANDB_CONFIG_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    return found


def _foreign(tmp_path: Path) -> dict[Path, bytes]:
    """Another run's folder of W&B, and what lies in it."""
    for name in ("offline-run-9/run-9.wandb", "offline-run-9/run-9.wandb.synced", "staging/kept"):
        (tmp_path / "other" / "wandb" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "other" / "wandb" / name).write_bytes(b"private")
    return {path: path.read_bytes() for path in (tmp_path / "other").rglob("*") if path.is_file()}


@pytest.mark.parametrize("link", ["wandb", "wandb/offline-run-9"])
def test_wandbs_folder_behind_a_link_is_neither_cleared_nor_sent(
    link: str, tmp_path: Path, sent: Sent, capsys: pytest.CaptureFixture[str]
) -> None:
    foreign = _foreign(tmp_path)
    result = write_result(tmp_path / "results")
    (result / link).parent.mkdir(exist_ok=True)
    (result / link).symlink_to(tmp_path / "other" / link)
    assert not publish.is_uploaded(result)
    code = main(["upload", str(result)])
    if link == "wandb":
        assert code == 1
        assert "is no folder of its own but a link or a file; remove it" in capsys.readouterr().err
        assert sent == []
        with pytest.raises(OSError, match="symbolic link"):
            child.write_run(result)
    assert {path: path.read_bytes() for path in foreign} == foreign


def test_a_mark_that_is_taken_back_is_the_results_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    foreign = _foreign(tmp_path)
    result = write_result(tmp_path / "results")
    own = result / "wandb" / "offline-run-1" / "run-1.wandb.synced"
    own.parent.mkdir(parents=True)
    own.touch()
    (result / "wandb" / "offline-run-9").symlink_to(tmp_path / "other" / "wandb" / "offline-run-9")
    monkeypatch.setattr(publish, "run_module", lambda *_: Ended(1, ["wandb: ERROR no"], 60))
    with pytest.raises(publish.WandbProblem):
        publish.sync(result, 1)
    assert not own.exists()
    assert {path: path.read_bytes() for path in foreign} == foreign


def test_an_artifact_holds_the_results_own_files_only(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("private")
    result = write_result(tmp_path / "results", wandb={"artifact": True, "mode": "offline"})
    for name in ("notes.txt", "steps2.jsonl"):
        (result / name).symlink_to(tmp_path / "secret")
    (result / "mirror.json").write_text(json.dumps({"path": "../.."}))
    assert [path.name for path in child.own_files(result)] == ["mirror.json", "run.json", "steps.jsonl"]


@pytest.mark.parametrize(
    ("filed", "settings", "words", "goes"),
    [
        ({}, {}, [], True),
        ({"project": "lmbench"}, {}, [], True),
        ({"entity": "thief"}, {}, [], False),
        ({"project": "public"}, {}, [], False),
        ({"entity": "team", "project": "speed"}, {"WANDB_ENTITY": "team", "WANDB_PROJECT": "speed"}, [], True),
        ({"entity": "thief"}, {"WANDB_ENTITY": "team"}, [], False),
        ({"entity": "thief", "project": "public"}, {}, ["--entity=me"], False),
        ({"entity": "thief", "project": "public"}, {}, ["--entity=me", "--project=mine"], True),
        ({"entity": "team", "project": "speed"}, {}, ["--as_filed"], True),
    ],
)  # fmt: skip
def test_a_record_does_not_choose_where_it_goes(
    filed: dict[str, str], settings: dict[str, str], words: list[str], goes: bool, tmp_path: Path, sent: Sent,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    write_result(tmp_path / "results", wandb={"mode": "offline", **filed})
    plain = write_result(tmp_path / "results")
    assert main(["upload", str(tmp_path / "results"), *words]) == (0 if goes else 2)
    told = capsys.readouterr()
    assert told.out.count("uploaded  ") == 1 + goes
    assert str(plain) in told.out
    assert told.err.count("\n") == (not goes)
    assert goes or "your settings do not; give --as_filed" in told.err
    assert sum(words[0] == "wandb" for words in sent) == 1 + goes


def test_what_wandb_stored_for_the_user_is_the_users_setting(tmp_path: Path, sent: Sent) -> None:
    settings = tmp_path / "home" / ".config" / "wandb" / "settings"
    settings.parent.mkdir(parents=True)
    settings.write_text("[default]\nentity = team\nproject = 100%\n")
    result = write_result(tmp_path / "results", wandb={"entity": "team", "project": "100%"})
    assert main(["upload", str(result)]) == 0
    settings.write_text("no settings")
    shutil.rmtree(result / "wandb")
    assert main(["upload", str(result)]) == 2


def test_the_command_for_later_names_where_the_user_sent_it(tmp_path: Path, sent: Sent) -> None:
    result = write_result(tmp_path / "results", wandb={"entity": "team", "project": "lmbench", "mode": "offline"})
    filing = load_run(result).record.wandb
    assert filing is not None
    told = publish.publish_run(result, filing, 10, is_interrupted=False)
    assert told is not None
    assert told.command == f"lmbench upload {result} --entity=team"
