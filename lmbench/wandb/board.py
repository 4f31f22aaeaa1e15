"""A board at W&B for each study: the view of `lmbench report` as a workspace, rendered through wandb-workspaces.

A view's charts become panels, its columns the table of runs; what every study needs comes after them. W&B has
figures of single runs, so what compares two cells is left out. `python -m lmbench.wandb.board FILE` makes the boards of
a request in a process of its own: wandb-workspaces takes 2 s to import.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
from msgspec import Struct

from lmbench.records.passes import TIMING
from lmbench.report import logged
from lmbench.report.facts import FACT
from lmbench.report.view import GENERIC, View

if TYPE_CHECKING:
    # It takes pandas along, which a run that only reads its settings does without.
    from lmbench.report.view import Catalogue

_MOST_RUNS = 100


class Panel(Struct, frozen=True):
    """One panel. Keys are `summary:time/step_ms`, `config:size`, and `series:time/step_ms` of each step.

    `bars`: a bar for each label and number of `y`, the mean over repeats; `series`: `y` over the steps.
    """

    kind: Literal["bars", "series"]
    title: str
    y: tuple[str, ...]


class Board(Struct, frozen=True):
    """A workspace: of the runs of `study`, or of all where that is None, and of one pass of them. `sections` are panels
    by their heading, `columns` keys in the table of runs."""

    name: str
    sections: dict[str, tuple[Panel, ...]]
    columns: tuple[str, ...]
    study: str | None = None
    run_pass: str = TIMING


class Request(Struct, frozen=True):
    """The boards that W&B is to have; an entity of None is the user's own."""

    project: str
    entity: str | None
    boards: tuple[Board, ...]


class _Shared(Struct, frozen=True):
    """What boards have after what their study shows: panels of timed or of profiled runs, and columns; and the keys of
    the report's columns that a function works out of a run's record, and that W&B has too."""

    columns: tuple[str, ...]
    worked_out: dict[str, str]
    timed: dict[str, tuple[Panel, ...]]
    profiled: dict[str, tuple[Panel, ...]]


def board_of(view: View, catalogue: Catalogue, kinds: Iterable[str], parts: Iterable[str]) -> Board:
    """The board of a study's view; `kinds` and `parts` are those of kernels that a profiled run can have. The generic
    view has the board of all runs."""
    shared = msgspec.json.decode((files("lmbench.wandb") / "board.json").read_bytes(), type=_Shared)

    def key_of(name: str) -> tuple[str, ...]:
        """The key of a report's column; none where a single run does not have it."""
        field = catalogue.column(name).expression
        is_logged = isinstance(field, str) and field in logged.run_names()
        key = logged.run_names()[field] if is_logged else shared.worked_out.get(name)
        return () if key is None else (f"summary:{key}",)

    is_generic, shown = view.name == GENERIC.name, list[Panel]()
    for chart in () if is_generic else view.charts:
        # W&B has nothing of what compares cells.
        if of_chart := tuple(key for name in chart.of or [chart.y] for key in key_of(name)):
            shown.append(Panel("bars", chart.title, of_chart))
    sections = {"Answer": tuple(shown), **(shared.profiled if view.is_profiled else shared.timed)}
    if view.is_profiled:
        sections["Kernels"] += tuple(
            Panel("bars", f"Step by {what}", tuple(f"summary:{logged.kernel_name(what, name)}" for name in names))
            for what, names in (("kind", kinds), ("part", parts))
        )
    facts = [f"config:{name}" for table in view.tables for name in table.rows if name in FACT]
    keys = [key for table in view.tables for name in table.columns for key in key_of(name)]
    return Board(
        "lmbench" if is_generic else f"lmbench {view.name}",
        {title: panels for title, panels in sections.items() if panels},
        tuple(dict.fromkeys(("summary:outcome", *facts, *keys, *shared.columns))),
        None if is_generic else view.name,
        "kernels" if view.is_profiled else TIMING,
    )


# in the process that talks to W&B


def main(file: str) -> int:
    """Save each board; prints a line for each that is saved. The last line printed says why not."""
    request = msgspec.json.decode(Path(file).read_bytes(), type=Request)
    try:
        import wandb

        entity = request.entity or wandb.Api().default_entity
        for board in request.boards:
            print(f"\n{_save(board, str(entity), request.project)}", flush=True)
    except ModuleNotFoundError:
        print("\nboards need wandb-workspaces; install it with `pip install 'wandb-workspaces<0.5'`", flush=True)
        return 1
    except Exception as error:
        print(f"\nwandb failed with {type(error).__name__}: {' '.join(str(error).split())}", flush=True)
        return 1
    return 0


def _save(board: Board, entity: str, project: str) -> str:
    """Make a board, or bring the one that is there up to date; returns in a line which, and where it is."""
    from wandb_workspaces import expr
    from wandb_workspaces import workspaces as ws
    from wandb_workspaces.workspaces.internal import get_view_dict

    sections = [
        ws.Section(title, [_drawn(panel) for panel in panels], is_open=index == 0)
        for index, (title, panels) in enumerate(board.sections.items())
    ]
    filters = [expr.Config("pass") == board.run_pass]
    if board.study is not None:
        filters.append(expr.Config("study") == board.study)
    runs = ws.RunsetSettings(
        filters=filters,
        order=[expr.Ordering(expr.Config("started_at"), ascending=False)],
        # A setting's value lies under `value`.
        pinned_columns=[f"{key}.value" if key.startswith("config:") else key for key in board.columns],
    )
    settings = ws.WorkspaceSettings(max_runs=_MOST_RUNS)
    workspace = ws.Workspace(
        entity=entity, project=project, name=board.name, sections=sections, settings=settings, runset_settings=runs
    )
    # The name in its address is the same each time, so that a board stays itself under a title that somebody gave it.
    address = sha256(f"lmbench {entity} {project} board {board.name}".encode()).hexdigest()[:11]
    workspace._internal_name = f"nw-{address}-v"
    try:
        workspace._internal_id = get_view_dict(entity, project, address)["id"]
    except ValueError as error:
        # There is none of this name yet; or no such project.
        if not str(error).startswith("Workspace"):
            raise
    done = "updated" if workspace._internal_id else "created"
    workspace.save()
    return f"{done}  {board.name}  {workspace.url}"


def _drawn(panel: Panel) -> Any:
    """A panel as wandb-workspaces has it."""
    from wandb_workspaces.reports import v2 as wr

    names = [key.partition(":")[2] for key in panel.y]
    if panel.kind == "bars":
        grouping = {"groupby": wr.Config("label"), "groupby_aggfunc": "mean", "groupby_rangefunc": "minmax"}
        return wr.BarPlot(title=panel.title, metrics=names, max_bars_to_show=_MOST_RUNS, **grouping)
    return wr.LinePlot(title=panel.title, x=logged.STEP, y=names, smoothing_type="none")


if __name__ == "__main__":
    # wandb tells what it does on standard error as well.
    with contextlib.redirect_stderr(sys.stdout):
        sys.exit(main(sys.argv[1]))
