"""Boards: a W&B workspace for each study, made by wandb-workspaces from the study's view in `lmbench report`.

A view's charts become panels and its columns the table of runs; panels and columns that all boards share follow. W&B
has numbers of single runs, so charts and columns that compare two cells are left out. `python -m lmbench.wandb.board
REQUEST` makes the boards of a request in a separate process, since wandb-workspaces takes 2 s to import.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from importlib.resources import files
from typing import Any

import msgspec
from msgspec import Struct

from lmbench.errors import error_line
from lmbench.files import short_digest
from lmbench.records.passes import TIMING
from lmbench.report import logged
from lmbench.report.answer import Answer, Column, Line, Table
from lmbench.report.facts import FACT
from lmbench.report.view import GENERIC, Catalogue, View

_MOST_RUNS = 100


class Panel(Struct, frozen=True):
    """One panel: bars with the mean over repeats of each key in `y`, for each label; or lines of `y` over steps.

    Keys look like `summary:time/step_ms`, `config:size` or, for numbers of each step, `series:time/step_ms`.
    """

    title: str
    y: tuple[str, ...]


class Board(Struct, frozen=True):
    """A workspace with the runs of one pass of `study`, or of all runs if that is None.

    `sections` are panels by heading, `columns` are the keys in the table of runs.
    """

    name: str
    sections: dict[str, tuple[Panel, ...]]
    columns: tuple[str, ...]
    study: str | None = None
    run_pass: str = TIMING


class BoardRequest(Struct, frozen=True):
    """The boards to make at W&B; without an entity they belong to the user's default entity."""

    project: str
    entity: str | None
    boards: tuple[Board, ...]


def planned_boards(request: BoardRequest) -> Answer:
    """The boards that would be made, with a row for each panel."""
    columns = [*map(Column, ("board", "section", "panel", "shows"))]
    rows = [
        [board.name, section, panel.title, ", ".join(panel.y)]
        for board in request.boards
        for section, panels in board.sections.items()
        for panel in panels
    ]
    count = Line("boards", f"{len(request.boards)} with {len(rows)} panels in project {request.project}")
    table = Table("panels", "What would be made", columns, rows)
    return Answer([count], [table], figures={"request": request}, first=())


def board_of(view: View, catalogue: Catalogue) -> Board:
    """The board of a study's view; the generic view gives the board of all runs, which is board.json.

    The columns of that board follow those of a study, and on boards of timed runs its panels do.
    """
    shared = msgspec.json.decode((files("lmbench.wandb") / "board.json").read_bytes(), type=Board)
    if view.name == GENERIC.name:
        return shared

    def keys_of(names: Iterable[str]) -> list[str]:
        """The keys of the report's columns, without columns that W&B lacks, such as comparisons of cells."""
        keys = [logged.run_names().get(catalogue.column(name).expression) for name in names]
        return [f"summary:{key}" for key in keys if key is not None]

    panels = [Panel(chart.title, tuple(keys_of(chart.of or [chart.y]))) for chart in view.charts]
    answer = tuple(panel for panel in panels if panel.y)
    sections = ({"Answer": answer} if answer else {}) | ({} if view.is_profiled else shared.sections)
    facts = [f"config:{name}" for table in view.tables for name in table.rows if name in FACT]
    keys = keys_of(name for table in view.tables for name in table.columns)
    return Board(
        f"{shared.name} {view.name}",
        sections,
        tuple(dict.fromkeys(("summary:outcome", *facts, *keys, *shared.columns))),
        view.name,
        "kernels" if view.is_profiled else TIMING,
    )


# in the process that talks to W&B


def main(text: str) -> int:
    """Save the boards of a request, which is JSON, and print a line for each.

    Returns 1 after a failure, which the last line explains.
    """
    request = msgspec.json.decode(text, type=BoardRequest)
    try:
        import wandb

        entity = request.entity or wandb.Api().default_entity
        for board in request.boards:
            print(f"\n{_save(board, str(entity), request.project)}", flush=True)
    except ModuleNotFoundError:
        print("\nboards need wandb-workspaces; install it with `pip install 'wandb-workspaces<0.5'`", flush=True)
        return 1
    except Exception as error:
        print(f"\nwandb failed with {error_line(error)}", flush=True)
        return 1
    return 0


def _save(board: Board, entity: str, project: str) -> str:
    """Create or update a board; returns a line that says which, with the board's address."""
    from wandb_workspaces import expr
    from wandb_workspaces import workspaces as ws
    from wandb_workspaces.workspaces.internal import get_view_dict

    sections = [
        ws.Section(title, [_plot_of(panel) for panel in panels], is_open=index == 0)
        for index, (title, panels) in enumerate(board.sections.items())
    ]
    filters = [expr.Config("pass") == board.run_pass]
    if board.study is not None:
        filters.append(expr.Config("study") == board.study)
    runs = ws.RunsetSettings(
        filters=filters,
        order=[expr.Ordering(expr.Config("started_at"), ascending=False)],
        # W&B keeps a setting's value under `value`.
        pinned_columns=[f"{key}.value" if key.startswith("config:") else key for key in board.columns],
    )
    settings = ws.WorkspaceSettings(max_runs=_MOST_RUNS)
    workspace = ws.Workspace(
        entity=entity, project=project, name=board.name, sections=sections, settings=settings, runset_settings=runs
    )
    # The address depends on lmbench's own name of the board, so that it is found again after a user renamed it.
    address = short_digest(f"lmbench {entity} {project} board {board.name}", 11)
    workspace._internal_name = f"nw-{address}-v"
    try:
        workspace._internal_id = get_view_dict(entity, project, address)["id"]
    except ValueError as error:
        # Without a workspace of this name a new one is saved. Other errors, such as an unknown project, are raised.
        if not str(error).startswith("Workspace"):
            raise
    done = "updated" if workspace._internal_id else "created"
    workspace.save()
    return f"{done}  {board.name}  {workspace.url}"


def _plot_of(panel: Panel) -> Any:
    """A panel as an object of wandb-workspaces."""
    from wandb_workspaces.reports import v2 as wr

    names = [key.partition(":")[2] for key in panel.y]
    if panel.y[0].startswith("series:"):
        return wr.LinePlot(title=panel.title, x=logged.STEP, y=names, smoothing_type="none")
    return wr.BarPlot(
        title=panel.title, metrics=names, max_bars_to_show=_MOST_RUNS,
        groupby=wr.Config("label"), groupby_aggfunc="mean", groupby_rangefunc="minmax",
    )  # fmt: skip


if __name__ == "__main__":
    # wandb also writes to standard error.
    with contextlib.redirect_stderr(sys.stdout):
        sys.exit(main(sys.argv[1]))
