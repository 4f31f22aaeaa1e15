"""Runs git and other programs."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lmbench.errors import UsageError

_TIMEOUT_S, _SHORT_TIMEOUT_S = 300.0, 5.0


def run_program(
    words: Sequence[str], timeout_s: float | None, text: str = "", variables: Mapping[str, str] = {}
) -> subprocess.CompletedProcess[str]:
    """Run a program, with `text` as its input and `variables` beside those of this process.

    A program that cannot be run, or takes too long, has exit code 1 and the reason as its standard error.
    """
    try:
        return subprocess.run(
            words, input=text, capture_output=True, text=True, errors="surrogateescape", timeout=timeout_s, check=False,
            env={**os.environ, **variables},
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return subprocess.CompletedProcess(words, 1, "", str(error))


def git(folder: Path, *words: str, problem: str, timeout_s: float = _TIMEOUT_S) -> str:
    """Run git in a folder and return its output.

    Raises:
        UsageError: git is missing, fails or takes too long; `problem` with git's own message.
    """
    # Without its optional locks this command cannot block a git command of the user's.
    process = run_program(["git", "-C", str(folder), *words], timeout_s, variables={"GIT_OPTIONAL_LOCKS": "0"})
    if process.returncode:
        message = " ".join(process.stderr.split())
        raise UsageError(f"{problem} ({message})" if message else problem)
    return process.stdout.strip()


def git_output(folder: Path, *words: str) -> str | None:
    """The output of a git command in a folder; None without git or a repository, or where the command fails."""
    with suppress(UsageError):
        return git(folder, *words, problem="", timeout_s=_SHORT_TIMEOUT_S)
    return None
