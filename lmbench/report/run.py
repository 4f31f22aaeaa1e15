"""A run as an answer: its banner, its speed with warnings, its phases, further details, and how to repeat it."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from lmbench.masking import leaves
from lmbench.records.codec import as_dict
from lmbench.records.examined import WHAT_IFS, KernelSummary, MemoryHistoryRecord
from lmbench.records.measured import RefusedAllocation
from lmbench.records.named import repeat_command, shown_path
from lmbench.records.passes import PASS, recording_of
from lmbench.records.run import AttentionCheck, Flops, RunRecord
from lmbench.records.schema import fields
from lmbench.records.summary import host_bound_fraction, late_rank
from lmbench.records.vocabulary import PHASES, SPANS
from lmbench.report.answer import BLANK, Answer, Cell, Column, Line, Table, guard_lines, labelled, listed
from lmbench.report.banner import banner
from lmbench.report.beside import endurance_lines, input_lines, owner_lines
from lmbench.report.charts import steps_charts
from lmbench.report.units import (
    GIB,
    MS,
    PERCENT,
    counted,
    duration,
    gib,
    mean_and_std,
    millijoules,
    milliseconds,
    percent,
    plain,
    tally,
    unit_of,
    whole,
)

#: The host limits a step if the device waits for it in phases that take at least this share of the step.
_HOST_LIMITED_FRACTION = 0.5
#: Milliseconds without the word, which the table's title says once for five columns.
_MS = replace(MS, word="")
_STATISTICS = ("mean", "std", "median", "min", "max")
#: Logged scalars of which the mean is shown.
_MOST_SCALARS = 8
_CLOCKS = {"host": "time", "sync": "synchronized time (not the step's own speed)"}


def run_answer(run: RunRecord, path: Path | None, notes: Sequence[Line] = (), with_banner: bool = True) -> Answer:
    """A run as `lmbench fit` prints it at the end and `lmbench show` prints it again.

    Args:
        run: its record.
        path: its result folder, None if nothing was kept.
        notes: lines about how the run ended.
        with_banner: whether to print the configuration, too.
    """
    has_times = run.error is None or not run.error.is_incorrect
    return Answer(
        headline=[
            *(banner(run) if with_banner else []),
            *([BLANK] if run.mode else []),
            *([*_speed(run), *owner_lines(run), *input_lines(run)] if has_times else []),
            *_peak_memory(run),
            *_ending(run),
            *guard_lines(run.guards),
        ],
        tables=[phase_table(run), *rank_tables(run)] if has_times and run.phases.step is not None else [],
        notes=[*details(run), *notes, *(_folder_and_commands(run, path) if path is not None else ())],
        charts=lambda: steps_charts(path) if path is not None else [],
        figures={"record": as_dict(run)},
    )


def phase_table(run: RunRecord) -> Table:
    """The mean, spread and share of the step of each phase, in milliseconds, with the verdict of the lag probes."""
    window, lags = run.window, run.probe.lags
    columns = [
        Column("phase"),
        *(Column(name, _MS, f"{name}_s", is_extra=name in ("median", "min", "max")) for name in _STATISTICS),
        Column("share", PERCENT, "share_fraction"),
        Column("verdict"),
    ]
    rows = []
    for span in (*PHASES, SPANS[0]):
        if (summary := run.phases.get(span)) is not None:
            times_s = [getattr(summary, f"{name}_s") for name in _STATISTICS]
            cells = [Cell(time_s, text=milliseconds(time_s, summary.std_s)) for time_s in times_s]
            verdict = lags[span].verdict if span in lags else ""
            rows.append([span, *cells, summary.share_fraction, verdict])
    clock, steps = _CLOCKS.get(run.clock or "", "device span"), "?" if window.steps is None else window.steps
    warmup = f"{window.warmup_steps} + {window.pace_steps}" if window.pace_steps else window.warmup_steps
    title = f"{clock} in ms, {steps} steps after {warmup} of warm-up"
    return Table("phases", title, columns, rows, has_total=True).without_empty_columns()


def rank_tables(run: RunRecord) -> list[Table]:
    """A table of each rank's mean step and phases and their skew over ranks; no table for a single rank."""
    if not run.per_rank:
        return []
    spans = (*PHASES, SPANS[0])
    rows = [
        [str(rank.rank), *(rank.mean_s.get(span) for span in spans), rank.run_peak_allocated_bytes]
        for rank in run.per_rank
    ]
    columns = [Column("rank"), *(Column(span, _MS, f"{span}_s") for span in spans), Column("peak", GIB, "peak_bytes")]
    series = [[value for value in values if value is not None] for values in zip(*rows, strict=True)]
    rows.append(["skew", *(max(values) - min(values) if values else None for values in series[1:])])
    title = "mean of each rank in ms; skew is the longest less the shortest"
    return [Table("ranks", title, columns, rows, has_total=True).without_empty_columns()]


