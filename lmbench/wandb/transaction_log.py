"""Read back what wandb wrote: its own writer is silent about a full disk."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# LevelDB's log format with W&B's own head: blocks of 32 KiB, pieces of (checksum u32, length u16, kind u8, bytes).
_MAGIC = b":W&B"
_HEAD_BYTES = 7
_BLOCK_BYTES = 32768
_FULL, _FIRST, _MIDDLE, _LAST = 1, 2, 3, 4


def history_count(file: Path) -> int | None:
    """Complete history rows of a .wandb file, 0 if its end is missing; None for a format that is not known here."""
    from wandb.proto import wandb_internal_pb2

    protocol: Any = wandb_internal_pb2
    data = file.read_bytes()
    if data[:4] != _MAGIC:
        return None
    count, is_ended = 0, False
    for raw in _records(data):
        record = protocol.Record()
        record.ParseFromString(raw)
        kind = record.WhichOneof("record_type")
        count += kind == "history"
        # Not only the last record: wandb may add its own after it.
        is_ended = is_ended or kind == "exit"
    return count if is_ended else 0


def _records(data: bytes) -> Iterator[bytes]:
    place, record = _HEAD_BYTES, b""
    while place + _HEAD_BYTES <= len(data):
        left = _BLOCK_BYTES - place % _BLOCK_BYTES
        if left < _HEAD_BYTES:
            place += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        if kind not in (_FULL, _FIRST, _MIDDLE, _LAST):
            return
        place += _HEAD_BYTES
        if place + length > len(data):
            return
        record += data[place : place + length]
        place += length
        if kind in (_FULL, _LAST):
            yield record
            record = b""
