"""What `lmbench kernels` says of a trace: first the answer, then tables and what was recorded; the screen holds the
answer, and the rest for the asking."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from rich.console import Console

from lmbench.kernels.roofline import Roofline, roofline_lines
from lmbench.kernels.tables import counted, run_line, shows_parts, tables, whole_name
from lmbench.kernels.trace.completeness import Completeness
from lmbench.kernels.trace.findings import Findings
from lmbench.kernels.trace.kinds import UNCLASSIFIED
from lmbench.kernels.trace.phases import OUTSIDE
from lmbench.kernels.trace.verdicts import PhaseVerdict
from lmbench.records.guard import not_passed
from lmbench.report.chosen import Chosen, more, print_chosen
from lmbench.report.markdown import parts_to_markdown
from lmbench.report.table import BLANK, Line, Part, Table
from lmbench.report.text import KERNEL_WIDTH, shortened
from lmbench.report.units import milliseconds, percent

#: Phases that have their advice in the answer, parts, kinds and operators that are named in it.
_ADVISED, _NAMED = 3, 3
# Idle shares of the clock and between a device's first kernel and its last that differ by more are both said.
_SAME_IDLE_FRACTION = 0.01
_OPERATORS = "operators on the host are shown, with the time of each without those inside it"


def print_findings(found: Findings, top: int, roof: Roofline | None, chosen: Chosen, console: Console) -> None:
    """Print the answer, or the tables that were chosen instead, or everything.

    Raises:
        UsageError: a table was chosen that there is none of.
    """
    made = tables(found, top, roof)
    short = [*answer(found), more(made)]
    print_chosen(chosen, made, _everything(found, made, roof), short, console, whole=("trace",))


def to_markdown(found: Findings, top: int, roof: Roofline | None) -> str:
    """All of it as Markdown."""
    return parts_to_markdown(_everything(found, tables(found, top, roof), roof))


def _everything(found: Findings, made: Sequence[Table], roof: Roofline | None) -> list[Part]:
    return [*answer(found), *made, BLANK, *facts(found, roof)]


def answer(found: Findings) -> list[Line]:
    """Was the device working, phase by phase, with what to do; what took the most; and what keeps that from being
    true."""
    lines = [("run", run_line(found.run))] if found.run is not None else [("trace", str(found.path))]
    if not found.has_kernels:
        return [
            *lines, *_source(found), ("note", f"no kernels in this trace: {found.why_no_kernels}; {_OPERATORS}"),
            *_operators(found), *_warnings(found),
        ]  # fmt: skip
    lines += [*_device(found), *_verdicts(found), ("kinds", _most(found, found.step.kinds_s))]
    if shows_parts(found):
        lines.append(("parts", _most(found, found.step.parts_s)))
    return [*lines, *_source(found), *_warnings(found)]


def _verdicts(found: Findings) -> list[Line]:
    """A line with its figures for each phase that is judged, and advice for those that take longest."""
    judged = [one for one in found.verdicts if one.verdict is not None]
    longest = sorted(judged, key=lambda one: -one.clock.window_s)[:_ADVISED]
    lines: list[Line] = []
    for one in judged:
        lag = f" (without the profiler {one.lag_verdict})" if one.lag_verdict not in (None, one.verdict) else ""
        lines.append((one.phase, f"{one.verdict}{lag}: {_figures(one)}"))
        if one in longest:
            lines.append(("", one.advice))
    return lines


def _figures(one: PhaseVerdict) -> str:
    clock = one.clock
    busy = f"busy {milliseconds(clock.busy_s)} of {milliseconds(clock.window_s)} ms"
    idle = {"waits for the host": clock.wait_fraction}
    if one.verdict == "stalled":
        idle |= {"has gaps": clock.gap_fraction, "idles for something else": clock.other_fraction}
    return ", ".join([busy, *(f"{words} in {percent(share)}" for words, share in idle.items())])


def _most(found: Findings, sums: Mapping[str, float]) -> str:
    """Those that take most of all kernel time."""
    longest = sorted(sums.items(), key=lambda item: -item[1])[:_NAMED]
    total_s = found.step.kernel_s
    shares = ", ".join(f"{name} {percent(seconds / total_s if total_s else None)}" for name, seconds in longest)
    return f"{shares} of kernel time"


def _operators(found: Findings) -> list[Line]:
    """The operators that take most of each phase."""
    return [
        (phase, ", ".join(f"{row.name} {percent(row.share_fraction)}" for row in rows[:_NAMED]))
        for phase, rows in found.operators.items()
        if rows
    ]


def _warnings(found: Findings) -> list[Line]:
    lines: list[Line] = []
    for guard in not_passed(found.guards):
        lines += [(guard.status.upper(), guard.message), ("", guard.advice)]
    return lines


def facts(found: Findings, roof: Roofline | None) -> list[Line]:
    """What was recorded, what verdicts rest on, what must be said of the roofline, and how the guards ended."""
    lines: list[Line] = [("trace", str(found.path))] if found.run is not None else []
    if found.has_kernels:
        steps = counted(found.steps, "step") if found.has_step_count else "steps unknown"
        captured = f"{milliseconds(found.captured_s)} ms in {counted(found.completeness.kernels, 'kernel')}, {steps}"
        lines += [("captured", captured), _completeness(found.completeness), ("matmul", _matmul(found)), *_parts(found)]
    lines += _idle_within(found)
    for one in found.verdicts:
        if one.verdict is None:
            continue
        lines.append((one.phase, f"{one.verdict}: {one.reason}"))
        lines.append(("", one.advice))
        if one.lag_verdict == one.verdict:
            lines.append(("", f"the lag of the unprofiled steps agrees (smallest {milliseconds(one.min_lag_s)} ms)"))
        elif one.lag_verdict:
            lag = f"the lag of the unprofiled steps says {one.lag_verdict} (smallest {milliseconds(one.min_lag_s)} ms)"
            lines.append(("", f"{lag}; {one.agreement}"))
    lines += roofline_lines(roof) if roof else []
    if found.guards:
        tally = Counter(guard.status for guard in found.guards)
        lines.append(("guards", ", ".join(f"{count} {status}" for status, count in tally.items())))
    return lines


def _device(found: Findings) -> list[Line]:
    """How much of each device's time was idle, and for what; and its communication."""
    lines: list[Line] = []
    per = " per step" if found.has_step_count else ""
    devices = found.clocks.devices
    for one in devices:
        reasons = (
            f"{percent(one.wait_fraction)} waiting for the host",
            f"{percent(one.gap_fraction)} between queued kernels",
            f"{percent(one.other_fraction)} other",
        )
        busy = f"busy {milliseconds(one.busy_s)} of {milliseconds(one.window_s)} ms{per}"
        idle = f"{busy}, idle {percent(one.idle_fraction)}: {', '.join(reasons)}"
        lines.append(("device" if len(devices) == 1 else f"device {one.device}", idle))
        if one.comm_s:
            hidden = f"{milliseconds(one.comm_overlapped_s)} ms beside kernels that compute"
            exposed = f"{milliseconds(one.comm_exposed_s)} ms exposed"
            lines.append(("", f"communication {milliseconds(one.comm_s)} ms{per}, {hidden}, {exposed}"))
    return lines


