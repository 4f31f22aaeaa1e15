"""How a cell's process is started: forked from a server that has imported everything, one for each round of repeats.

A fork takes milliseconds where imports take seconds, and measures the same (means and spread between processes, on an
H200). Forks share their server's hash seed and address layout. So every round of repeats, and every environment in it,
has a server of its own: within a round all cells have these in common, and between repeats they differ.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmbench.sweep import fork_server
from lmbench.sweep.environments import Environment, ServerLost

#: A guess of what a process takes beyond its steps, for an estimate.
START_S = 1.0

_READY_TIMEOUT_S = 300.0
_FORK_TIMEOUT_S = 60.0
# Servers for rounds to come take memory, and are started beside the present one's where cores are idle anyway.
_CORES_PER_SERVER = 4
_MOST_AHEAD = 3
# Ready servers, started ahead, take no time.
_WORTH_TELLING_S = 0.1


@dataclass(frozen=True)
class Launch:
    """A process to start: `lmbench WORDS` in an environment, with further variables; its output goes to `log`."""

    words: list[str]
    log: Path
    environment: Environment
    variables: dict[str, str]


class Process:
    """A process that was forked; it leads a process group of its own.

    `lost` says in one line what became of its server, where that ended first: then nobody knows how it ended itself.
    """

    def __init__(self, pid: int, server: Server, tie_fd: int) -> None:
        self.pid = pid
        self.lost: str | None = None
        self._server = server
        self._tie_fd: int | None = tie_fd
        self._code: int | None = None

    def wait(self, timeout_s: float) -> int | None:
        """Its exit code (minus a signal's number), None if it still runs after that time.

        Where its server is gone, it counts as killed, and the caller has to see to that.
        """
        if self._code is None:
            try:
                answer = self._server.answer(timeout_s)
                self._code = None if answer is None else int(answer["code"])
            except ServerLost as lost:
                self.lost = str(lost)
                self._code = -signal.SIGKILL
            if self._code is not None and self._tie_fd is not None:
                os.close(self._tie_fd)
                self._tie_fd = None
        return self._code


class Server:
    """One server, started by an environment's Python with its variables and the sweep's mark; `await_ready` before its
    first use."""

    def __init__(self, environment: Environment, mark: Mapping[str, str]) -> None:
        self.environment = environment
        name = environment.name
        self._where = f"{f'environment {name}: ' if name is not None else ''}{environment.python}"
        self._is_ready = False
        self._answers = b""
        self._output = tempfile.TemporaryFile()  # noqa: SIM115 (as long as the server)
        self._connection, theirs = socket.socketpair()
        inner, outer = os.pipe()
        self._tie_fd: int | None = outer
        try:
            self._process = subprocess.Popen(
                # -P: a package in the working directory takes no part, as under the installed command.
                [environment.python, "-P", fork_server.__file__, str(inner), str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=subprocess.STDOUT,
                env={**environment.process_variables(), **mark},
                cwd=environment.folder,
                start_new_session=True,
                pass_fds=(inner, theirs.fileno()),
            )
        except OSError as error:
            self._release()
            raise ServerLost(f"{self._where} does not run: {error.strerror}") from error
        finally:
            os.close(inner)
            theirs.close()

    def await_ready(self) -> None:
        """Wait until everything is imported.

        Raises:
            ServerLost: it cannot be, or lmbench is not the checkout's where the checkout has one.
        """
        if self._is_ready:
            return
        try:
            hello = self.answer(_READY_TIMEOUT_S)
            if hello is None:
                raise ServerLost(f"{self._where} has not imported lmbench within {_READY_TIMEOUT_S:g} s")
            self.environment.check_origin(Path(hello["lmbench"]))
        except ServerLost:
            self.close()
            raise
        self._is_ready = True

    @property
    def is_ready(self) -> bool:
        return self._is_ready and self._process.poll() is None

    def start(self, launch: Launch) -> Process:
        """Fork a process; the one before has ended. Raises ServerLost."""
        inner, outer = os.pipe()
        try:
            request = json.dumps({"words": launch.words, "variables": launch.variables}).encode() + b"\n"
            with launch.log.open("ab") as log:
                socket.send_fds(self._connection, [request[:1]], [log.fileno(), inner])
                self._connection.sendall(request[1:])
            answer = self.answer(_FORK_TIMEOUT_S)
            if answer is None:
                raise ServerLost(f"{self._where} does not fork within {_FORK_TIMEOUT_S:g} s")
        except BaseException as error:
            os.close(outer)
            lost = self._lost() if isinstance(error, BrokenPipeError | ConnectionResetError) else error
            # Nothing is known of it any more.
            self.close()
            raise lost from None
        finally:
            os.close(inner)
        return Process(answer["pid"], self, outer)

    def answer(self, timeout_s: float) -> dict[str, Any] | None:
        """What the server says next, None if it says nothing for that time. Raises ServerLost."""
        until_s = time.monotonic() + timeout_s
        while b"\n" not in self._answers:
            if not select.select([self._connection], [], [], max(0.0, until_s - time.monotonic()))[0]:
                return None
            with suppress(ConnectionResetError):
                if part := self._connection.recv(2**12):
                    self._answers += part
                    continue
            raise self._lost()
        line, _, self._answers = self._answers.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """End the server; it may have ended before."""
        self._process.kill()
        self._process.wait()
        self._release()

    def _lost(self) -> ServerLost:
        code = self._process.wait()
        self._output.seek(0)
        said = [line.strip() for line in self._output.read().decode(errors="replace").splitlines()]
        said = [line for line in said if line] or [f"exit code {code}"]
        why = said[-1] if code >= 0 else signal.Signals(-code).name
        what = "ended while it served" if self._is_ready else "finds no lmbench that works"
        return ServerLost(f"{self._where} {what}: {why}")

    def _release(self) -> None:
        self._connection.close()
        self._output.close()
        if self._tie_fd is not None:
            os.close(self._tie_fd)
            self._tie_fd = None


class Servers:
    """The servers of the present round by environment, and those that were started ahead for rounds to come.

    `mark` are variables that tell the sweep's processes from all others.
    """

    def __init__(
        self, say: Callable[[str], None], cores: int | None = None, mark: Mapping[str, str] | None = None
    ) -> None:
        self._say = say
        self._mark = mark or {}
        self._most_ahead = min(_MOST_AHEAD, (cores or os.cpu_count() or 1) // _CORES_PER_SERVER)
        self._rounds_to_come = 0
        self._now: dict[str | None, Server] = {}
        self._ahead: dict[str | None, list[Server]] = {}

    def begin_round(self, rounds_to_come: int) -> None:
        """End the servers of the round before. Of the rounds to come so many have work."""
        for server in self._now.values():
            server.close()
        self._now.clear()
        self._rounds_to_come = rounds_to_come

    def await_ready(self, environments: Iterable[Environment]) -> None:
        """Have this round's server for each environment, with everything imported.

        Where cores are idle, servers for rounds to come start together with it: later, beside a measurement, they would
        disturb it.

        Raises:
            ServerLost: one cannot start.
        """
        wanted = {environment.name: environment for environment in environments}
        missing = [wanted[name] for name in wanted if name not in self._now or not self._now[name].is_ready]
        if not missing:
            return
        began_s = time.monotonic()
        most_ahead = min(self._rounds_to_come, self._most_ahead // len(missing))
        started_ahead = 0
        for environment in missing:
            if (dead := self._now.pop(environment.name, None)) is not None:
                dead.close()
            ahead = self._ahead.get(environment.name, [])
            while ahead and not ahead[0].is_ready:
                ahead.pop(0).close()
            if not ahead:
                ahead = [Server(environment, self._mark) for _ in range(1 + most_ahead)]
                started_ahead = most_ahead
            self._now[environment.name], *self._ahead[environment.name] = ahead
        for environment in missing:
            self._now[environment.name].await_ready()
            for server in self._ahead[environment.name]:
                # One that cannot start is told of in its own round.
                with suppress(ServerLost):
                    server.await_ready()
        if (took_s := time.monotonic() - began_s) > _WORTH_TELLING_S:
            others = f" and {started_ahead} to come" if started_ahead else ""
            self._say(f"imported PyTorch, Lightning and lmbench for this round of repeats{others}, in {took_s:.1f} s")

    def start(self, launch: Launch) -> Process:
        """Fork a process from the round's server for its environment, which is ready. Raises ServerLost."""
        return self._now[launch.environment.name].start(launch)

    def close(self) -> None:
        """End all servers."""
        for server in (*self._now.values(), *(server for ahead in self._ahead.values() for server in ahead)):
            server.close()
        self._now.clear()
        self._ahead.clear()
