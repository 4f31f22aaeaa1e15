"""A SLURM of this machine alone: its daemons, two GPUs that are only device nodes, and no accounting.

The node claims eight CPUs, so that several tasks of a job array run at once on a small machine. Everything lies in a
folder of its own, on ports of its own: several may run side by side.
"""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import socket
import stat
import subprocess
import tempfile
import time
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest

GPUS = 2
_CPUS = 8
_PACKAGES = {"sbatch": "slurm-wlm", "slurmctld": "slurm-wlm", "slurmd": "slurm-wlm", "munged": "munge"}
# Where the daemons lie, whose folder is not on every user's path.
_PATH = f"{os.environ.get('PATH', '')}:/usr/sbin"
_START_S = 30


_CONFIGURATION = """\
ClusterName=tests
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
GresTypes=gpu
ReturnToService=2
SlurmdParameters=config_overrides
# A waiting task starts within a second; SLURM's own settings take three.
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1
KillWait=3
{nodes}PartitionName=main Nodes=ALL Default=YES State=UP
"""


class Slurm:
    """One that runs; `environment` holds what its commands need, such as `sbatch` and those that call it."""

    def __init__(self, folder):
        self._folder, self._daemons = folder, {}
        self.environment = {**os.environ, "PATH": _PATH, "SLURM_CONF": str(folder / "slurm.conf")}
        self._host = socket.gethostname().partition(".")[0]
        # Ranks on several nodes look for the first one by its name.
        self._nodes = [self._host, "localhost"]
        self._configure()

    def _configure(self):
        folder = self._folder
        # munged wants its socket where everybody may go.
        folder.chmod(0o755)
        with ExitStack() as taken:
            servers = [taken.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in (0, *self._nodes)]
            self._port, *ports = (server.getsockname()[1] for server in servers)
        key = folder / "munge.key"
        key.write_bytes(secrets.token_bytes(32))
        key.chmod(0o400)
        for number in range(GPUS):
            # SLURM takes no plain file for a GPU; this is another /dev/null.
            os.mknod(folder / f"gpu{number}", stat.S_IFCHR | 0o666, os.makedev(1, 3))
        place = f"NodeHostname={self._host} NodeAddr=127.0.0.1 CPUs={_CPUS} Gres=gpu:{GPUS}"
        nodes = [f"NodeName={name} Port={port} {place}\n" for name, port in zip(self._nodes, ports, strict=True)]
        values = {"folder": folder, "host": self._host, "port": self._port, "nodes": "".join(nodes)}
        (folder / "slurm.conf").write_text(_CONFIGURATION.format(**values))
        (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-{GPUS - 1}]\n")
        (folder / "cgroup.conf").write_text("CgroupAutomount=no\n")

    def run(self, *command):
        """What a command of SLURM prints, such as `squeue`."""
        done = subprocess.run(command, env=self.environment, check=False, capture_output=True, text=True, timeout=60)
        assert not done.returncode, (command, done.stderr)
        return done.stdout

    def start(self):
        folder = self._folder
        options = """--foreground --key-file={0}/munge.key --socket={0}/munge.socket --pid-file={0}/munged.pid
            --log-file={0}/munged.log --seed-file={0}/munged.seed"""
        self._start("munged", *options.format(folder).split())
        self._wait_for((folder / "munge.socket").exists)
        for node in self._nodes:
            self._start("slurmd", "-D", "-N", node)
        self._start_controller()

    def restart_controller(self):
        """End slurmctld, which keeps the jobs in its folder, and start it again; tasks go on meanwhile."""
        self._daemons["slurmctld -D"].terminate()
        self._daemons["slurmctld -D"].wait(timeout=_START_S)
        self._start_controller()

    def end(self):
        """Kill the daemons and the tasks; SLURM starts all of them with its configuration in the environment."""
        while processes := self._processes():
            for process in processes:
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            for daemon in self._daemons.values():
                daemon.wait()

    def _processes(self):
        # Not psutil's environ(): that ends at the zeros that slurmstepd leaves where it writes its title.
        variable = f"SLURM_CONF={self.environment['SLURM_CONF']}\0".encode()
        processes = []
        for environment in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError):
                if variable in environment.read_bytes():
                    processes.append(int(environment.parent.name))
        return processes

    def _start(self, daemon, *words):
        with (self._folder / f"{daemon}.out").open("ab") as log:
            self._daemons[" ".join([daemon, words[-1]])] = subprocess.Popen(
                [daemon, *words], env=self.environment, stdout=log, stderr=log, start_new_session=True
            )

    def _start_controller(self):
        self._start("slurmctld", "-D")
        # A command that finds no controller tries again for seconds.
        self._wait_for(self._controller_listens)
        self._wait_for(lambda: {*self._states()} <= {"idle", "mixed", "allocated"})

    def _controller_listens(self):
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", self._port)):
            return True
        return False

    def _states(self):
        with suppress(AssertionError):
            return self.run("sinfo", "--noheader", "--format=%T").split()
        return ["unknown"]

    def _wait_for(self, is_so):
        deadline_s = time.monotonic() + _START_S
        while not is_so():
            logs = [f"{path.name}:\n{path.read_text()[-2000:]}" for path in sorted(self._folder.glob("*.out"))]
            assert time.monotonic() < deadline_s, "\n".join(["SLURM did not start", *logs])
            time.sleep(0.05)


@contextmanager
def slurm_of_this_machine():
    """A running SLURM of two "nodes". Skips a test where it cannot run."""
    missing = sorted({package for program, package in _PACKAGES.items() if not shutil.which(program, path=_PATH)})
    if missing:
        pytest.skip(f"SLURM is missing: apt-get install {' '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("SLURM's tests make device nodes, which needs root")
    # A socket's path may have 107 characters: pytest's own folders are too deep.
    with tempfile.TemporaryDirectory(prefix="lmbench-slurm-") as folder:
        slurm = Slurm(Path(folder))
        try:
            slurm.start()
            yield slurm
        finally:
            slurm.end()
