"""Runs a sweep's processes on this machine: forked from a server that has imported everything, one for each round.

A fork takes milliseconds where imports take seconds, and measures the same (means and spread between processes, on an
H200). Forks share their server's hash seed and address layout. So every round of repeats, and every environment in it,
has a server of its own: within a round all cells have these in common, and between repeats they differ.
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

from lmbench.interruption import Terminated, held
from lmbench.records.process import clock_s
from lmbench.sweep import fork_server
from lmbench.sweep.environments import Environment, ServerLost
from lmbench.sweep.outcome import End, Launch, oom_kill_count

#: After SIGTERM or SIGINT a process may close its record; then it is killed.
GRACE_S = 10.0

# How often somebody is told that a process still runs.
_TICK_S = 0.5
# Servers for rounds to come take memory, and are started beside the present one's where cores are idle anyway.
_CORES_PER_SERVER = 4
_MOST_AHEAD = 3


class Server:
    """A fork server, started by an environment's Python with its variables and the sweep's mark; `await_ready` before
    its first fork."""

    def __init__(self, environment: Environment, mark: Mapping[str, str]) -> None:
        self._environment = environment
        self._name = (
            environment.python if environment.name is None else f"environment {environment.name}: {environment.python}"
        )
        self._is_ready = False
        self._open = ExitStack()
        self._output = self._open.enter_context(tempfile.TemporaryFile())  # noqa: SIM115 (closed by the stack)
        ours, its = Pipe()
        its_tie, tie = Pipe(duplex=False)
        self._connection = self._open.enter_context(ours)
        # When this process ends, however it does, the tie closes, and the server and its forks end.
        self._open.enter_context(tie)
        with its, its_tie:
            fds = its.fileno(), its_tie.fileno()
            try:
                self.process = subprocess.Popen(
                    # -P: a package in the working directory takes no part, as under the installed command.
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
            ServerLost: it cannot be, or lmbench is not the checkout's where the checkout has one.
        """
        if not self._is_ready:
            try:
                self._environment.check_origin(Path(self.receive()))
            except ServerLost:
                self.close()
                raise
            self._is_ready = True

    def fork(self, launch: Launch) -> int:
        """Fork a process, which leads a group of its own; the one before has ended. Returns its id.

        Raises:
            ServerLost: nothing is known of the server any more.
        """
        # Where the server is gone, `receive` says why.
        with suppress(OSError):
            self._connection.send((launch.words, launch.variables, str(launch.log)))
        return int(self.receive())

    def receive(self, timeout_s: float | None = None) -> Any:
        """What the server sends next, None if nothing came in that time. Raises ServerLost."""
        try:
            return self._connection.recv() if self._connection.poll(timeout_s) else None
        except (EOFError, OSError):
            code = self.process.wait()
            self._output.seek(0)
            lines = self._output.read().decode(errors="replace").split("\n")
            last = [f"exit code {code}", *filter(None, map(str.strip, lines))][-1]
            self.close()
            event = "ended while it served" if self._is_ready else "finds no lmbench that works"
            reason = last if code >= 0 else signal.Signals(-code).name
            raise ServerLost(f"{self._name} {event}: {reason}") from None

    def close(self) -> None:
        """End the server; it may have ended before."""
        self.process.kill()
        self.process.wait()
        self._open.close()


class _Ranks:
    """What a launcher started on several nodes; as a server has it, but no fork."""

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

    def receive(self, timeout_s: float | None = None) -> int | None:
        with suppress(subprocess.TimeoutExpired):
            return self._launcher.wait(timeout_s)
        return None


class LocalExecutor:
    """Servers by environment: the first of each is the present round's, the others are for rounds to come.

    `mark` are variables that tell the sweep's processes from all others. Where `is_hasty` is set, nobody waits for the
    servers of rounds to come: they import beside a measurement.
    """

    def __init__(self, mark: Mapping[str, str] | None = None, cores: int | None = None) -> None:
        self._mark = mark or {}
        self.is_hasty = False
        self._most_ahead = min(_MOST_AHEAD, (cores or os.cpu_count() or 1) // _CORES_PER_SERVER)
        self._rounds_to_come = 0
        self._servers: dict[str | None, deque[Server]] = defaultdict(deque)

    def begin_round(self, rounds_to_come: int) -> None:
        """End the servers of the round before."""
        for servers in filter(None, self._servers.values()):
            servers.popleft().close()
        self._rounds_to_come = rounds_to_come

    def await_ready(self, environments: Iterable[Environment]) -> None:
        """Have this round's server for each environment, with everything imported.

        Where cores are idle, servers for rounds to come start together with it: later, beside a measurement, they would
        disturb it (which both sides of a comparison bear in turn).

        Raises:
            ServerLost: a server cannot start.
        """
        wanted = {environment.name: environment for environment in environments}
        for name in wanted:
            while (servers := self._servers[name]) and servers[0].process.poll() is not None:
                servers.popleft().close()
        missing = [name for name in wanted if not self._servers[name]]
        ahead = min(self._rounds_to_come, self._most_ahead // max(1, len(missing)))
        for name in missing:
            self._servers[name].extend(Server(wanted[name], self._mark) for _ in range(1 + ahead))
        for name in wanted:
            # Nobody may have waited for it while it started for a round to come.
            present, *others = self._servers[name]
            present.await_ready()
            for server in () if self.is_hasty else others:
                # A server that cannot start is told of in its own round.
                with suppress(ServerLost):
                    server.await_ready()

    def run(self, launch: Launch, timeout_s: float, tick: Callable[[], object]) -> End:
        """Fork a process from its environment's server and wait for its end; `tick` is called now and then meanwhile.

        Nothing of the process outlives the call. Where it cannot be started, `End.lost` says why; where an interruption
        came, the process was given time to close its record, and `End.cause` is what to raise.
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
                    stack.callback(_kill_group, pid)
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
    """Keeps its servers over rounds and plans until `end`: what importing costs is paid once, and all forks share a
    hash seed and an address layout."""

    def begin_round(self, rounds_to_come: int) -> None:
        """The servers stay."""

    def close(self) -> None:
        """The servers stay."""

    def end(self) -> None:
        super().close()


def _stop(server: Server | _Ranks, pid: int, signum: int) -> int:
    """Ask a process to end, and kill its group if it does not; returns its exit code."""
    with suppress(ProcessLookupError):
        os.kill(pid, signum)
    with suppress(ServerLost):
        while (code := server.receive(GRACE_S)) is None:
            _kill_group(pid)
        return int(code)
    return -signal.SIGKILL


def _kill_group(pid: int) -> None:
    """Kill whatever of a process is left: itself, loaders, compilers. The next cell shall have the machine alone."""
    for kill in (os.killpg, os.kill):
        # The group is there as soon as the process has begun; the process may be gone before its group.
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
