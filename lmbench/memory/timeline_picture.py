"""The timeline of a history: a static picture, with data for the script that asks its blocks what they are; in a
report's page, in a page of its own, and as SVG."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from lmbench.memory.timeline import MemoryTimeline
from lmbench.report.page import palette, whole_page
from lmbench.report.palette import CATEGORIES as CATEGORY_COLOURS
from lmbench.report.palette import MUTED
from lmbench.report.palette import PHASES as PHASE_COLOURS
from lmbench.report.units import gib
from lmbench.text import shown

BAND_TOP, BAND_HEIGHT, AREA_TOP, AREA_HEIGHT, AXIS_HEIGHT = 4, 20, 30, 280, 22
HEIGHT = AREA_TOP + AREA_HEIGHT + AXIS_HEIGHT
#: A band of less of the width has its name in it on wide screens only.
_NARROW_PERCENT = 20
#: Heights within the areas' own picture.
_UNITS = 1000


@dataclass(frozen=True)
class MemoryPicture:
    """One history: what it is of, the data as JSON, the static picture, what its colours mean (of phases and of
    categories), and what is said below. `warning` is empty where the history is complete."""

    title: str
    data: str
    svg: str
    legends: list[tuple[str, list[tuple[str, str]]]]
    note: str
    warning: str


def own_page(picture: MemoryPicture, answer: str, tables: str) -> str:
    """A page with one history, which needs nothing else; `answer` and `tables`, above the picture and below it, are
    HTML of our own making."""
    body = f"""<header><p class="brand">lmbench</p></header>
