"""Fork servers and their processes: started, stopped in time, and completely gone afterwards.

Servers and processes are real, and import an lmbench of a few lines.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from multiprocessing import Pipe
from pathlib import Path

import pytest
from paths import ROOT
from tables import cases
from waiting import wait_for

from lmbench.records.process import process_start_s
from lmbench.sweep import local
from lmbench.sweep.environments import Environment, ServerLost
from lmbench.sweep.file import EnvironmentSpec
from lmbench.sweep.local import LocalExecutor
from lmbench.sweep.outcome import Launch

LMBENCH = {
    "__init__.py": "",
    "cli.py": (
        "import os, tempfile\ntempfile.gettempdir()\nAT_IMPORT = os.environ.get('FROM_ENVIRONMENT')\n"
        "FOLDER = tempfile.TemporaryDirectory()\n"
        "def main(words): pass\n"
    ),
    "__main__.py": (
        "import ctypes, os, signal, subprocess, sys, tempfile, time\nfrom pathlib import Path\nimport lmbench.cli\n"
        "here = Path(os.environ['HERE'])\ndef on(name, code):\n    def close(*_):\n        print('closing')\n"
        "        sys.exit(code)\n    signal.signal(name, close)\nexec(os.environ['CODE'])\n"
    ),
}
SLEEP = "time.sleep(60)"
CHILD = "(here / 'child').write_text(f'{subprocess.Popen([\"sleep\", \"60\"]).pid}\\n');"
OWN_SESSION = CHILD.replace("])", "], start_new_session=True)")


def environment(folder, **variables):
    """An environment with an lmbench of a few lines, which executes the variable CODE."""
    (folder / "lmbench").mkdir(parents=True, exist_ok=True)
    for file, text in LMBENCH.items():
        (folder / "lmbench" / file).write_text(text)
    return Environment("fake", sys.executable, EnvironmentSpec(variables=variables), folder)


class Machine(LocalExecutor):
    """An executor for processes that execute a line of code."""

    def __init__(self, folder, environment, cores=1, **more):
        self.folder, self.environment = folder, environment
        super().__init__(cores=cores, **more)

    def launch(self, code, log="log", pipe=None, **variables):
        variables = {"CODE": code, "HERE": str(self.folder), **variables}
        return Launch(["fit", "--x=1"], self.folder / log, self.environment, variables, pipe=pipe)

    def end(self, code, timeout_s=30.0, tick=lambda: None, **variables):
        (self.folder / "log").unlink(missing_ok=True)
        (end,) = self.run([self.launch(code, **variables)], timeout_s, tick)
        return end

    def printed(self, expression, **more):
        """The words that a process prints."""
        assert self.end(f"print({expression})", **more).code == 0
        return self.log.split()

    @property
    def log(self):
        return (self.folder / "log").read_text()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """An executor whose server serves many tests."""
    folder = tmp_path_factory.mktemp("fake")
    machine = Machine(folder, environment(folder, FROM_ENVIRONMENT="here"), mark={"LMBENCH_SWEEP": "/here"})
    yield machine
    machine.close()


@pytest.fixture
def machine(tmp_path):
    """An executor with servers of its own."""
    machine = Machine(tmp_path, environment(tmp_path))
    yield machine
    machine.close()


def pid_in(path):
    wait_for(lambda: path.exists() and path.read_text().endswith("\n"))
    return int(path.read_text())


def is_gone(pid):
    return wait_for(lambda: process_start_s(pid) is None)


def test_a_fork_gets_words_and_variables_and_its_output_is_kept(shared, tmp_path):
    end = shared.end(
        "print(*sys.argv[1:], lmbench.cli.AT_IMPORT, os.environ['FROM_SWEEP']);"
        "print('wrong', file=sys.stderr); sys.exit(7)",
        FROM_SWEEP="there",
    )
    assert (end.code, end.by, end.signal_name, end.lost) == (7, "itself", None, None)
    assert sorted(shared.log.splitlines()) == ["fit --x=1 here there", "wrong"]
    assert 0 < end.cost_s < 30
    # The sweep's mark is among the variables that the kernel keeps of a process.
    assert shared.printed("'LMBENCH_SWEEP=/here' in Path('/proc/self/environ').read_text().split(chr(0))") == ["True"]
    folders = "tempfile.gettempdir(), lmbench.cli.FOLDER.name, (own := tempfile.TemporaryDirectory()).name"
    temporary, of_server, own = shared.printed(folders, TMPDIR=str(tmp_path))
    assert (temporary, Path(of_server).is_dir(), Path(own).exists()) == (str(tmp_path), True, False)


def test_a_package_that_a_run_had_to_import_is_there_in_later_runs(machine):
    (machine.folder / "transformers.py").write_text("import os\nIMPORTED_BY = os.getpid()\n")
    expression = "__import__('transformers').IMPORTED_BY, os.getpid(), os.getppid()"
    by, own, _ = machine.printed(expression)
    assert by == own
    by, _, server = machine.printed(expression)
    assert by == server


def test_a_run_ends_also_with_more_names_of_modules_than_a_pipe_takes(machine):
    code = "sys.modules.update({f'transformers.{i:099}': sys for i in range(1000)}); print('done')"
    assert (machine.end(code).code, machine.log) == (0, "done\n")
    assert machine.printed("'served on'") == ["served", "on"]


@cases("""
- [code, exit_code, last_line]
- [1 / 0, 1, "ZeroDivisionError: division by zero"]
- [sys.exit('no'), 1, "no"]
- ["import threading; threading.Timer(0.1, print, ['waited for']).start()", 0, waited for]
# A pool that is never closed has a thread that waits for work, as in compiled runs.
- ["from concurrent.futures import ThreadPoolExecutor; pool = ThreadPoolExecutor(1);\
    pool.submit(print, 'pooled').result()", 0, pooled]
