"""`lmbench show RESULTS...`: a result again, as `lmbench fit` ended with it."""

from __future__ import annotations

from lmbench.errors import UsageError, tell
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
    answers, unread = [], list[str]()
    for folder in folders:
        try:
            answers.append(read_run(folder).answer())
        except UsageError as error:
            unread.append(str(error))
    for line in unread if answers else unread[:-1]:
        tell(line)
    if not answers:
        raise UsageError(unread[-1])
    return answers[0] if len(answers) == 1 else Answer(sections=answers)
