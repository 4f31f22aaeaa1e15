"""One answer in every format: the same figures, no text that acts as markup or control characters, no cell cut."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import re

from markdown_it import MarkdownIt
from tables import cases

from lmbench.report.answer import Answer, Cell, Column, Line, Table
from lmbench.report.console import make_console, shortened
from lmbench.report.render import FORMATS, Output, csv_field, escaped, give, print_answer, render
from lmbench.report.units import MS, PERCENT, SETTING, mean_and_std
from lmbench.standard_output import replace_unencodable

KINDS = Table(
    "kinds",
    "By kind",
    [Column("kind"), Column("time", MS, "total_s"), Column("share", PERCENT, "share_fraction")],
    [
        ["gemm", Cell(0.0123, std=0.0004, low=0.0119, high=0.0127), 0.925],
        ["a|b<c>", None, Cell(None, text="OOM (forward)", notes=("it was refused",), style="outcome")],
        ["all", 0.0133, 1.0],
    ],
    caption="H200",
    has_total=True,
)
OTHER = Table("names", "Names", [Column("name"), Column("n")], [["x" * 9, "1"]])
ANSWER = Answer(
    headline=[Line("run", "small"), Line("WARN", "drifts"), Line("", "measure longer")],
    tables=[KINDS, OTHER],
    notes=[Line("trace", "/tmp/trace.json", is_whole=True)],
    title="Kernels",
    figures={"busy_s": 0.5, "idle_s": float("nan")},
    first=["kinds"],
)


MARKDOWN = r"""
## Kernels

- **run**: small
- **WARN**: drifts__
  measure longer

**By kind**: H200

| kind       |    time (ms) |         share (%) |
| ---------- | -----------: | ----------------: |
| gemm       | 12.30 ± 0.40 |              92.5 |
| a\|b&lt;c> |            - | OOM (forward) [1] |
| all        |        13.30 |             100.0 |

[1] it was refused

**Names**

| name      | n   |
| --------- | --- |
| xxxxxxxxx | 1   |

