"""`lmbench upload RESULTS...` uploads results to W&B; `lmbench board [STUDY...]` makes a board there for each study."""

from __future__ import annotations

import os

from lmbench.commands.parser import PositiveFloat, Result
from lmbench.errors import ExitCode, tell
from lmbench.masking import masked_text
from lmbench.report.answer import Answer, Line


def upload(
    *results: Result,
    project: str | None = None,
    entity: str | None = None,
    timeout_s: PositiveFloat = 60.0,
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
    from lmbench.wandb.upload import upload_results

    destination = {name: value for name, value in (("project", project), ("entity", entity)) if value}
    return upload_results(results, destination, timeout_s)


def board(
    *studies: str,
    project: str | None = None,
    entity: str | None = None,
    dry_run: bool = False,
    timeout_s: PositiveFloat = 60.0,
) -> Answer:
    """Makes a workspace at W&B for each study, or brings the one that is there up to date.

    An update overwrites your own changes to the workspace and never makes a second one. A workspace shows the runs of
    the study's sweeps, which `lmbench upload` brings there. Needs wandb-workspaces (`pip install '.[boards]'`), and a
    key from WANDB_API_KEY or `wandb login`.

    Args:
        studies: shipped studies by name, or sweeps' files with a view; without any, all that ship and all runs together
        project: the project of the runs (WANDB_PROJECT, else lmbench)
        entity: the user or team that it belongs to (W&B's own default)
        dry_run: show what would be made, without asking W&B
        timeout_s: seconds that W&B may take
    """
    from lmbench.catalogue import make_catalogue
    from lmbench.configs import shipped_studies
    from lmbench.report.view import GENERIC
    from lmbench.wandb.board import BoardRequest, board_of, planned_boards
    from lmbench.wandb.publish import WandbProblem, WandbSettings, has_key, save_boards, write

    shipped = [GENERIC.name, *(name for name in shipped_studies() if not name.startswith("tiny_"))]
    catalogue = make_catalogue()
    views = {view.name: view for view in map(catalogue.view, studies or shipped)}
    boards = tuple(board_of(view, catalogue) for view in views.values())
    request = BoardRequest(project or os.environ.get("WANDB_PROJECT") or WandbSettings.project, entity, boards)
    if dry_run:
        return planned_boards(request)
    saved = []
    try:
        if not has_key():
            raise WandbProblem("no key for W&B: set WANDB_API_KEY, or run `wandb login`; --dry_run needs none")
        tell(f"sending {len(boards)} boards to {write([], timeout_s)}")
        for line in save_boards(request, timeout_s):
            label, _, board_and_url = line.partition("  ")
            saved.append(Line(label, masked_text(board_and_url), is_whole=True))
    except WandbProblem as problem:
        tell(f"board: {problem}")
        return Answer(saved, exit_code=ExitCode.NOT_SENT)
    return Answer(saved)
