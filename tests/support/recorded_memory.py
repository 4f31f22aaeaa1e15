"""The recorded history in memory_data/, as a run's folder.

`python tests/support/recorded_memory.py` writes its tables in golden/ anew; read the difference before you keep it.
"""

from __future__ import annotations

import contextlib
import io
import lzma
import os
import shutil
import tempfile
from pathlib import Path
from unittest import mock

from paths import GOLDEN as GOLDEN_FILES
from paths import MEMORY

from lmbench.cli import main

GOLDEN = GOLDEN_FILES / "memory_history.txt"


def unpack(folder):
    """The run's folder `recorded` in a folder."""
    run = folder / "recorded"
    run.mkdir()
    shutil.copy(MEMORY / "run.json", run)
    for name in ("memory_snapshot.pickle", "memory_notes.json"):
        (run / name).write_bytes(lzma.decompress((MEMORY / f"{name}.xz").read_bytes()))
    return run


def foreign(folder, name):
    """The path of a history that somebody else recorded, in a folder."""
    path = folder / f"{name}.pickle"
    path.write_bytes(lzma.decompress((MEMORY / f"h200_{name}.pickle.xz").read_bytes()))
    return path


def printed(folder):
    """What `lmbench memory` prints of it on a screen of 80 columns."""
    out = io.StringIO()
    with mock.patch.dict(os.environ, COLUMNS="80"), contextlib.chdir(folder), contextlib.redirect_stdout(out):
        assert main(["memory", "recorded", "--all"]) == 0
    return out.getvalue()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        unpack(Path(name))
        GOLDEN.write_text(printed(Path(name)), encoding="utf-8")
