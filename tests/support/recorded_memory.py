"""The recorded histories in tests/data/memory, unpacked."""

from __future__ import annotations

import lzma
import shutil

from paths import MEMORY


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
