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
    """Sums over the kernels of a trace of one device, in s: `busy`, `comm` and how much of it is `overlapped`."""
    text = path.read_bytes()
    events = json.loads(gzip.decompress(text) if text[:2] == b"\x1f\x8b" else text)["traceEvents"]
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    spans = [(event["ts"], event["ts"] + event["dur"], event["name"]) for event in kernels]
    comm = [span[:2] for span in spans if "nccl" in span[2]]
    compute = [span[:2] for span in spans if not re.search("nccl|^Mem(cpy|set) ", span[2])]
    overlapped = union_us(comm) + union_us(compute) - union_us(comm + compute)
    sums = {"busy": union_us(span[:2] for span in spans), "comm": union_us(comm), "overlapped": overlapped}
    return {name: time_us / 1e6 for name, time_us in sums.items()}
