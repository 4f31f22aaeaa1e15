"""Git in a folder of a test's own."""

from __future__ import annotations

import os
import subprocess


def git(*words, folder=".", **variables):
    """What git prints."""
    command = ["git", "-C", str(folder), "-c", "user.name=x", "-c", "user.email=x@example.org", *words]
    environment = {**os.environ, **variables}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.strip()
