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
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from itertools import chain, groupby
from multiprocessing import Pipe
from multiprocessing.reduction import send_handle
from pathlib import Path
from typing import Any, Literal

from lmbench.interruption import Terminated, held
from lmbench.python_process import kill_processes_below
from lmbench.records.process import clock_s, now
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
# Two sides share a server over so many rounds at most, if its start would take more than this share of a round.
_MOST_ROUNDS_SERVED, _MOST_START = 4, 0.5


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

    def fork(self, launches: Sequence[Launch]) -> list[int]:
        """Fork processes, each the leader of a group, and return their ids. The processes before have ended.

        Raises:
            ServerLost: the server has ended.
        """
        # `receive` says why a server has ended.
        with suppress(OSError):
            self._connection.send([(item.words, item.variables, str(item.log), bool(item.pipe)) for item in launches])
            for pipe in filter(None, (launch.pipe for launch in launches)):
                send_handle(self._connection, pipe.fileno(), self.process.pid)
                pipe.close()
        pids: list[int] = self.receive()
        return pids

    def end_all(self, pid: int) -> None:
        """Kill the group of a fork, and all processes below it, also those with a session of their own.

        When their parent ends, the server adopts them.
        """
        _kill_group(pid)
        kill_processes_below(self.process.pid)

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

    def fork(self, launches: Sequence[Launch]) -> list[int]:
        return [self._launcher.pid]

    def end_all(self, pid: int) -> None:
        _kill_group(pid)

    def receive(self, timeout_s: float | None = None) -> list[int] | None:
        with suppress(subprocess.TimeoutExpired):
            return [self._launcher.wait(timeout_s)]
        return None


@dataclass
class _Group:
    """Processes of one server: their ids, and their exit codes once all have ended."""

    server: Server | _Ranks
    pids: list[int]
    codes: list[int] | None = None


