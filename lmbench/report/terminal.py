"""A run on the screen: one table, the figures under it, guards with advice, and how to repeat it."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from textwrap import shorten, wrap
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lmbench.kernels.shown.summary import sound_kernels, top_other_words
from lmbench.records.paths import lookup
from lmbench.records.vocabulary import PHASES
from lmbench.report.text import shown
from lmbench.report.units import count, gib, milliseconds, percent

Record = dict[str, Any]
_LABEL = 13
_STATUSES = ("pass", "warn", "fail", "n/a")
_STYLES = {"FAIL": "bold red", "WARN": "yellow"}
_STATISTICS = ("mean_s", "std_s", "median_s", "min_s", "max_s")


class _Console(Console):
    """Goes quiet when its reader goes away (`| head`), where rich's own would end the program."""

    def on_broken_pipe(self) -> None:
        self.quiet = True


def make_console(stream: Any = None) -> Console:
    """A console that stays readable in a log file: never wider than 100 columns, no colour unless on a terminal."""
    width = min(100, shutil.get_terminal_size((80, 24)).columns)
    return _Console(file=stream or sys.stdout, width=max(80, width), highlight=False, soft_wrap=False)


def print_run(
    run: Record,
    path: Path,
    console: Console | None = None,
    with_banner: bool = True,
    notes: Sequence[tuple[str, str]] = (),
) -> None:
    """Print a run's record; `path` is its result folder, `notes` are labelled lines about how the run ended."""
    console = console or make_console()
    if with_banner:
        print_banner(run, console)
    if run.get("mode"):
        console.out("")
    if run.get("phases", {}).get("step"):
        _print_table(phase_table(run), console)
    _print_lines([*figures(run), *guard_lines(run), *closing_lines(run), *(_line(*note) for note in notes)], console)
    for label, text in where(run, path):
        # Whole, however long: to be copied.
        console.out(_line(label, shown(text)), highlight=False)


def print_banner(run: Record, console: Console | None = None) -> None:
    """Print what is measured, with what, on what."""
    console = console or make_console()
    _print_lines(banner(run), console)


