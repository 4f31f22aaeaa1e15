"""A run as an answer: what was measured, the answer with its warnings, the phases, the rest, and how to repeat it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from lmbench.records.codec import as_dict
from lmbench.records.environment import Gpu
from lmbench.records.guard import not_passed
from lmbench.records.instruments import DtypeRecord, KernelSummary, MemoryHistoryRecord, PhaseKernels
from lmbench.records.measured import PhaseSummary, RefusedAllocation, RunError
from lmbench.records.passes import PASSES, pass_of
from lmbench.records.run import AttentionCheck, RunRecord
from lmbench.records.summary import host_bound_fraction
from lmbench.records.vocabulary import PHASES, SPANS
from lmbench.report.answer import BLANK, Answer, Cell, Chart, Column, Line, Table
from lmbench.report.units import GIB, MS, PERCENT, count, gib, mean_and_std, milliseconds, percent, whole

#: From this share of the step on it is the host that sets its time.
_HOST_SETS_FRACTION = 0.5
#: The title of the table says the unit, once for five columns.
_MS = replace(MS, word="")
_STATUSES = ("pass", "warn", "fail", "n/a")
_STATISTICS = ("mean", "std", "median", "min", "max")
_CLOCKS = {"host": "time", "sync": "synchronized time (not the step's own speed)"}


def run_answer(run: RunRecord, path: Path | None, notes: Sequence[Line] = (), with_banner: bool = True) -> Answer:
    """A run as `lmbench fit` ends with and `lmbench show` repeats it.

    Args:
        run: its record.
        path: its result folder, None where nothing was kept.
        notes: lines about how the run ended.
        with_banner: whether the configuration is told again.
    """
    has_times = run.error is None or not run.error.is_incorrect
    step = run.phases.step if has_times else None
    warnings = [
        line
        for guard in sorted(not_passed(run.guards), key=lambda guard: guard.status != "fail")
        for line in [Line(guard.status.upper(), guard.message), *([Line("", guard.advice)] if guard.advice else [])]
    ]
    return Answer(
        headline=[
            *(banner(run) if with_banner else []),
            *([BLANK] if run.mode else []),
            *(_speed(run) if has_times else []),
            *_ending(run),
            *warnings,
        ],
        tables=[phase_table(run, step), *rank_tables(run)] if step is not None else [],
        notes=[*details(run), *notes, *(_where(run, path) if path is not None else ())],
        charts=lambda: _charts(path),
        figures={"record": as_dict(run)},
    )


def _charts(path: Path | None) -> list[Chart]:
    # Here: a terminal does without pandas.
    from lmbench.report.charts import steps_chart

    chart = steps_chart(path) if path is not None else None
    return [chart] if chart is not None else []


def _lines(*lines: tuple[str, object, str]) -> list[Line]:
    """Lines by label, whether there is anything to say, and text."""
    return [Line(label, text) for label, is_known, text in lines if is_known]


def _listed(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part)


def banner(run: RunRecord) -> list[Line]:
    """The configuration in a few labelled lines; none of a run that left no record of it."""
    if not run.mode:
        return []
    model, data, window, look = run.model, run.data, run.window, pass_of(run)
    environment, micro = run.environment, window.micro_batches or 1
    gpu = environment.gpu if environment else Gpu()
    processor_name = gpu.name or (environment.host.cpu_model if environment else None) or "CPU"
    heads = f"heads {model.num_heads}, head_dim {model.head_dim}, {'causal' if model.is_causal else 'not causal'}"
    parameters = model.parameter_count and f"{count(model.parameter_count)} parameters"
    shape = f"{data.batch_size} x context {data.context_length or '?'}, {data.source or '?'} tokens"
    seconds = f" and {window.requested_s:g} s" if window.requested_s else ""
    least = f"{seconds} at least" if look.has_timing else f", {look.label}: in no timing table"
    compiled = f"compiled ({run.compile.mode}{', regional' if run.compile.regional else ''})"
    return [
        Line("model", _listed(
            model.size or model.name or "(not built)",
            heads if model.head_dim is not None else parameters,
            model.attention and f"attention {model.attention}",
            model.attention_backend and f"which took {model.attention_backend}",
            model.checkpoint not in (None, "none") and f"checkpoint {model.checkpoint}",
            model.optimizer,
        )),
        Line("step", _listed(
            run.mode, f"batch {shape if data.batch_size else 'as the data gives it'}",
            micro > 1 and f"{micro} micro-batches a step",
        )),
        Line("precision", _listed(
            run.precision, f"float32 matmul {run.matmul_precision}", compiled if run.compile.is_enabled else "eager",
        )),
        Line("device", _listed(
            f"{run.world_size} x {processor_name}" if (run.world_size or 1) > 1 else processor_name,
            gpu.power_limit_w and f"power limit {whole(gpu.power_limit_w)} W",
        )),
        Line("window", f"{window.requested_steps or window.steps or 'all'} steps{least}, "
             f"after {window.warmup_steps} of warm-up"),
    ]  # fmt: skip


def phase_table(run: RunRecord, step: PhaseSummary) -> Table:
    """Phases by mean, spread and share of the step, in milliseconds, with the verdict of the lag probes."""
    window, verdicts = run.window, run.probe.verdicts
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
            lag = verdicts.get(span) if verdicts else None
            rows.append([span, *cells, summary.share_fraction, (lag and lag.verdict) or ""])
    clock, steps = _CLOCKS.get(run.clock or "", "device span"), "?" if window.steps is None else window.steps
    title = f"{clock} in ms, {steps} steps after {window.warmup_steps} of warm-up"
    shown = len(columns) if verdicts else -1
    return Table("phases", title, columns[:shown], [row[:shown] for row in rows], has_total=True)


def rank_tables(run: RunRecord) -> list[Table]:
    """Of several ranks each one's mean step and phases, and how far these are apart."""
    ranks = run.per_rank or []
    spans = [span for span in (*PHASES, SPANS[0]) if any(span in rank.mean_s for rank in ranks)]
    rows: list[list[Any]] = [
        [str(rank.rank), *(rank.mean_s.get(span) for span in spans), rank.run_peak_allocated_bytes] for rank in ranks
    ]
    columns = [Column("rank"), *(Column(span, _MS, f"{span}_s") for span in spans), Column("peak", GIB, "peak_bytes")]
    known = [index for index in range(len(columns)) if any(row[index] is not None for row in rows)]
    series = [[row[index] for row in rows if row[index] is not None] for index in known[1:]]
    rows = [[row[index] for index in known] for row in rows] + [["skew", *(max(one) - min(one) for one in series)]]
    title = "mean of each rank in ms; skew is the longest less the shortest"
    return [Table("ranks", title, [columns[index] for index in known], rows, has_total=True)] if ranks else []