def disputed_peak(flops: Flops) -> str:
    """The peak of a device to follow an MFU where sources disagree: ` of 2250 TFLOP/s, elsewhere 2500`."""
    _, _, others = (flops.peak_source or "").partition("; elsewhere ")
    return f" of {(flops.peak_flops_per_s or 0) * 1e-12:.5g} TFLOP/s, elsewhere {others}" if others else ""


def _speed(run: RunRecord) -> list[Line]:
    """The step with its spread and its longest phases, what limits it (host or device), throughput and MFU."""
    step, rate = run.step, run.throughput
    lines = []
    if step.mean_s:
        shares = sorted(((phase.share_fraction or 0.0, span) for span, phase in run.phases.items()), reverse=True)
        longest = [f"{span} {percent(share)}" for share, span in shares if share and span != "step"][:2]
        phases = listed(*longest)
        mean = f"{mean_and_std(step.mean_s, step.std_s)} ms (std of the steps)"
        lines = [Line("mean step", listed(mean, phases, separator=": ")), *labelled("limited by", _limit(run))]
    if late := late_rank(run):
        rank, phase, wait_s = late
        waits = f"and the others wait for it for {milliseconds(wait_s)} ms of each step"
        lines.append(Line("waits", f"for other ranks: rank {rank} takes longer in {phase}, {waits}"))
    padding = run.data.padding_fraction
    if rate.tokens_per_s:
        trained = whole(rate.tokens_per_s * (1 - (padding or 0.0)))
        useful = padding and f"{percent(padding)} of them padding as in the warm-up: {trained} that train"
        lines += labelled("throughput", f"{whole(rate.tokens_per_s)} tokens/s", useful)
    elif step.mean_s and run.window.tokens_reason:
        padded = f"; {percent(padding)} of the labels are padding" if padding else ""
        lines.append(Line("throughput", f"no tokens/s: {run.window.tokens_reason}{padded}"))
    causal = rate.mfu_causal_fraction and f"{percent(rate.mfu_causal_fraction)} with causal attention counted half"
    if rate.mfu_fraction:
        hardware = rate.hfu_fraction if run.flops.recomputed_per_token_flops else None
        # Behind the counter's name, what the count lacks.
        remarks = (run.flops.source or "").partition("; ")[2]
        mfu = percent(rate.mfu_fraction) + disputed_peak(run.flops)
        mfu += f" ({causal})" if causal else ""
        lines += labelled("MFU", mfu, hardware and f"HFU {percent(hardware)}", remarks, separator="; ")
    elif rate.tokens_per_s and rate.mfu_fraction is None and rate.mfu_reason:
        lines += labelled("MFU", f"none: {rate.mfu_reason}", causal, separator="; ")
    return lines


def _limit(run: RunRecord) -> str:
    """Whether the host or the device limits the step; empty where no probe step told."""
    host_fraction, waiting = host_bound_fraction(run), listed(*run.probe.host_bound)
    if host_fraction is None:
        return ""
    if host_fraction >= _HOST_LIMITED_FRACTION:
        return f"the host: the device waits for it in {percent(host_fraction)} of the step ({waiting})"
    if waiting:
        return f"the device, but in {waiting} ({percent(host_fraction)} of the step), where it waits for the host"
    return "the device: it always has work queued"


def _peak_memory(run: RunRecord) -> list[Line]:
    """The device's peak memory, or the host's on a CPU."""
    memory, host_bytes = run.memory, run.memory.host_peak_rss_bytes
    run_peak_bytes, steady_bytes = memory.run_peak_allocated_bytes, memory.steady_peak_allocated_bytes
    reserved_bytes, total_bytes = memory.run_peak_reserved_bytes, memory.device_total_bytes
    if not run_peak_bytes:
        return labelled("peak memory", host_bytes and f"{gib(host_bytes)} resident (host)")
    reserved = f"{gib(reserved_bytes)} reserved of {gib(total_bytes)}" if reserved_bytes and total_bytes else ""
    run_peak = listed(f"{gib(run_peak_bytes)} allocated", reserved)
    return labelled("peak memory", run_peak, steady_bytes and f"in the window {gib(steady_bytes)}", separator="; ")


