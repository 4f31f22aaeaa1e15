"""Upload a result to W&B, exactly once."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from lmbench.wandb.child import Ended, run_child
from lmbench.wandb.mirror import ensure_mirror
from lmbench.wandb.place import Place
from lmbench.wandb.problem import BoardProblem
from lmbench.wandb.sync import UNREACHABLE

DEFAULT_TIMEOUT_S = 60.0

_URL = re.compile(r"https?://\S+/runs/\S+")
_COMPLAINT = re.compile("(wandb: )?(ERROR|Error|Not authenticated|Traceback)")
_PREFIX = re.compile("^(wandb: )?(ERROR |Error: )?")

# What wandb 0.31 says, and what that means; `{}` is its own last complaint. The first that fits counts.
_MEANINGS = (
    (re.compile("panic: |HandleAbandonedError"), "wandb itself crashed over what the server answered", False),
    (
        re.compile("Fatal error while uploading"),
        "the server refused the steps; a next try replaces what arrived",
        False,
    ),
    (re.compile("no api key", re.IGNORECASE), "no W&B key; set WANDB_API_KEY or use `wandb login`", True),
    # Its whole comment on a server's 401.
    (
        re.compile("<no message>"),
        "the server refused it without a reason, as it does with a wrong or expired key",
        True,
    ),
    (re.compile("api key|authenticat|unauthorized", re.IGNORECASE), "W&B does not take the key: {}", True),
)


@dataclass(frozen=True)
class Upload:
    """An upload that is done: `url` of the run where wandb told it, `was_new` False if it was done before."""

    url: str | None
    uploaded_at: str
    was_new: bool


def upload(result: Path, timeout_s: float = DEFAULT_TIMEOUT_S) -> Upload:
    """Upload a closed result, unless that was done before; waits for another process that is at it.

    The server files a run under the result's name, so that an upload that broke off can be tried again.

    Raises BoardProblem: what was not uploaded, and why, in one line.
    """
    place = Place(result)
    if (note := place.uploaded) is not None:
        return Upload(note.get("url"), str(note.get("uploaded_at")), was_new=False)
    with place.locked(timeout_s):
        if (note := place.uploaded) is not None:
            return Upload(note.get("url"), str(note.get("uploaded_at")), was_new=False)
        file = ensure_mirror(result)
        marker = file.with_name(f"{file.name}.synced")
        # Somebody may have used `wandb sync` itself.
        was_new = not marker.is_file()
        url = _sync(file, marker, timeout_s) if was_new else None
        done = Upload(url, datetime.now(UTC).isoformat(timespec="seconds"), was_new)
        try:
            place.note_upload(url=done.url, uploaded_at=done.uploaded_at)
        except OSError as exc:
            raise BoardProblem(f"uploaded to {url}, which could not be noted beside it: {exc.strerror}") from exc
        return done


def _sync(file: Path, marker: Path, timeout_s: float) -> str | None:
    with tempfile.TemporaryDirectory(prefix="lmbench-wandb-", ignore_cleanup_errors=True) as scratch:
        ended = run_child("lmbench.wandb.sync", str(file), environment=_environment(scratch), timeout_s=timeout_s)
    problem = _problem(ended, marker.is_file(), timeout_s)
    if problem is not None:
        marker.unlink(missing_ok=True)
        raise problem
    found = _URL.search(ended.output)
    return found.group() if found else None


def _environment(scratch: str) -> dict[str, str]:
    """This process's own, without what would make wandb stay offline or take the run for another one."""
    dropped = ("WANDB_MODE", "WANDB_SERVICE", "WANDB_RUN_ID", "WANDB_RESUME", "WANDB_SILENT", "WANDB_QUIET")
    kept = {name: value for name, value in os.environ.items() if name not in dropped}
    return {**kept, "WANDB_CACHE_DIR": scratch, "WANDB_DIR": scratch, "WANDB_ERROR_REPORTING": "false"}


def _problem(ended: Ended, is_marked: bool, timeout_s: float) -> BoardProblem | None:
    """Why a sync did not upload everything; wandb says so in its output alone, the exit code is 0 nearly always."""
    if ended.exit_code is None:
        return BoardProblem(f"not done within {timeout_s:g} s; more time: --timeout-s", is_general=True)
    if ended.exit_code == UNREACHABLE:
        return BoardProblem(f"the W&B server cannot be reached: {ended.last_line}", is_general=True)
    complaints = [line for line in ended.output.splitlines() if _COMPLAINT.match(line)]
    if is_marked and not complaints:
        return None
    complaint = _PREFIX.sub("", (complaints or [ended.last_line])[-1])
    # Not the lines about where it found a key.
    said = "\n".join(line for line in ended.output.splitlines() if "Loaded credentials" not in line)
    for pattern, meaning, is_key in _MEANINGS:
        if pattern.search(said):
            return BoardProblem(meaning.format(complaint), is_usage=is_key, is_general=is_key)
    return BoardProblem(complaint)