def _print_lines(lines: list[str], console: Console) -> None:
    """Labelled lines, wrapped under their own text, not under their label; a path in them stays whole."""
    indent = " " * _LABEL
    for line in lines:
        wrapped = wrap(
            shown(line), console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        text = Text("\n".join(wrapped))
        text.stylize(_STYLES.get(line.split(" ", 1)[0], ""), 0, _LABEL)
        console.print(text, soft_wrap=True)


def _print_table(table: Table, console: Console) -> None:
    """A table without the blanks at its lines' ends, and a blank line after it."""
    with console.capture() as capture:
        console.print(table)
    for line in [*capture.get().splitlines(), ""]:
        console.out(line.rstrip(), highlight=False)


def banner(run: Record) -> list[str]:
    """The configuration in a few labelled lines; none of a run that left no record of it."""
    if not run.get("mode"):
        return []
    model, data, window = run.get("model", {}), run.get("data", {}), run.get("window", {})
    gpu = (run.get("environment") or {}).get("gpu") or {}
    limit = f", power limit {gpu['power_limit_w']:.0f} W" if gpu.get("power_limit_w") else ""
    parameters = f", {count(model['parameter_count'])} parameters" if model.get("parameter_count") else ""
    device = gpu.get("name") or (run.get("environment", {}).get("host") or {}).get("cpu_model") or "CPU"
    steps = window.get("requested_steps") or window.get("steps") or "all"
    seconds = f" and {window['requested_s']:g} s" if window.get("requested_s") else ""
    least = ", profiled: in no timing table" if run.get("is_profiled") else f"{seconds} at least"
    return [
        _line("model", f"{model.get('size') or model.get('name') or '(not built)'}{parameters}{_choices(run)}"),
        _line("step", f"{run.get('mode')}, batch {_shape(data)}{_accumulation(window)}"),
        _line("precision", f"{run.get('precision')}, float32 matmul {run.get('matmul_precision')}{_compiled(run)}"),
        _line("device", f"{device}{limit}"),
        _line("window", f"{steps} steps{least}, after {window.get('warmup_steps')} of warm-up"),
    ]


def _line(label: str, text: str) -> str:
    return f"{label:<{_LABEL}}{text}"


def _choices(run: Record) -> str:
    model = run.get("model", {})
    named = [f"attention {model['attention']}" if model.get("attention") else "", model.get("optimizer") or ""]
    return "".join(f", {choice}" for choice in named if choice)


def _shape(data: Record) -> str:
    if not data.get("batch_size"):
        return "as the data gives it"
    return f"{data['batch_size']} x context {data.get('context_length', '?')}, {data.get('source', '?')} tokens"


def _accumulation(window: Record) -> str:
    micro = window.get("micro_batches") or 1
    return f", {micro} micro-batches a step" if micro > 1 else ""


def _compiled(run: Record) -> str:
    options = run.get("compile") or {}
    if not options.get("is_enabled"):
        return ", eager"
    return f", compiled ({options.get('mode')}{', regional' if options.get('regional') else ''})"


def phase_table(run: Record) -> Table:
    """Phases by mean, spread and share of the step, in milliseconds, with the verdict of the lag probes."""
    window = run["window"]
    clock = {"host": "time", "sync": "synchronized time (not the step's own speed)"}.get(
        str(run.get("clock")), "device span"
    )
    title = f"{clock} in ms, {window.get('steps', '?')} steps after {window.get('warmup_steps')} of warm-up"
    table = Table(title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column("phase")
    for name in ("mean", "std", "median", "min", "max", "share"):
        table.add_column(name, justify="right")
    verdicts = run.get("probe", {}).get("verdicts") or {}
    if verdicts:
        table.add_column("verdict")
    for phase in (*PHASES, "step"):
        summary = run["phases"].get(phase)
        if not summary:
            continue
        cells = [milliseconds(summary.get(name)) for name in _STATISTICS]
        verdict = [verdicts.get(phase, {}).get("verdict", "")] if verdicts else []
        if phase == "step":
            table.add_section()
        table.add_row(phase, *cells, percent(summary.get("share_fraction")), *verdict)
    return table


def figures(run: Record) -> list[str]:
    """Unseen phases, throughput, MFU, memory, power and loss, a line each where there is something to say."""
    rate, memory, state = run.get("throughput", {}), run.get("memory", {}), run.get("device_state", {})
    loss = run.get("loss", {})
    lines = []
    if run.get("unseen_phases"):
        unseen = ", ".join(run["unseen_phases"])
        lines.append(f"unseen       {unseen}: the module optimizes by hand; their time is in other, a step is a batch")
    if rate.get("tokens_per_s"):
        lines.append(f"throughput   {rate['tokens_per_s']:,.0f} tokens/s")
    elif run.get("window", {}).get("tokens_reason"):
        lines.append(f"throughput   no tokens/s: {run['window']['tokens_reason']}")
    if rate.get("mfu_fraction") is not None:
        causal = rate.get("mfu_causal_fraction")
        half = f" ({percent(causal)} with causal attention counted half)" if causal is not None else ""
        lines.append(f"MFU          {percent(rate['mfu_fraction'])}{half}")
    elif rate.get("tokens_per_s") and rate.get("mfu_reason"):
        lines.append(f"MFU          none: {rate['mfu_reason']}")
    if memory.get("run_peak_allocated_bytes"):
        peak = memory.get("steady_peak_allocated_bytes")
        steady = f"; in the window {gib(peak)}" if peak else ""
        lines.append(
            f"peak memory  {gib(memory['run_peak_allocated_bytes'])} allocated, "
            f"{gib(memory.get('run_peak_reserved_bytes'))} reserved of {gib(memory.get('device_total_bytes'))}{steady}"
        )
    elif memory.get("host_peak_rss_bytes"):
        lines.append(f"peak memory  {gib(memory['host_peak_rss_bytes'])} resident (host)")
    lines += kernel_lines(run)
    if state.get("mean_power_w"):
        joules = rate.get("joules_per_token")
        per_token = f", {joules * 1e3:.3g} mJ/token" if joules else ""
        lines.append(f"power        {state['mean_power_w']:.0f} W{per_token}")
    if loss.get("first") is not None and loss.get("last") is not None:
        lines.append(f"loss         {loss['first']:.4f} first, {loss['last']:.4f} last")
    return lines


def kernel_lines(run: Record) -> list[str]:
    """What a profiled run's trace says in one line, or why it says nothing."""
    if not run.get("kernels"):
        return []
    kernels = sound_kernels(run["kernels"])
    if kernels.get("reason"):
        return [_line("kernels", f"none: {kernels['reason']}")]
    matmul, other = (lookup(kernels, f"phases.step.{name}") for name in ("matmul_fraction", "top_other"))
    top = top_other_words(other["name"], other["share_fraction"]) if other else ""
    total = milliseconds(kernels.get("kernel_s"))
    return [_line("kernels", f"{total} ms per step, {percent(matmul)} matmul{top}")]


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


def closing_lines(run: Record) -> list[str]:
    """How the run ended, if not `ok`."""
    if run.get("outcome") == "ok":
        return []
    error = run.get("error") or {}
    phase = f" in {error['phase']}" if error.get("phase") else ""
    asked = f", {gib(error['requested_bytes'])} asked for" if error.get("requested_bytes") else ""
    message = shorten(error.get("message") or "", 160, placeholder=" ...")
    return [_line("outcome", f"{run.get('outcome')}{phase}{asked}{f': {message}' if message else ''}")]


def where(run: Record, path: Path) -> list[tuple[str, str]]:
    """The folder, and the commands that look into its trace and that repeat the run, each with its label."""
    repeat = run.get("replay_command")
    kernels = f"lmbench kernels {shlex.quote(str(path))}" if lookup(run, "profile.trace_file") else None
    commands = [("next", kernels), ("repeat", repeat)]
    return [("result", str(path)), *((label, command) for label, command in commands if command)]
