"""Servers and one process forked from them, from start to end: in time, in one piece, and nothing left of it.

Server and processes are real, and small: the lmbench that they import is a few lines.
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paths import ROOT

from lmbench.instruments.milestones import clock_s
from lmbench.records.process import process_start_s
from lmbench.sweep import local
from lmbench.sweep.environments import Environment, EnvironmentFacts, ServerLost
from lmbench.sweep.executor import Launch, Stopped, oom_evidence, oom_kill_count
from lmbench.sweep.local import LocalExecutor

LMBENCH = {
    "__init__.py": "",
    "cli.py": (
        "import os, tempfile\ntempfile.gettempdir()\nAT_IMPORT = os.environ.get('FROM_ENVIRONMENT')\n"
        "FOLDER = tempfile.TemporaryDirectory()\n"
        "def main(words): pass\n"
    ),
    "__main__.py": (
        "import ctypes, os, signal, subprocess, sys, time\nfrom pathlib import Path\nimport lmbench.cli\n"
        "here = Path(os.environ['HERE'])\ndef on(name, code):\n    def close(*_):\n        print('closing')\n"
        "        sys.exit(code)\n    signal.signal(name, close)\nexec(os.environ['CODE'])\n"
    ),
}
SLEEP = "time.sleep(60)"
CHILD = "(here / 'child').write_text(f'{subprocess.Popen([\"sleep\", \"60\"]).pid}\\n');"


def environment(folder, name="fake", **variables):
    """Where a lmbench of a few lines is found first; it does what CODE says."""
    (folder / "lmbench").mkdir(exist_ok=True)
    for file, text in LMBENCH.items():
        (folder / "lmbench" / file).write_text(text)
    return Environment(name, sys.executable, EnvironmentFacts(variables=variables), folder)


@pytest.fixture(scope="module")
def fake(tmp_path_factory):
    return environment(tmp_path_factory.mktemp("fake"), FROM_ENVIRONMENT="here")


@pytest.fixture(scope="module")
def executor(fake):
    """One server for all tests of its processes."""
    executor = LocalExecutor(print)
    executor.await_ready([fake])
    yield executor
    executor.close()


def run(executor, tmp_path, fake, code, timeout_s=30.0, tick=lambda _: None, **variables):
    """Run code as the `lmbench` of an environment."""
    executor.await_ready([fake])
    variables = {"CODE": code, "HERE": str(tmp_path), **variables}
    return executor.run(Launch(["fit", "--x=1"], tmp_path / "log", fake, variables), timeout_s, tick)


@pytest.fixture
def end(executor, fake, tmp_path):
    return functools.partial(run, executor, tmp_path, fake)


def output(executor, tmp_path, fake, expression):
    """What a process prints, in a file of its own."""
    (tmp_path / "log").unlink(missing_ok=True)
    assert run(executor, tmp_path, fake, f"print({expression})").code == 0
    return (tmp_path / "log").read_text()


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


def test_it_gets_the_words_and_the_variables_and_its_output_is_kept(end, tmp_path):
    words = "*sys.argv[1:], lmbench.cli.AT_IMPORT, os.environ['FROM_SWEEP']"
    ended = end(f"print({words}); print('wrong', file=sys.stderr); sys.exit(7)", FROM_SWEEP="there")
    assert (ended.code, ended.by, ended.signal_name, ended.lost) == (7, "itself", None, None)
    assert sorted((tmp_path / "log").read_text().splitlines()) == ["fit --x=1 here there", "wrong"]
    assert 0 < ended.ended_s - ended.launched_s < 30


def test_its_temporary_folder_is_its_own_and_what_the_server_holds_stays(end, tmp_path):
    code = (
        "import tempfile; own = tempfile.TemporaryDirectory();"
        "print(tempfile.gettempdir(), lmbench.cli.FOLDER.name, own.name)"
    )
    assert end(code, TMPDIR=str(tmp_path)).code == 0
    folder, of_server, own = (tmp_path / "log").read_text().split()[:3]
    assert folder == str(tmp_path)
    assert Path(of_server).is_dir()
    assert not Path(own).exists()


def test_it_has_the_sweeps_mark_among_the_variables_that_the_kernel_keeps(fake, tmp_path):
    executor = LocalExecutor(print, cores=1, mark={"LMBENCH_SWEEP": "/here"})
    code = "'LMBENCH_SWEEP=/here' in Path('/proc/self/environ').read_text().split(chr(0))"
    assert output(executor, tmp_path, fake, code).strip() == "True"
    executor.close()


@pytest.mark.parametrize(
    ("code", "exit_code", "said"),
    [
        ("1 / 0", 1, "ZeroDivisionError: division by zero"),
        ("sys.exit('no')", 1, "no"),
        ("print('fine')", 0, "fine"),
        ("import threading; threading.Timer(0.1, print, ['waited for']).start()", 0, "waited for"),
        # A pool that nobody closes has a thread that waits for work; compiled runs have one.
        (
            "from concurrent.futures import ThreadPoolExecutor; pool = ThreadPoolExecutor(1);"
            "pool.submit(print, 'pooled').result()",
            0,
            "pooled",
        ),
    ],
)
def test_it_ends_as_a_python_of_its_own_would(code, exit_code, said, end, tmp_path):
    assert end(code).code == exit_code
    assert (tmp_path / "log").read_text().splitlines()[-1] == said


def test_a_signal_that_ended_it_is_known(end):
    ended = end("os.kill(os.getpid(), signal.SIGSEGV)")
    assert (ended.code, ended.signal_name) == (-11, "SIGSEGV")


def test_at_its_time_limit_it_may_close_its_record(end, tmp_path):
    ended = end(f"on(signal.SIGTERM, 143); {SLEEP}", timeout_s=0.3)
    assert (ended.code, ended.by) == (143, "timeout")
    assert (tmp_path / "log").read_text() == "closing\n"


def test_one_that_ignores_the_time_limit_is_killed_with_its_group(end, tmp_path, monkeypatch):
    monkeypatch.setattr(local, "GRACE_S", 0.2)
    ended = end(f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {CHILD} {SLEEP}", 0.3)
    assert (ended.code, ended.by) == (-signal.SIGKILL, "timeout")
    assert is_gone(pid_in(tmp_path / "child"))


def test_nothing_of_its_group_outlives_a_process_that_ended_by_itself(end, tmp_path):
    assert end(CHILD).code == 0
    assert is_gone(pid_in(tmp_path / "child"))


def test_an_interruption_is_passed_on_and_then_raised(end, tmp_path):
    def tick(elapsed_s):
        pid_in(tmp_path / "child")
        raise KeyboardInterrupt

    with pytest.raises(Stopped) as raised:
        end(f"on(signal.SIGINT, 130); {CHILD} {SLEEP}", tick=tick)
    assert isinstance(raised.value.cause, KeyboardInterrupt)
    assert (raised.value.end.code, raised.value.end.by) == (130, "interruption")


# servers


IDENTITY = "hash('x'), os.getppid(), ctypes.addressof(ctypes.c_int.in_dll(ctypes.pythonapi, 'Py_OptimizeFlag'))"


def test_processes_share_hash_seed_and_addresses_within_a_round_and_between_rounds_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    fake = environment(tmp_path)
    executor, rounds = LocalExecutor(print, cores=1), []
    for to_come in (1, 0):
        executor.begin_round(to_come)
        rounds.append([output(executor, tmp_path, fake, IDENTITY).split() for _ in range(3)])
    monkeypatch.setenv("PYTHONHASHSEED", "7")
    fixed = set()
    for _ in range(2):
        executor.begin_round(0)
        fixed.add(output(executor, tmp_path, fake, "hash('x')"))
    executor.close()
    for identities in rounds:
        assert identities == [identities[0]] * 3
    assert all(a != b for a, b in zip(rounds[0][0], rounds[1][0], strict=True)), rounds
    # A seed that the user fixed stays.
    assert len(fixed) == 1


def test_where_cores_are_idle_the_rounds_to_come_have_their_servers_before_anything_runs(tmp_path):
    fake, said = environment(tmp_path), []
    (tmp_path / "lmbench" / "cli.py").write_text("import time\ntime.sleep(0.2)\ndef main(words): pass\n")
    executor, pids = LocalExecutor(said.append, cores=8), []
    for to_come in (2, 1, 0):
        executor.begin_round(to_come)
        pids.append(output(executor, tmp_path, fake, "os.getppid()"))
    executor.close()
    assert len(set(pids)) == 3
    assert [line.partition(", in")[0] for line in said] == [
        "imported PyTorch, Lightning and lmbench for this round and 2 to come"
    ]
    assert all(is_gone(int(pid)) for pid in pids)


def test_each_environment_of_a_round_has_a_server_of_its_own(tmp_path):
    places = [tmp_path / name for name in "ab"]
    for place in places:
        place.mkdir()
    a, b = (environment(place, place.name, FROM_ENVIRONMENT=place.name) for place in places)
    executor = LocalExecutor(print)
    executor.begin_round(0)
    of_a, of_b, again = (
        output(executor, tmp_path, place, "lmbench.cli.AT_IMPORT, os.getppid()").split() for place in (a, b, a)
    )
    executor.close()
    assert of_a == again
    assert (of_a[0], of_b[0]) == ("a", "b")
    assert of_a[1] != of_b[1]


def test_a_process_whose_server_is_killed_ends_and_the_next_has_a_new_one(tmp_path):
    fake = environment(tmp_path)
    executor = LocalExecutor(print)
    before = int(output(executor, tmp_path, fake, "os.getppid()"))

    def tick(elapsed_s):
        pid_in(tmp_path / "child")
        os.kill(before, signal.SIGKILL)

    ended = run(executor, tmp_path, fake, f"{CHILD} {SLEEP}", 60, tick)
    assert ended.lost == f"environment fake: {sys.executable} ended while it served: SIGKILL"
    assert is_gone(pid_in(tmp_path / "child"))
    assert int(output(executor, tmp_path, fake, "os.getppid()")) != before
    executor.close()


CANNOT = {
    "no program": ("/nowhere/python", "", "environment x: /nowhere/python does not run: No such file or directory"),
    "no lmbench": (sys.executable, "raise ImportError('none here')", "finds no lmbench that works: ImportError: none"),
    "killed": (sys.executable, "import os; os.kill(os.getpid(), 9)", "finds no lmbench that works: SIGKILL"),
}


@pytest.mark.parametrize("why", CANNOT)
def test_a_server_that_cannot_start_says_why_in_one_line(why, tmp_path):
    python, cli, reason = CANNOT[why]
    fake = environment(tmp_path, "x")
    (tmp_path / "lmbench" / "cli.py").write_text(cli)
    executor = LocalExecutor(print)
    for _ in range(2):
        with pytest.raises(ServerLost) as raised:
            executor.await_ready([Environment("x", python, fake.facts, fake.folder)])
        assert reason in str(raised.value)
        assert "\n" not in str(raised.value)
    executor.close()


def test_a_server_of_another_lmbench_than_the_checkouts_is_refused(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "checkout").mkdir()
    elsewhere, checkout = environment(tmp_path / "elsewhere"), environment(tmp_path / "checkout")
    (tmp_path / "checkout" / "lmbench" / "__init__.py").write_text(
        f"__path__ = [{str(elsewhere.folder / 'lmbench')!r}]\n"
    )
    executor = LocalExecutor(print)
    for _ in range(2):
        with pytest.raises(ServerLost, match=r"lmbench comes from .*elsewhere.*, not from .*checkout"):
            executor.await_ready([checkout])
    executor.close()


SWEEP = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from lmbench.sweep.environments import Environment, EnvironmentFacts
from lmbench.sweep.executor import Launch
from lmbench.sweep.local import LocalExecutor
if sys.argv[4:]:
    Path(sys.argv[4], 'cgroup.procs').write_text(str(os.getpid()))
fake, executor = Environment(None, sys.executable, EnvironmentFacts(), Path(sys.argv[2])), LocalExecutor(str)
executor.await_ready([fake])
variables = {'CODE': sys.argv[3], 'HERE': sys.argv[2]}
end = executor.run(Launch([], Path(sys.argv[2], 'log'), fake, variables), 60, lambda _: None)
print(end.code, end.oom_evidence)
"""