<main>
<section>
<h1>{escape(picture.title)}</h1>
{answer}
{_section([picture], [])}
{tables}
</section>
</main>
"""
    return whole_page("memory", picture.title, body, _packaged("timeline.css"), [_packaged("timeline.js")])


def own_svg(picture: MemoryPicture) -> str:
    """The picture as a file of its own, light or dark as its viewer is."""
    style = f"{palette()}{_packaged('timeline.css')}text {{ font-family: system-ui, sans-serif; }}"
    legend, y = [], HEIGHT + 15
    for of_what, entries in picture.legends:
        legend.append(f'<text class="row" x="0" y="{y}">{escape(of_what)}</text>')
        x = 60
        for name, colour in entries:
            legend.append(
                f'<rect x="{x}" y="{y - 9}" width="10" height="10" fill="{colour}"/>'
                f'<text class="row" x="{x + 14}" y="{y}">{escape(name)}</text>'
            )
            x += 30 + 7 * len(name)
        y += 20
    warning = f'<text class="warning" x="0" y="{y}">{escape(picture.warning)}</text>'
    below = y + (20 if picture.warning else 0) - 10
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="1000" height="{below}">'
    ground = '<rect width="100%" height="100%" style="fill: var(--surface)"/>'
    return (
        f"{head}<title>{escape(picture.title)}</title><style>{style}</style>{ground}{picture.svg}{''.join(legend)}"
        + (f"{warning if picture.warning else ''}</svg>\n")
    )


def _section(pictures: Sequence[MemoryPicture], notes: Sequence[str]) -> str:
    from jinja2 import Environment, StrictUndefined

    environment = Environment(autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined)
    return environment.from_string(_packaged("timeline.html")).render(pictures=pictures, notes=notes)


def _packaged(name: str) -> str:
    return (files("lmbench.memory") / name).read_text(encoding="utf-8")


def memory_picture(title: str, timeline: MemoryTimeline) -> MemoryPicture:
    """The picture of one history."""
    tops = _tops(timeline)
    peak_bytes = tops[-1][timeline.peak] if tops else 0
    most = max(*timeline.reserved_bytes, peak_bytes, 1)
    data = {
        "most": most,
        "sizes": timeline.sizes_bytes,
        "labels": timeline.labels,
        "reserved": timeline.reserved_bytes,
        "time": timeline.time_us,
        "bands": [[shown(band.name), band.first, band.end] for band in timeline.bands],
        "blocks": [
            [b.first, b.last, b.size_bytes, b.category, b.part, b.phase, b.operator, b.stack] for b in timeline.blocks
        ],
        "names": [shown(name) for name in timeline.names],
        "stacks": [[shown(frame) for frame in stack] for stack in timeline.stacks],
        "top": AREA_TOP,
        "height": AREA_HEIGHT,
        "units": _UNITS,
        "peak": timeline.peak,
    }
    phases = [(shown(name), _band_colour(name)) for name in dict.fromkeys(band.name for band in timeline.bands)]
    categories = [
        (label, _css(CATEGORY_COLOURS.get(name, MUTED)))
        for name, label in zip(timeline.categories, timeline.labels, strict=True)
    ]
    # A stranger's ranges have names of their own, many and all of one colour.
    is_of_phases = any(band.name in PHASE_COLOURS for band in timeline.bands)
    legends = [("phases", phases)] * is_of_phases + [("held", categories)]
    warning = f"Not complete: {'; '.join(timeline.cuts)}." if timeline.cuts else ""
    note = (
        f"{timeline.entry_count:,} entries of the allocator's history, from left to right, as many in each column, "
        "which shows its moment of most memory; the dashed line is what was reserved. "
        f"The peak, {gib(peak_bytes)}, is marked."
    )
    svg = _static(title, timeline, tops, most)
    return MemoryPicture(title, json.dumps(data, separators=(",", ":")), svg, legends, note, shown(warning))


def _tops(timeline: MemoryTimeline) -> list[list[int]]:
    """For each category the bytes up to its upper edge, column by column."""
    tops: list[list[int]] = []
    below = [0] * len(timeline.time_us)
    for sizes in timeline.sizes_bytes:
        below = [under + own for under, own in zip(below, sizes, strict=True)]
        tops.append(below)
    return tops


def _static(title: str, timeline: MemoryTimeline, tops: list[list[int]], most: int) -> str:
    """In percent of the width: text keeps its size on any screen."""
    columns = len(timeline.time_us)
    parts = [
        f'<svg class="memory-picture" role="img" aria-label="{escape(title)}: memory over time, by category" '
        f'width="100%" height="{HEIGHT}">',
        _hatch(),
        *_bands(timeline, columns),
        f'<svg class="areas" x="0" y="{AREA_TOP}" width="100%" height="{AREA_HEIGHT}" viewBox="0 0 {columns} {_UNITS}" '
        'preserveAspectRatio="none">',
    ]
    below = [0] * columns
    for name, label, top in zip(timeline.categories, timeline.labels, tops, strict=True):
        colour = _css(CATEGORY_COLOURS.get(name, MUTED))
        largest = max(over - under for over, under in zip(top, below, strict=True))
        text = escape(f"{label}, up to {gib(largest)}")
        parts.append(f'<path d="{_area(below, top, most)}" fill="{colour}"><title>{text}</title></path>')
        below = top
    edge = " ".join(f"{i},{_y(v, most)} {i + 1},{_y(v, most)}" for i, v in enumerate(timeline.reserved_bytes))
    parts.append(f'<polyline class="reserved" points="{edge}"/>')
    at = timeline.peak + 0.5
    parts.append(f'<line class="peak" x1="{at}" x2="{at}" y1="0" y2="{_UNITS}"/></svg>')
    if timeline.cuts:
        parts.append(_cut(timeline))
    parts += _axes(timeline, most)
    return "".join(parts) + "</svg>"


def _hatch() -> str:
    return (
        '<defs><pattern id="memory-cut" width="8" height="8" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)"><rect class="hatch" width="3" height="8"/></pattern></defs>'
    )


def _cut(timeline: MemoryTimeline) -> str:
    """A history that only begins late is hatched where it begins; one with gaps, everywhere."""
    width, words = ("6%", "older entries are lost") if timeline.is_older_lost else ("100%", "not complete")
    return (
        f'<rect class="cut" x="0" y="{AREA_TOP}" width="{width}" height="{AREA_HEIGHT}" fill="url(#memory-cut)"/>'
        f'<text class="warning" x="6" y="{AREA_TOP + 30}">{words}</text>'
    )


def _y(size_bytes: int, most: int) -> str:
    return f"{_UNITS * (1 - size_bytes / most):.5g}"


def _area(below: Sequence[int], top: Sequence[int], most: int) -> str:
    """A path around what lies between two edges, in steps; columns that go on as before add nothing."""
    over = _edge(top, most)
    under = _edge(below, most)
    back = "L".join(f"{x} {y}" for x, y in reversed(under))
    return f"M{'L'.join(f'{x} {y}' for x, y in over)}L{back}Z"


def _edge(sizes: Sequence[int], most: int) -> list[tuple[int, str]]:
    points: list[tuple[int, str]] = []
    for column, size in enumerate(sizes):
        y = _y(size, most)
        if points and points[-1][1] == y:
            points[-1] = (column + 1, y)
        else:
            points += [(column, y), (column + 1, y)]
    return points


def _bands(timeline: MemoryTimeline, columns: int) -> list[str]:
    parts = []
    for band in timeline.bands:
        left, width = 100 * band.first / columns, 100 * (band.end - band.first) / columns
        name = escape(shown(band.name))
        colour = _band_colour(band.name)
        place = f'x="{left:.3f}%" y="{BAND_TOP}" width="{width:.3f}%" height="{BAND_HEIGHT}"'
        parts.append(f'<rect {place} fill="{colour}"><title>{name}</title></rect>')
        parts.append(
            f'<line class="border" x1="{left:.3f}%" x2="{left:.3f}%" y1="{BAND_TOP}" y2="{AREA_TOP + AREA_HEIGHT}"/>'
        )
        if width > 6:
            # A picture in the picture cuts off what does not fit.
            on = "on" if width > _NARROW_PERCENT else "on wide"
            parts.append(f'<svg {place}><text class="{on}" x="5" y="{BAND_HEIGHT - 6}">{name}</text></svg>')
    return parts


def _band_colour(name: str) -> str:
    return _css(PHASE_COLOURS.get(name, MUTED))


def _axes(timeline: MemoryTimeline, most: int) -> list[str]:
    """Bytes at the quarters of the height, times at those of the width."""
    parts = []
    for quarter in range(1, 5):
        y = AREA_TOP + AREA_HEIGHT * (1 - quarter / 4)
        parts.append(f'<line class="grid" x1="0" x2="100%" y1="{y:g}" y2="{y:g}"/>')
        parts.append(f'<text class="scale" x="2" y="{y + 11:g}">{gib(most * quarter / 4)}</text>')
    last = len(timeline.time_us) - 1
    for quarter in range(5):
        anchor = ("start", "middle", "middle", "middle", "end")[quarter]
        time = f"{timeline.time_us[round(last * quarter / 4)] / 1e3:,.1f}" + (" ms" if quarter == 4 else "")
        place = f'x="{25 * quarter}%" y="{AREA_TOP + AREA_HEIGHT + 15}"'
        parts.append(f'<text class="row" {place} text-anchor="{anchor}">{time}</text>')
    return parts


def _css(colour: int) -> str:
    return f"var(--series-{colour})" if colour else "var(--muted)"
