"""A run as an answer: what was measured, the answer with its warnings, the phases, the rest, and how to repeat it."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from textwrap import shorten

from lmbench.records.codec import as_dict
from lmbench.records.guard import not_passed
from lmbench.records.measured import PhaseSummary
from lmbench.records.passes import PASSES, pass_of
from lmbench.records.run import Model, RunRecord
from lmbench.records.summary import host_bound_fraction
from lmbench.records.vocabulary import PHASES, SPANS
from lmbench.report.answer import BLANK, Answer, Cell, Column, Line, Table
from lmbench.report.console import KERNEL_WIDTH, shortened
from lmbench.report.units import MS, PERCENT, count, gib, mean_and_std, milliseconds, percent

#: From this share of the step on it is the host that sets its time; so many phases are named.
_HOST_SETS_FRACTION = 0.5
_NAMED = 2
#: The title of the table says the unit, once for five columns.
_MS = replace(MS, word="")
#: Width of a kernel's name within a sentence.
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
    start = [*(banner(run) if with_banner else []), *([BLANK] if run.mode else [])]
    step = step_of(run)
    return Answer(
        headline=[*start, *headline(run)],
        tables=[phase_table(run, step)] if step is not None else [],
        notes=[*details(run), *notes, *(where(run, path) if path is not None else ())],
        figures={"record": as_dict(run)},
    )


def banner(run: RunRecord) -> list[Line]:
    """The configuration in a few labelled lines; none of a run that left no record of it."""
    if not run.mode:
        return []
    window = run.window
    steps = window.requested_steps or window.steps or "all"
    seconds = f" and {window.requested_s:g} s" if window.requested_s else ""
    look = pass_of(run)
    least = f"{seconds} at least" if look.has_timing else f", {look.label}: in no timing table"
    micro = window.micro_batches or 1
    accumulation = f", {micro} micro-batches a step" if micro > 1 else ""
    return [
        Line("model", _model(run)),
        Line("step", f"{run.mode}, batch {_shape(run)}{accumulation}"),
        Line("precision", f"{run.precision}, float32 matmul {run.matmul_precision}, {_compiled(run)}"),
        Line("device", _device(run)),
        Line("window", f"{steps} steps{least}, after {window.warmup_steps} of warm-up"),
    ]


def _model(run: RunRecord) -> str:
    model = run.model
    parts = [
        model.size or model.name or "(not built)",
        _heads(model) or (f"{count(model.parameter_count)} parameters" if model.parameter_count else None),
        f"attention {model.attention}" if model.attention else None,
        f"which took {model.attention_backend}" if model.attention_backend else None,
        f"checkpoint {model.checkpoint}" if model.checkpoint not in (None, "none") else None,
        model.optimizer,
    ]
    return ", ".join(part for part in parts if part)


def _heads(model: Model) -> str | None:
    """The shape of attention by itself, whose only parameters are its inputs."""
    if model.head_dim is None:
        return None
    return f"heads {model.num_heads}, head_dim {model.head_dim}, {'causal' if model.is_causal else 'not causal'}"


def _shape(run: RunRecord) -> str:
    data = run.data
    if not data.batch_size:
        return "as the data gives it"
    context = "?" if data.context_length is None else data.context_length
    return f"{data.batch_size} x context {context}, {data.source or '?'} tokens"


def _compiled(run: RunRecord) -> str:
    found = run.compile
    return f"compiled ({found.mode}{', regional' if found.regional else ''})" if found.is_enabled else "eager"


def _device(run: RunRecord) -> str:
    if run.environment is None:
        return "CPU"
    gpu = run.environment.gpu
    limit = f", power limit {gpu.power_limit_w:.0f} W" if gpu.power_limit_w else ""
    return f"{gpu.name or run.environment.host.cpu_model or 'CPU'}{limit}"


def step_of(run: RunRecord) -> PhaseSummary | None:
    """The step that is shown; None where there is none, or it is that of something wrong."""
    return None if _is_incorrect(run) else run.phases.step


def phase_table(run: RunRecord, step: PhaseSummary) -> Table:
    """Phases by mean, spread and share of the step, in milliseconds, with the verdict of the lag probes."""
    window, verdicts = run.window, run.probe.verdicts
    clock = _CLOCKS.get(run.clock or "", "device span")
    steps = "?" if window.steps is None else window.steps
    columns = [
        Column("phase"),
        *(Column(name, _MS, f"{name}_s", is_extra=name in ("median", "min", "max")) for name in _STATISTICS),
        Column("share", PERCENT, "share_fraction"),
        *([Column("verdict")] if verdicts else []),
    ]
    rows = []
    for span in (*PHASES, SPANS[0]):
        summary = run.phases.get(span)
        if summary is None:
            continue
        times = [getattr(summary, f"{name}_s") for name in _STATISTICS]
        words = [milliseconds(time_s, summary.std_s) for time_s in times]
        row = [span, *map(Cell, times, [None] * 5, [None] * 5, [None] * 5, words), summary.share_fraction]
        verdict = verdicts.get(span) if verdicts else None
        rows.append(row + [(verdict and verdict.verdict) or ""] * bool(verdicts))
    title = f"{clock} in ms, {steps} steps after {window.warmup_steps} of warm-up"
    return Table("phases", title, columns, rows, has_total=True)


def headline(run: RunRecord) -> list[Line]:
    """What a run is for: the step and who sets its time, throughput, MFU and peak memory; how it ended, if not well;
    and the guards that did not pass, each with its advice."""
    times = [] if _is_incorrect(run) else [*_step_lines(run), *_rate_lines(run)]
    return [*times, *_peak_lines(run), *closing_lines(run), *warning_lines(run)]


def _is_incorrect(run: RunRecord) -> bool:
    return run.error is not None and run.error.is_incorrect


def _step_lines(run: RunRecord) -> list[Line]:
    """The step with its spread, where most of it goes, and whether the host or the device sets it."""
    step = run.phases.step
    if step is None:
        return []
    lines = [Line("mean step", f"{mean_and_std(step.mean_s, step.std_s)} ms{_longest_phases(run)}")]
    bound, verdicts = host_bound_fraction(run), run.probe.verdicts
    if bound is None or verdicts is None:
        return lines
    words = {span: own.verdict for span, own in verdicts.items()}
    names = [span for span in PHASES if words.get(span) == "host-bound"]
    mixed = [span for span in PHASES if words.get(span) == "mixed"]
    if bound >= _HOST_SETS_FRACTION:
        told = f"the host: the device waits for it in {percent(bound)} of the step ({', '.join(names)})"
    elif names:
        told = f"the device, but in {', '.join(names)} ({percent(bound)} of the step), where it waits for the host"
    elif mixed:
        told = f"the device, which nearly waits for the host in {', '.join(mixed)}"
    else:
        told = "the device: it always has work queued"
    return [*lines, Line("limited by", told)]


def _longest_phases(run: RunRecord) -> str:
    shares = {span: found.share_fraction for span in PHASES if (found := run.phases.get(span)) is not None}
    known = sorted(((share, span) for span, share in shares.items() if share), reverse=True)[:_NAMED]
    return ": " + ", ".join(f"{span} {percent(share)}" for share, span in known) if known else ""


def details(run: RunRecord) -> list[Line]:
    """Unseen phases, what compiling did, what was refused, what kernels, memory and dtypes were found to be, power and
    loss, a line each where there is something to say; and how many guards passed."""
    loss, power_w, joules = run.loss, run.device_state.mean_power_w, run.throughput.joules_per_token
    lines = []
    if run.unseen_phases:
        unseen = ", ".join(run.unseen_phases)
        lines.append(
            Line("unseen", f"{unseen}: the module optimizes by hand; their time is in other, a step is a batch")
        )
    lines += _compile_lines(run)
    lines += _attention_lines(run)
    lines += _memory_lines(run)
    lines += _kernel_lines(run)
    lines += _dtype_lines(run)
    if power_w:
        lines.append(Line("power", f"{power_w:.0f} W{f', {joules * 1e3:.3g} mJ/token' if joules else ''}"))
    if loss.first is not None and loss.last is not None:
        lines.append(Line("loss", f"{loss.first:.4f} first, {loss.last:.4f} last"))
    return [*lines, *_tally_lines(run)]


def _rate_lines(run: RunRecord) -> list[Line]:
    """Throughput and MFU, or why there is none."""
    rate = run.throughput
    lines = []
    if rate.tokens_per_s:
        lines.append(Line("throughput", f"{rate.tokens_per_s:,.0f} tokens/s"))
    elif run.window.tokens_reason:
        lines.append(Line("throughput", f"no tokens/s: {run.window.tokens_reason}"))
    if rate.mfu_fraction is not None:
        causal = rate.mfu_causal_fraction
        half = f" ({percent(causal)} with causal attention counted half)" if causal is not None else ""
        again = (
            f"; HFU {percent(rate.hfu_fraction)}" if rate.hfu_fraction and run.flops.recomputed_per_token_flops else ""
        )
        told = f"{percent(rate.mfu_fraction)}{half}"
        if run.model.is_causal and causal is not None:
            # By itself it may be faster than its full count: half of that need not be done.
            told = f"{percent(causal)} of what causal attention needs ({percent(rate.mfu_fraction)} counted full)"
        lines.append(Line("MFU", f"{told}{again}"))
    elif rate.tokens_per_s and rate.mfu_reason:
        lines.append(Line("MFU", f"none: {rate.mfu_reason}"))
    return lines


def _peak_lines(run: RunRecord) -> list[Line]:
    """The peak of the device's memory, or of the host's; and what was refused."""
    memory = run.memory
    lines = []
    if memory.run_peak_allocated_bytes:
        peak = memory.steady_peak_allocated_bytes
        steady = f"; in the window {gib(peak)}" if peak else ""
        reserved = f"{gib(memory.run_peak_reserved_bytes)} reserved of {gib(memory.device_total_bytes)}"
        lines.append(Line("peak memory", f"{gib(memory.run_peak_allocated_bytes)} allocated, {reserved}{steady}"))
    elif memory.host_peak_rss_bytes:
        lines.append(Line("peak memory", f"{gib(memory.host_peak_rss_bytes)} resident (host)"))
    if (refused := memory.refused) is not None:
        free = f"{gib(refused.device_free_bytes)} free"
        held = f"{gib(refused.allocated_bytes)} held, {free}"
        lines.append(Line("refused", f"{gib(refused.requested_bytes)} more in {refused.phase}, with {held}"))
    return lines


def _compile_lines(run: RunRecord) -> list[Line]:
    """Where it is not one graph, and what was measured instead of attention that is written out."""
    lines = []
    if breaks := run.compile.graph_break_count:
        where = "what lies between graphs runs eagerly; --trainer.compile.fullgraph true tells where"
        lines.append(Line("compiled", f"with {breaks} graph break{'s' * (breaks > 1)}: {where}"))
    if run.compile.is_attention_fused:
        lines.append(Line("compiled", f"Inductor put PyTorch's fused attention in the place of {run.model.attention}"))
    return lines


def _attention_lines(run: RunRecord) -> list[Line]:
    """What attention by itself saves for its backward, and how right a function of the user's own was found to be."""
    saved, check, lines = run.memory.saved_bytes, run.model.attention_check, []
    if saved is not None:
        expected = run.memory.expected_saved_bytes
        by_shape = f", by its shape {gib(expected)}" if expected else ""
        lines.append(Line("saved", f"{gib(saved)} for the backward besides q, k and v{by_shape}"))
    if check is not None and check.deviation_fraction is not None and check.tolerance_fraction is not None:
        refused = f"; it refused {len(check.refused)} more" if check.refused else ""
        off = (
            f"off by {check.deviation_fraction:.1e} of a row's size at most, {check.tolerance_fraction:.1e} is allowed"
        )
        lines.append(Line("checked", f"against the formula at {check.cases} shapes{refused}: {off}"))
    return lines


