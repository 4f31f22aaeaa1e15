"""Sums of a trace in plain Python over its JSON, sharing nothing with lmbench: what its figures are held against."""

from __future__ import annotations

import gzip
import json
import re


def union_us(intervals):
    """Length of what the intervals cover."""
    covered, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return covered


def plain_sums(path):
    """By device, in s: `busy`, `comm` and how much of it is `overlapped`."""
    text = path.read_bytes()
    events = json.loads(gzip.decompress(text) if text[:2] == b"\x1f\x8b" else text)["traceEvents"]
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    found = {}
    for device in sorted({event["args"]["device"] for event in kernels}):
        own = [(e["ts"], e["ts"] + e["dur"], e["name"]) for e in kernels if e["args"]["device"] == device]
        comm = [one[:2] for one in own if re.search("nccl", one[2])]
        compute = [one[:2] for one in own if not re.search("nccl|^Mem(cpy|set) ", one[2])]
        overlapped = union_us(comm) + union_us(compute) - union_us(comm + compute)
        sums = {"busy": union_us([one[:2] for one in own]), "comm": union_us(comm)}
        found[device] = {name: value / 1e6 for name, value in {**sums, "overlapped": overlapped}.items()}
    return found
