"""Let W&B have results that are closed: beside them as offline runs, and at its server where that is asked for.

wandb runs in a process of its own, which may hang, crash or change its environment alone.
"""

from __future__ import annotations

import configparser
import os
import re
import shlex
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from lmbench.errors import UsageError
from lmbench.files import Unreadable, is_folder, read_file
from lmbench.masking import masked_message
from lmbench.records.load import load_run
from lmbench.records.run import WandbFiling, WandbMode
from lmbench.records.store import RUNS_FOLDER, SWEEP_FILE
from lmbench.text import one_line
from lmbench.wandb.board import Request, Saved

DEFAULT_TIMEOUT_S = 60.0
_MOST_SETTINGS_BYTES = 2**16

_URL = re.compile(r"https?://\S+/runs/\S+")
# What wandb's line about a fault begins with; one of them only names a file with more about it.
_FAULT = re.compile(r"(?:wandb: )?(?:ERROR|Error:) (?!Find detailed)(?:\[\S+\] )?")


@dataclass
class WandbSettings:
    """How W&B files the run, and whether it is uploaded.

    Args:
        mode: offline writes a W&B run beside the result when that is closed; online uploads it too; disabled does
            nothing. The variable WANDB_MODE can only take away from that.
        project: its project.
        entity: the user or team that it belongs to; W&B knows a default.
        group: what it is grouped with; in a sweep that is the sweep.
        tags: words to find it by.
        artifact: the result folder goes along as an artifact.
        timeout_s: seconds that W&B may take to write, and again to upload.
    """

    mode: WandbMode = "offline"
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
        mode, switch = self.mode, os.environ.get("WANDB_MODE")
        if switch == "disabled":
            mode = "disabled"
        elif switch in ("offline", "dryrun") and mode == "online":
            mode = "offline"
        return WandbFiling(mode, self.project, self.entity, self.group, list(self.tags), self.artifact)


@dataclass(frozen=True)
class Destination:
    """Where W&B files runs; None is W&B's own default for the user."""

    project: str | None = None
    entity: str | None = None

    def __str__(self) -> str:
        told = {"project": self.project, "entity": self.entity}
        return " of ".join(f"{name} {value!r}" for name, value in told.items() if value is not None)


def elsewhere(filing: WandbFiling | None) -> Destination:
    """What of the destination that a record names is none of the user's own settings: these are lmbench's project,
    WANDB_PROJECT and WANDB_ENTITY, and what `wandb init` stored for the user."""
    if filing is None:
        return Destination()
    stored = _stored_settings()
    own = {name: os.environ.get(f"WANDB_{name.upper()}") or stored.get(name) for name in ("project", "entity")}
    return Destination(
        filing.project if filing.project not in (None, WandbSettings.project, own["project"]) else None,
        filing.entity if filing.entity not in (None, own["entity"]) else None,
    )


def _stored_settings() -> dict[str, str]:
    folder = os.environ.get("WANDB_CONFIG_DIR") or Path.home() / ".config" / "wandb"
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(read_file(Path(folder) / "settings", _MOST_SETTINGS_BYTES, follows_links=True).decode())
        return dict(parser["default"])
    except (Unreadable, UnicodeError, configparser.Error, KeyError):
        return {}


def upload_options(filings: Iterable[WandbFiling]) -> list[str]:
    """The options with which `lmbench upload` sends these runs where they are filed."""
    found = list(dict.fromkeys(map(elsewhere, filings)))
    if len(found) > 1:
        return ["--as_filed"]
    named = {"project": found[0].project, "entity": found[0].entity} if found else {}
    return [f"--{name}={value}" for name, value in named.items() if value is not None]