def _memory_lines(run: RunRecord) -> list[Line]:
    """What the allocator's history says of the peak in one line, or why it says nothing."""
    history = run.memory_history
    if history is None:
        return []
    if history.reason:
        return [Line("peak is", f"not known: {history.reason}")]
    if not history.categories:
        return []
    largest = sorted(history.categories.items(), key=lambda item: -item[1])[:3]
    names = ", ".join(f"{name.removesuffix('_bytes').replace('_', ' ')} {gib(size)}" for name, size in largest)
    return [Line("peak is", f"in {history.peak_phase}: {names}")]


def _kernel_lines(run: RunRecord) -> list[Line]:
    """What a profiled run's trace says in one line, or why it says nothing."""
    kernels = run.kernels
    if kernels is None:
        return []
    if kernels.reason:
        return [Line("kernels", f"none: {kernels.reason}")]
    step = kernels.phases.step
    other = step and step.top_other
    top = top_other_words(other.name, other.share_fraction) if other else ""
    matmul = percent(None if step is None else step.matmul_fraction)
    return [Line("kernels", f"{milliseconds(kernels.kernel_s)} ms per step, {matmul} matmul{top}")]


def _dtype_lines(run: RunRecord) -> list[Line]:
    """What was noted of dtypes in one line, or why nothing was."""
    if run.dtypes is None:
        return []
    if run.dtypes.reason:
        return [Line("dtypes", f"none: {run.dtypes.reason}")]
    told = [f"{each.name.replace('_', ' ')} {'/'.join(each.dtypes)}" for each in run.dtypes.tensors if each.dtypes]
    return [Line("dtypes", ", ".join(told))]


