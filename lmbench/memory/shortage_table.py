"""A lack of memory as people read it: what was held, and a row for each change with its predicted peak."""

from __future__ import annotations

import shlex
from textwrap import shorten

import msgspec
from rich.console import Console

from lmbench.memory.forecast import Forecast
from lmbench.memory.shortage import EXPANDABLE, Remedy, Shortage
from lmbench.report.screen import print_line, print_table
from lmbench.report.table import Entry, Table, fact, numbers, words
from lmbench.report.units import MISSING, gib, gib_number


def print_shortage(found: Shortage, console: Console) -> None:
    """Print what happened, what was held, and what would fit."""
    for name, text in happened(found):
        print_line(name, text, console)
    if found.remedies or found.as_it_is.forecast is not None:
        console.out("")
        print_table(remedies_table(found), console)
        console.out("")
        for reason in dict.fromkeys(each.reason for each in (found.as_it_is, *found.remedies) if each.reason):
            print_line("not known", reason, console)
    print_line("do", advice(found), console)


def as_record(found: Shortage) -> object:
    """All of it for JSON, bytes as in the record."""
    told = {
        "error": found.run.error,
        "refused": found.refused,
        "unused_bytes": found.unused_bytes,
        "gpu": found.gpu,
        "as_it_is": found.as_it_is,
        "remedies": found.remedies,
        "advice": advice(found),
    }
    return msgspec.to_builtins(told)


def happened(found: Shortage) -> list[tuple[str, str]]:
    """What was asked for where, what the device held, and what was predicted."""
    error, held, memory = found.run.error, found.refused, found.run.memory
    where = f" in {error.phase}" if error and error.phase else ""
    message = shorten(error.message or "", 160, placeholder=" ...") if error else "nothing more is known"
    lines = [("outcome", f"out of memory{where}: {message}")]
    if held is None:
        if error and error.where == "host":
            lines.append(
                ("whose", "the host's memory, not the device's: fewer or smaller loader workers, or more of it")
            )
        return lines
    asked = gib(held.requested_bytes)
    lines.append(("asked", f"{asked} more in {held.phase}, with {gib(held.device_free_bytes)} free"))
    parts = [
        ("parameters", held.parameters_bytes),
        ("gradients", held.gradients_bytes),
        ("optimizer state", held.optimizer_state_bytes),
        ("activations and the rest", held.rest_bytes),
    ]
    told = ", ".join(f"{name} {gib(size)}" for name, size in parts if size)
    lines.append(("held", f"{gib(held.allocated_bytes)} of {gib(memory.device_total_bytes)}: {told}"))
    lines.append(("fragmented", f"{gib(found.unused_bytes)} reserved and not allocated"))
    return lines


def remedies_table(found: Shortage) -> Table:
    """The run as it is and each change: predicted peak, what the allocator will reserve, and whether that fits."""
    gpu = found.gpu
    caption = f"on {gpu.name} with {gib(gpu.total_bytes)}; GiB" if gpu is not None else "GiB"
    headings = [*words("options"), *numbers("peak", "reserved"), *words("fits")]
    rows = [
        [fact(_options(each) or each.change), *_sizes(each.forecast), fact(_fits(each))]
        for each in (found.as_it_is, *found.remedies)
    ]
    return Table("What would fit, predicted", caption, headings, rows)


def _options(each: Remedy) -> str:
    """A change as its options, without what all of them begin with."""
    return " ".join(word.removeprefix("--") for word in each.words)


def _sizes(made: Forecast | None) -> list[Entry]:
    if made is None:
        return [Entry(MISSING), Entry(MISSING)]
    return [Entry(gib_number(made.highest.peak.total_bytes)), Entry(gib_number(made.reserved_bytes))]


def _fits(each: Remedy) -> str:
    if each.forecast is None:
        return "not known"
    return {True: "yes", False: "no", None: ""}[each.forecast.fits]


def advice(found: Shortage) -> str:
    """The first thing to do, in a sentence."""
    if found.is_fragmented:
        return f"{EXPANDABLE}: what was asked for is there, in pieces; set it before the run"
    error = found.run.error
    if found.refused is None and error is not None and error.where == "host":
        return "give the host more memory, or let loaders keep less of it"
    fitting = [each for each in found.remedies if each.forecast is not None and each.forecast.fits]
    if fitting:
        # The one with the highest peak changes the least that has to be changed.
        least = max(fitting, key=lambda each: each.forecast.highest.peak.total_bytes if each.forecast else 0)
        return f"{least.change}: {shlex.join(least.words)}"
    made = found.as_it_is.forecast
    if made is not None and made.largest_batch_size is not None and made.largest_batch_size.value:
        return f"a batch of {made.largest_batch_size.value} fits: --data.batch_size={made.largest_batch_size.value}"
    if any(each.forecast is not None for each in found.remedies):
        return "none of these is enough alone; combine them, and ask: lmbench memory --config CONFIG OPTIONS"
    return "nothing could be predicted; make the batch or the context smaller"
