"""A command is a typed function: its signature makes the options, its mistakes are one line."""

from __future__ import annotations

from collections.abc import Sequence

from lmbench.commands.parser import run_typed


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
