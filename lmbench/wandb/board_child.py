"""Make boards and reports at W&B: `python -m lmbench.wandb.board_child FILE`, in a process of its own.

FILE is a Request as JSON. Only this module imports wandb-workspaces, which takes 2 s to import.
"""

from __future__ import annotations

import contextlib
import importlib
import re
import sys
from collections.abc import Iterator, Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from lmbench.records.vocabulary import PHASES
from lmbench.report.logged import STEP
from lmbench.wandb.board import Board, Made, Panel, Request, Saved

#: W&B's words for a workspace and for a report.
_TYPES: dict[Made, str] = {"board": "project-view", "report": "runs"}

#: Bars of a table's rows on top of each other, one for each run; W&B's own charts lay bars over each other. A
#: specification of Vega-Lite, in which W&B puts the names of columns and the table's rows, each with its run's name.
_STACKED_BARS = {
    "$schema": "https://vega.github.io/schema/vega-lite/v5.json",
    "data": {"name": "wandb"},
    "title": "${string:title}",
    "transform": [
        {"filter": "datum['${field:part}'] !== '${string:whole}'"},
        {"calculate": f"indexof({list(PHASES)}, datum['${{field:part}}'])", "as": "place"},
    ],
    "mark": {"type": "bar", "tooltip": {"content": "data"}},
    "encoding": {
        "y": {"field": "name", "type": "nominal", "title": None},
        "x": {"field": "${field:value}", "type": "quantitative", "stack": "zero", "title": "${string:unit}"},
        "color": {"field": "${field:part}", "type": "nominal", "title": None, "sort": list(PHASES)},
        "order": {"field": "place", "type": "quantitative"},
    },
}
#: By its content: W&B keeps the chart of a name as it was first.
STACKED_BARS = f"lmbench-stacked-{sha256(msgspec.json.encode(_STACKED_BARS)).hexdigest()[:8]}"

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


class BoardProblem(Exception):
    """Why W&B cannot have a board, in a line."""


def main(file: str) -> int:
    """Save each; prints a line of JSON for each that is saved. The last line printed says why not."""
    request = msgspec.json.decode(Path(file).read_bytes(), type=Request)
    try:
        for saved in _save(request):
            print(f"\n{msgspec.json.encode(saved).decode()}", flush=True)
    except Exception as error:
        print(f"\n{_reason(error)}", flush=True)
        return 1
    return 0


def _reason(error: Exception) -> str:
    said = " ".join(str(error).split())
    if isinstance(error, ModuleNotFoundError) and (error.name or "").startswith(("wandb_workspaces", "wandb")):
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


def _module(name: str) -> Any:
    """A module of wandb's, which has no types for what it exports."""
    return importlib.import_module(name)


def _save(request: Request) -> Iterator[Saved]:
    graphql, mutations = _module("wandb_workspaces._graphql"), _module("wandb_workspaces.reports.v2.gql")
    api = _module("wandb").Api()
    entity = request.entity or api.default_entity
    if not entity:
        raise BoardProblem("W&B names no entity of yours; give one by --entity")
    yield from _make_chart(api, entity)
    known: dict[str, list[dict[str, Any]]] = {}
    for board in request.boards:
        for kind in request.kinds:
            view_type = _TYPES[kind]
            if kind not in known:
                known[kind] = list(_views(api, entity, request.project, view_type))
            name = view_name(entity, request.project, kind, board.name)
            # By lmbench's own name for it, so that a board stays itself under a title that somebody gave it.
            found = [view for view in known[kind] if view["name"] == name]
            found += [view for view in known[kind] if view["displayName"] == board.name]
            is_board = kind == "board"
            model = (_workspace if is_board else _report)(board, entity, request.project)
            answer = graphql.execute_graphql(
                api,
                mutations.upsert_view,
                {
                    "id": found[0]["id"] if found else None,
                    "entityName": entity,
                    "projectName": request.project,
                    "type": view_type,
                    "name": found[0]["name"] if found else name,
                    "displayName": board.name,
                    "description": board.question,
                    "spec": model.spec.model_dump_json(by_alias=True, exclude_none=True),
                },
            )
            view = (answer.get("upsertView") or {}).get("view")
            if view is None:
                raise BoardProblem(f"the server did not save {board.name!r}")
            address = f"{graphql.get_app_url(api).rstrip('/')}/{entity}/{request.project}{_place(kind, board, view)}"
            yield Saved(kind, board.name, "updated" if found else "created", address)


def _make_chart(api: Any, entity: str) -> Iterator[Saved]:
    """Let W&B know the chart that it has not; a panel without it shows nothing, and the others what they show."""
    try:
        api.create_custom_chart(entity, STACKED_BARS, "lmbench stacked bars", "vega2", "private", _STACKED_BARS)
    # An older wandb cannot, an older server refuses, and what is there is there.
    except Exception as error:
        said = " ".join(str(error).split())
        if not re.search("exist|duplicate|unique", said, re.IGNORECASE):
            yield Saved("chart", STACKED_BARS, "left out", said)


def _place(kind: Made, board: Board, view: Mapping[str, str]) -> str:
    """Where a view is, below its project."""
    if kind == "board":
        return f"?nw={view['name'].removeprefix('nw-').removesuffix('-v')}"
    return f"/reports/{board.name.replace(' ', '-')}--{view['id'].rstrip('=')}"


