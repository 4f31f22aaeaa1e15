"""`lmbench numerics`: sums worked out exactly, as numpy adds them; edges where formulas have them; how it is told."""

from __future__ import annotations

import json
import random
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from browser import look, needs_browser

from lmbench.cli import main
from lmbench.numerics.experiment.operators import CASES, SMALL_FORMATS, Case, Setting, failure, thresholds
from lmbench.numerics.experiment.sums import published_sum, reduce, run_loop, sum_up
from lmbench.numerics.formats import FORMATS
from lmbench.numerics.loops import add_in_a_loop, stalls
from lmbench.numerics.picture import error_chart
from lmbench.numerics.record import Numerics, PublishedSum, Threshold
from lmbench.numerics.search import Edge, find_edges
from lmbench.numerics.tables import published_table
from lmbench.records.codec import decode
from lmbench.reference.published import load_accumulations

CPU = torch.device("cpu")
HALF, BRAIN, SINGLE, DOUBLE = (FORMATS[name] for name in ("float16", "bfloat16", "float32", "float64"))
NUMPY = {"float16": np.float16, "float32": np.float32, "float64": np.float64}
ADDENDS = (0.01, 1 / 3, 0.1, 1.0, 3.5, 2049.0, 6e-8, 1e-5, -0.7, 1 + 2**-10, 2**-7 * 1.5)


def brain_bits(values: np.ndarray) -> np.ndarray:
    """float32 rounded to bfloat16 by its bits: half a unit is added, less a bit where the last one kept is even."""
    bits = values.astype(np.float32).view(np.uint32).astype(np.uint64)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return kept.astype(np.uint32).view(np.float32)


def exactly_rounded(value: Fraction, digits: int, least_exponent: int) -> Fraction:
    """A positive rational to so many binary digits, ties to even, in rational arithmetic alone."""
    exponent = 0
    while value >= 2 ** (exponent + 1):
        exponent += 1
    while value < Fraction(2) ** exponent:
        exponent -= 1
    unit = Fraction(2) ** (max(exponent, least_exponent) - digits + 1)
    return round(value / unit) * unit


@pytest.mark.parametrize("name", NUMPY)
def test_rounding_is_numpys(name):
    rng = np.random.default_rng(1)
    values = rng.normal(size=4000) * 10.0 ** rng.uniform(-50, 45, 4000)
    with np.errstate(over="ignore"):
        halves = values.astype(np.float16).astype(float)
        # Ties among them.
        values = np.concatenate([values, halves * (1 + 2**-11), halves * (1 + 2**-24)])
        expected = values.astype(NUMPY[name]).astype(float)
    found = [FORMATS[name].rounded(float(value)) for value in values]
    np.testing.assert_array_equal(found, expected)


def test_rounding_to_bfloat16_is_that_of_its_bits():
    rng = np.random.default_rng(2)
    values = (rng.normal(size=4000) * 10.0 ** rng.uniform(-44, 38, 4000)).astype(np.float32)
    ties = (np.arange(1, 513) * 2.0**-9 + 1).astype(np.float32)
    for some in (values, ties):
        np.testing.assert_array_equal([BRAIN.rounded(float(value)) for value in some], brain_bits(some))


def test_what_is_rounded_to_infinity_and_to_zero_begins_where_it_says():
    for of in (HALF, BRAIN, SINGLE):
        assert of.rounded(of.overflow) == float("inf")
        assert of.rounded(of.overflow * (1 - 2**-30)) == of.largest
        assert of.rounded(of.underflow) == 0 < of.rounded(of.underflow * (1 + 2**-30))
    assert (HALF.overflow, HALF.underflow, HALF.smallest_normal) == (65520, 2**-25, 2**-14)
    finfo = torch.finfo(torch.bfloat16)
    assert (BRAIN.largest, BRAIN.smallest_normal) == (finfo.max, finfo.tiny)


def test_neighbours_of_a_format_are_those_of_its_bits():
    for value in (2.0**-14, 0.3, 1.0, 255.875, 65472.0):
        here = np.float16(value)
        above = float((here.view(np.uint16) + np.uint16(1)).view(np.float16))
        assert HALF.at(HALF.place(float(here)) + 1) == above
        assert HALF.at(HALF.place(float(here))) == here


