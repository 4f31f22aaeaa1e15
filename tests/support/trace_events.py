"""Traces written by hand as torch.profiler writes them."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from paths import TRACES

from lmbench.kernels.findings import examine, examine_trace
from lmbench.kernels.trace import load_trace

MAIN, AUTOGRAD, PROCESS, STREAM = 100, 101, 99, 7


@cache
def examined(name):
    """The findings of a recorded trace, which tests share."""
    return examine(TRACES / name / "trace.json.gz")


class HandWritten:
    """Events in us; `launch` and `kernel` belong together by their correlation id."""

    def __init__(self):
        self.events = []
        self.distributed = {}
        self.metadata = {"schema_version": 1, "module_classes": {}, "compiled_graphs": []}

    def add(self, cat, name, ts, dur, tid=MAIN, **args):
        event = {"ph": "X", "cat": cat, "name": name, "pid": PROCESS, "tid": tid, "ts": ts, "dur": dur, "args": args}
        self.events.append(event)

    def range(self, name, ts, dur, tid=MAIN):
        self.add("user_annotation", name, ts, dur, tid)

    def step(self, number, ts, dur):
        self.range(f"lmbench.step:{number}", ts, dur)

    def phase(self, name, ts, dur):
        self.range(f"lmbench.phase:{name}", ts, dur)

    def module(self, path, ts, dur, tid=MAIN):
        self.range(f"lmbench.module:{path}", ts, dur, tid)

    def op(self, name, ts, dur, tid=MAIN, **args):
        self.add("cpu_op", name, ts, dur, tid, **args)

    def call(self, name, ts, dur, tid=MAIN, **args):
        self.add("cuda_runtime", name, ts, dur, tid, **args)

    def launch(self, number, ts, dur=4.0, tid=MAIN, name="cudaLaunchKernel"):
        self.call(name, ts, dur, tid, correlation=number, cbid=211)

    def kernel(self, number, name, ts, dur, **args):
        cat = {"Memcpy": "gpu_memcpy", "Memset": "gpu_memset"}.get(name.split(" ", 1)[0], "kernel")
        known = {} if number is None else {"correlation": number}
        self.add(cat, name, ts, dur, args.get("stream", STREAM), **{"device": 0, "stream": STREAM, **known, **args})
        self.events[-1]["pid"] = args.get("device", 0)

    def read(self, events):
        """Add events, each a method and its arguments, named ones last."""
        for method, *values in events:
            named = values.pop() if isinstance(values[-1], dict) else {}
            getattr(self, method)(*values, **named)
        return self

    def document(self):
        known = {"lmbench": self.metadata, "distributedInfo": self.distributed}
        return {"schemaVersion": 1, **known, "traceEvents": self.events}

    def launched(self, at, name, start, dur, stream=STREAM, lasts=4.0, tid=MAIN, call="cudaLaunchKernel", **args):
        """A kernel with its launch, the call of which lasts so long."""
        number = len(self.events) + 1
        self.launch(number, at, lasts, tid, call)
        self.kernel(number, name, start, dur, stream=stream, **args)

    def write(self, path):
        path.write_text(json.dumps(self.document()))
        return path

    def loaded(self):
        with TemporaryDirectory() as folder:
            return load_trace(self.write(Path(folder, "t.json")))

    def examined(self):
        return examine_trace(self.loaded())


def planted(text):
    """Traces by name, whose events are in YAML."""
    return {name: HandWritten().read(events) for name, events in yaml.safe_load(text).items()}


def write_ranks(folder, text, offset_us=0):
    """Write a trace for each rank; the clock of a rank is as much ahead of the one before it."""
    for rank, trace in enumerate(planted(text).values()):
        trace.distributed = {"rank": rank, "world_size": 2}
        for event in trace.events:
            event["ts"] += offset_us * rank
        trace.write(folder / f"{rank}.json")
