"""Large results are read and shown quickly and in little memory, without torch."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest
import yaml
from runs import make_sweep

AXES = yaml.safe_load("""
model.size: [small, medium, large, xl, 2.7B]
mode: [inference, forward, forward_backward, train_step]
trainer.precision: [32-true, bf16-mixed, 16-mixed, bf16-true, 16-true]
data.batch_size: [1, 2, 4, 8, 16]
measure.warmup_steps: [1, 5]
""")


def timed_report(*words):
    """The processor seconds and peak resident bytes of a separate process with `lmbench report`.

    The process has one thread and waits for the disk alone; other processes of the machine do not count.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, "-m", "lmbench", "report", *words], check=True, stdout=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, after.ru_maxrss * 1024


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    folder = tmp_path_factory.mktemp("results")
    (run,) = (make_sweep(folder / "one", {}, steps=1000) / "runs").iterdir()
    steps = (run / "steps.jsonl").read_bytes()
    home = make_sweep(folder / "large", AXES, steps=0)
    for path in home.glob("runs/*/steps.jsonl"):
        path.write_bytes(steps)
    return home


# On an idle core, tables take 3.5 s of processor time and pages up to 10 s. On a shared core it is twice as long.
@pytest.mark.parametrize(
    ("view", "words", "limit_s"),
    yaml.safe_load("""
- [step_times, [--format=csv], 10]
- [warmup, [--format=markdown], 10]
- [precision, [--output=page.html], 25]
"""),
)
def test_1000_cells_and_a_million_steps_take_a_few_seconds_and_under_2_gib(
    view, words, limit_s, large, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    seconds, size_bytes = timed_report(str(large), "--view", view, *words)
    assert seconds < limit_s
    assert size_bytes < 2 * 2**30