class LocalExecutor:
    """Servers by environment. The first server of each is for the current round, the others for later rounds.

    `mark` are environment variables that identify the sweep's processes. With `is_hasty` a round does not wait for the
    servers of later rounds: they import during its measurements. With `is_lasting` the current server serves all
    rounds: imports are done once, and all forks share a hash seed and an address layout.
    """

    def __init__(self, mark: Mapping[str, str] = {}, cores: int | None = None, is_lasting: bool = False) -> None:
        self._mark = mark
        self.is_hasty, self.is_lasting = False, is_lasting
        self._most_ahead = min(_MOST_AHEAD, (cores or len(os.sched_getaffinity(0))) // _CORES_PER_SERVER)
        self._rounds_to_come = 0
        # How long the last server took to start, and the rounds that it served.
        self._start_s, self._rounds_served = 0.0, 0
        self._servers: dict[str | None, deque[Server]] = defaultdict(deque)

    def begin_round(self, rounds_to_come: int, last_round_s: float = 0.0) -> None:
        """End the previous round's servers, unless they are lasting.

        With `is_hasty` they stay for some rounds if none were started ahead and new ones would take more than half of a
        round. Comparisons see that in the records.
        """
        if self.is_lasting:
            return
        is_ahead = all(len(servers) > 1 for servers in self._servers.values())
        is_dear = not is_ahead and self._start_s > _MOST_START * last_round_s
        self._rounds_served += 1
        if self.is_hasty and is_dear and self._rounds_served < _MOST_ROUNDS_SERVED:
            return
        self._rounds_served = 0
        for servers in filter(None, self._servers.values()):
            servers.popleft().close()
        self._rounds_to_come = rounds_to_come

    def await_ready(self, environments: Iterable[Environment]) -> None:
        """Wait for this round's server of each environment, and start missing ones.

        Where the machine has cores to spare, servers of later rounds start at the same time. Started later they would
        disturb a measurement. With `is_hasty` they may: both sides of a comparison bear that in turn, and each round
        starts a server for a later one.

        Raises:
            ServerLost: a server cannot start.
        """
        by_name = {environment.name: environment for environment in environments}
        for name in by_name:
            while (servers := self._servers[name]) and servers[0].process.poll() is not None:
                servers.popleft().close()
        missing = [name for name in by_name if not self._servers[name]]
        started = by_name if self.is_hasty else missing
        ahead = self._most_ahead // max(1, len(self._servers))
        if self._rounds_served == _MOST_ROUNDS_SERVED - 1:
            # This is the last round of shared servers. Without cores to spare a start takes longer than a round.
            ahead = max(ahead, 1)
        wanted = 1 + min(self._rounds_to_come, ahead)
        began_s = clock_s()
        for name in started:
            servers = self._servers[name]
            servers.extend(Server(by_name[name], self._mark) for _ in range(wanted - len(servers)))
        for name in by_name:
            # A server that started ahead may still be importing.
            current, *later = self._servers[name]
            current.await_ready()
            if missing:
                self._start_s = clock_s() - began_s
            for server in () if self.is_hasty else later:
                # A server that cannot start is reported in its own round.
                with suppress(ServerLost):
                    server.await_ready()

    def run(self, launches: Sequence[Launch], timeout_s: float, tick: Callable[[], object]) -> list[End]:
        """Fork processes from their environments' servers and wait for their ends. `tick` is called about twice a
        second meanwhile. Launches of one environment stand next to each other.

        No process that it started outlives the call. If a process cannot be started, `End.lost` says why. After an
        interruption, which gives the processes time to close their records, `End.cause` is the exception to raise.
        """
        by: Literal["itself", "timeout"] = "itself"
        cause: BaseException | None = None
        lost: str | None = None
        groups: list[_Group] = []
        kills, launched_s, launched_at = oom_kill_count(), clock_s(), now()
        with ExitStack() as stack:
            try:
                self.await_ready(launch.environment for launch in launches)
                kills, launched_s = oom_kill_count(), clock_s()
                with held():
                    for _, members in groupby(launches, lambda launch: launch.environment):
                        (first, *_) = launched = list(members)
                        server: Server | _Ranks = self._servers[first.environment.name][0]
                        if first.launcher:
                            server = _Ranks(first, self._mark)
                        groups.append(_Group(server, server.fork(launched)))
                        for pid in groups[-1].pids:
                            stack.callback(server.end_all, pid)
                while (left_s := launched_s + timeout_s - clock_s()) > 0 and _running(groups):
                    for group in _running(groups):
                        group.codes = group.server.receive(min(_TICK_S / len(groups), left_s))
                    if _running(groups):
                        tick()
                if _running(groups):
                    lost = f"no end within {timeout_s:g} s; it was stopped"
                    by = "timeout"
                    _stop(groups, signal.SIGTERM)
            except (KeyboardInterrupt, SystemExit) as interruption:
                if not groups:
                    raise
                cause = interruption
                _stop(groups, signal.SIGTERM if isinstance(cause, Terminated) else signal.SIGINT)
            except ServerLost as error:
                lost = str(error)
        kills = oom_kill_count() - kills
        evidence = f"the kernel's count of such ends rose by {kills}" if kills else None
        codes = [code for group in groups for code in group.codes or [-signal.SIGKILL] * len(group.pids)]
        codes += [-signal.SIGKILL] * (len(launches) - len(codes))
        ends = []
        for launch, code in zip(launches, codes, strict=True):
            servers = () if launch.launcher else self._servers[launch.environment.name]
            server_pid = servers[0].process.pid if servers else None
            cost_s = (clock_s() - launched_s) / len(launches)
            ends.append(End(code, by, cost_s, launched_at, evidence, lost, cause, server_pid))
        return ends

    def close(self) -> None:
        """End all servers."""
        for servers in self._servers.values():
            while servers:
                servers.popleft().close()


def _running(groups: Sequence[_Group]) -> list[_Group]:
    return [group for group in groups if group.codes is None]


def _stop(groups: Sequence[_Group], signum: int) -> None:
    """Ask the processes that run to end by a signal, and kill their groups if they do not."""
    for pid in chain.from_iterable(group.pids for group in _running(groups)):
        with suppress(ProcessLookupError):
            os.kill(pid, signum)
    for group in _running(groups):
        with suppress(ServerLost):
            while (codes := group.server.receive(GRACE_S)) is None:
                for pid in group.pids:
                    _kill_group(pid)
            group.codes = codes


def _kill_group(pid: int) -> None:
    """Kill a process with its loaders and compilers, so that the next cell has the machine alone."""
    for kill in (os.killpg, os.kill):
        # A process that has just been forked leads no group yet. A process may also end before its group.
        with suppress(ProcessLookupError, PermissionError):
            kill(pid, signal.SIGKILL)
