"""A history over time: what is held by category, and the blocks that make most of it; in a small file of its own, so
that a page never has to read the snapshot, and as a chart."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from lmbench.files import Unreadable, read_unpacked
from lmbench.memory.categories import CATEGORY_LABELS, Category
from lmbench.records.codec import DamagedRecord, decode
from lmbench.records.guard import Guard
from lmbench.records.instruments import MemoryHistoryRecord
from lmbench.report.answer import Chart
from lmbench.report.palette import CATEGORIES as CATEGORY_COLOURS
from lmbench.report.palette import MUTED
from lmbench.report.palette import PHASES as PHASE_COLOURS
from lmbench.report.timeline import Layer, timeline
from lmbench.report.units import gib
from lmbench.report.vega import Spec

TIMELINE_FILE = "memory_timeline.json.gz"
_MAX_FILE_BYTES = 32 * 2**20
#: A column of the picture is the moment of most memory among as many entries as the next.
MAX_COLUMNS = 480
#: Blocks that can be asked what they are: those with most memory times columns.
MAX_BLOCKS = 600
MAX_FRAMES = 12
MAX_BANDS = 200
#: Between a module and the one that calls it are three frames of this file, which tell nothing.
_CALLING = "/torch/nn/modules/module.py:"

#: From the bottom of the stack: what stays, then what comes and goes.
STACKED: tuple[Category, ...] = (
    "parameters", "optimizer_state", "gradients", "inputs", "workspaces", "unknown", "activations", "logits",
    "temporaries",
)  # fmt: skip

_Place = Annotated[int, Meta(ge=0)]


class TimelineBlock(Struct, array_like=True):
    """A block: columns in which it is held, bytes, and the places of its category, part, phase, operator and stack."""

    first: _Place
    last: _Place
    size_bytes: _Place
    category: _Place
    part: _Place
    phase: _Place
    operator: _Place
    stack: _Place


class TimelineBand(Struct, array_like=True):
    """A phase, or a stranger's range: from one column up to another."""

    name: str
    first: _Place
    end: _Place


class MemoryTimeline(Struct):
    """The history, column by column. `sizes_bytes` has for each category its bytes in every column; `time_us` counts
    from the first entry. Blocks of a category lie upon each other in the order in which they stand here."""

    schema_version: Literal[1]
    cuts: list[str]
    is_older_lost: bool
    categories: list[str]
    labels: list[str]
    sizes_bytes: list[list[_Place]]
    reserved_bytes: list[_Place]
    time_us: list[int]
    peak: _Place
    entry_count: int
    bands: list[TimelineBand]
    blocks: list[TimelineBlock]
    names: list[str]
    stacks: list[list[str]]


def memory_timeline(findings: Any) -> MemoryTimeline:
    """The timeline of a history's `Findings`."""
    import numpy as np

    from lmbench.memory.replay import held_bytes

    played, blocks, bands = findings.played, findings.attribution.blocks, findings.attribution.bands
    count = played.entry_count
    borders = np.linspace(0, count, min(count, MAX_COLUMNS) + 1).astype(np.int64)
    moments = np.array([a + np.argmax(played.allocated_bytes[a:b]) for a, b in pairwise(borders)])
    categories = [name for name in STACKED if (blocks["category"] == name).any()]
    # Held at a moment: begun up to its entry, and not ended by it.
    first, last = np.searchsorted(moments, blocks["start"]), np.searchsorted(moments, blocks["end"]) - 1
    area = np.where(last >= first, (last - first + 1) * blocks["size_bytes"], 0)
    chosen = blocks.assign(first=first, last=last).iloc[np.argsort(-area, kind="stable")[:MAX_BLOCKS]]
    chosen = chosen[chosen["last"] >= chosen["first"]].sort_values("start", kind="stable")
    names, stacks = {"": 0}, {-1: 0}
    rows = []
    for row in chosen.itertuples():
        part, phase, operator = (names.setdefault(name, len(names)) for name in (row.owner, row.phase, row.operator))
        category, stack = categories.index(row.category), stacks.setdefault(row.stack, len(stacks))
        rows.append(TimelineBlock(row.first, row.last, row.size_bytes, category, part, phase, operator, stack))
    ranges = bands.phases if len(bands.phases) else bands.others.outermost()
    entries = np.searchsorted(played.time_us, np.stack([ranges.start, ranges.end]))
    starts, ends = np.searchsorted(borders, entries, side="right") - 1
    shown = [
        TimelineBand(name, max(int(start), 0), min(int(end), len(moments)))
        for name, start, end in zip(ranges.names, starts, ends, strict=True)
        if min(end, len(moments)) > start
    ]
    frames = [[str(frame) for frame in findings.frames_of(stack, 60)] for stack in stacks]
    sizes = [held_bytes(blocks[blocks["category"] == name], count)[moments].tolist() for name in categories]
    return MemoryTimeline(
        1, findings.cuts, bool(findings.cuts) and not played.holes, list(categories),
        [CATEGORY_LABELS[name] for name in categories], sizes, played.reserved_bytes[moments].tolist(),
        (played.time_us[moments] - played.time_us[0]).tolist(),
        int(np.searchsorted(borders, findings.peak, side="right") - 1), count, shown[:MAX_BANDS], rows, list(names),
        [[frame for frame in stack if _CALLING not in frame][:MAX_FRAMES] for stack in frames],
    )  # fmt: skip


