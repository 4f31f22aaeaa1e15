"""A forecast as people read it: a table of each phase's peak by category, and a verdict in a sentence."""

from __future__ import annotations

from rich.console import Console

from lmbench.memory.categories import CATEGORIES, CATEGORY_LABELS
from lmbench.memory.forecast import Forecast, Gpu, Largest, PhasePeak
from lmbench.report.screen import print_line, print_table
from lmbench.report.table import Entry, Table, fact, numbers, words
from lmbench.report.units import MISSING, count, gib, gib_number

#: Less is nothing in GiB with three decimals.
_LEAST_BYTES = 2**19
#: The phases that do the work; what is between them never has a peak of its own.
_SHOWN = ("forward", "backward", "clip", "optimizer")


def print_forecast(made: Forecast, console: Console) -> None:
    """Print the table, and below it what reaches the peak, whether it fits and what else would."""
    print_table(forecast_table(made), console)
    console.out("")
    highest = made.highest
    peak = f"{gib(highest.peak.total_bytes)} in {highest.phase}, at {highest.operator}"
    print_line("peak", f"{peak}; {gib(made.reserved_bytes)} reserved", console)
    print_line("verdict", verdict(made), console)
    for note in made.notes:
        print_line("note", note, console)
    print_line("predicted", f"from {made.method}, in {made.took_s:.0f} s, without a GPU", console)


def forecast_table(made: Forecast) -> Table:
    """Categories by phase, in GiB."""
    shown = [each for each in made.phases if each.phase in _SHOWN and _is_own(made, each)]
    rows = [
        [fact(CATEGORY_LABELS[category]), *(_entry(each.peak.get(category)) for each in shown)]
        for category in CATEGORIES
        if any(each.peak.get(category) >= _LEAST_BYTES for each in shown)
    ]
    rows.append([fact("all"), *(Entry(gib_number(each.peak.total_bytes)) for each in shown)])
    context = "" if made.context_length is None else f", context {count(made.context_length)}"
    compiled = "compiled" if made.is_compiled else "eager"
    caption = f"batch {made.batch_size}{context}, {made.precision}, {compiled}, zero_grad {made.zero_grad}; GiB"
    headings = [*words("category"), *numbers(*(each.phase for each in shown))]
    return Table("Predicted peak of each phase", caption, headings, rows, has_total=True)


def _is_own(made: Forecast, each: PhasePeak) -> bool:
    """Clipping that does not happen has a border all the same."""
    before = next((one for one in made.phases if one.phase == "optimizer"), None)
    return each.phase != "clip" or before is None or each.peak.total_bytes > before.peak.total_bytes


def _entry(size_bytes: int) -> Entry:
    return Entry(gib_number(size_bytes) if size_bytes >= _LEAST_BYTES else MISSING)


def verdict(made: Forecast) -> str:
    """Whether it fits, and the largest batch and context that do."""
    gpu = made.gpu
    if gpu is None:
        return "no GPU here: name one with --gpu, as in --gpu H200, and it is said whether this fits and what does"
    said = "fits" if made.fits else "does not fit"
    told = [f"{said} on {gpu.name} ({_size(gpu)})"]
    if made.largest_batch_size is not None:
        told.append(_largest("batch", made.largest_batch_size))
    if made.largest_context_length is not None:
        told.append(_largest("context", made.largest_context_length))
    return "; ".join(told)


def _size(gpu: Gpu) -> str:
    return f"{gib(gpu.total_bytes)} here" if gpu.is_here else f"about {gib(gpu.total_bytes)} of it"


def _largest(what: str, found: Largest) -> str:
    if found.value is None:
        return f"no {what} does, not even the smallest"
    more = " and above" if found.has_more else ""
    return f"largest {what} {found.value:,}{more} ({gib(found.reserved_bytes)} reserved)"