@pytest.mark.parametrize("addend", ADDENDS)
@pytest.mark.parametrize("name", NUMPY)
def test_a_loop_is_worked_out_as_numpy_adds(name, addend):
    of, n = FORMATS[name], 20_000
    with np.errstate(over="ignore"):
        totals = np.add.accumulate(np.full(n, addend, NUMPY[name])).astype(float)
    for count in (1, 2, 3, 5, 17, 100, 333, 1000, 2047, 4099, 9999, n):
        assert add_in_a_loop(count, addend, of, of).total == totals[count - 1], count


@pytest.mark.parametrize("addend", [abs(addend) for addend in ADDENDS])
@pytest.mark.parametrize(
    ("accumulator", "addend_format", "digits"),
    [(BRAIN, BRAIN, 8), (BRAIN, HALF, 24), (HALF, BRAIN, 24), (HALF, SINGLE, 24), (BRAIN, SINGLE, 24)],
)
def test_a_loop_over_other_formats_is_worked_out_as_rational_numbers_add(accumulator, addend_format, digits, addend):
    term, total = Fraction(addend_format.rounded(addend)), Fraction(0)
    totals = []
    for _ in range(700):
        step = total + term
        if step:
            # Of two bfloat16, in bfloat16 at once; of different formats, in float32 first.
            step = exactly_rounded(step, digits, -126)
            total = exactly_rounded(step, accumulator.digits, 1 - accumulator.max_exponent)
        totals.append(total if total <= accumulator.largest else float("inf"))
    for count in (1, 2, 50, 127, 129, 350, 351, 700):
        found = add_in_a_loop(count, addend, accumulator, addend_format).total
        assert found == totals[count - 1] or found == float("inf") == totals[count - 1], count


def test_a_hundred_million_additions_are_worked_out_at_once_and_right():
    totals = np.add.accumulate(np.full(23_000_000, 0.01, np.float32))
    stalled_after = int(np.argmax(totals == totals[-1])) + 1
    found = add_in_a_loop(100_000_000, 0.01, SINGLE, SINGLE)
    assert (found.total, found.stalled_after) == (float(totals[-1]), stalled_after) == (262144.0, 22_918_663)
    assert stalls(0.01, SINGLE, SINGLE) == (262144.0, 22_918_663)
    assert stalls(100.0, HALF, HALF) is None


def test_pytorch_adds_as_it_is_worked_out_in_every_pair_of_formats():
    draw = random.Random(3)
    for one in FORMATS.values():
        for other in FORMATS.values():
            addend, n = draw.choice(ADDENDS), draw.randrange(1, 400)
            assert run_loop(n, addend, one, other, CPU) == add_in_a_loop(n, addend, one, other).total, (one, other)


def test_a_sum_of_pytorchs_is_rounded_once():
    for of in SMALL_FORMATS:
        for n in (7, 1000, 30_000):
            assert reduce(n, 0.01, of, of, CPU) == of.rounded(n * of.rounded(0.01))


def test_the_published_sums_are_ours():
    loops = {(each.accumulator, each.addend_dtype, each.is_cast) for each in load_accumulations()}
    assert len(loops) == 4
    for each in load_accumulations():
        found = published_sum([each], CPU)
        assert found.differing == {}
        assert found.total == add_in_a_loop(1000, 0.01, FORMATS[each.accumulator], FORMATS[each.addend_dtype]).total
    exact = {found.total for each in load_accumulations() for found in [published_sum([each], CPU)]}
    assert exact == {9.953125, 10.00213623046875, 10.000133514404297}


def test_a_sum_that_is_not_the_published_one_says_how():
    of = PublishedSum(
        accumulator="float16", addend_dtype="float16", is_cast=False, n=1000, addend=0.01, total=9.953125,
        published={"001": "9.953125", "003": "9.9532"},
    )  # fmt: skip
    assert of.differing == {"9.9532": "9.9531"}


def test_a_device_that_adds_otherwise_is_told_of(monkeypatch):
    monkeypatch.setattr("lmbench.numerics.experiment.sums.run_loop", lambda *_: 9.96)
    assert not sum_up(1000, 0.01, HALF, HALF, CPU).is_exact


