"""W&B around `lmbench fit`: offline by default, uploaded where asked, and never the measurement's misfortune."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import sysconfig
import time
from pathlib import Path

import pytest
import yaml
from wandb_loopback import PLANTED_KEY, Offline, Server, SilentServer, closed_port_url

from lmbench.cli import main
from lmbench.records.fields import unregistered
from lmbench.records.load import load_run
from lmbench.wandb.place import Place

QUICK = [
    "--config", str(Path(__file__).parents[1] / "configs" / "smoke.yaml"), "--model.num_layers", "1",
    "--measure.steps", "6", "--measure.min_window_s", "0", "--measure.probe_steps", "2", "--data.context_length", "16",
]  # fmt: skip
# For a module that is not lmbench's.
FOREIGN = [
    "--trainer.accelerator", "cpu", "--data.batch_size", "4", "--data.context_length", "16",
    "--measure.warmup_steps", "3", "--measure.steps", "6", "--measure.min_window_s", "0", "--measure.probe_steps", "2",
]  # fmt: skip
UPLOAD = ["--trainer.logger.init_args.offline", "false"]


@pytest.fixture(autouse=True)
def _wandb(tmp_path, monkeypatch):
    """W&B as a newcomer has it: on, no account, nothing of the user's own; its servers are out of reach."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("WANDB_BASE_URL", closed_port_url())


def fit(tmp_path, *words, code=0, options=QUICK):
    results = tmp_path / "results"
    before = set(results.glob("*"))
    assert main(["fit", *options, "--measure.results_dir", str(results), *words]) == code
    (new,) = set(results.glob("*")) - before
    return load_run(new)


def offline_file(result):
    (file,) = result.path.glob("wandb/offline-run-*/*.wandb")
    return file


@pytest.mark.slow
def test_every_run_is_there_offline_without_account_or_network(tmp_path, capsys):
    environment = {name: value for name, value in os.environ.items() if "WANDB" in name}
    result = fit(tmp_path)
    offline = Offline(offline_file(result))
    assert [row["step"] for row in offline.history] == [record["step"] for record in result.steps] == list(range(9))
    assert offline.summary["throughput.tokens_per_s"] == pytest.approx(result.run["throughput"]["tokens_per_s"])
    assert offline.summary["outcome"] == "ok"
    assert offline.config["config.model.num_layers"] == 1
    assert offline.config["environment.versions.torch"] == result.run["environment"]["versions"]["torch"]
    assert {name: value for name, value in os.environ.items() if "WANDB" in name} == environment
    assert unregistered(result.run, "run") == []
    output = capsys.readouterr()
    assert f"W&B          offline, beside the result\nupload       lmbench upload {result.path}\n" in output.out
    assert output.err == ""


@pytest.mark.slow
def test_the_stored_configuration_repeats_the_run_in_a_folder_of_its_own(tmp_path):
    first = fit(tmp_path, "--trainer.logger.init_args.project", "speed", "--trainer.logger.init_args.id", "one")
    stored = yaml.safe_load((first.path / "config.yaml").read_text())["trainer"]["logger"]
    assert stored["init_args"] == {"project": "speed", "offline": True}
    assert Offline(offline_file(first)).run.run_id == "one"
    second = fit(tmp_path, "--config", str(first.path / "config.yaml"))
    assert Offline(offline_file(second)).run.run_id == second.path.name
    assert Offline(offline_file(second)).run.project == "speed"
    assert len(list(first.path.glob("wandb/offline-run-*"))) == 1


def test_the_logger_can_be_turned_off_or_be_another_one(tmp_path):
    assert fit(tmp_path, "--trainer.logger", "false").run["wandb"] is None
    other = fit(tmp_path, "--trainer.logger", "CSVLogger", "--trainer.logger.save_dir", str(tmp_path / "csv"))
    assert other.run["wandb"] is None
    assert (tmp_path / "csv").is_dir()
    assert not list((tmp_path / "results").glob("*/wandb"))


def test_wandb_s_own_switch_turns_it_off(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert not (fit(tmp_path).path / "wandb").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--trainer.logger.init_args.save_dir", "there"], "see --measure.results_dir"),
        (["--trainer.logger.init_args.mode", "online"], "which lmbench does not use; it uses project,"),
        (["--trainer.logger.init_args.log_model", "all"], "log_model is 'all'"),
        (["--trainer.logger+=WandbLogger"], "two WandbLoggers"),
        (["--wandb.timeout_s", "0"], "it must be above 0"),
    ],
)
def test_settings_without_effect_are_refused(tmp_path, capsys, words, said):
    assert main(["fit", *QUICK, "--measure.results_dir", str(tmp_path / "results"), *words]) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.count("\n") == 1
    assert not (tmp_path / "results").exists()


