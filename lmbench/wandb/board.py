"""A board at W&B for each study: the view of `lmbench report` as a workspace, rendered through wandb-workspaces.

A view's charts become panels, its columns the table of runs; sections that every study needs come after them. W&B has
figures of single runs, so what compares two cells is left out. `python -m lmbench.wandb.board FILE` makes the boards of
a request in a process of its own: wandb-workspaces takes 2 s to import.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import msgspec
from msgspec import Struct

from lmbench.records.passes import TIMING
from lmbench.records.vocabulary import PHASES
from lmbench.report import logged
from lmbench.report.facts import FACT
from lmbench.report.view import ChartSpec, View

_MOST_RUNS = 100
_VIEW_TYPE = "project-view"


class Panel(Struct, frozen=True):
    """One panel. Keys are `summary:time/step_ms`, `config:size`, and `series:time/step_ms` of each step.

    `bars`: a bar for each label and number of `y`, the mean over repeats; `series` and `area`: `y` over the steps, the
    second on top of each other for one run; `scatter`: a dot for each run, `y` over `x`; `differences`: what runs
    differ in.
    """

    kind: Literal["bars", "series", "area", "scatter", "differences"]
    title: str
    y: tuple[str, ...] = ()
    x: str | None = None
    is_log: bool = False


class Section(Struct, frozen=True):
    """Panels under a heading."""

    title: str
    panels: tuple[Panel, ...]


class Board(Struct, frozen=True):
    """A workspace: of the runs of `study`, or of all where that is None, and of one pass of them. `columns` are keys in
    the table of runs."""

    name: str
    sections: tuple[Section, ...]
    columns: tuple[str, ...]
    study: str | None = None
    run_pass: str = TIMING
    question: str = ""

    @property
    def keys(self) -> set[str]:
        """Every key that a panel or the table names."""
        panels = [panel for section in self.sections for panel in section.panels]
        return {*self.columns, *(key for panel in panels for key in (*panel.y, panel.x) if key is not None)}

    @property
    def filters(self) -> dict[str, str]:
        """What a run must have to be shown, by the names of its configuration."""
        return {"pass": self.run_pass, **({} if self.study is None else {"study": self.study})}


class Request(Struct, frozen=True):
    """The boards that W&B is to have; an entity of None is the user's own."""

    project: str
    entity: str | None
    boards: tuple[Board, ...]


class Saved(Struct, frozen=True):
    """What became of a board, `created` or `updated`, and its address."""

    name: str
    what: str
    address: str


# from a view to a board


def _summary(field: str) -> str:
    return f"summary:{logged.run_names()[field][0]}"


_STEP, _TOKENS = _summary("phases.step.mean_s"), _summary("throughput.tokens_per_s")
_MFU, _HOST_BOUND = _summary("throughput.mfu_fraction"), f"summary:{logged.HOST_BOUND}"
_PEAK, _HOST_PEAK = _summary("memory.run_peak_allocated_bytes"), _summary("memory.host_peak_rss_bytes")
_KERNEL_SPANS = ("forward", "backward", "optimizer")

#: The report's columns that are not fields of a record by their own names.
_COLUMNS: Mapping[str, str] = {
    **{f"{span}_s": _summary(f"phases.{span}.mean_s") for span in ("step", *PHASES)},
    **{f"{span}_kernel_s": _summary(f"kernels.phases.{span}.kernel_s") for span in _KERNEL_SPANS},
    **{f"step_{name}": _summary(f"phases.step.{name}") for name in ("median_s", "min_s", "cv_fraction")},
    **{name: _summary(f"throughput.{name}") for name in ("tokens_per_s", "mfu_fraction", "hfu_fraction")},
    **{name: _summary(f"compile.{name}") for name in ("graph_count", "graph_break_count")},
    **{f"{name}_first_step_s": _summary("compile.first_step_s") for name in ("cold", "warm")},
    "joules_per_token": _summary("throughput.joules_per_token"),
    "host_bound_fraction": _HOST_BOUND,
    "peak_bytes": _PEAK,
    "host_peak_bytes": _HOST_PEAK,
    "predicted_peak_bytes": _summary("memory_prediction.peak_allocated_bytes"),
    "first_loss": _summary("loss.first"),
    "skipped_count": _summary("window.skipped_count"),
    "kernel_s": _summary("kernels.phases.step.kernel_s"),
}
#: In the table of runs, whatever the study: before and after the study's own columns.
_FIRST = ("summary:outcome",)
_LAST = (
    *(f"config:{name}" for name in ("size", "mode", "precision", "compile", "batch", "context")),
    _STEP, _summary("phases.step.std_s"), _TOKENS, _MFU, _PEAK, _HOST_PEAK, _HOST_BOUND, "summary:guards/failed",
    "summary:guards/warned", "config:gpu", "config:commit", "config:started_at",
)  # fmt: skip
#: Facts whose charts lie over a number.
_NUMBERS = ("batch", "context", "micro_batches", "warmup", "ranks")
_DIFFERENCES = Section("What the runs differ in", (Panel("differences", "Differences"),))