- ["print('dies', flush=True); os.kill(os.getpid(), signal.SIGSEGV)", -11, dies]
""")
def test_a_fork_ends_like_a_new_python(code, exit_code, last_line, shared):
    end = shared.end(code)
    assert (end.code, end.signal_name) == (exit_code, "SIGSEGV" if exit_code < 0 else None)
    assert shared.log.splitlines()[-1] == last_line


@cases(f"""
code | timeout_s | exit_code | by
on(signal.SIGTERM, 143); {CHILD} {SLEEP} | 0.3 | 143 | timeout
signal.signal(signal.SIGTERM, signal.SIG_IGN); {CHILD} {SLEEP} | 0.3 | -9 | timeout
{CHILD} | 30 | 0 | itself
{OWN_SESSION} | 30 | 0 | itself
{OWN_SESSION} {SLEEP} | 0.3 | -15 | timeout
""")
def test_a_fork_may_close_its_record_at_its_time_limit_and_nothing_of_it_is_left(
    code, timeout_s, exit_code, by, shared, monkeypatch
):
    monkeypatch.setattr(local, "GRACE_S", 0.5)
    (shared.folder / "child").unlink(missing_ok=True)
    end = shared.end(code, float(timeout_s))
    assert (str(end.code), end.by, "closing" in shared.log) == (exit_code, by, exit_code == "143")
    assert is_gone(pid_in(shared.folder / "child"))


# A distribution's Python may stay at one address; the C library does not.
IDENTITY = "hash('x'), os.getppid(), ctypes.cast(ctypes.CDLL(None).getpid, ctypes.c_void_p).value"


def test_processes_share_hash_seed_and_addresses_within_a_round_and_differ_between_rounds(machine, monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    rounds = []
    for _ in range(2):
        machine.begin_round(1)
        rounds.append([machine.printed(IDENTITY) for _ in range(3)])
    assert [identities == [identities[0]] * 3 for identities in rounds] == [True, True]
    assert all(a != b for a, b in zip(rounds[0][0], rounds[1][0], strict=True)), rounds


@cases("""
- [cores, servers]
- [8, 6]
- [1, 2]
""")
def test_each_round_of_a_comparison_has_a_server_of_its_own_where_cores_are_idle(cores, servers, tmp_path):
    machine, pids, counts = Machine(tmp_path, environment(tmp_path), cores=cores), set(), []
    machine.is_hasty = True
    (tmp_path / "lmbench" / "cli.py").write_text("import time\ntime.sleep(0.2)\ndef main(words): pass\n")
    for to_come in (5, 4, 3, 2, 1, 0):
        # A server takes longer than half of a round, so without idle cores four rounds share one.
        machine.begin_round(to_come, last_round_s=0.1)
        pids.update(machine.printed("os.getppid()"))
        counts += [len(waiting) for waiting in machine._servers.values()]
    machine.close()
    assert len(pids) == servers
    # The next one starts during the last of these rounds.
    assert cores > 1 or counts == [1, 1, 1, 2, 1, 1]


def test_servers_of_later_rounds_are_ready_before_anything_runs_and_two_environments_share_the_cores(tmp_path):
    machine = LocalExecutor(cores=8)
    sides = [replace(environment(tmp_path / name), name=name) for name in "AB"]
    machine.begin_round(9)
    machine.await_ready(sides)
    for side in sides:
        machine.await_ready([side])
    servers = [server for name in "AB" for server in machine._servers[name]]
    assert [server._is_ready for server in servers] == [True] * 4
    machine.close()
    assert all(is_gone(server.process.pid) for server in servers)


PARTNER = """
import time
from multiprocessing.connection import Connection
other = Connection(int(os.environ["LMBENCH_TURNS_PIPE"]))
if os.environ["ENDS"]:
    other.recv()
    os._exit(9)
