"""Boards: what W&B is to show of a study's runs, as plain data. A panel names what runs are given, and nothing else.

A study's board follows from its view, the one of `lmbench report`: its charts as panels, its columns in the table of
runs. Sections that every study needs come after it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from lmbench.records.passes import TIMING
from lmbench.records.vocabulary import PHASES
from lmbench.report import logged
from lmbench.report.facts import FACT
from lmbench.report.view import ChartSpec, View
from lmbench.wandb.content import PHASE_TABLE

#: `bars`: a bar for each label and number of `y`, over repeats their mean; `stacked_bars`: a bar for each run, of the
#: rows of the table `y`; `stacked_area`: the series `y` on top of each other over the steps of one run; `series`: `y`
#: over the steps; `scatter`: a dot for each run; `parallel`: a line for each run through all of `y`; `differences`:
#: what runs differ in.
Kind = Literal["bars", "stacked_bars", "stacked_area", "series", "scatter", "parallel", "differences"]


@dataclass(frozen=True)
class Panel:
    """One panel. `x` and `y` are keys: `summary:time/step_ms`, `config:size`, and `series:time/step_ms` of each step.

    `is_log` are those of them that have a logarithmic axis.
    """

    kind: Kind
    title: str
    y: tuple[str, ...] = ()
    x: str | None = None
    group: str | None = None
    is_log: tuple[str, ...] = ()

    @property
    def keys(self) -> Iterator[str]:
        yield from (*self.y, *(key for key in (self.x, self.group) if key is not None))


@dataclass(frozen=True)
class Section:
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]
    is_open: bool = False


@dataclass(frozen=True)
class Board:
    """A workspace of W&B, or a report: of the runs of `study`, or of all where that is None, and of one pass of them.

    `columns` are keys in the table of runs, `question` is what the study answers, `text` (Markdown) goes into a report.
    """

    name: str
    sections: tuple[Section, ...]
    columns: tuple[str, ...]
    study: str | None = None
    run_pass: str = TIMING
    question: str = ""
    text: str = ""

    @property
    def keys(self) -> set[str]:
        """Every key that a panel or the table names."""
        in_panels = (key for section in self.sections for panel in section.panels for key in panel.keys)
        return {*self.columns, *in_panels, *self.filters}

    @property
    def filters(self) -> dict[str, str]:
        """What a run must have to be shown, by keys."""
        return {PASS: self.run_pass, **({} if self.study is None else {STUDY: self.study})}


Made = Literal["board", "report", "chart"]


@dataclass(frozen=True)
class Request:
    """What W&B is to have: each board as each of `kinds`. An entity of None is the user's own."""

    project: str
    entity: str | None
    kinds: tuple[Made, ...]
    boards: tuple[Board, ...]


@dataclass(frozen=True)
class Saved:
    """What became of a board: `created` or `updated`, and where it is; of a chart `left out`, and why."""

    kind: Made
    name: str
    what: str
    told: str


STUDY, PASS, LABEL = "config:study", "config:pass", "config:label"


def _summary(field: str) -> str:
    return f"summary:{logged.run_names()[field][0]}"


def _series(name: str) -> str:
    return f"series:{name}"


_STEP, _TOKENS = _summary("phases.step.mean_s"), _summary("throughput.tokens_per_s")
_MFU, _HOST_BOUND = _summary("throughput.mfu_fraction"), f"summary:{logged.HOST_BOUND}"
_PEAK, _HOST_PEAK = _summary("memory.run_peak_allocated_bytes"), _summary("memory.host_peak_rss_bytes")
_SIZE = "config:parameters"

