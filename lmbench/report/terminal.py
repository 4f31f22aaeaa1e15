"""A run on the screen: one table, the figures under it, guards with advice, and how to repeat it."""

from __future__ import annotations

import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lmbench.report.units import count, gib, milliseconds, percent
from lmbench.results.vocabulary import PHASES

Record = dict[str, Any]
_STATUSES = ("pass", "warn", "fail", "n/a")
_STATISTICS = ("mean_s", "std_s", "median_s", "min_s", "max_s")


def make_console(stream: Any = None) -> Console:
    """A console that stays readable in a log file: never wider than 100 columns, no colour unless on a terminal."""
    width = min(100, shutil.get_terminal_size((80, 24)).columns)
    return Console(file=stream or sys.stdout, width=max(80, width), highlight=False, soft_wrap=False)


def print_run(run: Record, path: Path, console: Console | None = None) -> None:
    """Print a run's record; `path` is its result folder."""
    console = console or make_console()
    console.print(headline(run), markup=False)
    if run.get("phases", {}).get("step"):
        console.print(phase_table(run))
    for line in (*figures(run), *guard_lines(run), *closing_lines(run, path)):
        console.print(line, markup=False)


def headline(run: Record) -> str:
    """What was measured, in one or two lines."""
    model, data = run.get("model", {}), run.get("data", {})
    gpu = (run.get("environment", {}).get("gpu") or {}).get("name")
    parts = [
        f"{model.get('size') or model.get('name', 'model')} ({count(model.get('parameter_count'))} parameters)",
        run.get("mode", ""),
        f"batch {data.get('batch_size', '?')} x context {data.get('context_length', '?')}",
        f"{run.get('precision')}, float32 matmul {run.get('matmul_precision')}",
        f"attention {model.get('attention', '?')}",
        gpu or run.get("device_type", ""),
    ]
    return " | ".join(str(part) for part in parts if part)


def phase_table(run: Record) -> Table:
    """Phases by mean, spread and share of the step, in milliseconds, with the verdict of the lag probes."""
    window = run["window"]
    title = f"device span in ms, {window.get('steps', '?')} steps after {window.get('warmup_steps')} of warm-up"
    table = Table(title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("phase")
    for name in ("mean", "std", "median", "min", "max", "share"):
        table.add_column(name, justify="right")
    table.add_column("verdict")
    verdicts = run.get("probe", {}).get("verdicts", {})
    for phase in (*PHASES, "step"):
        summary = run["phases"].get(phase)
        if not summary:
            continue
        cells = [milliseconds(summary.get(name)) for name in _STATISTICS]
        verdict = verdicts.get(phase, {}).get("verdict", "")
        if phase == "step":
            table.add_section()
        table.add_row(phase, *cells, percent(summary.get("share_fraction")), verdict)
    return table


def figures(run: Record) -> list[str]:
    """Throughput, MFU, memory, power and loss, a line each where known."""
    rate, memory, state = run.get("throughput", {}), run.get("memory", {}), run.get("device_state", {})
    loss = run.get("loss", {})
    lines = []
    if rate.get("tokens_per_s"):
        lines.append(f"throughput   {rate['tokens_per_s']:,.0f} tokens/s")
    if rate.get("mfu_fraction") is not None:
        causal = rate.get("mfu_causal_fraction")
        half = f" ({percent(causal)} with causal attention counted half)" if causal is not None else ""
        lines.append(f"MFU          {percent(rate['mfu_fraction'])}{half}")
    elif rate.get("mfu_reason"):
        lines.append(f"MFU          none: {rate['mfu_reason']}")
    if memory.get("run_peak_allocated_bytes"):
        lines.append(
            f"peak memory  {gib(memory['run_peak_allocated_bytes'])} allocated, "
            f"{gib(memory.get('run_peak_reserved_bytes'))} reserved of {gib(memory.get('device_total_bytes'))}; "
            f"steady {gib(memory.get('steady_peak_allocated_bytes'))}"
        )
    elif memory.get("host_peak_rss_bytes"):
        lines.append(f"peak memory  {gib(memory['host_peak_rss_bytes'])} resident (host)")
    if state.get("mean_power_w"):
        joules = rate.get("joules_per_token")
        per_token = f", {joules * 1e3:.3g} mJ/token" if joules else ""
        lines.append(f"power        {state['mean_power_w']:.0f} W{per_token}")
    if loss.get("first") is not None and loss.get("last") is not None:
        lines.append(f"loss         {loss['first']:.4f} first, {loss['last']:.4f} last")
    return lines


def guard_lines(run: Record) -> list[str]:
    """Guards that did not pass, with their advice; else one line saying how many did."""
    guards = run.get("guards", [])
    lines = []
    for guard in guards:
        if guard["status"] in ("fail", "warn"):
            lines.append(f"{guard['status'].upper():<12} {guard['message']}")
            if guard.get("advice"):
                lines.append(f"{'':<12} {guard['advice']}")
    if guards:
        tally = Counter(guard["status"] for guard in guards)
        lines.append("guards       " + ", ".join(f"{tally[s]} {s}" for s in _STATUSES if tally[s]))
    return lines


def closing_lines(run: Record, path: Path) -> list[str]:
    """Outcome if not `ok`, the folder, and the command that repeats the run."""
    lines = []
    if run.get("outcome") != "ok":
        error = run.get("error") or {}
        where = f" in {error['phase']}" if error.get("phase") else ""
        asked = f", {gib(error['requested_bytes'])} asked for" if error.get("requested_bytes") else ""
        lines.append(f"outcome      {run.get('outcome')}{where}{asked}: {error.get('message', '')}")
    lines.append(f"result       {path}")
    if run.get("replay_command"):
        lines.append(f"repeat       {run['replay_command']}")
    return lines
