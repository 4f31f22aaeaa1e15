"""A command is a typed function: its signature makes the options, its mistakes are one line."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from lmbench.commands.parser import run_typed
from lmbench.report.answer import Answer, Column, Table


def count(first: str, *more: str, top: int = 3, where: Path | None = None, is_deep: bool = False) -> Answer:
    """Counts letters.

    Of every word that it is given.

    Args:
        first: a word
        more: other words
        top: rows shown
        where: a folder
        is_deep: whether to look twice
    """
    rows = [[word, str(len(word) * (1 + is_deep))] for word in (first, *more)][:top]
    return Answer(tables=[Table("letters", "Letters", [Column("word"), Column("n")], rows)], exit_code=11)


def test_the_signature_makes_the_options_and_the_docstring_their_help(capsys):
    assert run_typed("count", count, ["-h"]) == 0
    told = capsys.readouterr().out
    for text in ("Counts letters.\n\nOf every word", "other words", "rows shown (default: 3)", "--output"):
        assert text in told


def test_the_answer_is_given_in_any_format_with_its_exit_code(capsys):
    assert run_typed("count", count, ["ab", "c", "d", "--top", "2", "--is_deep", "--json"]) == 11
    told = capsys.readouterr().out
    assert json.loads(told)["tables"]["letters"] == [{"word": "ab", "n": "4"}, {"word": "c", "n": "2"}]
    run_typed("count", count, ["ab", "c", "--format", "json"])
    assert json.loads(capsys.readouterr().out)["tables"]["letters"][0] == {"word": "ab", "n": "2"}


def sides(
    *names: str,
    revision: tuple[str, str] | None = None,
    variable: list[tuple[str, str, str]] | None = None,
    settings: Sequence[str] = (),
) -> int:
    print(names, revision, variable, settings)
    return 0


def test_options_take_several_words_come_again_and_pass_on_what_belongs_to_fit(capsys):
    words = "a b --revision main HEAD --variable X 1 2 --variable Y 3 4 --model.size tiny --measure.steps=3"
    assert run_typed("sides", sides, words.split()) == 0
    told = "('a', 'b') ['main', 'HEAD'] [['X', '1', '2'], ['Y', '3', '4']]"
    assert capsys.readouterr().out == f"{told} ['--model.size', 'tiny', '--measure.steps=3']\n"