#: What every study of timed runs shows.
_TIMED: tuple[Section, ...] = (
    Section(
        "Time",
        (
            Panel("bars", "Step time", (_STEP,)),
            Panel("bars", "Each phase", tuple(_summary(f"phases.{span}.mean_s") for span in PHASES)),
            Panel("area", "Phases of one run over the steps", tuple(f"series:time/{span}_ms" for span in PHASES)),
            Panel("bars", "Waiting for the host, share of the step", (_HOST_BOUND,)),
        ),
    ),
    Section(
        "Speed",
        (
            Panel("scatter", "Tokens/s against parameters", (_TOKENS,), "config:parameters", is_log=True),
            Panel("scatter", "MFU against parameters", (_MFU,), "config:parameters", is_log=True),
            Panel("scatter", "Tokens/s against batch", (_TOKENS,), "config:batch", is_log=True),
            Panel("scatter", "Tokens/s against peak memory", (_TOKENS,), _PEAK),
        ),
    ),
    Section(
        "Memory",
        (
            Panel("bars", "Peak memory", (_PEAK, _HOST_PEAK)),
            Panel(
                "bars",
                "Peak of each phase",
                tuple(_summary(f"memory.phase_peak_allocated_bytes.{span}") for span in _KERNEL_SPANS),
            ),
        ),
    ),
    Section(
        "Steps",
        tuple(
            Panel("series", f"{title} over the steps", (f"series:{name}",))
            for title, name in {
                "Step time": "time/step_ms",
                "Tokens/s": "throughput/tokens_per_s",
                "MFU": "throughput/mfu_percent",
                "Loss": "train/loss",
                "Lag at the end of forward": "lag/forward_ms",
            }.items()
        ),
    ),
    _DIFFERENCES,
)


def board_of(view: View, kinds: tuple[str, ...], parts: tuple[str, ...]) -> Board:
    """The board of a study's view; `kinds` and `parts` are those of kernels that a profiled run can have."""
    charts = tuple(panel for chart in view.charts if (panel := _panel_of(chart, kinds, parts)) is not None)
    shared = (_kernel_section(kinds, parts), _DIFFERENCES) if view.is_profiled else _TIMED
    own = {(panel.kind, panel.y, panel.x) for panel in charts}
    sections = [
        Section(section.title, tuple(panel for panel in section.panels if (panel.kind, panel.y, panel.x) not in own))
        for section in shared
    ]
    facts = (f"config:{name}" for table in view.tables for name in table.rows if name in FACT)
    columns = (key for table in view.tables for column in table.columns if (key := _key_of(column)) is not None)
    return Board(
        f"lmbench {view.name}",
        (*((Section("Answer", charts),) if charts else ()), *sections),
        tuple(dict.fromkeys((*_FIRST, *facts, *columns, *_LAST))),
        view.name,
        "kernels" if view.is_profiled else TIMING,
        view.question,
    )


def board_of_all() -> Board:
    """The board of every run of the project."""
    return Board("lmbench", _TIMED, (*_FIRST, *_LAST))


def _key_of(column: str) -> str | None:
    """The key of a report's column; None where a single run does not have it."""
    return _COLUMNS.get(column) or (_summary(column) if column in logged.run_names() else None)


