"""Cases as a table in the test's text or in a file; and texts of an answer, without the line breaks of a screen."""

from __future__ import annotations

import csv

import pytest
import yaml
from paths import DATA


def rows(text):
    """A list of each line's cells, which stand between `|`, `-` for an empty one; of a table of one column, of its
    lines. A line that begins with # is a comment."""
    lines = [line for line in text.strip().splitlines() if not line.startswith("#")]
    cells = [["" if (cell := part.strip()) == "-" else cell for part in line.split(" | ")] for line in lines]
    return [row[0] if len(row) == 1 else row for row in cells]


def cases(table, *more, **options):
    """Parametrize a test by a table, whose first row names the arguments: of words as `rows` reads them, or in YAML,
    whose rows are lists of values of any kind. `more` are rows in Python; `options` are those of pytest's mark."""
    names, *values = yaml.safe_load(table) if table.lstrip().startswith("- [") else rows(table)
    return pytest.mark.parametrize(names, [*values, *more], **options)


def stored(name):
    """What a YAML file of the tests' data holds."""
    return yaml.safe_load((DATA / f"{name}.yaml").read_text())


def texts_of(lines, label="answer"):
    """The texts of an answer's lines with a label, by default of the sentences that answer a view's question."""
    return [line.text for line in lines if line.label == label]


def csv_of(text):
    """The rows of a CSV text."""
    return list(csv.DictReader(text.splitlines()))


def flat(text):
    """The text with single blanks, however it was folded into lines and columns."""
    return " ".join(text.split())