- **trace**: /tmp/trace.json
"""


def test_markdown_is_aligned_and_its_notes_are_numbered():
    # Two blanks at the end are a line break.
    assert f"\n{render(ANSWER, 'markdown')}" == MARKDOWN.replace("__", "  ")


def test_csv_and_json_hold_every_figure_in_si_units():
    names, values, *_ = csv.reader(io.StringIO(render(ANSWER, "csv")))
    assert names == ["kind", "total_s", "total_std_s", "total_low_s", "total_high_s", "share_fraction"]
    assert values == ["gemm", "0.0123", "0.0004", "0.0119", "0.0127", "0.925"]
    plain = json.loads(render(ANSWER, "json"))
    first = plain["tables"]["kinds"][0]
    assert (list(first), list(map(str, first.values()))) == (names, values)
    assert (plain["busy_s"], plain["idle_s"]) == (0.5, None)
    assert plain["headline"][1] == ["WARN", "drifts"]


def test_latex_escapes_its_special_characters():
    rows = [["\\input{y} & #1"], ["[1] fit --help | more ---"], ["-3 .. -1 of x-1"]]
    text = render(Answer(tables=[Table("t", "50 % of a_b", [Column("x")], rows)]), "latex")
    assert r"\caption{50 \% of a\_b}" in text
    assert r"\textbackslash{}input\{y\} \& \#1 \\" in text
    # A bracket at the start of a row would be an argument of the line break before it.
    assert r"{[}1] fit -{}-help \textbar{} more -{}-{}- \\" in text
    assert r"$-$3 .. $-$1 of x-1 \\" in text


@cases("form", *[form for form in FORMATS if form != "svg"])
def test_no_format_lets_text_act_as_markup_or_control_characters(form):
    evil = "\x1b[31m</script><img src=x> ![p](http://x) \u0007"
    text = render(Answer([Line("run", evil)], [Table("t", evil, [Column(evil)], [[evil]])], title=evil), form)
    assert "\x1b" not in text
    assert "\u0007" not in text
    assert form not in ("html", "markdown") or "<img" not in text
    assert form != "markdown" or "![p](" not in text


def test_the_first_screen_names_the_tables_that_wait(capsys):
    assert give(ANSWER, Output()) == 0
    out = capsys.readouterr().out
    assert "By kind" in out
    assert "Names" not in out
    assert out.splitlines()[-1] == "tables       kinds, names; --table NAME or --all"
    give(ANSWER, Output(all=True))
    assert "trace        /tmp/trace.json" in capsys.readouterr().out
    give(ANSWER, Output(table="names"))
    assert "By kind" not in capsys.readouterr().out


def test_the_ending_of_a_file_says_its_format(tmp_path):
    for name, start in {"a.md": "## Kernels", "a.tex": r"% \usepackage{booktabs}", "a.html": "<!DOCTYPE html>"}.items():
        give(ANSWER, Output(output=tmp_path / name))
        assert (tmp_path / name).read_text().startswith(start)


def screen(table, width):
    """What a terminal of so many columns shows of a table."""
    console = make_console(stream := io.StringIO())
    console.width = width
    print_answer(Answer(tables=[table]), console)
    return stream.getvalue()


WIDE = Table(
    "wide",
    "Wide",
    [Column("cell"), Column("batch", SETTING), Column("mean", MS), Column("result", is_extra=True), Column("verdict")],
    [["one", 8, 0.12345, "results/20261124T0347", "slower"]],
)


@cases("""
- [width, left_out, rows]
- [60, "", [[one, "8", "123.45", results/20261124T0347, slower]]]
- [50, result, [[one, "8", "123.45", slower]]]
- [22, result, [[one, "8", "123.45"], [one, slower]]]
""")
def test_a_table_too_wide_leaves_out_extra_columns_with_a_word_and_goes_on_below(width, left_out, rows):
    text = screen(WIDE, width)
    assert max(map(len, text.splitlines())) <= width
    assert " ".join(text.partition(" also:")[2].split()) == left_out
    assert [line.split() for line in text.splitlines() if line.startswith("one")] == rows


def test_a_line_without_a_label_goes_on_below_the_one_above_on_a_page_too():
    page = render(ANSWER, "html")
    assert re.search(r'<p class="line"><span class="label ?"></span> measure longer</p>', page)


def test_a_block_below_repeats_the_columns_that_tell_its_rows_apart():
    facts = [Column(name) for name in ("size", "context length", "precision", "optimizer")]
    rows = [["tiny", "64", precision, "AdamW", 0.1, 0.2] for precision in ("32-true", "bf16-mixed")]
    table = Table("steps", "Steps", [*facts, Column("backward", MS), Column("step median", MS)], rows)
    lines = [line.split() for line in screen(table, 50).splitlines() if line.startswith("tiny")]
    assert lines[2:] == [["tiny", "32-true", "100.00", "200.00"], ["tiny", "bf16-mixed", "100.00", "200.00"]]


def test_fields_of_csv_are_no_formulas_and_markdown_has_no_markup_of_its_own():
    texts = ["=1+1", "+x", "@x", "\uff1dx", "-1.5", "x" * 50 + "end"]
    assert [csv_field(text)[0] for text in texts] == ["'", "'", "'", "'", "-", "x"]
    assert escaped("a*b|c `d` <e> [f](g)") == "a\\*b\\|c `d` &lt;e> [f]\\(g)"
    # A reference definition in any line would turn `![p]` and `[p]` in other lines into pictures and links.
    title = "![p]\\![p] [p]: http://host/x.png"
    page = MarkdownIt().render(render(Answer([Line("", "[p]: http://host/x.png")], title=title), "markdown"))
    assert not {"<img", "<a "} & set(re.findall("<a |<img", page))
    assert shortened(texts[-1], 20) == "xxxxxxxxxxxx..xxxend"


def test_an_encoding_without_the_signs_is_no_error():
    stream = io.TextIOWrapper(raw := io.BytesIO(), encoding="ascii", errors="strict")
    with contextlib.redirect_stdout(stream):
        replace_unencodable()
        print("443 ± 112 ≤ ─ ü")
        stream.flush()
    assert raw.getvalue() == b"443 ? 112 ? ? ?\n"


@cases("""
- [mean_s, std_s, text]
- [0.44321, 0.1125, 443 ± 112]
- [0.05059, 0.0, 50.59 ± 0.00]
- [0.002, 0.000004, 2.000 ± 0.004]
- [2.5, 0.01, "2,500 ± 10"]
- [0.02, null, "20.00"]
""")
def test_digits_follow_the_spread(mean_s, std_s, text):
    assert mean_and_std(mean_s, std_s) == text


def test_a_wrapped_cell_does_not_break_within_a_number():
    ways = Table("ways", "Ways", [Column("way"), Column("n" * 18)], [["BucketedDDP (bucket_cap_mb 25.0)", "1"]])
    assert "25.0)" in screen(ways, 50)


def test_the_longest_names_of_options_are_not_broken_where_columns_are_narrow(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    columns = [Column(name) for name in ("choice", "outcome", "reason")]
    rows = [["batch_size 2, accumulate_grad_batches 2", "no end within 10 s; it was stopped and left out", "slow " * 9]]
    print_answer(Answer(tables=[Table("t", "Trials", columns, rows)]), make_console())
    assert "accumulate_grad_batches" in capsys.readouterr().out
