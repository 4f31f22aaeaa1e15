"""What `lmbench overhead` found: one table of the arms, one of answers, and a few lines about both."""

from __future__ import annotations

from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from lmbench.overhead.statistics import (
    HOOKS_LIMIT_S,
    MEMORY_LIMIT_BYTES,
    TIME_LIMIT_FRACTION,
    Interval,
)
from lmbench.report.units import MISSING, milliseconds

Record = dict[str, Any]
_MEANING = {
    "bare": "plain PyTorch loop",
    "trainer": "Lightning's Trainer with everything off",
    "harness": "lmbench fit without probe steps",
    "hooks": "the harness, each of lmbench's own hooks clocked",
}


def print_overhead(result: Record, console: Console) -> None:
    """Print the result of `lmbench overhead` (the content of its `--json` file)."""
    meanings = [f"{arm:<9}{meaning}" for arm, meaning in _MEANING.items()]
    for line in (*_subject(result), *meanings):
        console.print(line, markup=False)
    console.print(arm_table(result))
    console.print(answer_table(result))
    for line in _notes(result):
        console.print(line, markup=False)
    # Not wrapped, so that it can be copied.
    console.print(f"repeat: {result['command']}", markup=False, soft_wrap=True)


def arm_table(result: Record) -> Table:
    """Arms by time per step, its difference to bare with a 95 % interval, and peak memory."""
    on_device = result["arms"]["bare"]["run_peak_allocated_bytes"] is not None
    peak = "run_peak_allocated_bytes" if on_device else "host_peak_rss_bytes"
    window = f"{result['rounds']} rounds of {result['steps']} steps (warm-up {result['warmup_steps']})"
    table = _table(f"{window}; ms a step, MiB of {'device' if on_device else 'host'} peak memory")
    table.add_column("arm", no_wrap=True)
    for name in ("mean", "min .. max", "over bare [95 % interval]", "peak", "over"):
        table.add_column(name, justify="right", no_wrap=True)
    for arm, summary in result["arms"].items():
        step, is_bare = summary["step_s"], arm == "bare"
        table.add_row(
            arm,
            milliseconds(step["mean"]),
            f"{milliseconds(step['min'])} .. {milliseconds(step['max'])}",
            MISSING if is_bare else _interval(summary["over_bare_s"], 1e3, "+.3f"),
            _mib(summary[peak], ",.0f"),
            MISSING if is_bare else _mib(summary[f"over_bare_{peak}"], "+,.1f"),
        )
    return table


def answer_table(result: Record) -> Table:
    """The questions, each with its answer and the figure behind it; `n/a` where a question is not asked."""
    table = _table(None)
    for name in ("question", "answer", "figure"):
        table.add_column(name, no_wrap=True)
    rows = (_time(result), _own_hooks(result), _added(result), _memory(result))
    for row in rows:
        table.add_row(*row)
    return table


def _time(result: Record) -> tuple[str, str, str]:
    found = result["arms"]["harness"]["over_bare_fraction"]
    is_asked = result["bottleneck"] in ("device", "mixed", "unknown")
    answer = Interval(**found).against(TIME_LIMIT_FRACTION) if is_asked else "n/a"
    return "step within 1 % of bare", answer, f"{_interval(found, 100, '+.2f')} %"


def _own_hooks(result: Record) -> tuple[str, str, str]:
    found = result["hooks"]["step_s"]
    answer = Interval(**found).against(HOOKS_LIMIT_S) if result["bottleneck"] != "device" else "n/a"
    return "own hooks at most 0.1 ms a step", answer, f"{_interval(found, 1e3, '.3f')} ms"


def _added(result: Record) -> tuple[str, str, str]:
    found = result["harness_over_trainer_s"]
    answer = Interval(**found).against(HOOKS_LIMIT_S) if result["bottleneck"] != "device" else "n/a"
    return "harness - trainer at most 0.1 ms", answer, f"{_interval(found, 1e3, '+.3f')} ms"


def _memory(result: Record) -> tuple[str, str, str]:
    harness = result["arms"]["harness"]
    window = harness["over_bare_steady_peak_allocated_bytes"]
    run = harness["over_bare_run_peak_allocated_bytes"]
    question = "device memory within 1 MiB of bare"
    if window is None:
        return question, "n/a", "a CPU has no counter of it"
    answer = "yes" if max(window, run) <= MEMORY_LIMIT_BYTES else "no"
    return question, answer, f"{_mib(window, '+,.2f')} MiB (window), {_mib(run, '+,.2f')} (run)"


def _notes(result: Record) -> list[str]:
    hooks, verdicts = result["hooks"], result["verdicts"]
    why = f" ({', '.join(f'{phase} {verdict}' for phase, verdict in verdicts.items())})" if verdicts else ""
    lightning = _interval(result["arms"]["trainer"]["over_bare_s"], 1e3, "+.3f")
    return [
        f"bottleneck: {result['bottleneck']}{why}",
        f"own hooks: {hooks['calls']:.0f} calls, median step {hooks['median_step_s'] * 1e3:.3f} ms; "
        f"{hooks['clocking_s'] * 1e3:.3f} ms of clocking taken off",
        "harness - trainer: with Lightning's own cost of calling lmbench's callbacks",
        f"Lightning's own part (trainer - bare): {lightning} ms a step",
        f"writing records: {result['pause_s'] * 1e3:.3f} ms a step of both, in pauses that a run subtracts",
        f"first loss in every arm: {result['first_loss']:.4f}",
    ]


def _subject(result: Record) -> list[str]:
    model, data, environment = result["model"], result["data"], result["environment"]
    versions, host = environment["versions"], environment["host"]
    device = environment["gpu"]["name"] or f"{environment['flags']['thread_count']} threads"
    named = ("torch", "lightning", "lmbench", "python")
    return [
        f"{model.get('size') or model['name']} | {result['mode']} | batch {data.get('batch_size', '?')} x "
        f"context {data.get('context_length', '?')} | {result['precision']}, float32 matmul "
        f"{result['matmul_precision']}",
        f"{device} | {host['cpu_model']}",
        ", ".join(f"{name} {versions[name]}" for name in named),
    ]


def _table(title: str | None) -> Table:
    return Table(title=title, title_justify="left", title_style="", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))


def _interval(found: Record, scale: float, form: str) -> str:
    mean, low, high = (format(found[name] * scale, form) for name in ("mean", "low", "high"))
    return f"{mean} [{low}, {high}]"


def _mib(size_bytes: int | None, form: str) -> str:
    return MISSING if size_bytes is None else format(size_bytes / 2**20, form)
