"""Traces written by hand as torch.profiler writes them, and real ones of a small model on the CPU."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

MAIN, AUTOGRAD, PROCESS, STREAM = 100, 101, 99, 7


class HandWritten:
    """Events in us; `launch` and `kernel` belong together by their correlation id."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.metadata: dict[str, Any] = {"schema_version": 1, "module_classes": {}, "compiled_graphs": []}

    def add(self, cat: str, name: str, ts: float, dur: float, tid: int = MAIN, **args: Any) -> None:
        event = {"ph": "X", "cat": cat, "name": name, "pid": PROCESS, "tid": tid, "ts": ts, "dur": dur, "args": args}
        self.events.append(event)

    def step(self, number: int, ts: float, dur: float) -> None:
        self.add("user_annotation", f"lmbench.step:{number}", ts, dur)

    def phase(self, name: str, ts: float, dur: float) -> None:
        self.add("user_annotation", f"lmbench.phase:{name}", ts, dur)

    def module(self, path: str, ts: float, dur: float, tid: int = MAIN) -> None:
        self.add("user_annotation", f"lmbench.module:{path}", ts, dur, tid)

    def op(self, name: str, ts: float, dur: float, tid: int = MAIN, **args: Any) -> None:
        self.add("cpu_op", name, ts, dur, tid, **args)

    def launch(self, number: int, ts: float, dur: float = 4.0, tid: int = MAIN, name: str = "cudaLaunchKernel") -> None:
        self.add("cuda_runtime", name, ts, dur, tid, correlation=number, cbid=211)

    def kernel(self, number: int | None, name: str, ts: float, dur: float, **args: Any) -> None:
        cat = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(name.split(" ", 1)[0], "kernel")
        known = {} if number is None else {"correlation": number}
        self.add(cat, name, ts, dur, STREAM, **{"device": 0, "stream": STREAM, **known, **args})
        self.events[-1]["pid"] = args.get("device", 0)

    def document(self) -> dict[str, Any]:
        return {"schemaVersion": 1, "lmbench": self.metadata, "traceEvents": self.events}

    def write(self, path: Path) -> Path:
        path.write_text(json.dumps(self.document()))
        return path


def record_steps(
    path: Path,
    forward: Callable[[], torch.Tensor],
    optimizer: torch.optim.Optimizer,
    steps: int = 2,
    micro_batches: int = 1,
) -> Path:
    """A real CPU trace of `steps` training steps with lmbench's ranges."""

    def phase(name: str) -> record_function:
        return record_function(f"lmbench.phase:{name}")

    with profile(activities=[ProfilerActivity.CPU]) as recording:
        recording.add_metadata_json("lmbench", json.dumps({"schema_version": 1, "steps": steps, "device_type": "cpu"}))
        for step in range(steps):
            with record_function(f"lmbench.step:{step}"):
                for _ in range(micro_batches):
                    with phase("forward"):
                        loss = forward()
                    with phase("backward"):
                        loss.backward()
                with phase("optimizer"):
                    optimizer.step()
                with phase("zero_grad"):
                    optimizer.zero_grad()
    recording.export_chrome_trace(str(path))
    return path
