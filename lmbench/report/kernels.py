"""What a trace shows, as people read it: on the screen, as Markdown, and its kernels as CSV."""

from __future__ import annotations

import csv
import io
from collections import Counter
from textwrap import wrap

from rich.console import Console

from lmbench.report.kernels_tables import (
    attention_table,
    clock_table,
    kernel_tables,
    launch_table,
    operator_tables,
    phase_table,
    share_table,
    shortened,
)
from lmbench.report.markdown import table_lines
from lmbench.report.roofline import Roofline
from lmbench.report.roofline_table import roofline_lines, roofline_table
from lmbench.report.table import Table
from lmbench.report.units import milliseconds, percent
from lmbench.results.paths import lookup
from lmbench.trace.findings import Findings, kernel_record
from lmbench.trace.kinds import KINDS
from lmbench.trace.parts import part_order

_LABEL = 12
_GAP = "  "
_LEAST_WIDTH = 12
Line = tuple[str, str]

NOT_KERNELS = "no kernels in this trace: below are operators on the host, with the time of each without those inside it"


def print_findings(found: Findings, top: int, console: Console, roof: Roofline | None = None) -> None:
    """Print all tables, readable at 80 columns."""
    print_lines(head(found), console)
    for table in tables(found, top, roof):
        print_table(table, console)
    console.out("")
    print_lines([*(roofline_lines(roof) if roof else []), *remarks(found)], console)


def to_markdown(found: Findings, top: int, roof: Roofline | None = None) -> str:
    """The same as Markdown, ready to paste; ends in a line feed."""
    lines = [f"- **{label}**: {text}" for label, text in head(found)]
    for table in tables(found, top, roof):
        lines += ["", *table_lines(table)]
    closing = [f"- {label}: {text}" for label, text in [*(roofline_lines(roof) if roof else []), *remarks(found)]]
    return "\n".join([*lines, "", *closing]).rstrip() + "\n"


def to_csv(found: Findings) -> str:
    """Every kernel of every phase, a row each, in SI units; of a trace without kernels its operators."""
    stream = io.StringIO()
    if found.has_kernels:
        names = ["phase", "name", "short_name", "kind", "parts_s", "total_s", "share_fraction", "instances", "mean_s"]
        rows = [kernel_record(row) for phase in found.phases for row in phase.rows]
        for row in rows:
            row["parts_s"] = "; ".join(f"{part} {seconds:.9g}" for part, seconds in row["parts_s"].items())
    else:
        names = ["phase", "name", "self_s", "share_fraction", "calls", "mean_s"]
        rows = [vars(row) for of_phase in found.operators.values() for row in of_phase]
    writer = csv.DictWriter(stream, fieldnames=names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return stream.getvalue()


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
        return [*lines, *_source(found), ("note", NOT_KERNELS)]
    steps = f"{found.steps} step{'s' if found.steps > 1 else ''}" if found.has_step_count else "steps unknown"
    count = found.completeness
    captured = f"{milliseconds(found.captured_s)} ms in {count.kernels:,} kernels, {steps}"
    return [*lines, ("captured", captured), ("matmul", _matmul(found)), *_source(found)]


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
    top = f"; top other kernel {other.short_name}, {percent(other.share_fraction)}" if other else ""
    return ", ".join(shares) + top


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
    bad = [guard for guard in found.guards if guard.status in ("warn", "fail")]
    for guard in bad:
        lines += [(guard.status.upper(), guard.message), ("", guard.advice)]
    if found.guards:
        tally = Counter(guard.status for guard in found.guards)
        lines.append(("guards", ", ".join(f"{count} {status}" for status, count in tally.items())))
    return lines


def print_table(table: Table, console: Console) -> None:
    """Title and caption, wrapped to the screen, then the table; its widest words are shortened until it fits."""
    console.out("")
    for line in wrap(f"{table.title}: {table.caption}", console.width):
        console.out(line, highlight=False)
    rows = [[heading.text for heading in table.headings], *([entry.full_text for entry in row] for row in table.rows)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    words = [index for index, heading in enumerate(table.headings) if not heading.is_number]
    while sum(widths) + len(_GAP) * (len(widths) - 1) > console.width:
        widest = max(words, key=widths.__getitem__)
        if widths[widest] <= _LEAST_WIDTH:
            break
        widths[widest] -= 1
    for number, row in enumerate(rows):
        pieces = [
            text.rjust(width) if heading.is_number else shortened(text, width).ljust(width)
            for text, width, heading in zip(row, widths, table.headings, strict=True)
        ]
        console.out(_GAP.join(pieces).rstrip(), highlight=False)
        if number == 0:
            console.out("─" * (sum(widths) + len(_GAP) * (len(widths) - 1)), highlight=False)


def print_lines(lines: list[Line], console: Console) -> None:
    """Labelled lines, wrapped beside their labels; a path stays whole, to be copied."""
    for label, text in lines:
        wide = label in ("trace", "A", "B")
        wrapped = [text] if wide else wrap(text, console.width - _LABEL, break_long_words=False, break_on_hyphens=False)
        for index, piece in enumerate(wrapped):
            console.out(f"{label if index == 0 else '':<{_LABEL}}{piece}", highlight=False)
