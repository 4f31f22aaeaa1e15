"""`lmbench show RESULTS...`: a result again, as `lmbench fit` ended with it."""

from __future__ import annotations

from lmbench.records.load import find_runs
from lmbench.records.named import find_result
from lmbench.report.answer import Answer
from lmbench.runs import read_run


def show(*results: str) -> Answer:
    """Prints results again as `lmbench fit` did; without any, the newest.

    Of a folder of many runs it lists them, as `lmbench list` does.

    Args:
        results: result folders, names such as `last`, or a folder of results
    """
    results = results or (find_result("last"),)
    folders = find_runs(results)
    if len(folders) > len(results):
        # Here: a single run is shown without what lists take to import.
        from lmbench.commands.list import listing

        return listing(results)
    answers = [read_run(folder).answer() for folder in folders]
    return answers[0] if len(answers) == 1 else Answer(sections=answers)
