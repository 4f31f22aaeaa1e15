"""Output for programs: standard output holds the result alone, whatever else is printed."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import warm_server
import yaml
from comparison_runs import make_runs
from fit_process import SMOKE
from noisy import WORD, make_noise_beside_any_command
from paths import TRACES
from planted_memory import planted_run, write_recording
from tables import cases, rows

NOISY = ["--model=noisy.Noisy", "--data=noisy.NoisyData", "--wandb.mode=offline"]
SHORT = [f"--config={SMOKE}", "--measure.min_window_s=0", "--measure.steps=2", "--measure.warmup_steps=1"]
TRACE = str(TRACES / "small_bf16_compiled")

#: Every command that has --json and does not run a user's module, with its words in a folder with results.
READING = {
    name: words.replace("TRACE", TRACE).split()
    for name, words in rows("""
compare | compare a b
compare --kernels | compare --kernels TRACE TRACE
fields | fields step_s
kernels | kernels TRACE
memory | memory memory_snapshot.pickle
noise | noise a
numerics | numerics
ceiling | ceiling --sustained_s=0.05
""")
}


def run(*words, folder, **settings):
    done = warm_server.run(*words, folder=folder, **settings)
    assert done.returncode in (0, 10, 11, 12), done.stderr
    return done


def check_noise(done, *places):
    """Everything that these places print is on standard error."""
    for place in places:
        assert done.stderr.count(f"{WORD} {place}\n") >= 5, place


@pytest.fixture
def results(tmp_path):
    for name in "ab":
        make_runs(tmp_path / name, [0.05] * 6)
    write_recording(tmp_path, planted_run())
    return tmp_path


@cases("command", *READING)
def test_json_of_a_command_that_reads_is_alone(command, results):
    done = run(*READING[command], "--json", folder=results, before=make_noise_beside_any_command)
    assert json.loads(done.stdout)
    check_noise(done, "parsing", "exit")


def test_json_of_a_run_is_alone_under_a_module_that_prints_and_logs(tmp_path):
    done = run("fit", *SHORT, *NOISY, "--dtypes.record=true", "--json", folder=tmp_path)
    (folder,) = (tmp_path / "results").iterdir()
    assert json.loads(done.stdout) == json.loads((folder / "run.json").read_text())
    check_noise(done, "constructor", "step", "worker", "end", "exit")
    read = run("dtypes", str(folder), "--json", folder=tmp_path, before=make_noise_beside_any_command)
    assert json.loads(read.stdout)


def test_other_output_for_programs_is_alone_too(tmp_path):
    done = run("validate", *SHORT, *NOISY, "--quiet", folder=tmp_path)
    assert [f"{path}\n" for path in tmp_path.glob("results/*")] == [done.stdout]
    done = run("fit", *SHORT, *NOISY, "--print_config", folder=tmp_path)
    assert yaml.safe_load(done.stdout)["model"]["class_path"] == "noisy.Noisy"


def predict():
    """Be the process that `lmbench memory --config` starts for a prediction."""
    request = '{"type":"Request","gpus":[]}'
    sys.argv = ["prediction", request, *SHORT, "--model=noisy.NoisyLanguageModel"]
    runpy.run_module("lmbench.fit.prediction", run_name="__main__", alter_sys=True)


def test_a_forecast_is_alone_under_a_module_that_prints(tmp_path):
    done = run(target=predict, folder=tmp_path)
    assert json.loads(done.stdout)["phases"]
    check_noise(done, "step")


def test_a_full_device_is_reported_in_one_line():
    with Path("/dev/full").open("w") as full:
        words = [sys.executable, "-m", "lmbench", *READING["kernels"], "--json"]
        done = subprocess.run(words, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "lmbench: standard output: No space left on device\n")
