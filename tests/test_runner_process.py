"""One process from start to end: in time, in one piece, and nothing left of it. The processes are real, and small."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lmbench.measure.milestones import clock_s
from lmbench.records.process import process_start_s
from lmbench.sweep import supervise
from lmbench.sweep.engine import ExecEngine, Launch
from lmbench.sweep.environments import Environment
from lmbench.sweep.oom_evidence import KillCount, evidence, kill_counts
from lmbench.sweep.supervise import Stopped, run_to_end


def launch(tmp_path, script):
    """A shell script in the place of Python: it gets the words that lmbench would."""
    program = tmp_path / "program"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    environment = Environment(str(program), {"FROM_ENVIRONMENT": "here"}, {})
    return Launch(["fit", "--x=1"], tmp_path / "log", environment, {"FROM_SWEEP": "there"})


def end(tmp_path, script, timeout_s=30.0):
    return run_to_end(ExecEngine(), launch(tmp_path, script), timeout_s, lambda _: None)


def pid_in(path):
    for _ in range(500):
        if path.exists() and path.read_text().endswith("\n"):
            return int(path.read_text())
        time.sleep(0.01)
    raise AssertionError(f"{path} was not written")


def is_gone(pid):
    for _ in range(500):
        if process_start_s(pid) is None:
            return True
        time.sleep(0.01)
    return False


def test_it_gets_the_words_and_the_variables_and_its_output_is_kept(tmp_path):
    ended = end(tmp_path, 'echo "$@ $FROM_ENVIRONMENT $FROM_SWEEP"; echo wrong >&2; exit 7')
    assert (ended.code, ended.by, ended.signal) == (7, "itself", None)
    assert (tmp_path / "log").read_text() == "-P -m lmbench fit --x=1 here there\nwrong\n"
    assert 0 < ended.ended_s - ended.launched_s < 30


def test_a_signal_that_ended_it_is_known(tmp_path):
    ended = end(tmp_path, "kill -SEGV $$")
    assert (ended.code, ended.signal) == (-11, signal.SIGSEGV)


def test_at_its_time_limit_it_may_close_its_record(tmp_path):
    ended = end(tmp_path, "trap 'echo closing; exit 143' TERM; sleep 60 & wait", timeout_s=0.3)
    assert (ended.code, ended.by) == (143, "timeout")
    assert (tmp_path / "log").read_text() == "closing\n"


def test_one_that_ignores_the_time_limit_is_killed_with_its_group(tmp_path, monkeypatch):
    monkeypatch.setattr(supervise, "GRACE_S", 0.2)
    started = time.monotonic()
    ended = end(tmp_path, f"trap '' TERM; sleep 60 & echo $! > {tmp_path}/pid; while :; do sleep 1; done", 0.3)
    assert (ended.code, ended.by) == (-signal.SIGKILL, "timeout")
    assert time.monotonic() - started < 20
    assert is_gone(pid_in(tmp_path / "pid"))


def test_nothing_of_its_group_outlives_a_process_that_ended_by_itself(tmp_path):
    ended = end(tmp_path, f"sleep 60 & echo $! > {tmp_path}/pid")
    assert ended.code == 0
    assert is_gone(pid_in(tmp_path / "pid"))


def test_an_interruption_is_passed_on_and_then_raised(tmp_path):
    def tick(elapsed_s):
        pid_in(tmp_path / "ready")
        raise KeyboardInterrupt

    script = f"trap 'echo closing; exit 130' INT; sleep 60 & echo 1 > {tmp_path}/ready; wait"
    with pytest.raises(Stopped) as raised:
        run_to_end(ExecEngine(), launch(tmp_path, script), 30, tick)
    assert isinstance(raised.value.cause, KeyboardInterrupt)
    assert (raised.value.end.code, raised.value.end.by) == (130, "interruption")


def test_it_does_not_outlive_a_sweep_that_is_killed(tmp_path):
    launch(tmp_path, f"sleep 60 & echo $! > {tmp_path}/inner; echo $$ > {tmp_path}/outer; wait")
    code = (
        "import sys\nfrom pathlib import Path\nfrom lmbench.sweep.engine import ExecEngine, Launch\n"
        "from lmbench.sweep.environments import Environment\nfrom lmbench.sweep.supervise import run_to_end\n"
        "environment = Environment(sys.argv[1], {}, {})\n"
        "run_to_end(ExecEngine(), Launch([], Path(sys.argv[2]), environment, {}), 60, lambda _: None)\n"
    )
    sweep = subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "program"), str(tmp_path / "log")])
    pids = [pid_in(tmp_path / name) for name in ("inner", "outer")]
    sweep.kill()
    sweep.wait()
    assert all(is_gone(pid) for pid in pids)


def test_evidence_of_a_memory_kill_is_a_counter_that_rose():
    before, after = [KillCount("a", 3)], [KillCount("a", 4)]
    assert evidence(before, after) == "oom_kill in a went from 3 to 4"
    assert evidence(before, before) is None
    assert evidence([], after) is None


def test_without_a_control_group_the_machines_counter_is_read(tmp_path):
    groups = tmp_path / "cgroup"
    groups.write_text("")
    machine = tmp_path / "vmstat"
    machine.write_text("nr_free_pages 1\noom_kill 5\n")
    assert kill_counts(groups, machine) == [KillCount(str(machine), 5)]
    assert kill_counts(groups, tmp_path / "nothing") == []


def test_a_real_memory_kill_is_seen(tmp_path):
    root = Path("/sys/fs/cgroup/memory")
    group = root / f"lmbench-test-{os.getpid()}"
    if os.geteuid() != 0 or not (root / "memory.limit_in_bytes").exists():
        pytest.skip("needs root and a control group (version 1) of its own")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(64 * 2**20))
        code = (
            "import os, sys\nfrom pathlib import Path\nfrom lmbench.sweep.engine import ExecEngine, Launch\n"
            "from lmbench.sweep.environments import Environment\nfrom lmbench.sweep.supervise import run_to_end\n"
            "Path(sys.argv[1], 'cgroup.procs').write_text(str(os.getpid()))\n"
            "launch = Launch([], Path(sys.argv[3]), Environment(sys.argv[2], {}, {}), {})\n"
            "end = run_to_end(ExecEngine(), launch, 60, lambda _: None)\n"
            "print(end.code, end.oom_evidence)\n"
        )
        program = launch(tmp_path, f"exec {sys.executable} -c 'x = bytearray(2**28)'").environment.python
        words = [sys.executable, "-c", code, str(group), program, str(tmp_path / "log")]
        done = subprocess.run(words, capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.startswith("-9 oom_kill in ")
        assert done.stdout.strip().endswith("went from 0 to 1")
    finally:
        for _ in range(100):
            try:
                group.rmdir()
                break
            except OSError:
                time.sleep(0.05)


def test_the_clock_dates_processes_as_the_kernel_does():
    child = subprocess.Popen(["sleep", "5"])
    began_s = process_start_s(child.pid)
    child.kill()
    child.wait()
    assert began_s is not None
    assert abs(clock_s() - began_s) < 2
