"""Let W&B have results that are closed: beside them as offline runs, and at its server where that is asked for.

wandb runs in a process of its own, which may hang, crash or change its environment alone.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from netrc import NetrcParseError, netrc
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import msgspec

from lmbench.errors import UsageError, tell
from lmbench.files import ScratchFolder, is_folder
from lmbench.masking import masked_message, masked_text, one_line
from lmbench.python_process import tied_python
from lmbench.records.load import load_run
from lmbench.records.named import sweep_of
from lmbench.records.run import WandbFiling, WandbMode
from lmbench.wandb.board import Request

DEFAULT_TIMEOUT_S = 60.0

#: Before the server's address, in what the process that writes prints.
SERVER = "server: "
_URL = re.compile(r"https?://\S+/runs/\S+")
# What wandb's line about a fault begins with; one of them only names a file with more about it.
_FAULT = re.compile(r"(?:wandb: )?(?:ERROR|Error:) (?!Find detailed)(?:\[\S+\] )?")
# What would make wandb stay offline, take the run for another one, be silent about what goes wrong, or use the
# background process of a WandbLogger in this process.
_DROPPED = re.compile("WANDB_(MODE|SERVICE|RUN_ID|RESUME|SILENT|QUIET)")


@dataclass
class WandbSettings:
    """How W&B files the run, and whether it is uploaded.

    Args:
        mode: offline writes a W&B run beside the result when that is closed; online uploads it too; disabled does
            nothing. Without a mode it is offline for who has a key for W&B or sets WANDB_MODE, else disabled. The
            variable WANDB_MODE can only take away from that.
        project: its project.
        entity: the user or team that it belongs to; W&B knows a default.
        group: what it is grouped with; in a sweep that is the sweep.
        tags: words to find it by.
        artifact: the result folder goes along as an artifact.
        timeout_s: seconds that W&B may take to write, and again to upload.
    """

    mode: WandbMode | None = None
    project: str = "lmbench"
    entity: str | None = None
    group: str | None = None
    tags: list[str] = field(default_factory=list)
    artifact: bool = False
    timeout_s: float = DEFAULT_TIMEOUT_S

    def filing(self) -> WandbFiling:
        """What of it a run's record keeps, with the mode that WANDB_MODE leaves.

        Raises:
            UsageError: a time limit of nothing.
        """
        if not self.timeout_s > 0:
            raise UsageError(f"wandb.timeout_s is {self.timeout_s:g}; it must be above 0")
        modes: tuple[WandbMode, ...] = ("disabled", "offline", "online")
        allowed = {"disabled": 0, "offline": 1, "dryrun": 1}.get(os.environ.get("WANDB_MODE", ""), 2)
        asked = self.mode or ("offline" if "WANDB_MODE" in os.environ or _has_key() else "disabled")
        mode = modes[min(modes.index(asked), allowed)]
        return WandbFiling(mode, self.project, self.entity, self.group, list(self.tags), self.artifact)


def _has_key() -> bool:
    """Whether WANDB_API_KEY or the user's netrc has a key for a host of W&B's or for the user's own server."""
    addresses = ["https://api.wandb.ai", "https://api.forge.coreweave.com", os.environ.get("WANDB_BASE_URL", "")]
    with suppress(OSError, RuntimeError):
        # Where `wandb login --host` notes the server.
        addresses += (Path.home() / ".config" / "wandb" / "settings").read_text().split()
    hosts = {urlsplit(address).netloc for address in addresses}
    with suppress(OSError, RuntimeError, NetrcParseError):
        if not hosts.isdisjoint(netrc(os.environ.get("NETRC")).hosts):
            return True
    return bool(os.environ.get("WANDB_API_KEY"))


def elsewhere(filing: WandbFiling | None) -> dict[str, str]:
    """The project and the entity that a record names, where they are none of the user's own settings: lmbench's
    project, WANDB_PROJECT and WANDB_ENTITY."""
    filing = filing or WandbFiling()
    known = {
        "project": (None, WandbSettings.project, os.environ.get("WANDB_PROJECT")),
        "entity": (None, os.environ.get("WANDB_ENTITY")),
    }
    return {name: getattr(filing, name) for name, values in known.items() if getattr(filing, name) not in values}


def upload_options(filings: Iterable[WandbFiling]) -> list[str]:
    """The options with which `lmbench upload` sends these runs where they are filed, if that is one place."""
    destinations = {tuple(elsewhere(filing).items()) for filing in filings}
    destination = destinations.pop() if len(destinations) == 1 else ()
    return [f"--{name}={value}" for name, value in destination]


class WandbProblem(Exception):
    """W&B did not get a result; the message is one line that says why, without secrets of wandb's own message."""

    def __init__(self, line: str) -> None:
        super().__init__(one_line(masked_message(line)))


class Ended(NamedTuple):
    """How a process ended: `exit_code` is None where it was stopped at its time limit."""

    exit_code: int | None
    lines: list[str]
    timeout_s: float

    def check(self) -> None:
        """Raises WandbProblem where the process was stopped or failed."""
        if self.exit_code is None:
            raise WandbProblem(f"wandb was not done within {self.timeout_s:g} s; is the server there?")
        if self.exit_code != 0:
            raise WandbProblem([f"wandb ended with exit code {self.exit_code}", *self.lines][-1])


