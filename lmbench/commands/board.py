"""`lmbench board [STUDY...]`: a board at W&B for each study, made or brought up to date."""

from __future__ import annotations

import os

from lmbench.commands.parser import PositiveFloat
from lmbench.commands.report import make_catalogue
from lmbench.errors import ExitCode, tell
from lmbench.masking import masked_text
from lmbench.report.answer import Answer, Column, Line, Table


def board(
    *studies: str,
    project: str | None = None,
    entity: str | None = None,
    dry_run: bool = False,
    timeout_s: PositiveFloat = 60.0,
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
    from lmbench.report.view import GENERIC
    from lmbench.wandb.board import Request, board_of
    from lmbench.wandb.publish import WandbProblem, WandbSettings, save_boards, write

    shipped = [GENERIC.name, *(name for name in shipped_studies() if not name.startswith("tiny_"))]
    catalogue = make_catalogue()
    boards = [board_of(catalogue.view(study), catalogue, KINDS, PARTS) for study in studies or shipped]
    project = project or os.environ.get("WANDB_PROJECT") or WandbSettings.project
    request = Request(project, entity, tuple({board.name: board for board in boards}.values()))
    if dry_run:
        titles = ("board", "section", "panel", "kind")
        columns = [*map(Column, titles), Column("shows", narrowing="fold")]
        rows = [
            [board.name, section, panel.title, panel.kind, ", ".join(panel.y)]
            for board in request.boards
            for section, panels in board.sections.items()
            for panel in panels
        ]
        count = Line("boards", f"{len(request.boards)} with {len(rows)} panels in project {project}")
        figures = {"request": request}
        return Answer([count], [Table("panels", "What would be made", columns, rows)], figures=figures, first=())
    saved = []
    try:
        tell(f"sending {len(boards)} boards to {write([], timeout_s)}")
        for line in save_boards(request, timeout_s):
            done, _, rest = line.partition("  ")
            saved.append(Line(done, masked_text(rest), is_whole=True))
    except WandbProblem as problem:
        tell(f"board: {problem}")
        return Answer(saved, exit_code=ExitCode.NOT_SENT)
    return Answer(saved)