def _ending(run: RunRecord) -> list[Line]:
    """The allocation that was refused, and the outcome, if it is not `ok`."""
    error, lines = run.failure, refusal(run.memory.refused)
    if run.outcome != "ok":
        phase, location = error.phase and f"in {error.phase}", error.location and f"at {error.location}"
        place = listed(run.outcome, phase, location, separator=" ")
        place = listed(place, error.requested_bytes and f"{gib(error.requested_bytes)} asked for")
        lines += labelled("outcome", place, error.brief, separator=": ")
    return lines


def refusal(refused: RefusedAllocation | None) -> list[Line]:
    """The allocation that was refused, and what the device held; no line where memory did not run out."""
    if refused is None or not refused.requested_bytes or not refused.phase:
        return []
    return labelled(
        "refused",
        f"{gib(refused.requested_bytes)} more in {refused.phase}",
        refused.location and f"at {refused.location}",
        refused.allocated_bytes and f"with {gib(refused.allocated_bytes)} held",
        refused.device_free_bytes is not None and f"{gib(refused.device_free_bytes)} free",
    )


def details(run: RunRecord) -> list[Line]:
    """Lines on unseen phases, compilation, kernels, memory, power and loss, as far as they are known, and on guards."""
    history, kernels = run.memory_history or MemoryHistoryRecord(), run.kernels or KernelSummary()
    compiled, check, loss = run.compile, run.model.attention_check, run.loss
    unseen, ends, restart_s = listed(*run.unseen_phases or ()), run.window.loader_end_count, run.window.loader_restart_s
    power_w, joules = run.device_state.mean_power_w, run.throughput.joules_per_token
    return [
        *labelled(
            "loader",
            ends and f"ended {counted(ends, 'time')} in the window ({run.window.loader_batches} batches an epoch)",
            restart_s and f"its restart took {milliseconds(restart_s)} ms of each",
            separator=": ",
        ),
        *labelled(
            "unseen", unseen and f"{unseen}: the module optimizes by hand; their time is in other, a step is a batch"
        ),
        *labelled(
            "compiled",
            compiled.is_attention_fused
            and f"Inductor put PyTorch's fused attention in the place of {run.model.attention}",
            not compiled.is_enabled and compiled.graph_count and f"by the module: {compiled.graph_count} graphs",
            compiled.graph_break_count
            and f"with graph breaks: {compiled.graph_break_count}; what lies between graphs runs eagerly, and "
            "--trainer.compile.fullgraph true tells where",
        ),
        *(_checked(check) if check is not None else ()),
        *labelled(
            "peak is",
            history.reason and f"not known: {history.reason}",
            history.peak_phase and f"in {history.peak_phase}",
        ),
        *labelled("kernels", kernels.reason and f"none: {kernels.reason}"),
        *_kernels(kernels),
        *labelled("path", what_sets(kernels)),
        *_ranks(run),
        *labelled("dtypes", run.dtypes and run.dtypes.reason and f"none: {run.dtypes.reason}"),
        *_cost(run),
        *endurance_lines(run),
        *labelled("power", power_w and f"{whole(power_w)} W", joules and f"{millijoules(joules)} mJ/token"),
        *_noted(run),
        *labelled("loss", loss.first and f"{loss.first:.4f} first", loss.last and f"{loss.last:.4f} last"),
        *labelled("guards", tally(guard.status for guard in run.guards)),
    ]


def _noted(run: RunRecord) -> list[Line]:
    """Means of the first logged scalars, and the numbers that rooms of installed packages recorded."""
    means = [f"{name} {plain(mean)} {run.scalar_units.get(name, '')}".rstrip() for name, mean in run.scalars.items()]
    more = f"and {len(means) - _MOST_SCALARS} more in run.json" if len(means) > _MOST_SCALARS else ""
    texts = {"scalars": [*means[:_MOST_SCALARS], more]}
    for name, value in leaves(run.rooms):
        if isinstance(value, int | float) and not isinstance(value, bool):
            room, _, title = name.partition(".")
            field = fields("run").get(f"rooms.{name}")
            unit = unit_of(field.unit if field else "1")
            text = f"{field.title if field else title} {unit.text(value)} {unit.word}".rstrip()
            texts.setdefault(room, []).append(text)
    return [line for label, of_label in texts.items() for line in labelled(label, *of_label)]