#: The report's columns that are not fields of a record by their own names.
_COLUMNS: Mapping[str, str] = {
    **{f"{span}_s": _summary(f"phases.{span}.mean_s") for span in ("step", *PHASES)},
    "step_median_s": _summary("phases.step.median_s"),
    "step_min_s": _summary("phases.step.min_s"),
    "step_cv_fraction": _summary("phases.step.cv_fraction"),
    "tokens_per_s": _TOKENS,
    "mfu_fraction": _MFU,
    "hfu_fraction": _summary("throughput.hfu_fraction"),
    "joules_per_token": _summary("throughput.joules_per_token"),
    "host_bound_fraction": _HOST_BOUND,
    "peak_bytes": _PEAK,
    "host_peak_bytes": _HOST_PEAK,
    "predicted_peak_bytes": _summary("memory_prediction.peak_allocated_bytes"),
    "first_loss": _summary("loss.first"),
    "skipped_count": _summary("window.skipped_count"),
    "cold_first_step_s": _summary("compile.first_step_s"),
    "warm_first_step_s": _summary("compile.first_step_s"),
    "graph_count": _summary("compile.graph_count"),
    "graph_break_count": _summary("compile.graph_break_count"),
    "kernel_s": _summary("kernels.phases.step.kernel_s"),
    "forward_kernel_s": _summary("kernels.phases.forward.kernel_s"),
    "backward_kernel_s": _summary("kernels.phases.backward.kernel_s"),
    "optimizer_kernel_s": _summary("kernels.phases.optimizer.kernel_s"),
}

#: In the table of runs, whatever the study.
_ALWAYS = (
    "summary:outcome", "config:size", "config:mode", "config:precision", "config:compile", "config:batch",
    "config:context", _STEP, _summary("phases.step.std_s"), _TOKENS, _MFU, _PEAK, _HOST_PEAK, _HOST_BOUND,
    "summary:guards/failed", "summary:guards/warned", "config:gpu", "config:commit", "config:started_at",
)  # fmt: skip

#: Facts whose charts lie over a number.
_NUMBERS = ("batch", "context", "micro_batches", "warmup", "ranks")


def key_of(column: str) -> str | None:
    """The key of a report's column; None where runs are not given it one by one, as of a ratio of two cells."""
    if column in _COLUMNS:
        return _COLUMNS[column]
    return _summary(column) if column in logged.run_names() else None


def board_of(view: View, kinds: Sequence[str] = (), parts: Sequence[str] = ()) -> Board:
    """The board of a study's view; `kinds` and `parts` are those of kernels that a profiled run can have."""
    charts = tuple(panel for chart in view.charts if (panel := _chart(chart, kinds, parts)) is not None)
    own = [key for table in view.tables for column in table.columns if (key := key_of(column)) is not None]
    facts = [f"config:{name}" for table in view.tables for name in table.rows if name in FACT]
    columns = dict.fromkeys((_ALWAYS[0], *facts, *_ALWAYS[1:7], *own, *_ALWAYS[7:]))
    answer = (Section("Answer", charts, is_open=True),) if charts else ()
    shared = kernel_sections(kinds, parts) if view.is_profiled else SECTIONS
    return Board(
        f"lmbench {view.name}",
        (*answer, *(_without(section, charts) for section in shared)),
        tuple(columns),
        view.name,
        "kernels" if view.is_profiled else TIMING,
        view.question,
    )


def board_of_all() -> Board:
    """The board of every run of the project."""
    return Board("lmbench", tuple(replace(section, is_open=True) for section in SECTIONS), _ALWAYS)


def _without(section: Section, charts: Sequence[Panel]) -> Section:
    """The section without what the study's own charts show."""
    own = {_shown(panel) for panel in charts}
    return replace(section, panels=tuple(panel for panel in section.panels if _shown(panel) not in own))


def _shown(panel: Panel) -> tuple[object, ...]:
    return panel.kind, panel.y, panel.x, panel.group


def _chart(chart: ChartSpec, kinds: Sequence[str], parts: Sequence[str]) -> Panel | None:
    """A chart as a panel; None where W&B has nothing of what it shows."""
    if chart.kind == "phases":
        return replace(_PHASES, title=chart.title)
    if chart.kind in ("steps", "curves"):
        field = "step_s" if chart.kind == "steps" else chart.y
        found = logged.step_names().get(field)
        return None if found is None else Panel("series", chart.title, (_series(found[0]),))
    if chart.kind in ("kinds", "parts"):
        names = kinds if chart.kind == "kinds" else parts
        # W&B has them of the whole step.
        return _kernels(chart.title, chart.kind[:-1], names) if chart.y == "step" else None
    key = key_of(chart.y)
    if key is None or chart.kind not in ("bars", "rows", "lines"):
        return None
    if chart.kind == "lines" and chart.x in _NUMBERS:
        x = f"config:{chart.x}"
        return Panel("scatter", chart.title, (key,), x, is_log=(x, key) if chart.is_log else (x,))
    return Panel("bars", chart.title, (key,), group=LABEL)