@pytest.mark.parametrize("of", [HALF, BRAIN], ids=lambda of: of.name)
def test_a_search_finds_the_very_neighbours(of):
    draw = random.Random(4)
    for _ in range(50):
        places = sorted(draw.sample(range(of.place(of.smallest_normal) + 1, of.place(of.largest)), 2))
        low, high = map(of.at, places)
        if high < low * 2**9:
            continue
        below, above = find_edges(lambda x, low=low, high=high: low <= x <= high, of)
        assert (below.holds_to, of.place(below.fails_from)) == (low, places[0] - 1)
        assert (above.holds_to, of.place(above.fails_from)) == (high, places[1] + 1)
    assert find_edges(lambda x: True, of) == (None, None)
    assert find_edges(lambda x: False, of) == (None, Edge(None, of.smallest_normal))


def found_for(width: int = 1024, eps: float = 1e-5) -> dict[tuple[str, str, str], Threshold]:
    setting = Setting(width, eps, CPU)
    with torch.inference_mode():
        rows = [row for case in CASES for of in SMALL_FORMATS for row in thresholds(case, of, setting)]
    return {(row.name, row.dtype, row.side): row for row in rows}


@pytest.mark.parametrize(("width", "eps"), [(1024, 1e-5), (64, 1e-12), (4098, 0.0)])
def test_operators_fail_where_their_formulas_say(width, eps):
    rows = [row for row in found_for(width, eps).values() if row.formula is not None]
    assert len(rows) == (23 if eps == 0 else 20 if eps == 1e-12 else 17)
    for row in rows:
        near, far = sorted((row.holds_to, row.fails_from))
        # A mean of squares in bfloat16 may be rounded up on the way.
        assert near * (1 - 2**-8) <= row.formula <= far * (1 + 2**-8), row


def test_between_its_edges_an_operator_holds_and_nowhere_else():
    setting = Setting(64, 1e-12, CPU)
    for case in CASES:
        for of in SMALL_FORMATS:
            edges = [row for row in thresholds(case, of, setting) if row.fails_from is not None]
            x_format = case.x_format or of
            for exponent in range(1 - x_format.max_exponent, x_format.max_exponent + 1):
                x = 2.0**exponent
                outside = any(x >= row.fails_from if row.side == "above" else x <= row.fails_from for row in edges)
                assert outside == (failure(case, x, of, setting) is not None), (case.operator, case.form, of.name, x)


def test_norms_in_float16_fail_where_numpys_squares_overflow():
    rows = found_for()
    numbers = np.arange(1, 0x7C00, dtype=np.uint16).view(np.float16)
    with np.errstate(over="ignore"):
        squares_hold = numbers[np.isfinite(numbers * numbers)].max()
        powers_hold = numbers[np.isfinite(np.exp(numbers))].max()
        powers_left = numbers[np.exp(-numbers) > 0].max()
    assert squares_hold == 255.875
    for name in ("LayerNorm: written out", "RMSNorm: written out"):
        row = rows[name, "float16", "above"]
        assert (row.holds_to, row.fails_from, row.first, row.gives) == (squares_hold, 256, "square", "0")
    softmax = rows["softmax: exp / sum, a logit", "float16", "above"]
    assert (softmax.holds_to, softmax.first, softmax.gives) == (powers_hold, "exponential", "nan")
    assert rows["softmax: torch", "float16", "above"].holds_to == powers_left
    loss = rows["cross entropy: -log(softmax)", "float16", "above"]
    assert (loss.holds_to, loss.first, loss.gives) == (powers_left, "softmax", "inf")
    assert rows["RMSNorm: sum / width", "float16", "above"].fails_from == 8


def test_what_adds_in_float32_holds_in_float16():
    rows = found_for()
    for name in ("LayerNorm: torch", "RMSNorm: torch", "RMSNorm: lmbench", "cross entropy: lmbench"):
        assert rows[name, "float16", "above"].fails_from is None
        assert (name, "float16", "below") not in rows


def test_an_epsilon_that_is_zero_lets_small_inputs_divide_by_zero():
    rows = found_for(eps=1e-12)
    row = rows["RMSNorm: written out", "float16", "below"]
    assert (row.gives, row.first) == ("inf", "square")
    assert row.holds_to > 2**-12.5 >= row.fails_from
    assert ("RMSNorm: lmbench", "float16", "below") not in rows
    eps = rows["eps of a norm: written out", "float16", "below"]
    assert (eps.fails_from, eps.gives) == (2.0**-25, "nan")