def _idle_within(found: Findings) -> list[Line]:
    """Idle time of the stretch that has kernels, where it is another than that of the whole."""
    return [
        (f"device {one.device}", f"idle between its first kernel and its last {percent(one.idle_within_fraction)}")
        for one in found.clocks.devices
        if abs((one.idle_fraction or 0.0) - one.idle_within_fraction) > _SAME_IDLE_FRACTION
    ]


def _completeness(count: Completeness) -> Line:
    """Whether launches and kernels belong together, in one line."""
    alone = count.kernels_without_launch
    told = [counted(count.kernels, "kernel"), f"{alone:,} without launch" if alone else "each with its launch"]
    if count.launched_before:
        told.append(f"{count.launched_before:,} of them launched before the trace began")
    if count.launches_without_kernel:
        told.append(f"{counted(count.launches_without_kernel, 'launch', 'launches')} without kernel")
    if count.captured_launches:
        told.append(f"{counted(count.captured_launches, 'launch', 'launches')} into a graph")
    if count.empty_fills:
        told.append(f"{counted(count.empty_fills, 'fill')} of no bytes")
    early = f"{count.kernels_before_launch:,} up to {count.worst_early_s * 1e6:,.1f} us before it"
    told.append(early if count.kernels_before_launch else "none before it")
    is_whole = not (alone or count.launches_without_kernel or count.kernels_before_launch)
    return "complete" if is_whole else "incomplete", ", ".join(told)


def _matmul(found: Findings) -> str:
    named = {name if name != "step" else whole_name(found): share for name, share in found.matmul_fractions.items()}
    shares = [f"{percent(share)} of {name}" for name, share in named.items()]
    text, other = ", ".join(shares), found.step.top_other
    if other is not None:
        text += f"; top other kernel {shortened(other.short_name, KERNEL_WIDTH)}, {percent(other.share_fraction)}"
    return text


def _source(found: Findings) -> list[Line]:
    if found.phase_source == "foreign":
        told = "not recorded by lmbench: by the ranges of Lightning and PyTorch"
        if inferred := " and ".join(found.inferred_phases):
            told = f"{inferred} inferred from what autograd runs, the others by the ranges of Lightning and PyTorch"
        present = {share.phase for share in found.phases} | found.operators.keys()
        if OUTSIDE in present and "forward" not in present:
            untold = "forward: it is outside" if "backward" in present else "forward and backward: they are outside"
            told += f"; nothing in the trace tells {untold}"
        return [("phases", told)]
    if found.phase_source == "none":
        return [("phases", "the trace shows no ranges of phases and no backward pass: everything is outside")]
    return []


def _parts(found: Findings) -> list[Line]:
    if not shows_parts(found):
        unknown = percent(found.step.parts_s.get(UNCLASSIFIED, 0.0) / found.step.kernel_s)
        why = "no range of a module" if found.has_modules else "the trace has no ranges of modules, and no operator"
        return [("parts", f"not shown: {why} tells what {unknown} of kernel time is for")]
    told = "the trace has no ranges of modules: only operators tell them, and what they do not tell is unclassified"
    return [] if found.has_modules else [("parts", told)]