def _panel_of(chart: ChartSpec, kinds: tuple[str, ...], parts: tuple[str, ...]) -> Panel | None:
    """A chart as a panel; None where W&B has nothing of what it shows."""
    if chart.kind == "phases":
        return Panel("bars", chart.title, tuple(_summary(f"phases.{span}.mean_s") for span in PHASES))
    if chart.kind in ("steps", "curves"):
        series = logged.step_names().get("step_s" if chart.kind == "steps" else chart.y)
        return None if series is None else Panel("series", chart.title, (f"series:{series[0]}",))
    if chart.kind in ("kinds", "parts"):
        names = kinds if chart.kind == "kinds" else parts
        # W&B has them of the whole step alone.
        return _kernels(chart.title, chart.kind[:-1], names) if chart.y == "step" else None
    key = _key_of(chart.y)
    if key is None or chart.kind not in ("bars", "rows", "lines"):
        return None
    if chart.kind == "lines" and chart.x in _NUMBERS:
        return Panel("scatter", chart.title, (key,), f"config:{chart.x}", chart.is_log)
    return Panel("bars", chart.title, (key,))


def _kernels(title: str, what: str, names: tuple[str, ...]) -> Panel:
    return Panel("bars", title, tuple(f"summary:{logged.kernel_name(what, name)}" for name in names))


def _kernel_section(kinds: tuple[str, ...], parts: tuple[str, ...]) -> Section:
    times = tuple(_summary(f"kernels.phases.{span}.kernel_s") for span in _KERNEL_SPANS)
    return Section(
        "Kernels",
        (
            Panel("bars", "Kernel time of each phase", times),
            _kernels("Step by kind", "kind", kinds),
            _kernels("Step by part", "part", parts),
            Panel("bars", "Matrix products, share", (_summary("kernels.phases.step.matmul_fraction"),)),
            Panel("bars", "Idle until the next launch", (_summary("kernels.phases.step.host_wait_s"),)),
        ),
    )


# in the process that talks to W&B


class BoardProblem(Exception):
    """Why W&B cannot have a board, in a line."""


def main(file: str) -> int:
    """Save each board; prints a line of JSON for each that is saved. The last line printed says why not."""
    request = msgspec.json.decode(Path(file).read_bytes(), type=Request)
    try:
        for saved in _save(request):
            print(f"\n{msgspec.json.encode(saved).decode()}", flush=True)
    except Exception as error:
        print(f"\n{reason_of(error)}", flush=True)
        return 1
    return 0


def reason_of(error: Exception) -> str:
    """A fault of wandb's in one line that says what to do."""
    said = " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith("wandb"):
        return "boards need wandb-workspaces; install it with `pip install 'lmbench[boards]'`"
    if isinstance(error, BoardProblem):
        return said
    if type(error).__name__ == "AuthenticationError":
        # wandb asks who the user is first, and calls whatever goes wrong then by this name.
        is_refused = re.search(r"error 40[13]|invalid credentials", said)
        return "the server refused it; is the key right?" if is_refused else "the server does not answer; is it there?"
    if "No API key" in said:
        return "no API key configured; give one by WANDB_API_KEY or `wandb login`"
    return f"wandb failed with {type(error).__name__}: {said}"


def _save(request: Request) -> Iterator[Saved]:
    graphql, mutations = _module("wandb_workspaces._graphql"), _module("wandb_workspaces.reports.v2.gql")
    api, project = _module("wandb").Api(), request.project
    entity = request.entity or api.default_entity
    if not entity:
        raise BoardProblem("W&B names no entity of yours; give one by --entity")
    views = list(_views(api, entity, project))
    for board in request.boards:
        # By lmbench's own name, so that a board stays itself under a title that somebody gave it; the same each time.
        name = f"nw-{sha256(f'lmbench {entity} {project} board {board.name}'.encode()).hexdigest()[:11]}-v"
        same = [view for view in views if view["name"] == name]
        same += [view for view in views if view["displayName"] == board.name]
        answer = graphql.execute_graphql(
            api,
            mutations.upsert_view,
            {
                "id": same[0]["id"] if same else None,
                "entityName": entity,
                "projectName": project,
                "type": _VIEW_TYPE,
                "name": same[0]["name"] if same else name,
                "displayName": board.name,
                "description": board.question,
                "spec": _workspace(board, entity, project).spec.model_dump_json(by_alias=True, exclude_none=True),
            },
        )
        view = (answer.get("upsertView") or {}).get("view")
        if view is None:
            raise BoardProblem(f"the server did not save {board.name!r}")
        place = view["name"].removeprefix("nw-").removesuffix("-v")
        url = f"{graphql.get_app_url(api).rstrip('/')}/{entity}/{project}?nw={place}"
        yield Saved(board.name, "updated" if same else "created", url)


