"""Publishes closed results at W&B: as offline runs beside the results, and by upload if that is asked for.

wandb runs in a separate process, so that a hang, a crash or a changed environment does not affect this one.
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
from lmbench.fit_options import option_words
from lmbench.masking import masked_message, masked_text, one_line
from lmbench.python_process import tied_python
from lmbench.records.load import load_run
from lmbench.records.named import sweep_of
from lmbench.records.run import WandbFiling, WandbMode
from lmbench.wandb.board import BoardRequest

DEFAULT_TIMEOUT_S = 60.0

#: The beginning of the line in which lmbench.wandb.child prints the server's address.
SERVER = "server: "
_URL = re.compile(r"https?://\S+/runs/\S+")
#: The beginning of a line of wandb about an error, except for the one that only names a file with details.
_FAULT = re.compile(r"(?:wandb: )?(?:ERROR|Error:) (?!Find detailed)(?:\[\S+\] )?")
#: Variables that would keep wandb offline, change the run's identity, hide errors, or make wandb use the background
#: process of a WandbLogger in this process.
_DROPPED = re.compile("WANDB_(MODE|SERVICE|RUN_ID|RESUME|SILENT|QUIET)")


@dataclass
class WandbSettings:
    """How W&B files the run, and whether it is uploaded.

    Args:
        mode: offline writes a W&B run beside the result when that is closed; online uploads it too; disabled does
            nothing. The default is offline if you have a key for W&B or set WANDB_MODE, else disabled. The variable
            WANDB_MODE can lower the mode (to offline or disabled), but never raise it.
        project: its project.
        entity: the user or team that it belongs to; W&B knows a default.
        group: its group; in a sweep the default is the sweep's name.
        tags: its tags.
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
        """The settings that a run's record keeps, with the mode as far as WANDB_MODE allows it.

        Raises:
            UsageError: the time limit is not positive.
        """
        if not self.timeout_s > 0:
            raise UsageError(f"wandb.timeout_s is {self.timeout_s:g}; it must be above 0")
        modes: tuple[WandbMode, ...] = ("disabled", "offline", "online")
        highest = {"disabled": 0, "offline": 1, "dryrun": 1}.get(os.environ.get("WANDB_MODE", ""), 2)
        wanted = self.mode or ("offline" if "WANDB_MODE" in os.environ or has_key() else "disabled")
        mode = modes[min(modes.index(wanted), highest)]
        return WandbFiling(mode, self.project, self.entity, self.group, list(self.tags), self.artifact)


def has_key() -> bool:
    """Whether WANDB_API_KEY is set, or the user's netrc has a key for W&B's hosts or for the user's own server."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    addresses = ["https://api.wandb.ai", "https://api.forge.coreweave.com", os.environ.get("WANDB_BASE_URL", "")]
    with suppress(OSError, RuntimeError):
        # `wandb login --host` keeps the server's address in this file.
        addresses += (Path.home() / ".config" / "wandb" / "settings").read_text().split()
    hosts = {urlsplit(address).netloc for address in addresses}
    with suppress(OSError, RuntimeError, NetrcParseError):
        return not hosts.isdisjoint(netrc(os.environ.get("NETRC")).hosts)
    return False


def foreign_destination(filing: WandbFiling | None) -> dict[str, str]:
    """The project and entity of a record that the user's own settings do not name: lmbench's default project,
    WANDB_PROJECT and WANDB_ENTITY."""
    filing = filing or WandbFiling()
    users = {
        "project": (None, WandbSettings.project, os.environ.get("WANDB_PROJECT")),
        "entity": (None, os.environ.get("WANDB_ENTITY")),
    }
    return {name: getattr(filing, name) for name, values in users.items() if getattr(filing, name) not in values}


def common_destination(filings: Iterable[WandbFiling]) -> dict[str, str]:
    """The foreign destination of these filings, if all have the same; else empty."""
    destinations = {tuple(foreign_destination(filing).items()) for filing in filings}
    return dict(destinations.pop()) if len(destinations) == 1 else {}


def upload_command(result: Path, filings: Iterable[WandbFiling]) -> str:
    """The command that uploads a result, or a folder of them, to the project and entity of the filings."""
    return shlex.join(["lmbench", "upload", str(result), *option_words(common_destination(filings))])


class WandbProblem(Exception):
    """W&B did not get a result. The message is one line that says why; secrets in wandb's message are masked."""

    def __init__(self, line: str) -> None:
        super().__init__(one_line(masked_message(line)))


class Ended(NamedTuple):
    """How a process ended, with the lines that it printed; `exit_code` is None if its time limit stopped it."""

    exit_code: int | None
    lines: list[str]
    timeout_s: float

    def check(self) -> None:
        """Raises WandbProblem if the process was stopped or failed."""
        if self.exit_code is None:
            raise WandbProblem(f"wandb was not done within {self.timeout_s:g} s; is the server there?")
        if self.exit_code != 0:
            raise WandbProblem((self.lines or [f"wandb ended with exit code {self.exit_code}"])[-1])


