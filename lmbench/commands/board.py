"""`lmbench board [STUDY...]`: a board at W&B for each study, made or brought up to date."""

from __future__ import annotations

import os
import re

import msgspec

from lmbench.errors import ExitCode, UsageError, tell
from lmbench.masking import masked, masked_text
from lmbench.report.answer import Answer, Column, Line, Table


def board(
    *studies: str, project: str | None = None, entity: str | None = None, dry_run: bool = False, timeout_s: float = 60.0
) -> Answer:
    """Makes a workspace at W&B for each study, or brings the one that is there up to date.

    What it shows of your own changes is lost, and there are never two. Its runs are those of the study's sweeps;
    `lmbench upload` brings them. Needs wandb-workspaces (`pip install '.[boards]'`), and a key from WANDB_API_KEY or
    `wandb login`.

    Args:
        studies: shipped studies by name, or sweeps' files with a view; without any, all that ship and all runs together
        project: the project of the runs (WANDB_PROJECT, else lmbench)
        entity: the user or team that it belongs to (W&B's own default)
        dry_run: tell what would be made; asks nobody
        timeout_s: seconds that W&B may take
    """
    from lmbench.configs import shipped_studies
    from lmbench.kernels.kinds import KINDS
    from lmbench.kernels.parts import PARTS
    from lmbench.report.view import GENERIC, read_view
    from lmbench.wandb.board import Board, Request, board_of, board_of_all
    from lmbench.wandb.publish import WandbProblem, WandbSettings, save_boards

    if not timeout_s > 0:
        raise UsageError(f"--timeout_s is {timeout_s:g}; it must be above 0")
    shipped = [GENERIC.name, *(name for name in shipped_studies() if not name.startswith("tiny_"))]
    boards: dict[str, Board] = {}
    for study in studies or shipped:
        view = read_view(study)
        if not re.fullmatch(r"[\w.-]+", view.name):
            raise UsageError(f"{view.name!r} is no name for a board; rename the file: only letters, digits and '_.-'")
        made = board_of_all() if view.name == GENERIC.name else board_of(view, KINDS, PARTS)
        boards.setdefault(made.name, made)
    request = Request(
        project or os.environ.get("WANDB_PROJECT") or WandbSettings.project, entity, tuple(boards.values())
    )
    request = msgspec.convert(masked(msgspec.to_builtins(request)), Request)
    if dry_run:
        columns = [
            Column("board"),
            Column("section"),
            Column("panel"),
            Column("kind"),
            Column("shows", narrowing="fold"),
        ]
        rows = [
            [each.name, section.title, panel.title, panel.kind, ", ".join(panel.y)]
            for each in request.boards
            for section in each.sections
            for panel in section.panels
        ]
        count = Line("boards", f"{len(boards)} with {len(rows)} panels in project {request.project}")
        figures = {"request": request}
        return Answer([count], [Table("panels", "What would be made", columns, rows)], figures=figures, first=())
    saved = []
    try:
        for each in save_boards(request, timeout_s):
            saved.append(Line(each.what, f"{each.name}  {masked_text(each.address)}", is_whole=True))
    except WandbProblem as problem:
        tell(f"board: {problem}")
        return Answer(saved, exit_code=ExitCode.INTERNAL)
    return Answer(saved)
