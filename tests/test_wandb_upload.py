"""`lmbench upload` against servers on the loopback: exactly once, and one line for every fault."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time

import pytest
from wandb_loopback import PLANTED_KEY, Server, SilentServer, closed_port_url
from wandb_results import write_result

from lmbench.cli import main
from lmbench.records.load import load_run
from lmbench.wandb.place import Place

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def _own_home(tmp_path, monkeypatch):
    """No key but the planted one, and none of the user's own settings."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("WANDB_API_KEY", PLANTED_KEY)
    monkeypatch.setenv("WANDB_BASE_URL", closed_port_url())


@pytest.fixture
def server(monkeypatch):
    with Server() as found:
        monkeypatch.setenv("WANDB_BASE_URL", found.url)
        yield found


def test_a_result_is_uploaded_exactly_once(tmp_path, server, capsys):
    result = write_result(tmp_path / "results")
    assert main(["upload", str(tmp_path / "results")]) == 0
    first = capsys.readouterr().out
    assert first.startswith("uploaded ")
    assert f"{server.url}/me/lmbench/runs/{result.name}" in first
    questions = len(server.questions)
    assert main(["upload", str(result)]) == 0
    assert capsys.readouterr().out.startswith("already uploaded ")
    assert len(server.questions) == questions
    records = load_run(result).steps
    assert [row["step"] for row in server.history[result.name]] == [record["step"] for record in records]
    assert [row["loss"] for row in server.history[result.name]] == [record["loss"] for record in records]
    assert server.config[result.name]["config.model.size"] == "tiny"
    assert server.summary[result.name]["phases.forward.mean_s"] == load_run(result).run["phases"]["forward"]["mean_s"]
    # Every series (2: its pattern) is drawn over the step (5: the place, from 1, of the metric that is its x-axis).
    metrics = server.config[result.name]["_wandb"]["m"]
    (every,) = [metric for metric in metrics if metric.get("2") == "*"]
    assert metrics[every["5"] - 1]["1"] == "step"