def _speed(run: RunRecord) -> list[Line]:
    """The step with its spread, where most of it goes, whether the host or the device sets it, throughput and MFU."""
    step, rate, bound = run.phases.step or PhaseSummary(), run.throughput, host_bound_fraction(run)
    shares = {
        span: phase.share_fraction for span, phase in run.phases.items() if span in PHASES and phase.share_fraction
    }
    longest = sorted(shares, key=shares.__getitem__, reverse=True)[:2]
    most = _listed(*(f"{span} {percent(shares[span])}" for span in longest))
    words = {span: lag.verdict for span, lag in run.probe.verdicts.items()} if run.probe.verdicts else {}
    waiting = _listed(*(span for span in PHASES if words.get(span) == "host-bound"))
    limits = [
        ((bound or 0.0) >= _HOST_SETS_FRACTION,
         f"the host: the device waits for it in {percent(bound)} of the step ({waiting})"),
        (waiting, f"the device, but in {waiting} ({percent(bound)} of the step), where it waits for the host"),
        (True, "the device: it always has work queued"),
    ]  # fmt: skip
    mfu, causal, has_mfu = percent(rate.mfu_fraction), rate.mfu_causal_fraction, rate.mfu_fraction is not None
    half = "" if causal is None else f" ({percent(causal)} with causal attention counted half)"
    has_hfu = rate.hfu_fraction and run.flops.recomputed_per_token_flops
    hfu = f"; HFU {percent(rate.hfu_fraction)}" if has_hfu else ""
    return _lines(
        (
            "mean step",
            step.mean_s,
            ": ".join(filter(None, [f"{mean_and_std(step.mean_s, step.std_s)} ms (std of the steps)", most])),
        ),
        ("limited by", step.mean_s and bound is not None, next(text for holds, text in limits if holds)),
        ("throughput", rate.tokens_per_s, f"{whole(rate.tokens_per_s)} tokens/s"),
        (
            "throughput",
            step.mean_s and not rate.tokens_per_s and run.window.tokens_reason,
            f"no tokens/s: {run.window.tokens_reason}",
        ),
        ("MFU", has_mfu, mfu + half + hfu),
        ("MFU", not has_mfu and rate.tokens_per_s and rate.mfu_reason, f"none: {rate.mfu_reason}"),
    )


