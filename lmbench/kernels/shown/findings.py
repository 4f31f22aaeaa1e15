"""What a trace shows, as people read it: on the screen, as Markdown, and its kernels as CSV."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable
from typing import Any

from rich.console import Console

from lmbench.kernels.shown.roofline import Roofline
from lmbench.kernels.shown.roofline_table import roofline_lines, roofline_table
from lmbench.kernels.shown.screen import Line, lines_as_markdown, print_lines, print_table
from lmbench.kernels.shown.tables import (
    attention_table,
    clock_table,
    kernel_tables,
    launch_table,
    operator_tables,
    phase_table,
    share_table,
)
from lmbench.kernels.trace.completeness import Completeness
from lmbench.kernels.trace.findings import Findings, kernel_record
from lmbench.kernels.trace.kinds import KINDS
from lmbench.kernels.trace.parts import part_order
from lmbench.records.guards.guard import Guard
from lmbench.records.paths import lookup
from lmbench.report.markdown import table_lines
from lmbench.report.table import Table
from lmbench.report.terminal import top_other_words
from lmbench.report.text import shown
from lmbench.report.units import milliseconds, percent

_OPERATORS = "below are operators on the host, with the time of each without those inside it"


def print_findings(found: Findings, top: int, console: Console, roof: Roofline | None = None) -> None:
    """Print all tables, readable at 80 columns."""
    print_lines(head(found), console)
    for table in tables(found, top, roof):
        print_table(table, console)
    console.out("")
    print_lines(_closing(found, roof), console)


def to_markdown(found: Findings, top: int, roof: Roofline | None = None) -> str:
    """The same as Markdown, ready to paste; ends in a line feed."""
    lines = lines_as_markdown(head(found))
    for table in tables(found, top, roof):
        lines += ["", *table_lines(table)]
    return "\n".join([*lines, "", *lines_as_markdown(_closing(found, roof))]).rstrip() + "\n"


def _closing(found: Findings, roof: Roofline | None) -> list[Line]:
    return [*(roofline_lines(roof) if roof else []), *remarks(found)]


def to_csv(found: Findings) -> str:
    """Every kernel of every phase, a row each, in SI units; of a trace without kernels its operators."""
    stream = io.StringIO()
    if found.has_kernels:
        names = ["phase", "name", "short_name", "kind", "parts_s", "total_s", "share_fraction", "instances", "mean_s"]
        rows = [_kernel_fields(kernel_record(row)) for phase in found.phases for row in phase.rows]
    else:
        names = ["phase", "name", "self_s", "share_fraction", "calls", "mean_s"]
        rows = [dict(vars(row)) for of_phase in found.operators.values() for row in of_phase]
    writer = csv.DictWriter(stream, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: shown(value) if isinstance(value, str) else value for name, value in row.items()})
    return stream.getvalue()


def _kernel_fields(record: dict[str, Any]) -> dict[str, Any]:
    parts = "; ".join(f"{part} {seconds:.9g}" for part, seconds in record["parts_s"].items())
    return {**record, "parts_s": parts}


def tables(found: Findings, top: int, roof: Roofline | None = None) -> list[Table]:
    """All tables that this trace, and what its kernels attain, have something for."""
    if not found.has_kernels:
        return operator_tables(found, top)
    kinds = share_table(found, "kind", lambda share: share.kinds_s, KINDS.index)
    parts = share_table(found, "part", lambda share: share.parts_s, part_order)
    made = [phase_table(found), kinds, parts, *kernel_tables(found, top)]
    if found.clocks.phases:
        made += [clock_table(found), launch_table(found)]
    if found.attention:
        made.append(attention_table(found))
    if roof is not None:
        made.append(roofline_table(roof))
    return made


def head(found: Findings) -> list[Line]:
    """What was recorded."""
    lines = [("trace", str(found.path))]
    if found.run:
        lines.append(("run", run_line(found)))
    if not found.has_kernels:
        return [*lines, *_source(found), ("note", f"no kernels in this trace: {found.why_no_kernels}; {_OPERATORS}")]
    steps = f"{found.steps} step{'s' if found.steps > 1 else ''}" if found.has_step_count else "steps unknown"
    count = found.completeness
    captured = f"{milliseconds(found.captured_s)} ms in {_counted(count.kernels, 'kernel')}, {steps}"
    return [*lines, ("captured", captured), _completeness(count), ("matmul", _matmul(found)), *_source(found)]


def _completeness(count: Completeness) -> Line:
    """Whether launches and kernels belong together, in one line."""
    alone = count.kernels_without_launch
    told = [_counted(count.kernels, "kernel"), f"{alone:,} without launch" if alone else "each with its launch"]
    if count.launches_without_kernel:
        told.append(f"{_counted(count.launches_without_kernel, 'launch', 'launches')} without kernel")
    early = f"{count.kernels_before_launch:,} up to {count.worst_early_s * 1e6:,.1f} us before it"
    told.append(early if count.kernels_before_launch else "none before it")
    is_whole = not (alone or count.launches_without_kernel or count.kernels_before_launch)
    return "complete" if is_whole else "incomplete", ", ".join(told)


def _counted(number: int, word: str, several: str | None = None) -> str:
    return f"{number:,} {word if number == 1 else several or f'{word}s'}"


def run_line(found: Findings) -> str:
    """The run's settings in one line."""
    run = found.run
    size = lookup(run, "model.size") or lookup(run, "model.name")
    attention = lookup(run, "model.attention")
    compiled = "compiled" if lookup(run, "compile.is_enabled") else "eager"
    shape = f"batch {lookup(run, 'data.batch_size')} x context {lookup(run, 'data.context_length')}"
    precision = f"{run.get('precision')}, float32 matmul {run.get('matmul_precision')}"
    device = lookup(run, "environment.gpu.name") or "CPU"
    named = [size, f"attention {attention}" if attention else None, lookup(run, "model.optimizer")]
    return ", ".join(str(one) for one in (*named, run.get("mode"), shape, precision, compiled, device) if one)


def _matmul(found: Findings) -> str:
    shares = [f"{percent(share)} of {name}" for name, share in found.matmul_fractions.items()]
    other = found.step.top_other
    return ", ".join(shares) + (top_other_words(other.short_name, other.share_fraction) if other else "")


def _source(found: Findings) -> list[Line]:
    if found.phase_source == "foreign":
        return [
            ("phases", "not recorded by lmbench: by the ranges of Lightning and PyTorch, and by what autograd runs")
        ]
    if found.phase_source == "none":
        return [("phases", "the trace has no ranges of phases and no backward pass: everything is outside")]
    return []


def remarks(found: Findings) -> list[Line]:
    """Verdicts with their reasons and advice, then the guards that did not pass."""
    lines: list[Line] = []
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
    for guard in not_passed(found.guards):
        lines += [(guard.status.upper(), guard.message), ("", guard.advice)]
    if found.guards:
        tally = Counter(guard.status for guard in found.guards)
        lines.append(("guards", ", ".join(f"{count} {status}" for status, count in tally.items())))
    return lines


def not_passed(guards: Iterable[Guard]) -> list[Guard]:
    """Those that somebody should read."""
    return [guard for guard in guards if guard.status in ("warn", "fail")]
