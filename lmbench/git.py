"""Runs git in a checkout."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

from lmbench.errors import UsageError

_TIMEOUT_S, _SHORT_TIMEOUT_S = 300.0, 5.0


def git(folder: Path, *words: str, problem: str, timeout_s: float = _TIMEOUT_S) -> str:
    """Run git in a folder and return its output.

    Raises:
        UsageError: git is missing, fails or takes too long; `problem` with git's own message.
    """
    # Without its optional locks this command cannot block a git command of the user's.
    command, variables = ["git", "-C", str(folder), *words], {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False, stdin=subprocess.DEVNULL,
            env=variables, errors="surrogateescape",
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{problem}: git: {error}") from error
    if process.returncode:
        message = " ".join(process.stderr.split())
        raise UsageError(f"{problem} ({message})" if message else problem)
    return process.stdout.strip()


def git_output(folder: Path, *words: str) -> str | None:
    """The output of a git command in a folder; None without git or a repository, or where the command fails."""
    with suppress(UsageError):
        return git(folder, *words, problem="", timeout_s=_SHORT_TIMEOUT_S)
    return None