other.send("ready")
try:
    other.recv()
except EOFError:
    print("alone")
"""


def test_two_processes_have_a_pipe_that_closes_as_soon_as_one_of_them_ends(machine):
    pipes = zip(["", "1"], Pipe(), strict=True)
    launches = [machine.launch(PARTNER, f"log{ends}", pipe, ENDS=ends) for ends, pipe in pipes]
    assert [end.code for end in machine.run(launches, 60, lambda: None)] == [0, 9]
    assert (machine.folder / "log").read_text() == "alone\n"


def test_a_process_whose_server_is_killed_ends_and_the_next_has_a_new_one(machine):
    (before,) = map(int, machine.printed("os.getppid()"))

    def tick():
        pid_in(machine.folder / "child")
        os.kill(before, signal.SIGKILL)

    end = machine.end(f"{CHILD} {SLEEP}", 60, tick)
    assert end.lost == f"environment fake: {sys.executable} ended while it served: SIGKILL"
    assert is_gone(pid_in(machine.folder / "child"))
    assert machine.printed("os.getppid()") != [str(before)]


@cases(f"""
python | file | text | reason
/nowhere/python | cli.py | - | fake: /nowhere/python does not run: No such file or directory
{sys.executable} | cli.py | raise ImportError('none here') | no lmbench that works: ImportError: none here
# The environment imports another lmbench than the checkout's.
{sys.executable} | __init__.py | __path__ = ['ELSEWHERE'] | lmbench comes from ELSEWHERE, not from
""")
def test_a_server_that_cannot_serve_says_why_in_one_line(python, file, text, reason, machine, tmp_path):
    elsewhere = str(environment(tmp_path.with_name(f"{tmp_path.name}-elsewhere")).folder / "lmbench")
    (tmp_path / "lmbench" / file).write_text(text.replace("ELSEWHERE", elsewhere))
    for _ in range(2):
        with pytest.raises(ServerLost) as raised:
            machine.await_ready([Environment("fake", python, EnvironmentSpec(), tmp_path)])
        assert reason.replace("ELSEWHERE", elsewhere) in str(raised.value)
        assert "\n" not in str(raised.value)


SWEEP = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from lmbench.sweep.environments import Environment
from lmbench.sweep.file import EnvironmentSpec
from lmbench.sweep.outcome import Launch
from lmbench.sweep.local import LocalExecutor
Path(sys.argv[4], 'cgroup.procs').write_text(str(os.getpid()))
fake, executor = Environment(None, sys.executable, EnvironmentSpec(), Path(sys.argv[2])), LocalExecutor()
executor.await_ready([fake])
variables = {'CODE': sys.argv[3], 'HERE': sys.argv[2]}
(end,) = executor.run([Launch([], Path(sys.argv[2], 'log'), fake, variables)], 60, lambda _: None)
print(end.code, end.oom_evidence)
"""


def test_a_real_memory_kill_is_seen_and_ends_the_process_not_its_server(tmp_path):
    root = Path("/sys/fs/cgroup/memory")
    group = root / f"lmbench-test-{os.getpid()}"
    if os.geteuid() != 0 or not (root / "memory.limit_in_bytes").exists():
        pytest.skip("needs root and a control group (version 1) of its own")
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(64 * 2**20))
        environment(tmp_path)
        # The kernel ends the group's largest process, which this one would be. So the sweep is another process.
        words = [sys.executable, "-c", SWEEP, str(ROOT), str(tmp_path), "x = bytearray(2**28)", str(group)]
        out = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout
        # The kernel counts the whole machine's: another test's process may have ended so, too.
        assert re.fullmatch("-9 the kernel's count of such ends rose by [1-9]\n", out), out
    finally:
        wait_for(lambda: not subprocess.run(["rmdir", group], check=False).returncode)