@pytest.mark.slow
def test_a_run_out_of_memory_is_on_the_board_too(tmp_path):
    result = fit(tmp_path, "--model.d_model", "2000000", code=3)
    offline = Offline(offline_file(result))
    assert (result.outcome, offline.summary["outcome"]) == ("oom", "oom")
    assert offline.history == []


@pytest.mark.slow
def test_a_run_that_breaks_is_on_the_board_too(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    result = fit(tmp_path, "--model", "wandb_modules.Raising", code=1, options=FOREIGN)
    offline = Offline(offline_file(result))
    assert (result.outcome, offline.summary["outcome"]) == ("error", "error")
    assert offline.summary["error.message"] == "broken on purpose"
    assert len(offline.history) == len(result.steps) == 5


@pytest.mark.slow
def test_it_is_uploaded_when_closed_where_asked(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", PLANTED_KEY)
    with Server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        result = fit(tmp_path, *UPLOAD)
        assert len(server.history[result.path.name]) == 9
        output = capsys.readouterr()
        assert f"W&B          uploaded: {server.url}/me/lmbench/runs/{result.path.name}" in output.out
        questions = len(server.questions)
        assert main(["upload", str(result.path)]) == 0
        assert len(server.questions) == questions
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not [path for path in files if PLANTED_KEY.encode() in path.read_bytes()]
    assert PLANTED_KEY not in output.out + output.err


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["no key", "wrong key", "nobody there", "no answer"])
def test_an_upload_that_fails_changes_nothing_about_the_run(tmp_path, monkeypatch, capsys, fault):
    said = {
        "no key": "no W&B key",
        "wrong key": "wrong or expired key",
        "nobody there": "cannot be reached",
        "no answer": "not done within 2 s",
    }[fault]
    if fault != "no key":
        monkeypatch.setenv("WANDB_API_KEY", PLANTED_KEY)
    server = SilentServer() if fault == "no answer" else Server(status=200 if fault == "no key" else 401)
    with server:
        if fault != "nobody there":
            monkeypatch.setenv("WANDB_BASE_URL", server.url)
        result = fit(tmp_path, *UPLOAD, "--wandb.timeout_s", "2" if fault == "no answer" else "30")
    assert (result.outcome, result.run["exit_code"]) == ("ok", 0)
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert error.startswith("lmbench: not uploaded to W&B: ")
    assert said in error
    assert f"later: lmbench upload {result.path}" in error
    # It is there as if no upload had been asked for, and can be uploaded later.
    assert len(Offline(offline_file(result)).history) == 9
    assert Place(result.path).uploaded is None


@pytest.mark.slow
def test_in_the_window_nothing_of_wandb_runs_whatever_becomes_of_the_upload(tmp_path):
    tests = str(Path(__file__).parent)
    states = []
    for words in (["--trainer.logger", "false"], [], [*UPLOAD, "--wandb.timeout_s", "1"]):
        file = tmp_path / "state.json"
        env = {**os.environ, "PYTHONPATH": tests, "STATE_FILE": str(file), "WANDB_API_KEY": PLANTED_KEY}
        command = [sys.executable, "-m", "lmbench", "fit", *FOREIGN, "--model", "wandb_modules.Watching", *words]
        folder = ["--measure.results_dir", str(tmp_path / "results")]
        subprocess.run([*command, *folder], env=env, capture_output=True, check=True)
        states.append(json.loads(file.read_text()))
    assert states[0] == states[1] == states[2]
    assert states[0]["is_open"] is False
    assert "".join(states[0]["children"]) == ""


@pytest.mark.slow
def test_wandb_s_offline_switch_keeps_it_from_uploading(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    with Server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        result = fit(tmp_path, *UPLOAD)
        assert server.questions == []
    assert offline_file(result).is_file()


@pytest.mark.slow
def test_a_broken_wandb_costs_one_line(tmp_path, monkeypatch, capsys):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "wandb.py").write_text("raise RuntimeError('broken')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "broken"))
    done = run_fit([sys.executable], tmp_path)
    assert done.returncode == 0
    assert "W&B got nothing of this run: wandb failed with RuntimeError: broken; later: lmbench upload" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.fixture
def without_wandb(tmp_path):
    """A Python in which wandb really is not installed: all of this environment's packages but that one."""
    site = tmp_path / "site"
    (site / "lmbench").mkdir(parents=True)
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if not entry.name.startswith(("wandb", "lmbench")):
            (site / entry.name).symlink_to(entry)
    import lmbench

    for entry in Path(lmbench.__path__[0]).iterdir():
        (site / "lmbench" / entry.name).symlink_to(entry)
    # In a checkout these two lie elsewhere.
    for name in ("callbacks", "configs"):
        if not (site / "lmbench" / name).exists():
            found = importlib.import_module(f"lmbench.{name}").__path__[0]
            (site / "lmbench" / name).symlink_to(found)
    return {**os.environ, "PYTHONPATH": str(site)}


def run_fit(python, tmp_path, *words, env=None):
    command = [*python, "-m", "lmbench", "fit", *QUICK, "--measure.results_dir", str(tmp_path / "results"), "--quiet"]
    return subprocess.run([*command, *words], capture_output=True, text=True, env=env, cwd=tmp_path, check=False)


@pytest.mark.slow
def test_without_wandb_installed_the_default_configuration_measures(tmp_path, without_wandb):
    python = [str(Path(sys.base_prefix) / "bin" / f"python3.{sys.version_info.minor}")]
    absent = subprocess.run(
        [*python, "-c", "import lmbench.fit.run, wandb"],
        env=without_wandb,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert absent.stderr.splitlines()[-1] == "ModuleNotFoundError: No module named 'wandb'"
    done = run_fit(python, tmp_path, env=without_wandb)
    assert done.returncode == 0, done.stderr
    (folder,) = (tmp_path / "results").iterdir()
    later = f"later: lmbench upload {folder}"
    assert done.stderr == f"lmbench: W&B got nothing of this run: wandb is not installed; {later}\n"
    assert load_run(folder).outcome == "ok"
    # What another machine recorded repeats here, and the other way round.
    assert run_fit(python, tmp_path, "--config", str(folder / "config.yaml"), env=without_wandb).returncode == 0
    assert run_fit([sys.executable], tmp_path, "--config", str(folder / "config.yaml")).returncode == 0


@pytest.mark.slow
def test_a_module_s_own_logging_arrives_and_starts_nothing_in_the_run(tmp_path, monkeypatch, capsys):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    words = ["--model", "wandb_modules.Logging", "--trainer.log_every_n_steps", "1"]
    result = fit(tmp_path, *words, "--trainer.logger.init_args.prefix", "mine", options=FOREIGN)
    offline = Offline(offline_file(result))
    logged = [row for row in offline.history if "logged/mine-square" in row]
    assert [row["logged/mine-square"] for row in logged[:4]] == [0.0, 1.0, 4.0, 9.0]
    assert len([row for row in offline.history if "step_s" in row]) == len(result.steps)
    assert offline.config["logged.tried"] is True
    assert "(without what the module sent by picture, watch)" in capsys.readouterr().out
    rows = [json.loads(line) for line in (result.path / "logged.jsonl").read_text().splitlines()]
    assert rows[1]["trainer/global_step"] == 0


@pytest.mark.slow
def test_ctrl_c_while_it_uploads_leaves_the_result_as_it_was(tmp_path):
    with SilentServer() as server:
        env = {**os.environ, "WANDB_BASE_URL": server.url, "WANDB_API_KEY": PLANTED_KEY}
        command = [sys.executable, "-m", "lmbench", "fit", *QUICK, "--measure.results_dir", str(tmp_path / "results")]
        running = subprocess.Popen(
            [*command, *UPLOAD], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("results/*/wandb/mirror.json")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(0.5)
        running.send_signal(2)
        _, error = running.communicate(timeout=20)
    (folder,) = (tmp_path / "results").iterdir()
    assert error.startswith("lmbench: not uploaded to W&B: stopped; later: lmbench upload")
    assert error.count("\n") == 1
    assert (load_run(folder).outcome, load_run(folder).run["exit_code"]) == ("ok", 0)
    assert running.returncode == 130


@pytest.mark.slow
def test_an_interrupted_run_is_on_the_board_and_not_uploaded_behind_the_user_s_back(tmp_path):
    with Server() as server:
        env = {**os.environ, "WANDB_BASE_URL": server.url, "WANDB_API_KEY": PLANTED_KEY}
        command = [sys.executable, "-m", "lmbench", "fit", *QUICK, "--measure.results_dir", str(tmp_path / "results")]
        words = [*UPLOAD, "--measure.steps", "100000"]
        running = subprocess.Popen(
            [*command, *words], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )
        deadline = time.monotonic() + 60
        while not any(path.stat().st_size for path in tmp_path.glob("results/*/steps.jsonl")):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        running.send_signal(2)
        _, error = running.communicate(timeout=30)
        assert server.questions == []
    (folder,) = (tmp_path / "results").iterdir()
    assert "lmbench: not uploaded, as the run was interrupted; later: lmbench upload" in error
    assert running.returncode == 130
    loaded = load_run(folder)
    offline = Offline(offline_file(loaded))
    assert (loaded.outcome, offline.summary["outcome"]) == ("interrupted", "interrupted")
    assert len(offline.history) == len(loaded.steps) > 0


def test_a_disk_without_room_for_w_and_b_keeps_the_result(tmp_path, small_disk, capsys):
    small_disk(96)
    result = fit(tmp_path)
    assert (result.outcome, len(result.steps)) == ("ok", 9)
    error = capsys.readouterr().err
    assert error.startswith("lmbench: W&B got nothing of this run: ")
    assert "disk" in error
    assert error.count("\n") == 1
    assert Place(result.path).mirror is None
