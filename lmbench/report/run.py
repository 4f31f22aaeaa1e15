"""A run as an answer: its configuration, its speed with warnings, its phases, further details, and how to repeat it."""

from __future__ import annotations

import shlex
import string
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from textwrap import shorten
from typing import Any

from msgspec import Struct

from lmbench.records.codec import as_dict
from lmbench.records.measured import PhaseSummary
from lmbench.records.passes import PASSES, pass_of
from lmbench.records.run import Fp8Layers, RunRecord
from lmbench.records.schema import value_at
from lmbench.records.summary import host_bound_fraction, late_rank
from lmbench.records.vocabulary import PHASES, SPANS
from lmbench.report import shipped, units
from lmbench.report.answer import BLANK, Answer, Cell, Chart, Column, Line, Table, guard_lines
from lmbench.report.facts import choices_of
from lmbench.report.units import GIB, MS, PERCENT, mean_and_std, milliseconds, percent, plain

#: The host limits a step if the device waits for it in phases that take at least this share of the step.
_HOST_LIMITED_FRACTION = 0.5
#: Milliseconds without the word, which the table's title says once for five columns.
_MS = replace(MS, word="")
_STATISTICS = ("mean", "std", "median", "min", "max")
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
    step = run.phases.step if has_times else None
    return Answer(
        headline=[
            *(banner(run) if with_banner else []),
            *([BLANK] if run.mode else []),
            *(_speed(run) if has_times else []),
            # The device's peak memory, or the host's on a CPU; a refused allocation; the outcome, if not `ok`.
            *lines(
                "ending",
                run,
                host_peak=None if run.memory.run_peak_allocated_bytes else run.memory.host_peak_rss_bytes,
                ended=None if run.outcome == "ok" else run.outcome,
                message=shorten(value_at(run, "error.message") or "", 160, placeholder=" ..."),
            ),
            *guard_lines(run.guards),
        ],
        tables=[phase_table(run, step), *rank_tables(run)] if step is not None else [],
        notes=[*details(run), *notes, *(_folder_and_commands(run, path) if path is not None else ())],
        charts=lambda: _charts(path),
        figures={"record": as_dict(run)},
    )


def _charts(path: Path | None) -> list[Chart]:
    # Imported here, since a terminal needs no charts.
    from lmbench.report.charts import steps_charts

    return steps_charts(path) if path is not None else []


def _listed(*parts: object) -> str:
    return ", ".join(str(part) for part in parts if part)


def banner(run: RunRecord) -> list[Line]:
    """The configuration in a few labelled lines; none for a run that did not record it."""
    if not run.mode:
        return []
    model, data, window, run_pass = run.model, run.data, run.window, pass_of(run)
    host = run.environment.host.cpu_model if run.environment else None
    processor_name = value_at(run, "environment.gpu.name") or host or "CPU"
    shape = f"{data.batch_size} x context {data.context_length or '?'}, {data.source or '?'} tokens"
    fp8 = model.fp8 or Fp8Layers()
    compiled = f"compiled ({run.compile.mode}, regional)" if run.compile.regional else f"compiled ({run.compile.mode})"
    return lines(
        "banner", run,
        name=model.size or model.name or "(not built)",
        checkpoint=None if model.checkpoint == "none" else model.checkpoint,
        choices=choices_of(model),
        shape=shape if data.batch_size else "as the data gives it",
        micro_batches=window.micro_batches if (window.micro_batches or 1) > 1 else None,
        compiled=compiled if run.compile.is_enabled else "eager",
        is_eager=not run.compile.is_enabled,
        not_fp8=_listed(*fp8.left_out),
        fp8_peak=plain(run.flops.peak_flops_per_s * 1e-12) if run.flops.peak_flops_per_s else None,
        device=f"{run.world_size} x {processor_name}" if (run.world_size or 1) > 1 else processor_name,
        steps=window.requested_steps or window.steps or "all",
        at_least=" at least" if run_pass.has_timing else None,
        other_pass=None if run_pass.has_timing else run_pass.label,
    )  # fmt: skip


def phase_table(run: RunRecord, step: PhaseSummary) -> Table:
    """The mean, spread and share of the step of each phase, in milliseconds, with the verdict of the lag probes."""
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
    return Table("phases", title, columns, rows, has_total=True).without_empty_columns()


def rank_tables(run: RunRecord) -> list[Table]:
    """A table of each rank's mean step and phases and their skew over ranks; no table for a single rank."""
    if not run.per_rank:
        return []
    spans = (*PHASES, SPANS[0])
    rows: list[list[Any]] = [
        [str(rank.rank), *(rank.mean_s.get(span) for span in spans), rank.run_peak_allocated_bytes]
        for rank in run.per_rank
    ]
    columns = [Column("rank"), *(Column(span, _MS, f"{span}_s") for span in spans), Column("peak", GIB, "peak_bytes")]
    series = [[value for value in values if value is not None] for values in zip(*rows, strict=True)]
    rows.append(["skew", *(max(values) - min(values) if values else None for values in series[1:])])
    title = "mean of each rank in ms; skew is the longest less the shortest"
    return [Table("ranks", title, columns, rows, has_total=True).without_empty_columns()]


