"""A chart before it is a picture: series of points, each with its interval or with the reason why it is missing."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Point:
    """One value in the chart's unit with the ends of its interval; None with the outcome where there is none.

    `tip` is what a pointer over the mark shows.
    """

    x: str | float
    y: float | None
    low: float | None = None
    high: float | None = None
    outcome: str = ""
    tip: str = ""


@dataclass(frozen=True)
class Series:
    """Points that belong together; `label` is empty where there is only one series.

    `colour` is the place of its colour (see colours), None for one by the order of the series.
    """

    label: str
    points: list[Point]
    colour: int | None = None


@dataclass(frozen=True)
class Chart:
    """A chart, ready to be drawn.

    `kind` is `bars`, `rows`, `lines`, `phases` or `steps` (see ChartSpec). `categories` are the places of bars, in
    order. `limit` is a level to mark, with its name. `whiskers` says what the intervals are.
    """

    kind: str
    x_label: str
    y_label: str
    series: list[Series]
    title: str = ""
    caption: str = ""
    whiskers: str = ""
    is_log: bool = False
    limit: tuple[float, str] | None = None
    categories: list[str] = field(default_factory=list)

    @property
    def highest(self) -> float:
        return max((p.high or p.y or 0.0 for series in self.series for p in series.points), default=0.0)

    @property
    def lowest(self) -> float:
        return min((p.y for series in self.series for p in series.points if p.y), default=0.0)

    @property
    def most_missing(self) -> int:
        """The largest number of points that are missing in one place."""
        missing = Counter(point.x for series in self.series for point in series.points if point.outcome)
        return max(missing.values(), default=0)