# What would make wandb stay offline, take the run for another one, be silent about what goes wrong, or use the
# background process of a WandbLogger in this process.
_DROPPED = ("WANDB_MODE", "WANDB_SERVICE", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SILENT", "WANDB_QUIET")


@dataclass(frozen=True)
class Ended:
    """How a process ended: `exit_code` is None where it was stopped at its time limit."""

    exit_code: int | None
    lines: list[str]
    timeout_s: float

    def check(self) -> None:
        """Raises WandbProblem where the process was stopped or failed."""
        if self.exit_code is None:
            raise WandbProblem(f"wandb was not done within {self.timeout_s:g} s; is the server there?")
        if self.exit_code != 0:
            raise WandbProblem(self.lines[-1] if self.lines else f"wandb ended with exit code {self.exit_code}")


def run_module(module: str, words: Sequence[str], timeout_s: float) -> Ended:
    """Run `python -m module words`, at most so long; whatever ends the wait ends the process too.

    It hears no Ctrl-C of the terminal, so that this process decides.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _DROPPED}
    with (
        # By itself wandb would leave logs and caches in the working directory and in the user's home.
        tempfile.TemporaryDirectory(prefix="lmbench-wandb-", ignore_cleanup_errors=True) as scratch,
        # A file, not a pipe: wandb's own background process would keep a pipe open.
        tempfile.TemporaryFile() as output,
    ):
        process = subprocess.Popen(
            # -P: the installed modules, as in this process, whatever lies in the working directory.
            [sys.executable, "-P", "-m", module, *words],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**environment, "WANDB_DIR": scratch, "WANDB_CACHE_DIR": scratch, "WANDB_ERROR_REPORTING": "false"},
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
        text = output.read().decode(errors="replace")
    return Ended(exit_code, [line.strip() for line in text.splitlines() if line.strip()], timeout_s)


class WandbProblem(Exception):
    """W&B did not get a result; the message is one line that says why, without secrets of wandb's own message."""

    def __init__(self, line: str) -> None:
        super().__init__(one_line(masked_message(line)))


@dataclass(frozen=True)
class Published:
    """What became of W&B's copy of a run, in one line; `command` uploads it, where that was not asked for."""

    line: str
    is_problem: bool = False
    command: str | None = None


def publish_run(result: Path, filing: WandbFiling, timeout_s: float, is_interrupted: bool) -> Published | None:
    """Write the closed result of this process for W&B, and upload it where that was asked for. Never raises.

    None where W&B is to have nothing, or not yet: a sweep writes its runs together when it is done, since only then
    their records say which cell they are.
    """
    in_sweep = result.parent.name == RUNS_FOLDER and (result.parent.parent / SWEEP_FILE).is_file()
    if filing.mode == "disabled" or in_sweep:
        return None
    command = shlex.join(["lmbench", "upload", str(result), *upload_options([filing])])
    what = "W&B got nothing of this run"
    try:
        write([result], timeout_s)
        if filing.mode == "offline":
            return Published("offline, beside the result", command=command)
        if is_interrupted:
            return Published(f"not uploaded to W&B: the run was interrupted; later: {command}", is_problem=True)
        what = "not uploaded to W&B"
        return Published(f"uploaded: {sync(result, timeout_s) or 'the server told no address'}")
    # Whatever it is, a second Ctrl-C included: the result is complete, and the run ends as it ended.
    except BaseException as error:
        why = "stopped" if isinstance(error, KeyboardInterrupt | SystemExit) else " ".join(str(error).split())
        return Published(f"{what}: {why}; later: {command}", is_problem=True)


def write_new(results: Iterable[Path], tell: Callable[[str], None]) -> WandbMode:
    """Write a sweep's runs that W&B is to have and that were not written yet; `tell` hears how many those are.

    Returns the most that one of them asks for; where that is `online`, writing is left to the upload.

    Raises:
        WandbProblem: not all could be written.
    """
    modes: dict[Path, WandbMode] = {}
    for result in results:
        filing = load_run(result, with_steps=False).record.wandb
        modes[result] = (filing and filing.mode) or "disabled"
    if "online" in modes.values():
        return "online"
    asked = [result for result, mode in modes.items() if mode == "offline"]
    if new := [result for result in asked if not _files(result, ".wandb")]:
        tell(f"writing {len(new)} run{'s' * (len(new) > 1)} for W&B")
        write(new, DEFAULT_TIMEOUT_S)
    return "offline" if asked else "disabled"


def write(results: Sequence[Path], timeout_s: float) -> None:
    """Write the results' offline runs, in the place of those that are there; `timeout_s` is for each.

    Raises:
        WandbProblem: not all could be written. (wandb itself says nothing of steps that a full disk has no room for;
            they are in the result, and the upload writes again.)
    """
    for result in results:
        _check_folder(result)
    run_module("lmbench.wandb.child", [str(result) for result in results], timeout_s * len(results)).check()


def is_uploaded(result: Path) -> bool:
    """Whether the result's offline run has wandb's own mark of an upload, whoever did it."""
    return bool(_files(result, ".wandb.synced"))


def _files(result: Path, suffix: str) -> list[Path]:
    """Files of the result's offline runs by the ends of their names; none that only a link leads to."""
    runs = [run for run in _entries(result / "wandb") if is_folder(run)]
    return [file for run in runs for file in _entries(run) if file.name.endswith(suffix) and not file.is_symlink()]


def _entries(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir()) if is_folder(folder) else []
    except OSError:
        return []


def _check_folder(result: Path) -> None:
    """Raises WandbProblem where what would be written, sent or removed lies behind a link, and is not the result's."""
    folder = result / "wandb"
    if os.path.lexists(folder) and not is_folder(folder):
        raise WandbProblem(f"{folder} is no folder of its own but a link or a file; remove it")


def sync(result: Path, timeout_s: float, options: Sequence[str] = ()) -> str | None:
    """Upload the result's offline run with wandb's own `wandb sync`; returns its address where wandb tells it.

    Raises:
        WandbProblem: it is not at the server, or not all of it.
    """
    _check_folder(result)
    ended = run_module("wandb", ["sync", *options, str(result / "wandb")], timeout_s)
    faults = [_FAULT.sub("", line) for line in ended.lines if _FAULT.match(line)]
    if ended.exit_code == 0 and is_uploaded(result) and not faults:
        return next((found.group() for line in ended.lines if (found := _URL.search(line))), None)
    # wandb also marks what a server took only in part.
    for mark in _files(result, ".wandb.synced"):
        mark.unlink()
    if ended.exit_code is None:
        ended.check()
    why = (faults or ended.lines or ["no reason given"])[-1]
    # Its whole comment on a server's 401.
    raise WandbProblem("the server refused it; is the key right?" if why == "<no message>" else why)


def save_boards(request: Request, timeout_s: float) -> Iterator[Saved]:
    """Make or update boards and reports at W&B; yields those that are there now.

    Raises:
        WandbProblem: (after them) not all are.
    """
    with tempfile.TemporaryDirectory(prefix="lmbench-boards-") as scratch:
        file = Path(scratch) / "request.json"
        file.write_bytes(msgspec.json.encode(request))
        ended = run_module("lmbench.wandb.board", [str(file)], timeout_s)
    yield from (msgspec.json.decode(line, type=Saved) for line in ended.lines if line.startswith('{"name":'))
    ended.check()
