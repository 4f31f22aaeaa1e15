"""`lmbench upload` of a result that somebody else made neither removes nor sends files outside of it, and does not let
the result alone choose the destination."""

from __future__ import annotations

import json

import pytest
from runs import write_result
from tables import cases, stored
from wandb_loopback import Server, replace_wandb

from lmbench.cli import main
from lmbench.wandb import child, publish


@pytest.fixture
def sent(tmp_path, monkeypatch):
    """The command lines of wandb's programs, which are recorded instead of run."""
    for name in ("WANDB_PROJECT", "WANDB_ENTITY"):
        monkeypatch.delenv(name, raising=False)
    return replace_wandb(monkeypatch)


def _foreign(tmp_path):
    """Make another run's W&B folder; returns its files."""
    names = ("offline-run-9/run-9.wandb", "offline-run-9/run-9.wandb.synced", "staging/kept")
    files = [tmp_path / "other" / "wandb" / name for name in names]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("private")
    return files


@cases("link", "wandb", "wandb/offline-run-9")
def test_wandbs_folder_behind_a_link_is_neither_cleared_nor_sent(link, tmp_path, sent, capsys):
    foreign = _foreign(tmp_path)
    result = write_result(tmp_path / "results")
    (result / link).parent.mkdir(exist_ok=True)
    (result / link).symlink_to(tmp_path / "other" / link)
    assert not publish.is_uploaded(result)
    code = main(["upload", str(result)])
    if link == "wandb":
        assert code == 6
        assert "is a link; remove it" in capsys.readouterr().err
        assert sent == []
        with pytest.raises(OSError, match="symbolic link"):
            child.write_run(result)
    assert [file.read_text() for file in foreign] == ["private"] * 3


def test_an_artifact_holds_the_results_own_files_only(tmp_path):
    (tmp_path / "secret").write_text("private")
    result = write_result(tmp_path / "results", wandb={"artifact": True, "mode": "offline"})
    for name in ("notes.txt", "steps2.jsonl"):
        (result / name).symlink_to(tmp_path / "secret")
    (result / "mirror.json").write_text(json.dumps({"path": "../.."}))
    assert [path.name for path in child.artifact_files(result)] == ["mirror.json", "run.json", "steps.jsonl"]


DESTINATIONS = stored("wandb_destinations")


@cases("filed | settings | words | goes", *DESTINATIONS)
def test_a_record_does_not_choose_where_it_goes(filed, settings, words, goes, tmp_path, sent, monkeypatch, capsys):
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    write_result(tmp_path / "results", wandb={"mode": "offline", **filed})
    plain = write_result(tmp_path / "results")
    assert main(["upload", str(tmp_path / "results"), *words.split()]) == (0 if goes else 2)
    output = capsys.readouterr()
    assert output.out.count("uploaded  ") == 1 + goes
    assert str(plain) in output.out
    assert output.err.count("\n") == 1 + (not goes)
    assert goes or "your settings do not; give --project and --entity" in output.err
    assert sum(words[0] == "wandb" for words in sent) == 1 + goes


def test_settings_in_a_folder_choose_neither_server_nor_entity(planted_key, tmp_path, monkeypatch, printed):
    result = write_result(tmp_path / "results")
    with Server() as thief, Server() as own:
        for folder in ("results/wandb", f"results/{result.name}/wandb", f"results/{result.name}/wandb/wandb"):
            (tmp_path / folder).mkdir()
            (tmp_path / folder / "settings").write_text(f"[default]\nentity = thief\nbase_url = {thief.url}\n")
        monkeypatch.chdir(tmp_path / "results")
        monkeypatch.delenv("WANDB_BASE_URL")
        (tmp_path / "home" / ".config" / "wandb").mkdir(parents=True)
        (tmp_path / "home" / ".config" / "wandb" / "settings").write_text(f"[default]\nbase_url = {own.url}\n")
        printed("upload", ".")
        assert (thief.questions, thief.authorizations) == ([], set())
        assert own.filed
        assert {filed.get("entity") for filed in own.filed.values()} <= {"me", None}