def examine_run(folder: Path) -> tuple[MemoryHistoryRecord, list[Guard]]:
    """The figures of the history in a run's folder and its guards; writes the timeline beside it.

    Raises UsageError for a history that cannot be read, OSError where the timeline cannot be written.
    """
    from lmbench.memory.findings import examine

    findings = examine(folder)
    record = (findings.run and findings.run.memory_history) or MemoryHistoryRecord()
    findings.summarize(record)
    write_timeline(memory_timeline(findings), folder)
    return record, findings.guards


def write_timeline(timeline: MemoryTimeline, folder: Path) -> None:
    """Write it beside run.json. Raises OSError."""
    (folder / TIMELINE_FILE).write_bytes(gzip.compress(msgspec.json.encode(timeline), mtime=0))


def read_timeline(folder: Path) -> MemoryTimeline:
    """A run's timeline. Raises DamagedRecord, with one line, for a file that cannot be read or is none."""
    try:
        timeline = decode(read_unpacked(folder / TIMELINE_FILE, _MAX_FILE_BYTES), MemoryTimeline)
    except Unreadable as error:
        raise DamagedRecord(f"{TIMELINE_FILE} is not read: {error}") from error
    columns = len(timeline.time_us)
    lengths = {len(column) for column in (timeline.reserved_bytes, *timeline.sizes_bytes)}
    if lengths != {columns} or len(timeline.categories) != len(timeline.sizes_bytes) or timeline.peak >= columns:
        raise DamagedRecord("it is no timeline of memory: its columns are empty, or not of one length")
    for block in timeline.blocks:
        is_named = max(block.part, block.phase, block.operator) < len(timeline.names)
        is_known = block.category < len(timeline.categories) and block.stack < len(timeline.stacks)
        if block.last >= columns or not (is_named and is_known):
            raise DamagedRecord("it is no timeline of memory: a block refers to what is not there")
    return timeline


