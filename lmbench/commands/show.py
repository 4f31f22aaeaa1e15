"""`lmbench show RESULTS...`: a result again, as `lmbench fit` ended with it."""

from __future__ import annotations

from lmbench.errors import UsageError, tell
from lmbench.records.load import find_runs
from lmbench.report.answer import Answer
from lmbench.runs import read_run


def show(*results: str) -> Answer:
    """Prints results again as `lmbench fit` did.

    Args:
        results: result folders, or folders of them
    """
    answers, unread = [], list[str]()
    for folder in find_runs(results):
        try:
            answers.append(read_run(folder).answer())
        except UsageError as error:
            unread.append(str(error))
    for line in unread if answers else unread[:-1]:
        tell(line)
    if not answers:
        raise UsageError(unread[-1])
    return answers[0] if len(answers) == 1 else Answer(sections=answers)