def run_module(module: str, words: Sequence[str], timeout_s: float) -> Ended:
    """Run `python -m module words` for at most `timeout_s`; whatever ends the wait also ends the process.

    The process gets no Ctrl-C from the terminal, so that this process decides. Its working directory is empty, since
    wandb would send to the server that a `wandb/settings` in the user's working directory names.
    """
    environment = {name: value for name, value in os.environ.items() if not _DROPPED.fullmatch(name)}
    environment["WANDB_ERROR_REPORTING"] = "false"
    if path := environment.get("PYTHONPATH"):
        environment["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))
    with (
        # By default wandb leaves logs and caches in the working directory and in the user's home.
        ScratchFolder("wandb") as scratch,
        # A file instead of a pipe, which wandb's background process would keep open.
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
    """The outcome of publishing a run, in one line; `command` uploads a run that was only written."""

    line: str
    is_problem: bool = False
    command: str | None = None


def publish_run(result: Path, filing: WandbFiling, timeout_s: float, is_interrupted: bool) -> Published | None:
    """Write the closed result of this process for W&B, and upload it if its mode is `online`. Never raises.

    Returns None if W&B is disabled, and for runs of a sweep. A sweep writes its runs together at its end, since only
    then their records say which cell they belong to.
    """
    if filing.mode == "disabled" or sweep_of(result):
        return None
    command = upload_command(result, [filing])
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
    # No exception, not even a second Ctrl-C, changes how the run ends: its result is complete.
    except BaseException as error:
        why = "stopped" if isinstance(error, KeyboardInterrupt | SystemExit) else one_line(str(error))
        return Published(f"{problem}: {why}; later: {command}", is_problem=True)


def write_new(results: Iterable[Path]) -> None:
    """Write those of a sweep's runs that have W&B enabled and were not written yet.

    Raises:
        WandbProblem: not all could be written.
    """
    filings = {result: load_run(result, with_steps=False).record.wandb for result in results}
    enabled = (result for result, filing in filings.items() if filing and filing.mode != "disabled")
    if new := [result for result in enabled if not _files(result, "*.wandb")]:
        write(new, DEFAULT_TIMEOUT_S)


def write(results: Sequence[Path], timeout_s: float) -> str:
    """Write the results' offline runs, which replace earlier ones, within `timeout_s` for each.

    Returns the address of the server to which W&B sends by the user's environment and home, even without results.

    Raises:
        WandbProblem: not all could be written. wandb does not report steps for which a full disk has no room. The
            result has them, and `lmbench upload` writes the run again.
    """
    for result in results:
        _check_folder(result)
    words = [str(result.absolute()) for result in results]
    ended = run_module("lmbench.wandb.child", words, timeout_s * max(1, len(results)))
    ended.check()
    return next((masked_text(line.removeprefix(SERVER)) for line in ended.lines if line.startswith(SERVER)), "W&B")


def is_uploaded(result: Path) -> bool:
    """Whether the result's offline run has wandb's mark of an upload, by lmbench or by the user."""
    return bool(_files(result, "*.wandb.synced"))


def _files(result: Path, pattern: str) -> list[Path]:
    """The files of the result's offline runs that match the pattern, links left out."""
    runs = filter(is_folder, (result / "wandb").glob("*") if is_folder(result / "wandb") else ())
    return [file for run in runs for file in run.glob(pattern) if not file.is_symlink()]


def _check_folder(result: Path) -> None:
    """Raises WandbProblem if the result's W&B folder is a link: files elsewhere would be removed, written or sent."""
    if (result / "wandb").is_symlink():
        raise WandbProblem(f"{result / 'wandb'} is a link; remove it")


def sync(result: Path, timeout_s: float, options: Sequence[str] = ()) -> str | None:
    """Upload the result's offline run with `wandb sync`; returns the run's address if wandb prints it.

    Raises:
        WandbProblem: the server did not get the run, or only a part of it.
    """
    _check_folder(result)
    ended = run_module("wandb", ["sync", *options, str(result.absolute() / "wandb")], timeout_s)
    faults = [_FAULT.sub("", line) for line in ended.lines if _FAULT.match(line)]
    if ended.exit_code == 0 and is_uploaded(result) and not faults:
        return next((address.group() for line in ended.lines if (address := _URL.search(line))), None)
    # wandb also marks a run of which the server took only a part.
    for mark in _files(result, "*.wandb.synced"):
        mark.unlink()
    if ended.exit_code is None:
        ended.check()
    reason = (faults or ended.lines or ["no reason given"])[-1]
    # wandb prints nothing but this when a server answers 401.
    raise WandbProblem("the server refused it; is the key right?" if reason == "<no message>" else reason)


def save_boards(request: BoardRequest, timeout_s: float) -> Iterator[str]:
    """Create or update boards at W&B; yields a line for each.

    Raises:
        WandbProblem: after these lines, if not all boards were saved.
    """
    ended = run_module("lmbench.wandb.board", [msgspec.json.encode(request).decode()], timeout_s)
    yield from (line for line in ended.lines if line.startswith(("created  ", "updated  ")))
    ended.check()