def test_two_uploads_at_once_do_not_double(tmp_path, server):
    result = write_result(tmp_path / "results")
    command = [sys.executable, "-m", "lmbench", "upload", str(result)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = sorted(process.communicate(timeout=60)[0] for process in both)
    assert [process.returncode for process in both] == [0, 0]
    assert [output.split("  ")[0].strip() for output in outputs] == ["already uploaded", "uploaded"]
    assert len(server.history[result.name]) == 9


def test_an_upload_that_broke_off_is_done_anew(tmp_path, monkeypatch, capsys):
    result = write_result(tmp_path / "results")
    with Server(upload_status=403) as refusing:
        monkeypatch.setenv("WANDB_BASE_URL", refusing.url)
        assert main(["upload", str(result)]) == 1
    assert "the server refused the steps" in capsys.readouterr().err
    assert Place(result).uploaded is None
    with Server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        assert main(["upload", str(result)]) == 0
        assert len(server.history[result.name]) == 9


def test_what_wandb_sync_uploaded_is_not_uploaded_again(tmp_path, server, capsys):
    result = write_result(tmp_path / "results")
    assert main(["upload", str(result)]) == 0
    (result / "wandb" / "uploaded.json").unlink()
    questions = len(server.questions)
    assert main(["upload", str(result)]) == 0
    assert capsys.readouterr().out.splitlines()[1].startswith("already uploaded")
    assert len(server.questions) == questions


def test_a_moved_result_arrives_under_its_own_name(tmp_path, server, monkeypatch):
    result = write_result(tmp_path / "results")
    monkeypatch.setenv("WANDB_BASE_URL", closed_port_url())
    assert main(["upload", str(result)]) == 1
    shutil.move(result, tmp_path / "moved")
    monkeypatch.setenv("WANDB_BASE_URL", server.url)
    assert main(["upload", str(tmp_path / "moved")]) == 0
    assert list(server.history) == [result.name]
    assert len(server.artifacts) == 2


FAULTS = {
    "no key": (None, 2, "no W&B key; set WANDB_API_KEY"),
    "short key": ("short", 2, "does not take the key"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_key_that_is_missing_or_malformed(tmp_path, server, monkeypatch, capsys, fault):
    key, code, said = FAULTS[fault]
    result = write_result(tmp_path / "results")
    monkeypatch.delenv("WANDB_API_KEY")
    if key is not None:
        monkeypatch.setenv("WANDB_API_KEY", key)
    check_fault(result, capsys, code, said)
    assert server.history == {}


def check_fault(result, capsys, code, said, *words):
    assert main(["upload", str(result), *words]) == code
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert PLANTED_KEY not in error
    assert Place(result).uploaded is None


def test_a_server_that_refuses_the_key(tmp_path, monkeypatch, capsys):
    with Server(status=401) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        check_fault(write_result(tmp_path / "results"), capsys, 2, "as it does with a wrong or expired key")
        assert server.questions == ["UpsertBucket"]


def test_nobody_at_the_server_s_address(tmp_path, capsys):
    started = time.monotonic()
    check_fault(write_result(tmp_path / "results"), capsys, 1, "cannot be reached")
    assert time.monotonic() - started < 8


def test_a_server_that_never_answers(tmp_path, monkeypatch, capsys):
    with SilentServer() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        started = time.monotonic()
        check_fault(write_result(tmp_path / "results"), capsys, 1, "not done within 3 s", "--timeout-s", "3")
        assert time.monotonic() - started < 9


def test_a_server_that_stops_answering_in_the_middle(tmp_path, monkeypatch, capsys):
    with Server(upload_status=500) as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        check_fault(write_result(tmp_path / "results"), capsys, 1, "not done within 4 s", "--timeout-s", "4")


def test_one_general_fault_is_told_once_for_many_results(tmp_path, capsys):
    for _ in range(3):
        write_result(tmp_path / "results")
    assert main(["upload", str(tmp_path / "results")]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert lines[1] == "lmbench: 2 more not tried, since nothing about them would be different"


def test_a_run_that_goes_on_is_left_alone_and_a_killed_one_uploaded(tmp_path, server, capsys):
    from lmbench.measure.host import process_identity

    write_result(tmp_path / "results", outcome="running", **process_identity())
    killed = write_result(tmp_path / "results", outcome="running", boot_id="gone")
    assert main(["upload", str(tmp_path / "results")]) == 0
    assert "still running" in capsys.readouterr().out
    assert list(server.history) == [killed.name]
    assert server.summary[killed.name]["outcome"] == "killed"


def test_an_upload_waits_for_the_one_that_is_at_it(tmp_path, server):
    result = write_result(tmp_path / "results")
    with Place(result).locked(0):
        waiting = threading.Thread(target=main, args=(["upload", str(result)],))
        waiting.start()
        time.sleep(0.5)
        assert server.questions == []
    waiting.join(30)
    assert len(server.history[result.name]) == 9


def test_no_key_is_left_in_results_output_or_home(tmp_path, server, capsys):
    write_result(tmp_path / "results")
    assert main(["upload", str(tmp_path / "results")]) == 0
    output = capsys.readouterr()
    assert PLANTED_KEY not in output.out + output.err
    # It is the key that the server was given, and it is nowhere else.
    assert server.authorizations - {""}
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if PLANTED_KEY.encode() in path.read_bytes()]
    assert "WANDB_SERVICE" not in os.environ


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "nothing to upload"),
        (["/nowhere"], "does not exist"),
        (["/tmp", "--timeout-s", "0"], "it must be above 0"),
        (["/tmp", "--timeout"], "unknown option --timeout"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(capsys, words, said):
    assert main(["upload", *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1


def test_its_help_needs_neither_torch_nor_wandb():
    code = (
        "import sys; from lmbench.cli import main; code = main(['upload', '-h']);"
        "import lmbench.wandb.upload, lmbench.wandb.mirror, lmbench.records.load;"
        "print([name for name in ('torch', 'lightning', 'wandb') if name in sys.modules], code)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "RESULTS" in done.stdout
    assert done.stdout.splitlines()[-1] == "[] 0"