def sweep(tmp_path, code, *more):
    """A process that does what a sweep does: starts a server, and has it fork."""
    environment(tmp_path)
    words = [sys.executable, "-c", SWEEP, str(ROOT), str(tmp_path), code, *map(str, more)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True)


def test_neither_process_nor_server_outlives_a_sweep_that_is_killed(tmp_path):
    pids = "\n".join(
        f"(here / '{name}').write_text(f'{{os.{get}()}}\\n')"
        for name, get in (("own", "getpid"), ("server", "getppid"))
    )
    killed = sweep(tmp_path, f"{CHILD}\n{pids}\n{SLEEP}")
    found = [pid_in(tmp_path / name) for name in ("child", "own", "server")]
    killed.kill()
    killed.communicate()
    assert all(is_gone(pid) for pid in found)


# the kernel's out-of-memory killer


def test_evidence_of_a_memory_kill_is_a_counter_that_rose():
    assert oom_evidence(("a", 3), ("a", 4)) == "oom_kill in a went from 3 to 4"
    assert oom_evidence(("a", 3), ("a", 3)) is oom_evidence(None, ("a", 4)) is oom_evidence(("b", 3), ("a", 4)) is None


def test_without_a_control_group_the_machines_counter_is_read(tmp_path):
    groups, machine = tmp_path / "cgroup", tmp_path / "vmstat"
    groups.write_text("")
    machine.write_text("nr_free_pages 1\noom_kill 5\n")
    assert oom_kill_count(groups, machine) == (str(machine), 5)
    assert oom_kill_count(groups, tmp_path / "nothing") is None


def test_a_real_memory_kill_is_seen_and_met_the_process_not_its_server(tmp_path):
    root = Path("/sys/fs/cgroup/memory")
    group = root / f"lmbench-test-{os.getpid()}"
    if os.geteuid() != 0 or not (root / "memory.limit_in_bytes").exists():
        pytest.skip("needs root and a control group (version 1) of its own")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(64 * 2**20))
        out, _ = sweep(tmp_path, "x = bytearray(2**28)", group).communicate(timeout=60)
        assert out.startswith("-9 oom_kill in ")
        assert out.strip().endswith("went from 0 to 1")
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
