"""Results as files to publish: `lmbench report RESULTS --publish docs/mine` writes docs/mine.md and docs/mine.csv.

The page has the tables of each study, with machine, versions and commit above them and the command below each. The
file of rows has those of `--format csv`, then a row for each process, so that every figure of the page has its row.
Answers of other commands (`lmbench overhead --format json --output RESULTS/NAME.json`) are published with the runs of
their folder, if it has any.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from msgspec import Struct

from lmbench.errors import UsageError
from lmbench.records.codec import find_packed
from lmbench.records.run import RunRecord
from lmbench.records.store import RUN_FILE, write_whole
from lmbench.records.vocabulary import MIN_REPEATS
from lmbench.report.answer import Answer, Line, Value
from lmbench.report.facts import Facts, commit_text, environment_of
from lmbench.report.frame import Frame, MeasuredCell
from lmbench.report.groups import ReportedRun
from lmbench.report.render import escaped, render
from lmbench.report.results import GO_ON, Section, cells_table, read_sections, rows_table, section_answer
from lmbench.report.view import Catalogue


class _StoredAnswer(Struct):
    """An answer as JSON: labels and texts, and by name the rows of its tables in SI units."""

    tables: dict[str, list[dict[str, Value]]]
    headline: list[tuple[str, str]] = []
    notes: list[tuple[str, str]] = []


def publish(paths: Sequence[str], catalogue: Catalogue, target: Path) -> Answer:
    """Write the page and the rows of all results at or below the paths; returns what was written, and doubts about it.

    Args:
        target: path of both files, without their endings.

    Raises:
        UsageError: there is no result, or the files cannot be written.
    """
    target = target.with_suffix("") if target.suffix in (".md", ".csv") else target
    stored, name = _stored_answers(paths), target.name
    # A folder may have answers alone.
    folders = {file.parent for file in stored}
    with_runs = [path for path in paths if Path(path) not in folders or any(Path(path).rglob(RUN_FILE))]
    sections = read_sections(with_runs, catalogue) if with_runs else []
    gpus = {str(run.facts["gpu"]) for section in sections for run in section.frame.runs if "gpu" in run.facts}
    title = f"lmbench on {', '.join(sorted(gpus))}" if gpus else name
    by_run = [section._replace(frame=_by_run(section.frame)) for section in sections]
    page = (
        f"# {escaped(title)}\n\n"
        f"Written by `lmbench report RESULTS --publish {name}`. [{name}.csv]({name}.csv) has a row for each cell, with "
        "the 95 % interval of its mean step, and a row for each process.\n\n"
    )
    page += render(Answer(sections=[*map(_page_section, sections), *stored.values()]), "markdown")
    records = [
        *cells_table([*sections, *by_run], _stated).records(),
        *(
            {"sweep": answer.title, **row}
            for answer in stored.values()
            for table in answer.tables
            for row in table.records()
        ),
    ]
    try:
        write_whole(Path(f"{target}.md"), page)
        write_whole(Path(f"{target}.csv"), render(Answer(tables=[rows_table("rows", records)]), "csv"))
    except OSError as error:
        raise UsageError(f"--publish {str(target)!r}: {error.strerror}; name files in a folder that exists") from error
    return Answer(headline=[Line("written", f"{target}.md, {target}.csv", is_whole=True), *_doubts(sections)])


def _stored_answers(paths: Iterable[str]) -> dict[Path, Answer]:
    """The answers that lie in the folders as JSON, by their files; other files are passed over."""
    answers = {}
    for file in sorted(file for path in paths for file in Path(path).glob("*.json")):
        if (stored := find_packed(file, _StoredAnswer)) is not None:
            tables = [rows_table(name, rows) for name, rows in stored.tables.items()]
            headline, notes = ([Line(*line) for line in part] for part in (stored.headline, stored.notes))
            answers[file] = Answer(headline, tables, notes, title=file.stem)
    return answers


def _page_section(section: Section) -> Answer:
    """A section with the command that repeats it below each of its tables, without what names the folder here."""
    answer = section_answer(section)
    answer = replace(answer, headline=[line for line in answer.headline if line.label != GO_ON])
    if command := section.group.sweep.command:
        tables = [Answer(tables=[table], notes=[Line("command", f"`{command}`")]) for table in answer.tables]
        return replace(answer, tables=(), notes=(), sections=[*tables, Answer(notes=answer.notes)])
    return answer


def _by_run(frame: Frame) -> Frame:
    """The frame in which each process that a table counts is a cell, without a baseline."""
    samples = [(cell, run) for cell in frame.cells for run in cell.samples]
    return Frame([MeasuredCell([run], {**cell.facts, "repeat": run.repeat}) for cell, run in samples])


def _stated(cell: MeasuredCell) -> Facts:
    """The facts of a cell with all versions, commits and hosts of its runs; several are separated by blanks."""
    known = environment_of({**run.facts, "commit": _commits(run.record)} for run in _with_environment(cell.runs))
    return cell.facts | {name: " ".join(values) for name, values in known.items() if values}


def _with_environment(runs: Iterable[ReportedRun]) -> list[ReportedRun]:
    """The runs that came as far as their environment; one that was stopped before it claims nothing."""
    return [run for run in runs if run.record.environment.versions.lmbench]


def _commits(run: RunRecord) -> str:
    """The commits of the user's code and of lmbench, with a plus after changes."""
    code = run.environment.code
    return " and ".join(dict.fromkeys(filter(None, map(commit_text, (code.project, code.lmbench))))) or "none"


def _is_committed(run: RunRecord) -> bool:
    """Whether commits name the code of a run.

    lmbench's own model and data need no commit of the folder that the run was started in.
    """
    code = run.environment.code
    is_own = all((part.name or "").startswith("lmbench.") for part in (run.model, run.data))
    commit = code.project.commit or (code.lmbench.commit if is_own else None)
    return commit is not None and not code.project.is_dirty and not code.lmbench.is_dirty


def _doubts(sections: Sequence[Section]) -> Iterator[Line]:
    """What a reader of the files could object to."""
    records = [run.record for section in sections for run in _with_environment(section.frame.runs)]
    commits = sorted({*map(_commits, records)})
    if len(commits) > 1:
        yield Line("WARN", f"runs of {len(commits)} commits: {', '.join(commits)}; a page is of one")
    if not all(map(_is_committed, records)):
        yield Line("WARN", "the code of some runs had no commit or uncommitted changes, so nobody can repeat them")
    for section in sections:
        few = sum(0 < len(cell.samples) < MIN_REPEATS for cell in section.frame.cells)
        if few:
            subject = f"{section.group.name}: {few} of its cells" if section.group.name else f"{few} cells"
            yield Line("WARN", f"{subject} have fewer than {MIN_REPEATS} processes")
