"""`lmbench list`: the results so far, and names for results. `lmbench show`: a result again."""

from __future__ import annotations

from pathlib import Path

from lmbench.commands.parser import PositiveInt, Result
from lmbench.errors import UsageError
from lmbench.records.load import find_runs
from lmbench.records.named import find_result, name_result, shown_path
from lmbench.records.store import RESULTS
from lmbench.report.answer import Answer, Line


def list_(*results: Result, where: str | None = None, limit: PositiveInt = 20, name: str | None = None) -> Answer:
    """Lists results, the newest first: when, what, ms a step, tokens/s, peak memory and how each ended.

    A result's name is understood wherever a command takes a result: `last`, `last~1` (the one before), FOLDER/last, or
    a name that was given with `lmbench list --name baseline RUN`.

    Args:
        results: folders of results (results); a sweep's folder lists its runs
        where: only runs with NAME=VALUE,...: a fact (precision=bf16-mixed), an option or a field of the record
        limit: results listed
        name: give one result this name
    """
    if name is None:
        from lmbench.report.listing import listing

        return listing(results or [str(RESULTS)], where, limit)
    if len(results) != 1:
        raise UsageError(f"--name names one result, such as `lmbench list --name {name} last`; {len(results)} given")
    path = Path(results[0])
    find_runs([path])
    earlier = name_result(name, path)
    lines = [Line(name, shown_path(path.resolve()), is_whole=True)]
    return Answer([*lines, *([Line("was", shown_path(earlier), is_whole=True)] if earlier else [])])


def show(*results: Result) -> Answer:
    """Prints results again as `lmbench fit` did; without any, the newest.

    Of a folder of many runs it lists them, as `lmbench list` does.

    Args:
        results: result folders, names such as `last`, or a folder of results
    """
    from lmbench.report.listing import listing
    from lmbench.runs import read_run

    results = results or (Result(find_result("last")),)
    folders = find_runs(results)
    if len(folders) > len(results):
        return listing(results)
    answers = [read_run(folder).answer() for folder in folders]
    return answers[0] if len(answers) == 1 else Answer(sections=answers)