_VIEWS = """
query LmbenchViews($entity: String!, $project: String!, $type: String!, $after: String) {
  project(name: $project, entityName: $entity) {
    allViews(viewType: $type, first: 100, after: $after) {
      edges { node { id name displayName } }
      pageInfo { endCursor hasNextPage }
    }
  }
}
"""


def _views(api: Any, entity: str, project: str) -> Iterator[dict[str, Any]]:
    """Every workspace of the project that is there."""
    page: Mapping[str, Any] = {"hasNextPage": True}
    while page.get("hasNextPage"):
        asked = {"entity": entity, "project": project, "type": _VIEW_TYPE, "after": page.get("endCursor")}
        answer = _module("wandb_workspaces._graphql").execute_graphql(api, _VIEWS, asked).get("project")
        if answer is None:
            advice = "upload runs to it first, or give --project and --entity"
            raise BoardProblem(f"{entity} has no project {project!r} that you may see; {advice}")
        yield from (edge["node"] for edge in answer["allViews"]["edges"])
        page = answer["allViews"].get("pageInfo") or {}


def _workspace(board: Board, entity: str, project: str) -> Any:
    """W&B's own model of a workspace; nothing is asked of the server."""
    expr, ws = _module("wandb_workspaces.expr"), _module("wandb_workspaces.workspaces")
    sections = [
        ws.Section(section.title, [_drawn(panel) for panel in section.panels], is_open=place == 0)
        for place, section in enumerate(board.sections)
    ]
    # A setting's value lies under `value`.
    columns = [f"{key}.value" if key.startswith("config:") else key for key in board.columns]
    runs = ws.RunsetSettings(
        filters=[expr.Config(name) == value for name, value in board.filters.items()],
        order=[expr.Ordering(expr.Config("started_at"), ascending=False)],
        pinned_columns=columns,
    )
    settings = ws.WorkspaceSettings(max_runs=_MOST_RUNS)
    named = {"entity": entity, "project": project, "name": board.name}
    return ws.Workspace(**named, sections=sections, settings=settings, runset_settings=runs)._to_model()


def _drawn(panel: Panel) -> Any:
    """A panel as wandb-workspaces has it."""
    wr = _module("wandb_workspaces.reports.v2")
    names = [key.partition(":")[2] for key in panel.y]
    if panel.kind == "bars":
        grouping = {"groupby": wr.Config("label"), "groupby_aggfunc": "mean", "groupby_rangefunc": "minmax"}
        return wr.BarPlot(title=panel.title, metrics=names, max_bars_to_show=_MOST_RUNS, **grouping)
    if panel.kind == "scatter":
        kind, _, name = str(panel.x).partition(":")
        x = wr.Config(name) if kind == "config" else wr.SummaryMetric(name)
        log = panel.is_log or None
        return wr.ScatterPlot(title=panel.title, x=x, y=wr.SummaryMetric(names[0]), log_x=log, log_y=log)
    if panel.kind == "differences":
        return wr.RunComparer(diff_only="split")
    area = {"plot_type": "stacked-area", "max_runs_to_show": 1} if panel.kind == "area" else {}
    return wr.LinePlot(title=panel.title, x=logged.STEP, y=names, smoothing_type="none", **area)


def _module(name: str) -> Any:
    """A module of wandb's, which has no types for what it exports."""
    return importlib.import_module(name)


if __name__ == "__main__":
    # wandb tells what it does on standard error as well.
    with contextlib.redirect_stderr(sys.stdout):
        sys.exit(main(sys.argv[1]))
