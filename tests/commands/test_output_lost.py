"""Output that nobody takes: a reader that went away is no failure, a full device is one, and neither a traceback."""

from __future__ import annotations

import subprocess
import sys

from paths import TRACES

TRACE = TRACES / "small_bf16_compiled"
# Far more than a pipe holds.
COMMAND = f"{sys.executable} -m lmbench kernels {TRACE} --json"


def shell(command):
    return subprocess.run(["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False)


def test_a_reader_that_goes_away_is_no_failure():
    done = shell(f"{COMMAND} | head -c 10")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout) == 10


def test_a_full_device_is_told_in_one_line():
    done = shell(f"{COMMAND} > /dev/full")
    assert (done.returncode, done.stderr) == (1, "lmbench: standard output: No space left on device\n")
