"""A disk that is really full: a tmpfs of 64 KiB."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess

import pytest

from lmbench.results.fields import SCHEMA_VERSION
from lmbench.results.load import load_run
from lmbench.results.store import RunFolder


@pytest.fixture
def small_disk(tmp_path):
    mount = shutil.which("mount")
    disk = tmp_path / "disk"
    disk.mkdir()
    command = [mount or "mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or mount is None or subprocess.run(command, check=False).returncode:
        pytest.skip("mounting a small tmpfs needs root; the file size limit is tested in test_results_store")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def _fill(folder):
    step = 0
    while True:
        folder.append_steps([{"step": step + i, "pad": "x" * 80} for i in range(9)])
        step += 9


def test_a_full_disk_keeps_what_was_measured_and_recording_can_go_on(small_disk):
    ballast = small_disk / "ballast"
    ballast.write_bytes(b"\0" * 16 * 1024)
    folder = RunFolder.create(small_disk)
    folder.write_run({"schema_version": SCHEMA_VERSION, "outcome": "interrupted"})
    with pytest.raises(OSError, match="space") as raised:
        _fill(folder)
    assert raised.value.errno == errno.ENOSPC
    run = load_run(folder.path)
    assert (run.outcome, run.damage) == ("interrupted", None)
    written = [step["step"] for step in run.steps]
    assert written == list(range(len(written)))
    assert len(written) > 200
    assert (folder.path / "steps.jsonl").read_bytes().endswith(b"}\n")

    with pytest.raises(OSError, match="space"):
        folder.write_run({"schema_version": SCHEMA_VERSION, "outcome": "ok", "pad": "x" * 10_000})
    assert load_run(folder.path).outcome == "interrupted"
    assert sorted(file.name for file in folder.path.iterdir()) == ["run.json", "steps.jsonl"]

    ballast.unlink()
    folder.append_steps([{"step": len(written)}])
    folder.write_run({"schema_version": SCHEMA_VERSION, "outcome": "ok"})
    run = load_run(folder.path)
    assert (run.outcome, run.damage, len(run.steps)) == ("ok", None, len(written) + 1)