def _kernels(title: str, what: str, names: Iterable[str]) -> Panel:
    return Panel("bars", title, tuple(f"summary:{logged.kernel_name(what, name)}" for name in names), group=LABEL)


_PHASES = Panel("stacked_bars", "Where the step goes", (f"summary:{PHASE_TABLE}",))

#: What every study of timed runs shows.
SECTIONS: tuple[Section, ...] = (
    Section(
        "Time",
        (
            Panel("bars", "Step time", (_STEP,), group=LABEL),
            _PHASES,
            Panel(
                "bars", "Each phase", tuple(_summary(f"phases.{span}.mean_s") for span in PHASES), group=LABEL
            ),
            Panel(
                "stacked_area", "Phases of one run over the steps",
                tuple(_series(f"time/{span}_ms") for span in PHASES),
            ),
            Panel("bars", "Waiting for the host, share of the step", (_HOST_BOUND,), group=LABEL),
        ),
    ),
    Section(
        "Speed against size, precision and compile",
        (
            Panel("scatter", "Tokens/s against parameters", (_TOKENS,), _SIZE, is_log=(_SIZE, _TOKENS)),
            Panel("scatter", "MFU against parameters", (_MFU,), _SIZE, is_log=(_SIZE,)),
            Panel("scatter", "Tokens/s against batch", (_TOKENS,), "config:batch", is_log=("config:batch",)),
            Panel("scatter", "Tokens/s against peak memory", (_TOKENS,), _PEAK),
            Panel("scatter", "Tokens/s against peak host memory", (_TOKENS,), _HOST_PEAK),
            Panel("bars", "Eager against compiled, mean step of the runs shown", (_STEP,), group="config:compile"),
            Panel("bars", "Precisions, mean step of the runs shown", (_STEP,), group="config:precision"),
            Panel("bars", "Precisions, mean tokens/s of the runs shown", (_TOKENS,), group="config:precision"),
            Panel(
                "parallel", "Everything at once",
                ("config:size", "config:precision", "config:compile", "config:batch", "config:context", _STEP,
                 _TOKENS, _MFU, _PEAK, _HOST_PEAK),
                is_log=(_STEP, _TOKENS),
            ),
        ),
    ),
    Section(
        "Memory",
        (
            Panel("bars", "Peak memory", (_PEAK, _HOST_PEAK), group=LABEL),
            Panel(
                "bars", "Peak of each phase",
                tuple(_summary(f"memory.phase_peak_allocated_bytes.{span}")
                      for span in ("forward", "backward", "optimizer")),
                group=LABEL,
            ),
            Panel("scatter", "Peak memory against batch", (_PEAK,), "config:batch"),
            Panel("scatter", "Peak memory against context", (_PEAK,), "config:context"),
        ),
    ),
    Section(
        "Steps",
        (
            Panel("series", "Step time over the steps", (_series("time/step_ms"),)),
            Panel("series", "Tokens/s over the steps", (_series("throughput/tokens_per_s"),)),
            Panel("series", "MFU over the steps", (_series("throughput/mfu_percent"),)),
            Panel("series", "Loss over the steps", (_series("train/loss"),)),
            Panel("series", "Lag at the end of forward and backward, over the steps",
                  (_series("lag/forward_ms"), _series("lag/backward_ms"))),
        ),
    ),
    Section("What the runs differ in", (Panel("differences", "Differences"),)),
)  # fmt: skip


def kernel_sections(kinds: Sequence[str], parts: Sequence[str]) -> tuple[Section, ...]:
    """What a study of profiled runs shows."""
    times = tuple(_summary(f"kernels.phases.{span}.kernel_s") for span in ("forward", "backward", "optimizer"))
    waits = (_summary("kernels.phases.step.host_wait_s"),)
    shares = (_summary("kernels.phases.step.matmul_fraction"),)
    return (
        Section(
            "Kernels",
            (
                Panel("bars", "Kernel time of each phase", times, group=LABEL),
                _kernels("Step by kind", "kind", kinds),
                _kernels("Step by part", "part", parts),
                Panel("bars", "Matrix products, share of the kernel time", shares, group=LABEL),
                Panel("bars", "Idle until the next kernel was launched", waits, group=LABEL),
            ),
        ),
        SECTIONS[-1],
    )