def view_name(entity: str, project: str, kind: str, name: str) -> str:
    """What W&B knows a board by: the same each time."""
    return f"nw-{sha256(f'lmbench {entity} {project} {kind} {name}'.encode()).hexdigest()[:11]}-v"


def _views(api: Any, entity: str, project: str, view_type: str) -> Iterator[dict[str, Any]]:
    """Every view of the project that is there."""
    graphql = _module("wandb_workspaces._graphql")
    after = None
    while True:
        asked = {"entity": entity, "project": project, "type": view_type, "after": after}
        found = graphql.execute_graphql(api, _VIEWS, asked).get("project")
        if found is None:
            raise BoardProblem(
                f"{entity} has no project {project!r} that you may see; upload runs to it first, or give --project and "
                "--entity"
            )
        views = found["allViews"]
        yield from (edge["node"] for edge in views["edges"])
        page = views.get("pageInfo") or {}
        if not page.get("hasNextPage"):
            return
        after = page["endCursor"]


def _workspace(board: Board, entity: str, project: str) -> Any:
    """W&B's own model of a workspace; nothing is asked of the server."""
    expr, ws = _module("wandb_workspaces.expr"), _module("wandb_workspaces.workspaces")
    return ws.Workspace(
        entity=entity,
        project=project,
        name=board.name,
        sections=[
            ws.Section(section.title, [_panel(panel, entity) for panel in section.panels], is_open=section.is_open)
            for section in board.sections
        ],
        settings=ws.WorkspaceSettings(max_runs=_MOST_RUNS),
        runset_settings=ws.RunsetSettings(
            filters=_filters(board),
            order=[expr.Ordering(expr.Config("started_at"), ascending=False)],
            pinned_columns=_columns(board),
        ),
    )._to_model()


def _report(board: Board, entity: str, project: str) -> Any:
    """W&B's own model of a report; asks the server for the project's number."""
    wr = _module("wandb_workspaces.reports.v2")
    # The question heads the tables.
    blocks: list[Any] = [wr.MarkdownBlock(board.text)] if board.text else [wr.P(board.question)]
    for section in board.sections:
        runs = wr.Runset(
            entity=entity,
            project=project,
            name=board.study or "all runs",
            filters=_filters(board),
            order=[wr.OrderBy(wr.Config("started_at"), ascending=False)],
            pinned_columns=_columns(board),
        )
        blocks += [
            wr.H2(section.title),
            wr.PanelGrid([runs], panels=[_panel(panel, entity) for panel in section.panels]),
        ]
    return wr.Report(
        project=project, entity=entity, title=board.name, description=board.question, blocks=blocks,
        width="fluid",
    )._to_model()  # fmt: skip


#: W&B draws ten by itself; a study has a few dozen.
_MOST_RUNS = 100


def _filters(board: Board) -> list[Any]:
    expr = _module("wandb_workspaces.expr")
    return [expr.Config(_name(key)) == value for key, value in board.filters.items()]


def _columns(board: Board) -> list[str]:
    """Keys as the table of runs has them; a setting's value lies under `value`."""
    return [f"{key}.value" if key.startswith("config:") else key for key in board.columns]


def _name(key: str) -> str:
    return key.partition(":")[2]


def _metric(key: str) -> Any:
    """A setting or a number of the summary, for a panel that takes both."""
    wr = _module("wandb_workspaces.reports.v2")
    return wr.Config(_name(key)) if key.startswith("config:") else wr.SummaryMetric(_name(key))


def _panel(panel: Panel, entity: str) -> Any:
    wr = _module("wandb_workspaces.reports.v2")
    names = [_name(key) for key in panel.y]
    if panel.kind == "bars":
        group = None if panel.group is None else wr.Config(_name(panel.group))
        return wr.BarPlot(
            title=panel.title, metrics=names, groupby=group, groupby_aggfunc="mean", groupby_rangefunc="minmax",
            max_bars_to_show=_MOST_RUNS,
        )  # fmt: skip
    if panel.kind == "stacked_bars":
        return wr.CustomChart(
            query={"summaryTable": {"tableKey": names[0]}},
            chart_name=f"{entity}/{STACKED_BARS}",
            chart_fields={"part": "phase", "value": "mean_ms"},
            chart_strings={"title": panel.title, "unit": "ms", "whole": "step"},
        )
    if panel.kind == "scatter":
        x, (y,) = str(panel.x), panel.y
        return wr.ScatterPlot(
            title=panel.title,
            x=_metric(x),
            y=_metric(y),
            log_x=x in panel.is_log or None,
            log_y=y in panel.is_log or None,
        )
    if panel.kind == "parallel":
        columns = [
            wr.ParallelCoordinatesPlotColumn(_metric(key), display_name=_name(key), log=key in panel.is_log or None)
            for key in panel.y
        ]
        return wr.ParallelCoordinatesPlot(title=panel.title, columns=columns)
    if panel.kind == "differences":
        return wr.RunComparer(diff_only="split")
    is_stack = panel.kind == "stacked_area"
    return wr.LinePlot(
        title=panel.title, x=STEP, y=names, plot_type="stacked-area" if is_stack else "line",
        max_runs_to_show=1 if is_stack else None, smoothing_type="none",
    )  # fmt: skip


if __name__ == "__main__":
    # wandb tells what it does on standard error as well.
    with contextlib.redirect_stderr(sys.stdout):
        sys.exit(main(sys.argv[1]))
