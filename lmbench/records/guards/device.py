"""Guards on the device's state over the window: caps, clock, neighbours, allocator."""

from __future__ import annotations

from collections.abc import Sequence

from lmbench.records.guards.guard import Guard, at_most, not_applicable
from lmbench.records.paths import lookup, number
from lmbench.records.vocabulary import Record

#: Share of the window under a cap from which it is worth a word.
CAPPED_LIMIT_FRACTION = 0.01
CLOCK_DROP_LIMIT_FRACTION = 0.05

_MIB = 2**20


def power_cap(run: Record, steps: Sequence[Record]) -> Guard:
    """Warns if the power limit held the clock down for over 1 % of the window."""
    limit = number(run, "environment.gpu.power_limit_w")
    at = "" if limit is None else f" of {limit:.0f} W"
    advice = (
        f"This is the card's speed at its power limit{at}: compare only with windows as long and cards with "
        "the same limit, and expect shorter bursts to be faster."
    )
    return _capped("power_cap", run, "device_state.power_capped_fraction", f"its power limit{at}", advice)


def thermal_cap(run: Record, steps: Sequence[Record]) -> Guard:
    """Warns if temperature held the clock down for over 1 % of the window."""
    celsius = number(run, "device_state.close.temperature_c")
    at = "" if celsius is None else f" ({celsius:.0f} °C at the end)"
    advice = "Cool the card, or let it settle with a longer warm-up; times depend on its temperature now."
    return _capped("thermal_cap", run, "device_state.thermal_capped_fraction", f"temperature{at}", advice)


def _capped(name: str, run: Record, path: str, what: str, advice: str) -> Guard:
    value = number(run, path)
    if value is None:
        return not_applicable(name, _no_counter(run))
    message = f"{what} held the clock down for {value:.1%} of the window"
    return at_most(name, value, CAPPED_LIMIT_FRACTION, "fraction", message, advice=advice)


def sm_clock_drop(run: Record, steps: Sequence[Record]) -> Guard:
    """Warns if the SM clock fell by over 5 % from the window's start to its end."""
    name = "sm_clock_drop"
    value = number(run, "device_state.sm_clock_drop_fraction")
    if value is None:
        return not_applicable(name, _no_counter(run))
    clocks = [number(run, f"device_state.{end}.sm_clock_hz") for end in ("open", "close")]
    message = f"the SM clock fell by {value:.1%}" if value > 0 else "the SM clock did not fall"
    if None not in clocks:
        message += f" ({' -> '.join(f'{clock / 1e6:.0f}' for clock in clocks if clock is not None)} MHz)"
    advice = "Warm up for longer, so that the clock settles before the window; its mean mixes two speeds."
    return at_most(name, value, CLOCK_DROP_LIMIT_FRACTION, "fraction", message, advice=advice)


def other_processes(run: Record, steps: Sequence[Record]) -> Guard:
    """Warns if other processes had the GPU open at either end of the window."""
    name = "other_processes"
    count = number(run, "device_state.other_process_count")
    if count is None:
        hidden = "the driver does not show this machine's processes"
        return not_applicable(name, hidden if run.get("device_type") == "cuda" else _no_counter(run))
    pids = {pid for end in ("open", "close") for pid in lookup(run, f"device_state.{end}.other_process_pids") or ()}
    message = f"{count:.0f} other processes on the GPU" + (f": pid {_joined(pids)}" if pids else "")
    advice = "End them or take another GPU: they share its time, memory and power."
    return at_most(name, count, 0, "count", message, advice=advice)


def allocator_growth(run: Record, steps: Sequence[Record]) -> Guard:
    """Warns if the allocator took more memory from the device within the window."""
    name = "allocator_growth"
    growth = number(run, "memory.window_reserved_growth_bytes")
    if growth is None:
        return not_applicable(name, "no caching allocator was read")
    message = f"reserved memory grew by {growth / _MIB:.0f} MiB in the window"
    advice = (
        "Warm up for longer: an allocation from the device waits for it. If it never ends, memory leaks or fragments."
    )
    return at_most(name, growth, 0, "bytes", message, advice=advice)


def allocator_retries(run: Record, steps: Sequence[Record]) -> Guard:
    """Warns if an allocation within the window worked only after the cache was emptied."""
    name = "allocator_retries"
    count = number(run, "memory.window_alloc_retry_count")
    if count is None:
        return not_applicable(name, "no caching allocator was read")
    message = f"{count:.0f} allocations in the window needed the cache emptied"
    advice = (
        "Memory is nearly full: take a smaller batch, or PYTORCH_ALLOC_CONF=expandable_segments:True against fragments."
    )
    return at_most(name, count, 0, "count", message, advice=advice)


def _no_counter(run: Record) -> str:
    return "the card does not report it" if run.get("device_type") == "cuda" else "not a CUDA device"


def _joined(pids: set[int]) -> str:
    return ", ".join(map(str, sorted(pids)))