def _ending(run: RunRecord) -> list[Line]:
    """The peak of the device's memory, or of the host's; what was refused; and how the run ended, if not `ok`."""
    memory, refused, error = run.memory, run.memory.refused or RefusedAllocation(), run.error or RunError()
    peak, rss, steady = memory.run_peak_allocated_bytes, memory.host_peak_rss_bytes, memory.steady_peak_allocated_bytes
    message = shorten(error.message or "", 160, placeholder=" ...")
    place = "".join(f" {word} {name}" for word, name in (("in", error.phase), ("at", error.location)) if name)
    asked = error.requested_bytes and f"{gib(error.requested_bytes)} asked for"
    end = _listed(f"{run.outcome}{place}", asked)
    return _lines(
        ("peak memory", peak, f"{gib(peak)} allocated, {gib(memory.run_peak_reserved_bytes)} reserved of "
         f"{gib(memory.device_total_bytes)}{f'; in the window {gib(steady)}' if steady else ''}"),
        ("peak memory", rss and not peak, f"{gib(rss)} resident (host)"),
        ("refused", memory.refused, f"{gib(refused.requested_bytes)} more in {refused.phase}, with "
         f"{gib(refused.allocated_bytes)} held, {gib(refused.device_free_bytes)} free"),
        ("outcome", run.outcome != "ok", ": ".join(filter(None, [end, message]))),
    )  # fmt: skip


def details(run: RunRecord) -> list[Line]:
    """Unseen phases, what compiling did, what kernels, memory and dtypes were found to be, power and loss, a line each
    where there is something to say; and how many guards passed."""
    history, dtypes = run.memory_history or MemoryHistoryRecord(), run.dtypes or DtypeRecord()
    kernels, breaks = run.kernels or KernelSummary(), run.compile.graph_break_count
    step, power_w = kernels.phases.step or PhaseKernels(), run.device_state.mean_power_w
    joules, check = run.throughput.joules_per_token, run.model.attention_check or AttentionCheck()
    parts = sorted(history.categories.items(), key=lambda item: -item[1])[:3]
    names = {name: name.removesuffix("_bytes").replace("_", " ") for name, _ in parts}
    by_tensor = _listed(
        *(f"{row.name.replace('_', ' ')} {'/'.join(row.dtypes)}" for row in dtypes.tensors if row.dtypes)
    )
    tally = Counter[str](guard.status for guard in run.guards)
    return _lines(
        ("unseen", run.unseen_phases, f"{_listed(*run.unseen_phases or ())}: the module optimizes by hand; their time "
         "is in other, a step is a batch"),
        ("compiled", run.compile.is_attention_fused,
         f"Inductor put PyTorch's fused attention in the place of {run.model.attention}"),
        ("compiled", breaks, f"with {breaks} graph break{'' if breaks == 1 else 's'}: what lies between graphs runs "
         "eagerly; --trainer.compile.fullgraph true tells where"),
        ("checked", check.deviation_fraction is not None, f"against the formula at {check.cases} shapes: off by "
         f"{check.deviation_fraction or 0:.1e} of a row's size at most, {check.tolerance_fraction or 0:.1e} allowed"),
        ("peak is", history.reason, f"not known: {history.reason}"),
        ("peak is", parts and not history.reason,
         f"in {history.peak_phase}: {_listed(*(f'{names[name]} {gib(size)}' for name, size in parts))}"),
        ("kernels", kernels.reason, f"none: {kernels.reason}"),
        ("kernels", run.kernels and not kernels.reason, f"{milliseconds(kernels.kernel_s)} ms per step, "
         f"{percent(step.matmul_fraction)} matmul"),
        ("dtypes", dtypes.reason, f"none: {dtypes.reason}"),
        ("dtypes", run.dtypes and not dtypes.reason, by_tensor),
        ("power", power_w, f"{whole(power_w)} W{f', {joules * 1e3:.3g} mJ/token' if joules else ''}"),
        ("loss", None not in (run.loss.first, run.loss.last),
         f"{run.loss.first or 0:.4f} first, {run.loss.last or 0:.4f} last"),
        ("guards", tally, _listed(*(f"{tally[status]} {status}" for status in _STATUSES if tally[status]))),
    )  # fmt: skip


def _where(run: RunRecord, path: Path) -> list[Line]:
    """The folder, and the commands that look into its trace and that repeat the run, each with its label."""
    commands = [look.command for look in PASSES if look.recorded(run)]
    if run.outcome == "oom" and run.memory.refused is not None:
        commands.append("memory")
    lines = _lines(
        ("result", True, str(path)),
        *(("next", True, f"lmbench {command} {shlex.quote(str(path))}") for command in dict.fromkeys(commands)),
        ("repeat", run.replay_command, str(run.replay_command)),
    )
    return [line._replace(is_whole=True) for line in lines]
