"""What git tells about a folder."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

_TIMEOUT_S = 5.0


def git_output(folder: Path, *words: str) -> str | None:
    """The output of a git command in a folder; None without git or a repository, or where the command fails."""
    # Without its optional locks this command cannot block a git command of the user's.
    command, variables = ["git", "-C", str(folder), *words], {**os.environ, "GIT_OPTIONAL_LOCKS": "0"}
    try:
        output = subprocess.check_output(
            command, text=True, stderr=subprocess.DEVNULL, timeout=_TIMEOUT_S, env=variables
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return output.strip()
