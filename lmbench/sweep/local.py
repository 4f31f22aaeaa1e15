"""Runs a sweep's processes on this machine: they are forked from a server that has imported everything.

A fork takes milliseconds where imports take seconds, and measures the same (means and spread between processes, on an
H200). Forks share their server's hash seed and address layout. So each environment gets a new server for every round of
repeats: all cells of a round share seed and layout, and repeats differ in them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import tempfile
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack, suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, Literal

import psutil

from lmbench.interruption import Terminated, held
from lmbench.records.process import clock_s
from lmbench.sweep import fork_server
from lmbench.sweep.environments import Environment, ServerLost
from lmbench.sweep.outcome import End, Launch, oom_kill_count

#: Time that a process has after SIGTERM or SIGINT to close its record, before it is killed.
GRACE_S = 10.0

# How often progress is shown while a process runs.
_TICK_S = 0.5
# Servers of later rounds start together with the current one on machines with cores to spare. Each takes memory.
_CORES_PER_SERVER = 4
_MOST_AHEAD = 3


class Server:
    """A fork server, started by an environment's Python with its variables and the sweep's mark.

    Call `await_ready` before the first fork.
    """

    def __init__(self, environment: Environment, mark: Mapping[str, str]) -> None:
        self._environment = environment
        self._name = (
            environment.python if environment.name is None else f"environment {environment.name}: {environment.python}"
        )
        self._is_ready = False
        self._open = ExitStack()
        self._output = self._open.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (closed by the stack)
        self._connection, server_connection = Pipe()
        server_tie, tie = Pipe(duplex=False)
        self._open.enter_context(self._connection)
        # However this process ends, the tie closes, and the server and its forks end.
        self._open.enter_context(tie)
        with server_connection, server_tie:
            fds = server_connection.fileno(), server_tie.fileno()
            try:
                self.process = subprocess.Popen(
                    # -P keeps packages in the working directory out, as the installed command does.
                    [environment.python, "-P", fork_server.__file__, *map(str, fds)],
                    stdin=subprocess.DEVNULL,
                    stdout=self._output,
                    stderr=subprocess.STDOUT,
                    env={**environment.process_variables(), **mark},
                    cwd=environment.folder,
                    start_new_session=True,
                    pass_fds=fds,
                )
            except OSError as error:
                raise ServerLost(f"{self._name} does not run: {error.strerror}") from error

    def await_ready(self) -> None:
        """Wait until everything is imported.

        Raises:
            ServerLost: importing failed, or the checkout has an lmbench but another one was imported.
        """
        if not self._is_ready:
            try:
                self._environment.check_origin(Path(self.receive()))
            except ServerLost:
                self.close()
                raise
            self._is_ready = True

    def fork(self, launch: Launch) -> int:
        """Fork a process, which leads a group of its own, and return its id. The process before has ended.

        Raises:
            ServerLost: the server has ended.
        """
        # `receive` says why a server has ended.
        with suppress(OSError):
            self._connection.send((launch.words, launch.variables, str(launch.log)))
        return int(self.receive())

    def end_all(self, pid: int) -> None:
        """Kill the group of a fork, and all processes below it, also those with a session of their own.

        When their parent ends, the server adopts them.
        """
        _kill_group(pid)
        with suppress(psutil.Error):
            for process in psutil.Process(self.process.pid).children(recursive=True):
                with suppress(psutil.Error):
                    process.kill()

    def receive(self, timeout_s: float | None = None) -> Any:
        """The server's next message, None if none comes in time. Raises ServerLost where the server has ended."""
        try:
            return self._connection.recv() if self._connection.poll(timeout_s) else None
        except (EOFError, OSError):
            code = self.process.wait()
            self._output.seek(0)
            lines = self._output.read().decode(errors="replace").split("\n")
            last_line = [f"exit code {code}", *filter(None, map(str.strip, lines))][-1]
            self.close()
            event = "ended while it served" if self._is_ready else "finds no lmbench that works"
            reason = last_line if code >= 0 else signal.Signals(-code).name
            raise ServerLost(f"{self._name} {event}: {reason}") from None

    def close(self) -> None:
        """End the server if it still runs."""
        self.process.kill()
        self.process.wait()
        self._open.close()


class _Ranks:
    """Ranks on several nodes, started by a launcher such as srun. It has a server's methods, but does not fork."""

    def __init__(self, launch: Launch, mark: Mapping[str, str]) -> None:
        environment = launch.environment
        with launch.log.open("ab") as log:
            self._launcher = subprocess.Popen(
                [*launch.launcher, environment.python, "-P", "-m", "lmbench", *launch.words],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**environment.process_variables(), **mark, **launch.variables},
                cwd=environment.folder,
                start_new_session=True,
            )

    def fork(self, launch: Launch) -> int:
        return self._launcher.pid

    def end_all(self, pid: int) -> None:
        _kill_group(pid)

    def receive(self, timeout_s: float | None = None) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._launcher.wait(timeout_s)
        return None


