"""The report on a terminal, where tables keep to its width; the same words as Markdown has."""

from __future__ import annotations

from rich.console import Console

from lmbench.report.screen import print_line, print_table
from lmbench.report.sections import Report, Section


def print_report(report: Report, console: Console) -> None:
    """Print the sections one after the other."""
    for place, section in enumerate(report.sections):
        if place:
            console.out("")
        _print_section(section, console)
    for line in report.unread:
        print_line("not read", line, console)


def _print_section(section: Section, console: Console) -> None:
    for line in (section.title, section.view.question, *section.answers):
        if line:
            console.print(line)
    print_line("cells", section.tally, console)
    for line in section.environment:
        print_line("measured", line, console)
    for table in section.tables:
        print_table(table, console)
        for number, note in enumerate(table.notes, start=1):
            print_line(f"[{number}]", note, console)
    if section.failures or section.notes:
        console.out("")
    for failure in section.failures:
        print_line("not ok", failure.text, console)
    for note in section.notes:
        print_line("note", note, console)