def _speed(run: RunRecord) -> list[Line]:
    """The step with its spread and its longest phases, what limits it (host or device), throughput and MFU."""
    step, rate, bound = run.phases.step or PhaseSummary(), run.throughput, host_bound_fraction(run)
    shares = {
        span: phase.share_fraction for span, phase in run.phases.items() if span in PHASES and phase.share_fraction
    }
    longest = sorted(shares, key=shares.__getitem__, reverse=True)[:2]
    most = _listed(*(f"{span} {percent(shares[span])}" for span in longest))
    verdicts = {span: lag.verdict for span, lag in run.probe.verdicts.items()} if run.probe.verdicts else {}
    waiting = _listed(*(span for span in PHASES if verdicts.get(span) == "host-bound"))
    limit = "the device: it always has work queued"
    if (bound or 0.0) >= _HOST_LIMITED_FRACTION:
        limit = f"the host: the device waits for it in {percent(bound)} of the step ({waiting})"
    elif waiting:
        limit = f"the device, but in {waiting} ({percent(bound)} of the step), where it waits for the host"
    late, late_in, wait_s = late_rank(run) or (None, None, None)
    return lines(
        "speed", run,
        late=None if late is None else str(late), late_in=late_in, wait=wait_s,
        step=mean_and_std(step.mean_s, step.std_s) if step.mean_s else None,
        most=most,
        limit=limit if step.mean_s and bound is not None else None,
        no_tokens=run.window.tokens_reason if step.mean_s and not rate.tokens_per_s else None,
        no_mfu=rate.mfu_reason if rate.tokens_per_s and rate.mfu_fraction is None else None,
        hfu=rate.hfu_fraction if run.flops.recomputed_per_token_flops else None,
    )  # fmt: skip


def details(run: RunRecord) -> list[Line]:
    """Lines on unseen phases, compilation, kernels, memory, power and loss, as far as they are known, and on guards."""
    tally = Counter[str](guard.status for guard in run.guards).most_common()
    communication_s = value_at(run, "kernels.phases.step.comm_s") or 0.0
    exposed_s = value_at(run, "kernels.phases.step.comm_exposed_s") or 0.0
    difference = "the difference is communication that no work hides, and waiting"
    # Twice the standard error of the difference between two means of 8 steps is the standard deviation of a step.
    noise_s = (run.phases.step.std_s if run.phases.step else None) or 0.0
    if (run.probe.synchronized_step_s or 0.0) - (run.probe.unsynchronized_step_s or 0.0) <= noise_s:
        difference = "no difference above the noise of the steps"
    return lines(
        "details", run, hidden=communication_s - exposed_s, difference=difference,
        unseen=_listed(*run.unseen_phases or ()), tally=_listed(*(f"{number} {status}" for status, number in tally)),
    )  # fmt: skip


def _folder_and_commands(run: RunRecord, path: Path) -> list[Line]:
    """The folder, the commands that analyse what the run recorded, and the command that repeats it, each labelled."""
    commands = [run_pass.command for run_pass in PASSES if run_pass.recorded(run)]
    if run.outcome == "oom" and run.memory.refused is not None:
        commands.append("memory")
    next_steps = [("next", f"lmbench {command} {shlex.quote(str(path))}") for command in dict.fromkeys(commands)]
    texts = [("result", str(path)), *next_steps, ("repeat", run.replay_command)]
    return [Line(label, text, is_whole=True) for label, text in texts if text]


class _Wording(string.Formatter):
    """Fills placeholders from the caller's words, or else from the record's field of that name.

    Raises:
        LookupError: the word or field is empty, unknown or zero.
    """

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        value = kwargs[field_name] if field_name in kwargs else value_at(args[0], field_name)
        if not value:
            raise LookupError(field_name)
        return value, field_name

    def format_field(self, value: Any, format_spec: str) -> str:
        if value is True:
            return ""
        unit_function = getattr(units, format_spec, None)
        return unit_function(value) if unit_function else format(value, format_spec)


_SECTIONS: dict[str, list[list[str]]] = tomllib.loads(shipped("lines.toml"))


def lines(section: str, record: Struct, **words: Any) -> list[Line]:
    """The lines of a section of lines.toml, without pieces and lines whose placeholders have no value."""
    filled, wording = [], _Wording()
    for label, *pieces in _SECTIONS[section]:
        texts = [""] * len(pieces)
        for index, piece in enumerate(pieces):
            with suppress(LookupError):
                texts[index] = wording.vformat(piece, (record,), words)
        if texts[0]:
            filled.append(Line(label, "".join(texts)))
    return filled