class LocalExecutor:
    """Servers by environment. The first server of each is for the current round, the others for later rounds.

    `mark` are environment variables that identify the sweep's processes. With `is_hasty` a round does not wait for the
    servers of later rounds: they import during its measurements.
    """

    def __init__(self, mark: Mapping[str, str] | None = None, cores: int | None = None) -> None:
        self._mark = mark or {}
        self.is_hasty = False
        self._most_ahead = min(_MOST_AHEAD, (cores or os.cpu_count() or 1) // _CORES_PER_SERVER)
        self._rounds_to_come = 0
        self._servers: dict[str | None, deque[Server]] = defaultdict(deque)

    def begin_round(self, rounds_to_come: int) -> None:
        """End the previous round's servers."""
        for servers in filter(None, self._servers.values()):
            servers.popleft().close()
        self._rounds_to_come = rounds_to_come

    def await_ready(self, environments: Iterable[Environment]) -> None:
        """Wait for this round's server of each environment, and start missing ones.

        Where the machine has cores to spare, servers of later rounds start at the same time. Started later they would
        disturb a measurement. With `is_hasty` they may: both sides of a comparison bear that in turn.

        Raises:
            ServerLost: a server cannot start.
        """
        by_name = {environment.name: environment for environment in environments}
        for name in by_name:
            while (servers := self._servers[name]) and servers[0].process.poll() is not None:
                servers.popleft().close()
        missing = [name for name in by_name if not self._servers[name]]
        ahead = min(self._rounds_to_come, self._most_ahead // max(1, len(missing)))
        for name in missing:
            self._servers[name].extend(Server(by_name[name], self._mark) for _ in range(1 + ahead))
        for name in by_name:
            # A server that started ahead may still be importing.
            current, *later = self._servers[name]
            current.await_ready()
            for server in () if self.is_hasty else later:
                # A server that cannot start is reported in its own round.
                with suppress(ServerLost):
                    server.await_ready()

    def run(self, launch: Launch, timeout_s: float, tick: Callable[[], object]) -> End:
        """Fork a process from its environment's server and wait for its end. `tick` is called twice a second meanwhile.

        No process that it started outlives the call. If the process cannot be started, `End.lost` says why. After an
        interruption, which gives the process time to close its record, `End.cause` is the exception to raise.
        """
        by: Literal["itself", "timeout", "interruption"] = "itself"
        cause: BaseException | None = None
        code = lost = pid = None
        kills, launched_s = oom_kill_count(), clock_s()
        with ExitStack() as stack:
            try:
                self.await_ready([launch.environment])
                server: Server | _Ranks = self._servers[launch.environment.name][0]
                kills, launched_s = oom_kill_count(), clock_s()
                with held():
                    server = _Ranks(launch, self._mark) if launch.launcher else server
                    pid = server.fork(launch)
                    stack.callback(server.end_all, pid)
                while code is None and (left_s := launched_s + timeout_s - clock_s()) > 0:
                    if (code := server.receive(min(_TICK_S, left_s))) is None:
                        tick()
                if code is None:
                    lost = f"no end within {timeout_s:g} s; it was stopped"
                    by, code = "timeout", _stop(server, pid, signal.SIGTERM)
            except (KeyboardInterrupt, SystemExit) as interruption:
                if pid is None:
                    raise
                by, cause = "interruption", interruption
                code = _stop(server, pid, signal.SIGTERM if isinstance(cause, Terminated) else signal.SIGINT)
            except ServerLost as error:
                code, lost = -signal.SIGKILL, str(error)
        kills = oom_kill_count() - kills
        evidence = f"the kernel's count of such ends rose by {kills}" if kills else None
        return End(code, by, launched_s, clock_s(), evidence, lost, cause)

    def close(self) -> None:
        """End all servers."""
        for servers in self._servers.values():
            while servers:
                servers.popleft().close()


class LastingExecutor(LocalExecutor):
    """Keeps its servers over rounds and plans until `end`.

    Imports are done once, and all forks share a hash seed and an address layout.
    """

    def begin_round(self, rounds_to_come: int) -> None:
        """Keep the servers."""

    def close(self) -> None:
        """Keep the servers."""

    def end(self) -> None:
        super().close()


def _stop(server: Server | _Ranks, pid: int, signum: int) -> int:
    """Ask a process to end by a signal, kill its group if it does not, and return its exit code."""
    with suppress(ProcessLookupError):
        os.kill(pid, signum)
    with suppress(ServerLost):
        while (code := server.receive(GRACE_S)) is None:
            _kill_group(pid)
        return int(code)
    return -signal.SIGKILL


def _kill_group(pid: int) -> None:
    """Kill a process with its loaders and compilers, so that the next cell has the machine alone."""
    for kill in (os.killpg, os.kill):
        # A process that has just been forked leads no group yet. A process may also end before its group.
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