def memory_chart(title: str, history: MemoryTimeline) -> Chart:
    """The chart of a history: phases above, below them what is held, each large block by itself."""
    columns = len(history.time_us)
    totals = [sum(sizes) for sizes in zip(*history.sizes_bytes, strict=True)]
    top = max(*history.reserved_bytes, *totals, 1) / 2**30
    floors = [[0] * columns]
    for sizes in history.sizes_bytes:
        floors.append([floor + size for floor, size in zip(floors[-1], sizes, strict=True)])
    areas = [
        {"name": label, "start": start, "end": end, "low": low / 2**30, "high": high / 2**30}
        for label, (below, above) in zip(history.labels, pairwise(floors), strict=True)
        for start, end, low, high in _steps(0, below, above)
        if high > low
    ]
    moments = []
    for column, total in enumerate(totals):
        held = sorted(zip(history.labels, history.sizes_bytes, strict=True), key=lambda pair: -pair[1][column])
        moments.append({
            "name": "", "start": column, "end": column + 1, "low": 0, "high": top, "opacity": 0,
            "time": f"{history.time_us[column] / 1e3:.2f} ms",
            "held": f"{gib(total)} of {gib(history.reserved_bytes[column])} reserved",
            "parts": "\n".join(f"{label} {gib(sizes[column])}" for label, sizes in held if sizes[column]),
        })  # fmt: skip
    phases = [
        {"name": band.name, "start": band.first, "end": band.end, "low": 1.03 * top, "high": 1.1 * top}
        for band in history.bands
    ]
    steps = [
        {"start": column, "reserved": size / 2**30}
        for column, size in enumerate([*history.reserved_bytes, history.reserved_bytes[-1]])
    ]
    reserved: Spec = {
        "data": {"values": steps},
        "mark": {
            "type": "line", "interpolate": "step-after", "strokeDash": [5, 3], "color": "var(--text)", "clip": True,
        },
        "encoding": {
            "x": {"field": "start", "type": "quantitative"}, "y": {"field": "reserved", "type": "quantitative"},
        },
    }  # fmt: skip
    peak: Spec = {
        "data": {"values": [{"start": history.peak + 0.5}]},
        "mark": {"type": "rule", "clip": True},
        "encoding": {"x": {"field": "start", "type": "quantitative"}},
    }
    colours = {
        label: CATEGORY_COLOURS.get(name, MUTED)
        for name, label in zip(history.categories, history.labels, strict=True)
    }  # fmt: skip
    times = [round(time / 1e3, 2) for time in history.time_us]
    cuts = f"Not complete: {'; '.join(history.cuts)}. " if history.cuts else ""
    spec = timeline(
        [
            Layer("", moments, {"": MUTED}, {"time": "time", "held": "held", "parts": "of it"}, has_legend=False),
            Layer("held", areas, colours, {"name": "many small blocks of"}),
            Layer("", _blocks(history, floors), colours, {
                "size": "block", "name": "category", "part": "part", "phase": "made in", "operator": "saved by",
                "stack": "stack",
            }, has_legend=False),
            Layer("phases", phases, {band.name: PHASE_COLOURS.get(band.name, MUTED) for band in history.bands},
                  {"name": "phase"}),
        ],
        columns, 1.1 * top, height=320,
        x={"title": "ms, by entries of the history", "tickCount": 6, "labelExpr": f"{times}[datum.value]"},
        y={"title": "GiB"}, more=[reserved, peak],
    )  # fmt: skip
    return Chart(
        title, spec,
        f"{cuts}{history.entry_count:,} entries of the allocator's history, from left to right; each column shows its "
        "moment of most memory; the dashed line is what was reserved. The peak, "
        f"{gib(totals[history.peak])}, is marked. The snapshot opens in pytorch.org/memory_viz too.",
    )  # fmt: skip


def _steps(first: int, low: list[int], high: list[int]) -> list[tuple[int, int, int, int]]:
    """Columns from `first` on in which both edges stay: from a column up to another, and the edges."""
    steps: list[tuple[int, int, int, int]] = []
    for column, edges in enumerate(zip(low, high, strict=True), start=first):
        if steps and steps[-1][2:] == edges:
            steps[-1] = (steps[-1][0], column + 1, *edges)
        else:
            steps.append((column, column + 1, *edges))
    return steps


def _blocks(history: MemoryTimeline, floors: list[list[int]]) -> list[dict[str, Any]]:
    """The large blocks as spans, each on those of its category that are older."""
    spans = []
    edges = [list(floor) for floor in floors]
    for block in history.blocks:
        edge, columns = edges[block.category], slice(block.first, block.last + 1)
        low = edge[columns]
        edge[columns] = [size + block.size_bytes for size in low]
        words = {
            "name": history.labels[block.category], "size": gib(block.size_bytes), "part": history.names[block.part],
            "phase": history.names[block.phase] or "before", "operator": history.names[block.operator],
            "stack": "\n".join(history.stacks[block.stack])
            or "none: made before the history, or by autograd's own thread",
        }  # fmt: skip
        spans += [
            {"start": start, "end": end, "low": floor / 2**30, "high": ceiling / 2**30, **words}
            for start, end, floor, ceiling in _steps(block.first, low, edge[columns])
        ]
    return spans
