"""Unprintable characters in foreign text are escaped wherever a command shows the text."""

from __future__ import annotations

import json
import re
import unicodedata

import pytest
from comparison_runs import make_run
from runs import BASE, make_record, places, write_run
from tables import cases

from lmbench.cli import main
from lmbench.masking import one_line, shown
from lmbench.records.codec import DamagedRecord, decode_run

PLANTED = "$\\frac{$\x1b[31m\x9b2J\u202e\u2066\u061c\u200b\u00ad\ufeff\x00\r\n[red]<script>a|b"
UNSEEN = {"Cc", "Cf", "Cs", "Zl", "Zp"}


def test_every_character_that_cannot_be_seen_is_escaped_and_all_others_stay():
    raw = [chr(code) for code in range(0x110000) if unicodedata.category(chr(code)) in UNSEEN]
    assert len(raw) > 2000
    assert [character for character in raw if not shown(character).isascii() or shown(character) == character] == []
    assert shown("a\tb\n\x1b[31m\u202e\ud800\U000e0041") == r"a\tb\n\x1b[31m\u202e\ud800\U000e0041"
    assert shown("größer, 中文, 🧪\ufe0f, 2 × 3") == "größer, 中文, 🧪\ufe0f, 2 × 3"
    assert one_line("out of memory\n  asked for\t2 GiB") == "out of memory asked for 2 GiB"


# commands


def _unseen(text):
    return [character for character in text if character != "\n" and unicodedata.category(character) in UNSEEN]


def _planted(run):
    """The record with the planted text at the end of every free text, and of a name in a mapping."""
    decode_run(json.dumps(run).encode())
    for container, key in places(run):
        value = container[key]
        if not isinstance(value, str):
            continue
        container[key] = f"{value}{PLANTED}"
        try:
            decode_run(json.dumps(run).encode())
        except DamagedRecord:
            container[key] = value
    run["config"] = {**run.get("config", {}), f"own{PLANTED}": {f"x{PLANTED}": f"=1+1{PLANTED}"}}
    return run


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Runs with planted text in folders with such names: two sides to compare, a failed run, and one without schema."""
    folder = tmp_path_factory.mktemp("results") / "own\x1b[31m\u202e[red]<script>a|b"
    for side in ("a", "b"):
        for repeat in range(3):
            path = make_run(folder / side, 0.05 + 0.001 * repeat)
            planted = _planted(json.loads((path / "run.json").read_text()))
            (path / "run.json").write_text(json.dumps(planted | {"outcome": "ok"}))
    edited = _planted(make_record({"model.size": "small", "data.context_length": 256}))
    edited |= {"outcome": "failed", "error": {"kind": PLANTED, "message": PLANTED, "phase": PLANTED}}
    edited["guards"] = [
        {"name": PLANTED, "status": status, "message": PLANTED, "advice": PLANTED} for status in ("warn", "fail")
    ]
    write_run(folder / "b" / "failed", edited)
    (folder / "b" / "other").mkdir()
    (folder / "b" / "other" / "run.json").write_text(json.dumps(BASE | {"schema_version": PLANTED}))
    return folder


# Command lines: of RESULTS, with the planted TEXT, or with a file name that is a PART of it.
@cases("""
line
show RESULTS/a RESULTS/b
report RESULTS/a RESULTS/b --format=markdown
report RESULTS/a RESULTS/b --output=RESULTS/page.html
compare RESULTS/a RESULTS/b
compare RESULTS/a RESULTS/b --json
compare RESULTS/a RESULTS/b --about TEXT
noise RESULTS/a
kernels RESULTS/PART
sweep RESULTS/a --dry_run
sweep smoke --dry_run --data.batch_size=TEXT
shTEXT
""")
def test_planted_text_is_escaped_in_every_output(line, results, capsys):
    words = {"RESULTS": str(results), "TEXT": PLANTED, "PART": PLANTED[8:14]}
    code = main([re.sub("[A-Z]+", lambda name: words[name[0]], word) for word in line.split()])
    captured = capsys.readouterr()
    page = (results / "page.html").read_text(encoding="utf-8") if "page.html" in line else ""
    text = captured.out + captured.err + page
    assert code != 1
    assert text
    assert _unseen(text) == []
    assert "<script>a" not in page
    if "--json" in line:
        json.loads(captured.out)