def test_a_sum_that_overflows_whatever_is_added_holds_for_nothing():
    (case,) = (case for case in CASES if case.form == "exp / sum, all")
    (row,) = thresholds(case, HALF, Setting(2**17, 0.0, CPU))
    assert (row.holds_to, row.fails_from, row.first, row.gives) == (None, 2**-14, "sum", "0")


def test_a_wrong_operator_is_seen_however_it_is_wrong():
    def doubled(x, dtype, setting):
        row = setting.row(dtype, x)
        yield "double", row * 2 if x > 100 and dtype != torch.float64 else row

    (row,) = thresholds(Case("identity", "wrong", "all x", doubled), HALF, Setting(8, 0.0, CPU))
    assert (row.holds_to, row.fails_from, row.gives) == (100, 100.0625, "off by 2x or more")


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("numerics")
    page, svg = folder / "page.html", folder / "chart.svg"
    assert main(["numerics", "--device", "cpu", "--html", str(page), "--svg", str(svg)]) == 0
    return page, svg


def test_the_screen_answers_first_and_fits(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["numerics", "--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "-0.47 % in float16" in lines[0]
    assert "-60 %" in " ".join(lines[:2])
    assert any("|x| = 256" in line for line in lines[2:4])
    assert max(map(len, lines)) <= 80
    assert sum(line.endswith(" equal") for line in lines) == 4


def test_json_is_the_typed_record(capsys):
    words = ["--n", "2e3", "--addend", "100", "--accumulator", "float16", "--addend_dtype", "bfloat16", "--json"]
    assert main(["numerics", "--device", "cpu", "--width", "16", *words]) == 0
    found = decode(capsys.readouterr().out.encode(), Numerics)
    (each,) = found.sums
    assert (each.n, each.loop.total, each.reduction.total) == (2000, None, None)
    (both,) = found.curves
    assert [point.n for point in both.points][:4] == [10, 20, 50, 100]
    loop, reduction = error_chart(found).series
    assert (loop.points[-1].y, loop.points[-1].outcome) == (None, "inf")
    assert (reduction.points[0].y, reduction.points[0].outcome) == (None, "")
    assert published_table(found).rows[0][1].text == "9.953125"


def test_the_picture_stands_by_itself(written):
    text = written[1].read_text()
    assert text.startswith("<svg")
    assert "--series-6" in text.partition("<rect")[0]
    assert len(re.findall(r"<title>loop float16, n = ", text)) == 16


@needs_browser
def test_the_page_asks_for_nothing_and_fits_a_phone(written):
    seen = look(written[0], 390)
    assert seen["requests"] == []
    assert seen["scroll_width"] <= seen["client_width"] <= 390
    assert seen["charts"] == 1
    assert seen["smallest_text_px"] >= 8.5


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--accumulator", "floot16"], "choose one of float64, float32, bfloat16, float16; did you mean"),
        (["--addend_dtype", "int8"], "--addend_dtype is 'int8'"),
        (["--n", "1e9"], "from 1 to 100,000,000"),
        (["--n", "0"], "from 1 to"),
        (["--n", "2.5"], "no whole number"),
        (["--n", "inf"], "no whole number"),
        (["--addend", "nan"], "finite number other than 0"),
        (["--addend", "inf"], "finite number other than 0"),
        (["--addend", "0"], "finite number other than 0"),
        (["--addend", "1e6", "--device", "cpu"], "infinite in float16, whose largest number is 65504"),
        (["--addend", "1e300", "--accumulator", "float32", "--device", "cpu"], "infinite in float32"),
        (["--width", "1"], "--width is 1"),
        (["--width", "1025"], "an even number"),
        (["--eps", "-1"], "--eps is -1"),
        (["--eps", "nan"], "--eps is nan"),
        (["--device", "tpu"], "choose cuda or cpu"),
        (["--html", "/nope/x.html"], "cannot be written"),
    ],
)
def test_mistakes_are_one_line(words, told, capsys):
    assert main(["numerics", *words]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.count("\n") == 1
    assert told in printed.err


def test_json_alone_is_on_standard_output(written, tmp_path, capsys):
    words = ["--json", "--n", "10", "--width", "2", "--accumulator", "float16", "--addend_dtype", "float16"]
    assert main(["numerics", "--device", "cpu", *words, "--svg", str(tmp_path / "x.svg")]) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out)["width"] == 2
    assert printed.err.endswith("x.svg\n")
