"""`lmbench report RESULTS...`: results as tables and charts, by the view of their study."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from lmbench.commands.parser import Result
from lmbench.errors import UsageError
from lmbench.report.answer import Answer


def report(
    *results: Result,
    view: str | None = None,
    baseline: str | None = None,
    reference: str | None = None,
    over: Literal["commit", "time"] | None = None,
    publish: Path | None = None,
) -> Answer:
    """Shows results as tables, and with `--output page.html` as one page with charts that needs no network.

    A sweep is shown by its study's view, other runs with a row for whatever differs. CSV has a row for each cell.

    Args:
        results: folders of runs or of sweeps, or folders of them
        view: show all results by the view of this study, or of this YAML file
        baseline: FACT=VALUE,... that speed-ups refer to, such as precision=32-true,matmul=highest
        reference: add others' figures of the same configurations: published (five write-ups), h200 (lmbench's own:
            the pages of lmbench/reference/), or a file that --format csv wrote
        over: each configuration's figures over commits or over time, with their change points
        publish: write PATH.md, the tables each with its command, and PATH.csv, their rows and those of each process
    """
    if over and (view or baseline or reference):
        raise UsageError("--over has tables and pictures of its own; leave out --view, --baseline and --reference")
    if publish and (view or baseline or reference or over):
        raise UsageError("--publish shows each study by its own view; leave out the other options")
    from lmbench.catalogue import make_catalogue
    from lmbench.report.publishing import publish as publish_results
    from lmbench.report.results import read_sections, report_on

    if publish is not None:
        return publish_results(results, make_catalogue(), publish)
    return report_on(read_sections(results, make_catalogue(reference), view, baseline, over))
