"""Timelines of steps for a report's page: data for the script that moves them, and a static picture for where there is
none; as many as a page can carry."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from lmbench.kernels.step_timeline import StepTimeline
from lmbench.report.palette import FUSED, MUTED, part_colour
from lmbench.report.palette import KINDS as KIND_COLOURS
from lmbench.report.palette import PHASES as PHASE_COLOURS
from lmbench.text import shown

#: More kernels than this are joined with their neighbours: a page stays under a few MB.
MAX_KERNELS = 6000
#: Pieces of a row in the static picture: narrower ones are joined.
_STATIC_PIECES = 400
#: The data counts time in tenths of a microsecond.
_NS = 100
#: Kernels of one part are one bar if no more than this lies between them: what lay in the queue follows within 1 to
#: 2 us (see lmbench.kernels.trace.clocks); a longer gap is an idle device, and drawn as one.
_QUEUED_GAP = 50

ROWS = ("host: phases", "host: launches", "device: phases", "device: parts of the model", "device: kernels by kind")
ROW_HEIGHT, BAR_TOP, BAR_HEIGHT = 38, 15, 20


@dataclass(frozen=True)
class Piece:
    """A bar of a row, in the data's time; `busy` is how much of it is filled, the rest are gaps too short to draw."""

    start: int
    end: int
    colour: int
    label: str
    busy: float


@dataclass(frozen=True)
class StepPicture:
    """One step: what it is of, the data as JSON, the static picture, and for each kind of row what its colours mean,
    the longest first."""

    title: str
    data: str
    svg: str
    note: str
    legends: list[tuple[str, list[tuple[str, str]]]]


def step_picture(title: str, timeline: StepTimeline) -> StepPicture:
    """The picture of one step."""
    data, joined = timeline_data(timeline)
    more = f" Kernels next to each other are joined where they are many ({joined:,} of them)." if joined else ""
    own = sum(timeline.kernels.is_own)
    note = (
        f"{own:,} kernels, from the host's beginning of the step to the end of the last of them, under the profiler, "
        "which slows the host. A phase goes on while it waits, parts and kernels do not. Paler: gaps too short to "
        f"draw, or work of the step before.{more}"
    )
    return StepPicture(title, json.dumps(data, separators=(",", ":")), _static(title, data), note, _legends(data))


