"""The report as Markdown: aligned pipe tables that can be read as they are and pasted anywhere."""

from __future__ import annotations

from collections.abc import Sequence

from lmbench.report.sections import Failure, Report, Section
from lmbench.report.table import Table
from lmbench.report.text import shown


def to_markdown(report: Report) -> str:
    """The whole report; ends in a line feed. The same results give the same text."""
    parts = [_section(section) for section in report.sections]
    if report.unread:
        parts.append("\n".join(["### Not read", "", *(f"- {_escape(line)}" for line in report.unread)]))
    return "\n\n".join(parts) + "\n"


def _section(section: Section) -> str:
    lines = [f"## {_escape(section.title)}", ""]
    if section.view.question:
        lines += [section.view.question, ""]
    lines += [f"- {_escape(line)}" for line in (section.tally, *section.environment)]
    for table in section.tables:
        lines += ["", *table_lines(table)]
    if section.failures:
        lines += ["", "**Not ok**", "", *(f"- {_failure(failure)}" for failure in section.failures)]
    if section.notes:
        lines += ["", "**Notes**", "", *(f"- {_escape(note)}" for note in section.notes)]
    return "\n".join(lines)


def _failure(failure: Failure) -> str:
    subject = f"{failure.cell}: " if failure.cell else ""
    reason = f": {failure.reason}" if failure.reason else ""
    runs = "run" if len(failure.run_ids) == 1 else "runs"
    return f"{_escape(subject + failure.outcome + reason)} ({runs} {shown(', '.join(failure.run_ids))})"


def table_lines(table: Table) -> list[str]:
    """One table with its title, caption and notes."""
    headings = [_escape(heading.text) for heading in table.headings]
    rows = [[_escape(entry.full_text) for entry in row] for row in table.rows]
    columns = list(zip(headings, *rows, strict=True))
    widths = [max(3, *(len(text) for text in column)) for column in columns]
    numbers = [heading.is_number for heading in table.headings]
    lines = [f"**{_escape(table.title)}**: {_escape(table.caption)}", ""]
    lines.append(_line(headings, widths, numbers))
    rules = [f"{'-' * (width - 1)}{':' if number else '-'}" for width, number in zip(widths, numbers, strict=True)]
    lines.append(f"| {' | '.join(rules)} |")
    lines += [_line(row, widths, numbers) for row in rows]
    if table.notes:
        lines += ["", *(f"[{number}] {_escape(note)}  " for number, note in enumerate(table.notes, start=1))]
        lines[-1] = lines[-1].rstrip()
    return lines


def _line(texts: Sequence[str], widths: Sequence[int], numbers: Sequence[bool]) -> str:
    padded = (
        text.rjust(width) if number else text.ljust(width)
        for text, width, number in zip(texts, widths, numbers, strict=True)
    )
    return f"| {' | '.join(padded)} |"


def _escape(text: str) -> str:
    """Text that Markdown shows as it is, on one line."""
    text = shown(" ".join(text.split()))
    for character, written in (("\\", "\\\\"), ("|", "\\|"), ("<", "&lt;"), ("*", "\\*")):
        text = text.replace(character, written)
    return text
