"""PyTorch's flight recorder: the last collectives of each rank, and the one in which ranks stopped.

NCCL's watchdog notices a collective that takes longer than the timeout. All ranks then write their last collectives to
a file each, and the watchdog aborts its process, in C++ and without a word to Python. The files are pickles, which are
read without running any code of theirs.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import torch
from msgspec import Struct
from torch.distributed import DistError

from lmbench.errors import message_of
from lmbench.files import plain_unpickled, read_file

#: The largest file that is read; 2000 collectives with stacks take under 10 MB.
_MAX_FILE_BYTES = 256 << 20
#: Collectives that a rank remembers, PyTorch's own number.
_REMEMBERED = 2000
#: The watchdog aborts its process after four times this time, in which the other ranks write their files.
_WRITING_MS = 500


class Collective(Struct, frozen=True):
    """A collective that a rank has called, from PyTorch's flight recorder; the fields are the recorder's own."""

    process_group: tuple[str, ...]
    collective_seq_id: int
    profiling_name: str
    state: str
    input_sizes: list[list[int]] = []
    timeout_ms: int = 0

    def __str__(self) -> str:
        sizes = ", ".join(" x ".join(map(str, size)) for size in self.input_sizes)
        return f"{self.profiling_name}, number {self.collective_seq_id} of its group, of {sizes} elements"


class FlightRecord(Struct):
    """The collectives that a rank called last, oldest first."""

    entries: list[Collective] = []


def recording_variables(folder: Path) -> dict[str, str]:
    """Environment variables with which NCCL's process groups remember collectives and write them to `folder`."""
    return {
        "TORCH_FR_BUFFER_SIZE": str(_REMEMBERED),
        "TORCH_FR_DUMP_TEMP_FILE": str(folder / "collectives"),
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": str(_WRITING_MS),
    }


def read_stop(folder: Path, count: int) -> str | None:
    """Where ranks stopped, from the files that they wrote to `folder`; None if no file tells.

    That is a rank that waited, the collective in which it waited, and other collectives of this number: a mistake,
    since all ranks have to call the same.

    Args:
        folder: the folder of `recording_variables`.
        count: ranks.
    """
    calls = [(rank, call) for rank in range(count) for call in _read(folder / f"collectives{rank}")]
    waits = [(rank, call) for rank, call in calls if call.state != "completed"]
    if not waits:
        return None
    # Of ranks that wait in collectives of one number, the first.
    rank, waited = min(waits, key=lambda wait: wait[1].collective_seq_id)
    text = f"rank {rank} waited {waited.timeout_ms / 1e3:g} s in {waited}"
    number = waited.process_group, waited.collective_seq_id
    for other, call in calls:
        if (call.process_group, call.collective_seq_id) == number and str(call) != str(waited):
            text += f", where rank {other} called {call}"
    return text


def _read(path: Path) -> list[Collective]:
    """The collectives that a rank wrote, oldest first; none where there is no such file, or a damaged one."""
    try:
        content = plain_unpickled(read_file(path, _MAX_FILE_BYTES))
        return msgspec.convert(content, FlightRecord, strict=False).entries
    except Exception:
        # A rank may have been killed while it wrote, and a damaged pickle can raise any error.
        return []


def failed_collective(exception: BaseException) -> str | None:
    """The collective that failed, by PyTorch's flight recorder; None where the exception is about no collective."""
    if not (isinstance(exception, DistError) or re.search("/gloo/|pair closure", message_of(exception))):
        return None
    record = torch._C._distributed_c10d._dump_fr_trace_json(True, False)  # type: ignore[attr-defined]
    entries = msgspec.json.decode(record, type=FlightRecord, strict=False).entries
    # Gloo's entries all stay `scheduled`, and the last one failed. NCCL marks the running one as `started`.
    running = [entry for entry in entries if entry.state == "started"]
    return str((running or entries[-1:])[0]) if entries else None