def _legends(data: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    phases: dict[str, int] = defaultdict(int)
    for phase, start, end in data["host"]:
        phases[phase] += end - start
    parts: dict[str, int] = defaultdict(int)
    kinds: dict[str, int] = defaultdict(int)
    for kernel in data["kernels"]:
        phases[data["phases"][kernel[5]][0]] += kernel[1]
        part = data["parts"][kernel[4]][0]
        parts[FUSED if "+" in part else part] += kernel[1]
        kinds[data["kinds"][kernel[3]][0]] += kernel[1]
    return [
        ("phases", _explained(phases, lambda name: PHASE_COLOURS.get(name, MUTED))),
        ("parts", _explained(parts, part_colour)),
        ("kinds", _explained(kinds, lambda name: KIND_COLOURS.get(name, MUTED))),
    ]


def _explained(times: dict[str, int], colour: Callable[[str], int]) -> list[tuple[str, str]]:
    return [(name, _css(colour(name))) for name in sorted(times, key=lambda name: -times[name])]


def timeline_data(timeline: StepTimeline) -> tuple[dict[str, Any], int]:
    """Columns of whole numbers; `kernels` are [start, length, name, kind, part, phase, own, launch, its length, n].
    Then how many kernels are joined with others."""
    columns = timeline.kernels
    kernels = [
        [_tenths(start), _tenths(length), name, kind, part, phase, own, _tenths(launch), _tenths(launch_length), 1]
        for start, length, name, kind, part, phase, own, launch, launch_length in zip(
            columns.start_ns, columns.duration_ns, columns.name, columns.kind, columns.part, columns.phase,
            columns.is_own, columns.launch_ns, columns.launch_duration_ns, strict=True,
        )
    ]  # fmt: skip
    kept = _joined(kernels)
    return {
        "end": _tenths(timeline.end_ns),
        "gap": _QUEUED_GAP,
        "host": [[shown(p), max(0, _tenths(a)), _tenths(b)] for p, a, b in timeline.host_phases],
        "names": [shown(name) for name in timeline.names],
        "kinds": [[shown(name), KIND_COLOURS.get(name, MUTED)] for name in timeline.kinds],
        "parts": [[shown(name), part_colour(name)] for name in timeline.parts],
        "phases": [[shown(name), PHASE_COLOURS.get(name, MUTED)] for name in timeline.phases],
        "colours": dict(PHASE_COLOURS),
        "kernels": kept,
    }, len(kernels) - len(kept)


def _tenths(time_ns: int | None) -> int:
    """A time in the data's unit, -1 where there is none."""
    return -1 if time_ns is None else round(time_ns / _NS)


def _joined(kernels: list[list[int]]) -> list[list[int]]:
    """Neighbours of one kind and part made one, the shorter ones first, until there are few enough."""
    limit = 20
    while len(kernels) > MAX_KERNELS:
        found: list[list[int]] = []
        for kernel in kernels:
            last = found[-1] if found else None
            is_close = last is not None and kernel[0] - last[0] - last[1] < limit and kernel[1] < limit
            if last is not None and is_close and kernel[5:7] == last[5:7] and (limit > 500 or kernel[3:5] == last[3:5]):
                last[1] = max(last[1], kernel[0] + kernel[1] - last[0])
                last[9] += kernel[9]
            else:
                found.append(list(kernel))
        kernels = found
        limit *= 2
    return kernels


def _static(title: str, data: dict[str, Any]) -> str:
    """The whole step, in percent of the width: text keeps its size on any screen."""
    end = data["end"] or 1
    parts = [
        f'<svg class="timeline-picture" role="img" aria-label="{escape(title)}: one step on host and device" '
        f'width="100%" height="{len(ROWS) * ROW_HEIGHT + 22}">'
    ]
    for row, (label, pieces) in enumerate(zip(ROWS, _rows(data), strict=True)):
        top = row * ROW_HEIGHT
        parts.append(f'<text class="row" x="0" y="{top + 11}">{escape(label)}</text>')
        parts += [_bar(piece, top + BAR_TOP, end) for piece in _merged(pieces, end / _STATIC_PIECES)]
    parts.append(_axis(end, len(ROWS) * ROW_HEIGHT))
    return "".join(parts) + "</svg>"


def _rows(data: dict[str, Any]) -> list[list[Piece]]:
    kernels = data["kernels"]
    host = [Piece(a, min(b, data["end"]), data["colours"].get(p, 0), p, 1.0) for p, a, b in data["host"]]
    launches = [
        Piece(k[7], k[7] + max(k[8], 1), data["kinds"][k[3]][1], data["names"][k[2]], 1.0) for k in kernels if k[7] >= 0
    ]
    launches.sort(key=lambda piece: piece.start)
    return [
        [piece for piece in host if piece.start < data["end"]],
        launches,
        _runs(data, 5, "phases", data["end"]),
        _runs(data, 4, "parts", _QUEUED_GAP),
        [_piece(k, data["kinds"][k[3]][1], data["names"][k[2]]) for k in kernels],
    ]


def _piece(kernel: Sequence[int], colour: int, label: str) -> Piece:
    start = max(kernel[0], 0)
    return Piece(start, kernel[0] + max(kernel[1], 1), colour, label, 1.0 if kernel[6] else 0.4)


def _runs(data: dict[str, Any], place: int, names: str, gap: int) -> list[Piece]:
    """Kernels one after the other that share a phase, or a part, as one piece, up to that gap between them."""
    found: list[Piece] = []
    keys: list[tuple[int, int]] = []
    for kernel in data["kernels"]:
        label, colour = data[names][kernel[place]]
        piece, key = _piece(kernel, colour, label), (kernel[place], kernel[6])
        if keys and keys[-1] == key and piece.start - found[-1].end <= gap:
            found[-1] = Piece(found[-1].start, max(found[-1].end, piece.end), colour, label, piece.busy)
        else:
            found.append(piece)
            keys.append(key)
    return found


def _merged(pieces: Iterable[Piece], least: float) -> Iterable[Piece]:
    """Pieces that are shorter than `least` joined with their neighbours; the longest of them gives colour and label."""
    group: list[Piece] = []
    for piece in pieces:
        if group and (piece.start - group[-1].end > least or _span(group) > least or piece.end - piece.start > least):
            yield _one(group)
            group = []
        group.append(piece)
    if group:
        yield _one(group)


def _span(group: Sequence[Piece]) -> int:
    return max(piece.end for piece in group) - group[0].start


def _one(group: Sequence[Piece]) -> Piece:
    if len(group) == 1:
        return group[0]
    times: dict[tuple[int, str], int] = defaultdict(int)
    for piece in group:
        times[piece.colour, piece.label] += piece.end - piece.start
    colour, label = max(times, key=times.__getitem__)
    span = max(_span(group), 1)
    busy = sum((piece.end - piece.start) * piece.busy for piece in group) / span
    more = f" and {len(group) - 1} more" if len(times) > 1 else f" ({len(group)})"
    return Piece(group[0].start, group[0].start + span, colour, label + more, min(busy, 1.0))


def _bar(piece: Piece, top: int, end: int) -> str:
    left, width = 100 * piece.start / end, max(100 * (piece.end - piece.start) / end, 0.04)
    pale = "" if piece.busy > 0.99 else f' opacity="{max(piece.busy, 0.15):.2f}"'
    text = escape(f"{piece.label}, {(piece.end - piece.start) / 10:,.1f} us")
    place = f'x="{left:.3f}%" y="{top}" width="{width:.3f}%" height="{BAR_HEIGHT}"'
    bar = f'<rect {place} fill="{_css(piece.colour)}"{pale}><title>{text}</title></rect>'
    if width < 9:
        return bar
    # A picture in the picture cuts off what does not fit.
    label = f'<text class="on" x="5" y="{BAR_HEIGHT - 6}">{escape(piece.label)}</text>'
    return bar + f"<svg {place}>{label}</svg>"


def _css(colour: int) -> str:
    return f"var(--series-{colour})" if colour else "var(--muted)"


def _axis(end: int, top: int) -> str:
    """Times at the quarters."""
    texts = []
    for quarter in range(5):
        anchor = ("start", "middle", "middle", "middle", "end")[quarter]
        time = f"{end * quarter / 4 / 10_000:,.2f}" + (" ms" if quarter == 4 else "")
        texts.append(f'<text class="row" x="{25 * quarter}%" y="{top + 13}" text-anchor="{anchor}">{time}</text>')
    return "".join(texts)