def top_other_words(name: str, share_fraction: float) -> str:
    """The longest kernel that is no matrix product, to follow their share in a line of text."""
    return f"; top other kernel {shortened(name, KERNEL_WIDTH)}, {percent(share_fraction)}"


def warning_lines(run: RunRecord) -> list[Line]:
    """Guards that did not pass, with their advice, those that failed first."""
    lines = []
    for guard in sorted(not_passed(run.guards), key=lambda guard: guard.status != "fail"):
        lines += [Line(guard.status.upper(), guard.message), *([Line("", guard.advice)] if guard.advice else [])]
    return lines


def _tally_lines(run: RunRecord) -> list[Line]:
    """How many guards ended how."""
    tally = Counter[str](guard.status for guard in run.guards)
    told = ", ".join(f"{tally[status]} {status}" for status in _STATUSES if tally[status])
    return [Line("guards", told)] if told else []


def closing_lines(run: RunRecord) -> list[Line]:
    """How the run ended, if not `ok`."""
    if run.outcome == "ok":
        return []
    error = run.error
    if error is None:
        return [Line("outcome", run.outcome)]
    phase = f" in {error.phase}" if error.phase else ""
    asked = f", {gib(error.requested_bytes)} asked for" if error.requested_bytes else ""
    at = f" at {error.location}" if error.location else ""
    message = shorten(error.message or "", 160, placeholder=" ...")
    return [Line("outcome", f"{run.outcome}{phase}{at}{asked}{f': {message}' if message else ''}")]


def where(run: RunRecord, path: Path) -> list[Line]:
    """The folder, and the commands that look into its trace and that repeat the run, each with its label."""
    commands = [look.command for look in PASSES if look.recorded(run)]
    if run.outcome == "oom" and run.memory.refused is not None and "memory" not in commands:
        commands.append("memory")
    lines = [("result", str(path)), *(("next", f"lmbench {command} {shlex.quote(str(path))}") for command in commands)]
    lines += [("repeat", run.replay_command)] if run.replay_command else []
    return [Line(label, text, is_whole=True) for label, text in lines]
