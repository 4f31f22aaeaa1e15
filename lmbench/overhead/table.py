"""What `lmbench overhead` found: one table of the arms, one of answers, and a few lines about both."""

from __future__ import annotations

from rich.console import Console

from lmbench.overhead.result import Interval, Overhead
from lmbench.report.screen import print_table
from lmbench.report.table import Entry, Table, fact, numbers, words
from lmbench.report.units import MISSING, milliseconds

#: What the harness may cost: in step time where the device is the bottleneck, in its own hooks' time a step
#: where the host is, and in device memory.
TIME_LIMIT_FRACTION = 0.01
HOOKS_LIMIT_S = 0.1e-3
MEMORY_LIMIT_BYTES = 2**20

_MEANING = {
    "bare": "plain PyTorch loop",
    "trainer": "Lightning's Trainer with everything off",
    "harness": "lmbench fit without probe steps",
    "hooks": "the harness, each of lmbench's own hooks clocked",
}


def print_overhead(found: Overhead, console: Console) -> None:
    """Print the result of `lmbench overhead`."""
    meanings = [f"{arm:<9}{meaning}" for arm, meaning in _MEANING.items()]
    for line in (*_subject(found), *meanings):
        console.print(line)
    print_table(arm_table(found), console)
    print_table(answer_table(found), console)
    for line in _notes(found):
        console.print(line)
    # Not wrapped, so that it can be copied.
    console.print(f"repeat: {found.command}", soft_wrap=True)


def arm_table(found: Overhead) -> Table:
    """Arms by time per step, its difference to bare with a 95 % interval, and peak memory."""
    on_device = found.arms["bare"].run_peak_allocated_bytes is not None
    rows = []
    for arm, summary in found.arms.items():
        step, is_bare = summary.step_s, arm == "bare"
        peak, over = summary.host_peak_rss_bytes, summary.over_bare_host_peak_rss_bytes
        if on_device:
            peak, over = summary.run_peak_allocated_bytes, summary.over_bare_run_peak_allocated_bytes
        figures = (
            milliseconds(step.mean),
            f"{milliseconds(step.min)} .. {milliseconds(step.max)}",
            MISSING if is_bare else _interval(summary.over_bare_s, 1e3, "+.3f"),
            _mib(peak, ",.0f"),
            MISSING if is_bare else _mib(over, "+,.1f"),
        )
        rows.append([fact(arm), *map(Entry, figures)])
    title = f"{found.rounds} rounds of {found.steps} steps (warm-up {found.warmup_steps})"
    caption = f"ms a step, MiB of {'device' if on_device else 'host'} peak memory"
    columns = numbers("mean", "min .. max", "over bare [95 % interval]", "peak", "over")
    return Table(title, caption, [*words("arm"), *columns], rows)


def answer_table(found: Overhead) -> Table:
    """The questions, each with its answer and the figure behind it; `n/a` where a question is not asked."""
    harness, hooks, added = found.arms["harness"], found.hooks.step_s, found.harness_over_trainer_s
    asks_the_host, asks_the_device = found.bottleneck != "device", found.bottleneck not in ("host", "cpu")
    window, run = harness.over_bare_steady_peak_allocated_bytes, harness.over_bare_run_peak_allocated_bytes
    memory = ("n/a", "a CPU has no counter of it")
    if window is not None and run is not None:
        is_within = max(window, run) <= MEMORY_LIMIT_BYTES
        memory = ("yes" if is_within else "no", f"{_mib(window, '+,.2f')} MiB (window), {_mib(run, '+,.2f')} (run)")
    rows = [
        (
            "step within 1 % of bare",
            harness.over_bare_fraction.against(TIME_LIMIT_FRACTION) if asks_the_device else "n/a",
            f"{_interval(harness.over_bare_fraction, 100, '+.2f')} %",
        ),
        (
            "own hooks at most 0.1 ms a step",
            hooks.against(HOOKS_LIMIT_S) if asks_the_host else "n/a",
            f"{_interval(hooks, 1e3, '.3f')} ms",
        ),
        (
            "harness - trainer at most 0.1 ms",
            added.against(HOOKS_LIMIT_S) if asks_the_host else "n/a",
            f"{_interval(added, 1e3, '+.3f')} ms",
        ),
        ("device memory within 1 MiB of bare", *memory),
    ]
    # A figure is a number, which is never shortened, however wide.
    headings = [*words("question", "answer"), *numbers("figure")]
    entries = [[fact(question), Entry(answer, "outcome"), Entry(figure)] for question, answer, figure in rows]
    return Table("Answers", "means over rounds with 95 % intervals", headings, entries)


def _notes(found: Overhead) -> list[str]:
    hooks = found.hooks
    verdicts = ", ".join(f"{phase} {verdict}" for phase, verdict in found.verdicts.items())
    loss = "not finite" if found.first_loss is None else f"{found.first_loss:.4f}"
    return [
        f"bottleneck: {found.bottleneck}" + (f" ({verdicts})" if verdicts else ""),
        f"own hooks: {hooks.calls:.0f} calls, median step {hooks.median_step_s * 1e3:.3f} ms; "
        f"{hooks.clocking_s * 1e3:.3f} ms of clocking taken off",
        "harness - trainer: with Lightning's own cost of calling lmbench's callbacks",
        f"Lightning's own part (trainer - bare): {_interval(found.arms['trainer'].over_bare_s, 1e3, '+.3f')} ms a step",
        f"writing records: {found.pause_s * 1e3:.3f} ms a step of both, in pauses that a run subtracts",
        f"first loss in every arm: {loss}",
    ]


def _subject(found: Overhead) -> list[str]:
    model, data, environment = found.model, found.data, found.environment
    versions = environment.versions
    batch, context = ("?" if number is None else number for number in (data.batch_size, data.context_length))
    return [
        f"{model.size or model.name} | {found.mode} | batch {batch} x context {context} | {found.precision}, float32 "
        f"matmul {found.matmul_precision}",
        f"{environment.gpu.name or f'{environment.flags.thread_count} threads'} | {environment.host.cpu_model}",
        f"torch {versions.torch}, lightning {versions.lightning}, lmbench {versions.lmbench}, python {versions.python}",
    ]


def _interval(found: Interval, scale: float, form: str) -> str:
    mean, low, high = (format(value * scale, form) for value in (found.mean, found.low, found.high))
    return f"{mean} [{low}, {high}]"


def _mib(size_bytes: int | None, form: str) -> str:
    return MISSING if size_bytes is None else format(size_bytes / 2**20, form)
