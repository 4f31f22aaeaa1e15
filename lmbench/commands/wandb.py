"""What W&B gets: `lmbench upload RESULTS...` brings it results, `lmbench board [STUDY...]` a board for each study."""

from __future__ import annotations

import os
from pathlib import Path

from lmbench.commands.parser import PositiveFloat
from lmbench.commands.report import make_catalogue
from lmbench.errors import ExitCode, tell
from lmbench.masking import masked_text, shown
from lmbench.records.load import find_runs, load_known
from lmbench.records.vocabulary import DAMAGED, RUNNING
from lmbench.report.answer import Answer, Column, Line, Table
from lmbench.wandb.publish import DEFAULT_TIMEOUT_S, WandbProblem, elsewhere, is_uploaded, sync, write


def upload(
    *results: str,
    project: str | None = None,
    entity: str | None = None,
    timeout_s: PositiveFloat = DEFAULT_TIMEOUT_S,
) -> int:
    """Uploads every result at or below the given folders to W&B, unless it is there.

    Steps, summary, configuration, environment and guards, by wandb's own `wandb sync`. Needs
    wandb, and a key from WANDB_API_KEY or `wandb login`; WANDB_BASE_URL names a server of
    your own. A result goes to another project or entity than your settings name only where
    an option says so. The first upload that fails ends the command.

    Args:
        results: result folders, or folders of them
        project: another project than the results' own
        entity: another user or team than the results' own
        timeout_s: seconds for each result
    """
    options = {name: value for name, value in (("project", project), ("entity", entity)) if value}
    due: list[Path] = []
    code = ExitCode.OK
    for folder in find_runs(results):
        run = load_known(folder)
        places = {name: value for name, value in elsewhere(run.record.wandb).items() if name not in options}
        if run.outcome == DAMAGED:
            tell(f"not uploaded: {folder}: {run.damage}")
            code = ExitCode.USAGE
        elif is_uploaded(folder):
            print(shown(f"already uploaded  {folder}"))
        elif run.outcome == RUNNING:
            print(shown(f"still running     {folder}"))
        elif places:
            # Neither settings nor options send it there.
            place = " of ".join(f"{name} {value!r}" for name, value in places.items())
            advice = "give --project and --entity"
            tell(f"not uploaded: {folder}: it names {place}, and your settings do not; {advice}")
            code = ExitCode.USAGE
        else:
            due.append(folder)
    try:
        # Anew: what lies there may lack steps (a full disk), or name files where the result was moved from.
        if due:
            tell(f"sending {len(due)} of the results to {write(due, timeout_s)}")
        while due:
            url = sync(due[0], timeout_s, [f"--{name}={value}" for name, value in options.items()])
            print(shown(f"uploaded          {due.pop(0)}{f' -> {masked_text(url)}' if url else ''}"), flush=True)
    except WandbProblem as problem:
        more = f"; {len(due) - 1} more not tried" if due[1:] else ""
        tell(f"not uploaded: {due[0]}: {problem}{more}")
        return ExitCode.NOT_SENT
    return code


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
    from lmbench.kernels.names import KINDS, PARTS
    from lmbench.report.view import GENERIC
    from lmbench.wandb.board import Request, board_of
    from lmbench.wandb.publish import WandbProblem, WandbSettings, save_boards, write

    shipped = [GENERIC.name, *(name for name in shipped_studies() if not name.startswith("tiny_"))]
    catalogue = make_catalogue()
    boards = [board_of(catalogue.view(study), catalogue, KINDS, PARTS) for study in studies or shipped]
    project = project or os.environ.get("WANDB_PROJECT") or WandbSettings.project
    request = Request(project, entity, tuple({board.name: board for board in boards}.values()))
    if dry_run:
        columns = [*map(Column, ("board", "section", "panel", "kind", "shows"))]
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