def _cost(run: RunRecord) -> list[Line]:
    """What a billion tokens cost, in money and in time."""
    rate, price = run.throughput.tokens_per_s, run.throughput.price_per_token
    if not rate or not price:
        return []
    devices = f"{duration(1e9 / rate)} on {run.rank_count} device(s)"
    return labelled("cost", f"{1e9 * price:,.2f} for 10^9 tokens", devices)


def path_cause(kernels: KernelSummary) -> tuple[str, float] | None:
    """What takes most of the chain that sets the step, and its seconds; None without a path."""
    if not kernels.path or not kernels.path_s:
        return None
    name, time_s = next(iter(kernels.path.items()))
    return name.removesuffix("_s").replace("_", " "), time_s


def largest_saving(kernels: KernelSummary) -> tuple[str, float] | None:
    """The change that would save most of the step, and its seconds; None where no change saves any.

    Other recorded what-ifs, such as half the layers, bound what the tuner's axes can save.
    """
    changes = [(change_s, words) for words, change_s in kernels.what_if.items() if words in WHAT_IFS]
    change_s, words = min(changes, default=(0.0, ""))
    return (words, -change_s) if change_s < 0 else None


def what_sets(kernels: KernelSummary) -> str:
    """One sentence on what takes most of the chain that sets the step, and on the change that saves most of it."""
    cause, saving = path_cause(kernels), largest_saving(kernels)
    if cause is None:
        return ""
    taken = f"{milliseconds(cause[1])} of {milliseconds(kernels.path_s)} ms"
    text = f"{cause[0]} takes {taken} of the chain that sets the step"
    return f"{text}; {saving[0]} would save {milliseconds(saving[1])} ms" if saving else text


def _kernels(kernels: KernelSummary) -> list[Line]:
    """How long the device was busy in a step, and how much of its communication lay beside computing."""
    step = kernels.phases.step
    if step is None or step.busy_s is None or step.window_s is None:
        return []
    busy = f"busy {milliseconds(step.busy_s)} of {milliseconds(step.window_s)} ms per step"
    matmul_s = step.kinds.get("gemm_s")
    lines = labelled("kernels", busy, matmul_s and f"{milliseconds(matmul_s)} ms of it matmul")
    if step.comm_s and step.comm_exposed_s is not None:
        exposed, hidden = milliseconds(step.comm_exposed_s), milliseconds(step.comm_s - step.comm_exposed_s)
        lines += labelled("", f"communication: {exposed} ms exposed", f"{hidden} ms beside computing")
    return lines


def _ranks(run: RunRecord) -> list[Line]:
    """What a step takes with and without synchronizing gradients, and whether the difference tells anything."""
    synchronized_s, unsynchronized_s = run.probe.synchronized_step_s, run.probe.unsynchronized_step_s
    if synchronized_s is None or unsynchronized_s is None:
        return []
    # Twice the standard error of the difference between two means of 8 steps is the standard deviation of a step.
    difference = "the difference is communication that no work hides, and waiting"
    if synchronized_s - unsynchronized_s <= (run.step.std_s or 0.0):
        difference = "no difference above the noise of the steps"
    without = f"{milliseconds(unsynchronized_s)} without synchronizing gradients: {difference}"
    return labelled("ranks", f"{milliseconds(synchronized_s)} ms a step", without)


def _checked(check: AttentionCheck) -> list[Line]:
    """How far the user's attention is from the formula."""
    deviation, tolerance = check.deviation_fraction, check.tolerance_fraction
    return labelled(
        "checked",
        check.cases and f"against the formula at {check.cases} shapes",
        deviation and tolerance and f"off by {deviation:.1e} of a row's size at most, {tolerance:.1e} allowed",
        separator=": ",
    )


def _folder_and_commands(run: RunRecord, path: Path) -> list[Line]:
    """The folder, the commands that analyse what the run recorded, and the command that repeats it, each labelled."""
    commands = [run_pass.command for run_pass in PASS.values() if recording_of(run, run_pass)]
    if run.outcome == "oom" and run.memory.refused is not None:
        commands.append("memory")
    next_steps = [("next", f"lmbench {command} {shlex.quote(shown_path(path))}") for command in dict.fromkeys(commands)]
    texts = [("result", shown_path(path)), *next_steps, ("repeat", repeat_command(run, path))]
    return [Line(label, text, is_whole=True) for label, text in texts if text]
