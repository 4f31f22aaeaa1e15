"""What `lmbench numerics` found, as people read it: two answers, three tables, and what to do."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Console

from lmbench.numerics.formats import FORMATS
from lmbench.numerics.record import Numerics, PublishedSum, Summation, Threshold
from lmbench.report.screen import print_parts
from lmbench.report.table import BLANK, Entry, Line, Table, fact, numbers, words
from lmbench.report.units import MISSING

_HALVES = ("float16", "bfloat16")
_INFINITE = "inf"
_FROM = {"above": "from", "below": "up to"}


def print_numerics(found: Numerics, console: Console) -> None:
    """Print the answers, the tables and the advice."""
    made = (sum_table(found), published_table(found), threshold_table(found))
    print_parts([*answers(found), *made, BLANK, *closing(found)], console)


def answers(found: Numerics) -> list[Line]:
    """How wrong a sum is, and when norms overflow, in a line each; then where that was seen."""
    environment = found.environment
    halves = [each for each in found.sums if each.accumulator in _HALVES] or found.sums
    device = environment.gpu.name or environment.host.cpu_model or "CPU"
    return [
        ("sums", f"{subject(found)} in a loop: {'; '.join(_loop_told(each) for each in halves)}"),
        ("norms", _norms_told(found.thresholds)),
        ("device", f"{device}, torch {environment.versions.torch}"),
    ]


def subject(found: Numerics) -> str:
    """`1,000 x 0.01`."""
    return f"{found.n:,} x {found.addend:g}"


def _loop_told(of: Summation) -> str:
    name = of.accumulator if of.accumulator == of.addend_dtype else pair_name(of)
    stall = f", as it stalls at {of.stalls_at:g}" if of.stalls_after is not None and of.stalls_after < of.n else ""
    reduction = error_text(of.reduction.error_fraction)
    return f"{error_text(of.loop.error_fraction)} in {name}{stall} (torch.sum {reduction})"


def _norms_told(thresholds: Iterable[Threshold]) -> str:
    norms = [each for each in thresholds if each.operator.endswith("Norm") and each.dtype == _HALVES[0]]
    failing: dict[str, list[str]] = {}
    for each in norms:
        if each.fails_from is not None:
            told = f"({each.form}) -> {each.gives} {_FROM[each.side]} |x| = {each.fails_from:.4g}"
            failing.setdefault(told, []).append(each.operator)
    holding = dict.fromkeys(each.form for each in norms if each.fails_from is None)
    parts = [f"{' and '.join(operators)} {told}" for told, operators in failing.items()]
    return f"in float16: {'; '.join([*parts, *([', '.join(holding) + ': never'] if holding else [])])}"


def sum_table(found: Numerics) -> Table:
    """A row for each pair of formats."""
    caption = (
        f"{subject(found)} = {found.n * found.addend:.9g}, added one after the other and by torch.sum; "
        "stalls: where a loop that goes on grows no more"
    )
    headings = [*words("total += addend"), *numbers("loop", "error", "torch.sum", "error", "stalls at")]
    return Table("Sums", caption, headings, [_sum_row(each) for each in found.sums])


def _sum_row(of: Summation) -> list[Entry]:
    figures = [figure for each in (of.loop, of.reduction) for figure in (total_text(each.total), each.error_fraction)]
    texts = [figure if isinstance(figure, str) else error_text(figure) for figure in figures]
    stall = MISSING if of.stalls_at is None else f"{of.stalls_at:g}"
    return [fact(pair_name(of)), *map(Entry, (*texts, stall))]


def published_table(found: Numerics) -> Table:
    """A row for each published loop: its sum here beside the printed ones."""
    n, addend = found.published[0].n, found.published[0].addend
    sources = ", ".join(sorted({source for each in found.published for source in each.published}))
    caption = f"{n:,} x {addend:g} in a loop, run here; as printed by write-ups {sources} (lmbench/reference/README.md)"
    headings = [*words("total += addend"), *numbers("here", "published"), *words("")]
    return Table("Published", caption, headings, [_published_row(each) for each in found.published])


def _published_row(of: PublishedSum) -> list[Entry]:
    figures = ", ".join(dict.fromkeys(of.published.values()))
    differing = [f"{rounded} here, not {figure}" for figure, rounded in of.differing.items()]
    cast = ".float()" if of.is_cast else ""
    name = fact(f"{of.accumulator} += {of.addend_dtype}{cast}")
    return [name, Entry(repr(of.total)), Entry(figures), fact("; ".join(differing) or "equal")]


def threshold_table(found: Numerics) -> Table:
    """A row for each operator and form, float16 and bfloat16 side by side."""
    caption = (
        f"the x from which on the result is not finite, is 0 or off by 2x; rows of {found.width:,}, eps {found.eps:g}; "
        "x: norms' ±x, or how far small logits lie below the largest; formula, first: in float16, if it fails there"
    )
    headings = [*words("operator"), *numbers(_HALVES[0], "formula"), *words("fails first"), *numbers(_HALVES[1])]
    by_name: dict[str, list[Threshold]] = {}
    for each in found.thresholds:
        by_name.setdefault(each.name, []).append(each)
    rows = [_threshold_row(name, side, of) for name, of in by_name.items() for side in _sides(of)]
    return Table("Norms and softmax", caption, headings, rows)


def _sides(of: Iterable[Threshold]) -> list[str]:
    """The sides on which it fails in either format; one where there is none."""
    return sorted({each.side for each in of if each.fails_from is not None}) or ["above"]


def _threshold_row(name: str, side: str, of: Iterable[Threshold]) -> list[Entry]:
    failing = {each.dtype: each for each in of if each.side == side and each.fails_from is not None}
    here = failing.get(_HALVES[0])
    shown = here or failing.get(_HALVES[1])
    formula = None if here is None else here.formula
    return [
        fact(name),
        Entry(_edge(here)),
        Entry(MISSING if formula is None else f"{formula:.5g}" if formula > 1 else f"{formula:.3g}"),
        fact(MISSING if shown is None else f"{shown.first} -> {shown.gives}"),
        Entry(_edge(failing.get(_HALVES[1]))),
    ]


def _edge(of: Threshold | None) -> str:
    if of is None:
        return MISSING
    return f"{'≤' if of.side == 'below' else ''}{of.fails_from:.4g}"


def detail_table(found: Numerics) -> Table:
    """A row for each threshold, with all that is known of it."""
    headings = [
        *words("operator", "form", "input", "format"),
        *numbers("holds to", "fails from", "formula"),
        *words("fails first", "gives", "what to do"),
    ]
    caption = (
        "neighbours in the input's format, none where it holds for all normal numbers; formula: where it has to "
        "fail, none where that depends on a kernel"
    )
    return Table("Where each begins to fail", caption, headings, [_detail_row(each) for each in found.thresholds])


def _detail_row(of: Threshold) -> list[Entry]:
    about = map(fact, (of.operator, of.form, of.input, of.dtype))
    edges = [MISSING if edge is None else f"{edge:.6g}" for edge in (of.holds_to, of.fails_from, of.formula)]
    result = (of.first or MISSING, of.gives or MISSING, of.advice.partition(": ")[2] or MISSING)
    return [*about, *map(Entry, edges), *map(fact, result)]


def closing(found: Numerics) -> list[Line]:
    """What the addends are in their formats, what was not as worked out, and what to do."""
    held = {each.addend_dtype: each.rounded_addend for each in found.sums if each.rounded_addend != found.addend}
    addends = [f"{value:.7g} in {name} ({error_text(value / found.addend - 1)})" for name, value in held.items()]
    told = f"{found.addend:g} is {', '.join(addends)}: an error that no accumulator takes away"
    lines = [("addend", told)] if addends else []
    for each in found.sums:
        if not each.is_exact:
            lines.append(
                ("DIFFERS", f"{pair_name(each)}: {each.tried_additions:,} additions in PyTorch gave another sum here")
            )
    half = FORMATS[_HALVES[0]]
    if half.rounded(found.eps) and found.eps < half.smallest_normal:
        is_held = f"it is {half.rounded(found.eps):.5g} there, and 0 where subnormal numbers are flushed"
        lines.append(
            ("eps", f"{found.eps:g} is below float16's smallest normal number, {half.smallest_normal:.2g}: {is_held}")
        )
    advice = dict.fromkeys(each.advice for each in found.thresholds if each.advice)
    return [*lines, *(("" if at else "do", each) for at, each in enumerate(advice))]


def pair_name(of: Summation) -> str:
    return f"{of.accumulator} += {of.addend_dtype}"


def total_text(total: float | None) -> str:
    """A sum with the digits that float32 has; `inf` where there is none."""
    return _INFINITE if total is None else f"{total:.8g}"


def error_text(fraction: float | None) -> str:
    """A relative error in percent with two digits or to the whole percent; `inf` where the sum is."""
    if fraction is None:
        return _INFINITE
    percent = fraction * 100
    return "0" if fraction == 0 else f"{percent:+,.0f} %" if abs(percent) >= 10 else f"{percent:+.2g} %"