def run_module(module: str, words: Sequence[str], timeout_s: float) -> Ended:
    """Run `python -m module words`, at most so long; whatever ends the wait ends the process too.

    It hears no Ctrl-C of the terminal, so that this process decides. Its working directory is an empty one: wandb would
    send where a `wandb/settings` in the user's says.
    """
    environment = {name: value for name, value in os.environ.items() if not _DROPPED.fullmatch(name)}
    environment["WANDB_ERROR_REPORTING"] = "false"
    if path := environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))
    with (
        # By itself wandb would leave logs and caches in the working directory and in the user's home.
        ScratchFolder("wandb") as scratch,
        # A file, not a pipe: wandb's own background process would keep a pipe open.
        tempfile.TemporaryFile() as output,
    ):
        process = subprocess.Popen(
            tied_python("-m", module, *words),
            cwd=scratch,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment | dict.fromkeys(("TMPDIR", "WANDB_DIR", "WANDB_CACHE_DIR"), scratch),
            start_new_session=True,
        )
        exit_code: int | None = None
        try:
            with suppress(subprocess.TimeoutExpired):
                exit_code = process.wait(timeout_s)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        output.seek(0)
        lines = output.read().decode(errors="replace").splitlines()
    return Ended(exit_code, [*filter(None, map(str.strip, lines))], timeout_s)


class Published(NamedTuple):
    """What became of W&B's copy of a run, in one line; `command` uploads it, where that was not asked for."""

    line: str
    is_problem: bool = False
    command: str | None = None


def publish_run(result: Path, filing: WandbFiling, timeout_s: float, is_interrupted: bool) -> Published | None:
    """Write the closed result of this process for W&B, and upload it where that was asked for. Never raises.

    None where W&B is to have nothing, or not yet: a sweep writes its runs together when it is done, since only then
    their records say which cell they are.
    """
    if filing.mode == "disabled" or sweep_of(result):
        return None
    command = shlex.join(["lmbench", "upload", str(result), *upload_options([filing])])
    problem = "W&B got nothing of this run"
    try:
        server = write([result], timeout_s)
        if filing.mode == "offline":
            return Published("offline, beside the result", command=command)
        problem = "not uploaded to W&B"
        if is_interrupted:
            raise WandbProblem("the run was interrupted")
        tell(f"sending the result to {server}")
        return Published(f"uploaded: {sync(result, timeout_s) or 'the server told no address'}")
    # Whatever it is, a second Ctrl-C included: the result is complete, and the run ends as it ended.
    except BaseException as error:
        why = "stopped" if isinstance(error, KeyboardInterrupt | SystemExit) else one_line(str(error))
        return Published(f"{problem}: {why}; later: {command}", is_problem=True)


def write_new(results: Iterable[Path]) -> None:
    """Write a sweep's runs that W&B is to have and that were not written yet.

    Raises:
        WandbProblem: not all could be written.
    """
    filings = {result: load_run(result, with_steps=False).record.wandb for result in results}
    asked = (result for result, filing in filings.items() if filing and filing.mode != "disabled")
    if new := [result for result in asked if not _files(result, "*.wandb")]:
        write(new, DEFAULT_TIMEOUT_S)


def write(results: Sequence[Path], timeout_s: float) -> str:
    """Write the results' offline runs, in the place of those that are there; `timeout_s` is for each.

    Returns the address of the server that W&B sends to, by the user's environment and home; also without results.

    Raises:
        WandbProblem: not all could be written. (wandb itself says nothing of steps that a full disk has no room for;
            they are in the result, and the upload writes again.)
    """
    for result in results:
        _check_folder(result)
    words = [str(result.absolute()) for result in results]
    ended = run_module("lmbench.wandb.child", words, timeout_s * max(1, len(results)))
    ended.check()
    return next((masked_text(line.removeprefix(SERVER)) for line in ended.lines if line.startswith(SERVER)), "W&B")


def is_uploaded(result: Path) -> bool:
    """Whether the result's offline run has wandb's own mark of an upload, whoever did it."""
    return bool(_files(result, "*.wandb.synced"))


def _files(result: Path, pattern: str) -> list[Path]:
    """Files of the result's offline runs; none that a link leads to."""
    runs = filter(is_folder, (result / "wandb").glob("*") if is_folder(result / "wandb") else ())
    return [file for run in runs for file in run.glob(pattern) if not file.is_symlink()]


def _check_folder(result: Path) -> None:
    """Raises WandbProblem where what would be written, sent or removed lies behind a link, and is not the result's."""
    if (result / "wandb").is_symlink():
        raise WandbProblem(f"{result / 'wandb'} is a link; remove it")


def sync(result: Path, timeout_s: float, options: Sequence[str] = ()) -> str | None:
    """Upload the result's offline run with wandb's own `wandb sync`; returns its address where wandb tells it.

    Raises:
        WandbProblem: it is not at the server, or not all of it.
    """
    _check_folder(result)
    ended = run_module("wandb", ["sync", *options, str(result.absolute() / "wandb")], timeout_s)
    faults = [_FAULT.sub("", line) for line in ended.lines if _FAULT.match(line)]
    if ended.exit_code == 0 and is_uploaded(result) and not faults:
        return next((address.group() for line in ended.lines if (address := _URL.search(line))), None)
    # wandb also marks what a server took only in part.
    for mark in _files(result, "*.wandb.synced"):
        mark.unlink()
    if ended.exit_code is None:
        ended.check()
    why = (faults or ended.lines or ["no reason given"])[-1]
    # Its whole comment on a server's 401.
    raise WandbProblem("the server refused it; is the key right?" if why == "<no message>" else why)


def save_boards(request: Request, timeout_s: float) -> Iterator[str]:
    """Make or update boards at W&B; yields a line for each that is there now.

    Raises:
        WandbProblem: (after them) not all are.
    """
    with ScratchFolder("boards") as scratch:
        file = Path(scratch) / "request.json"
        file.write_bytes(msgspec.json.encode(request))
        ended = run_module("lmbench.wandb.board", [str(file)], timeout_s)
    yield from (line for line in ended.lines if line.startswith(("created  ", "updated  ")))
    ended.check()
