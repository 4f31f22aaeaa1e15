"""What `lmbench memory` says: of a history, of a run that ran out of memory, of a configuration to come."""

from __future__ import annotations

import shlex
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from textwrap import shorten
from typing import Any

from lmbench.memory.categories import CATEGORIES, CATEGORY_LABELS, Category
from lmbench.memory.findings import Allocation, Findings
from lmbench.memory.forecast import Forecast, Largest, PhasePeak
from lmbench.memory.shortage import EXPANDABLE, Remedy, Shortage
from lmbench.memory.timeline import memory_chart, memory_timeline
from lmbench.records.guard import not_passed
from lmbench.report.answer import Answer, Column, Line, Table
from lmbench.report.units import COUNT, PERCENT, WORDS, Unit, count, gib, gib_number, percent, whole

#: Parts with less of the peak than this are together in one row.
_PART_FRACTION = 0.005
#: A category with less of the peak than this has no column of its own beside the model's parts.
_COLUMN_FRACTION = 0.03
#: A column with less in every row is left out.
_COLUMN_BYTES = 2**20
#: Autograd's name of what saves for all of a compiled region.
_COMPILED_REGION = "CompiledFunction"
#: Phases of a forecast that do the work; what is between them never has a peak of its own.
_FORECAST_PHASES = ("forward", "backward", "clip", "optimizer")
#: Headings of narrow columns.
_SHORT: Mapping[Category, str] = {
    "parameters": "params", "gradients": "grads", "optimizer_state": "optim", "activations": "acts",
    "temporaries": "temps", "workspaces": "work",
}  # fmt: skip
#: What makes less of the largest category, each in a clause.
_REMEDIES: Mapping[Category, str] = {
    "parameters": "a lower precision of the weights (bf16-true), or fewer of them on each device",
    "gradients": "gradients set to none before the forward, a lower precision of the weights, or fewer on each device",
    "optimizer_state": "an optimizer with less state, or its state over several ranks; a smaller batch changes nothing",
    "logits": "a loss in pieces of the vocabulary or of the sequence, or a smaller batch accumulated",
    "temporaries": "a smaller batch accumulated, or compiling, which does without most of them",
    "inputs": "fewer batches on the device at a time",
}


def _gib(size_bytes: float) -> str:
    """GiB with the digits that matter beside a whole peak: what is less than half a MiB is 0.000."""
    value = size_bytes / 2**30
    return f"{value:.{3 if abs(value) < 1 else 2}f}"


def _mib(size_bytes: float) -> str:
    value = size_bytes / 2**20
    return f"{value:,.{0 if value >= 100 else 1 if value >= 1 else 3}f}"


# The captions or headings name these units, once for all columns.
_OF_PEAK = Unit("", 2.0**-30, _gib, "_gib")
_MIB = Unit("", 2.0**-20, _mib, "_mib")
_GIB = Unit("", 2.0**-30, gib_number, "_gib")


def _sizes(categories: Sequence[Category]) -> list[Column]:
    return [Column(_SHORT.get(name, name), _OF_PEAK, f"{name}_bytes") for name in categories]


# a recorded history


def history_answer(findings: Findings, top: int = 15) -> Answer:
    """What the peak is made of, where it is from, and how to make it smaller; `top` of the largest allocations."""
    tables = [
        _category_table(findings), _phase_table(findings), _part_table(findings), _largest_table(findings, top),
        _saved_table(findings), _operator_table(findings),
    ]  # fmt: skip
    peaks = None if findings.notes is None else findings.notes.peaks
    figures = {
        "path": str(findings.path), "device": findings.played.device, "entries": findings.played.entry_count,
        "is_complete": findings.is_complete, "cuts": findings.cuts,
        "peak": {
            "allocated_bytes": findings.peak_bytes, "requested_bytes": findings.peak_requested_bytes,
            "reserved_bytes": findings.peak_reserved_bytes,
            "pending_bytes": int(findings.played.pending_bytes[findings.peak]),
            "phase": findings.peak_phase, "step": findings.peak_step,
        },
        "allocator": peaks, "residual": findings.residual and findings.residual._asdict(), "guards": findings.guards,
        "free_at_end": {
            "total_bytes": findings.played.free_bytes, "largest_bytes": findings.played.largest_free_bytes,
        },
    }  # fmt: skip
    return Answer(
        headline=_head(findings),
        tables=[table for table in tables if table.rows],
        notes=_closing(findings),
        charts=[memory_chart(f"Memory over time: {findings.title}", memory_timeline(findings))],
        figures=figures,
        data=lambda: _allocations(findings.largest),
        first=("peak",),
    )


def _head(findings: Findings) -> list[Line]:
    """What is missing in the history, what the peak is made of, what makes it smaller, and guards that did not pass."""

    def share(size_bytes: int) -> str:
        return f"{gib(size_bytes)} ({percent(size_bytes / (findings.peak_bytes or 1))})"

    lines = [] if findings.is_complete else [Line("INCOMPLETE", "; ".join(findings.cuts))]
    step = f" of step {findings.peak_step}" if findings.peak_step else ""
    where = f" in {findings.peak_phase}{step}" if len(findings.attribution.bands.phases) else ""
    largest = sorted(findings.by_category.items(), key=lambda item: -item[1])
    categories = ", ".join(f"{CATEGORY_LABELS[name]} {share(size)}" for name, size in largest[:3]) or "nothing"
    part = next((part for part in findings.by_part if part), None)
    most = ""
    if part is not None:
        sizes = findings.by_part[part]
        name, size = max(sizes.items(), key=lambda item: item[1])
        of_it = f"{gib(size) if len(sizes) > 1 else 'all'} of it {CATEGORY_LABELS[name]}"
        most = f"Most is made by {_part(part, _common(findings))}: {share(sum(sizes.values()))}, {of_it}."
    elif findings.largest:
        first = findings.largest[0]
        source = f" from {_frame(first.user_frame)}" if first.user_frame else ""
        most = f"Most is in {whole(first.count)} x {_mib(first.size_bytes)} MiB{source}: {share(first.total_bytes)}."
    lines.append(Line("peak", f"{gib(findings.peak_bytes)}{where}: {categories}. {most}"))
    reserved, unused = findings.peak_reserved_bytes, findings.peak_reserved_bytes - findings.peak_bytes
    fraction = percent(unused / (reserved or 1))
    known = f"{gib(reserved)} at the peak, {gib(unused)} ({fraction}) of it in no block"
    lines.append(Line("reserved", known if unused >= 0 else "not known: segments are missing in this snapshot"))
    if largest and (remedy := _remedy(findings, largest[0][0])):
        lines.append(Line("do", remedy))
    is_compiled = findings.run is not None and bool(findings.run.compile.is_enabled)
    if is_compiled or findings.attribution.blocks["operator"].str.startswith(_COMPILED_REGION).any():
        only = (
            "each compiled region is one operator: what it makes and saves has its name, without the modules inside; "
        )
        lines.append(Line("compiled", f"{only}an eager run tells them apart"))
    for guard in not_passed(findings.guards):
        lines += [Line(guard.status.upper(), guard.message), Line("", guard.advice)]
    return lines


def _remedy(findings: Findings, largest: Category) -> str | None:
    """What makes the peak smaller, by what most of it is; nothing where that is unknown."""
    if largest != "activations":
        return _REMEDIES.get(largest)
    saved = sum(row.total_bytes for row in findings.saved)
    why = f"{gib(saved)} are saved for the backward: " if saved else ""
    if findings.run is None:
        return f"{why}checkpoints (torch.utils.checkpoint), or a smaller batch accumulated"
    if findings.run.model.checkpoint in (None, "none"):
        return f"{why}--model.checkpoint block or selective saves less, or a smaller batch accumulated"
    return f"{why}a smaller batch accumulated; blocks are checkpointed already"


def _category_table(findings: Findings) -> Table:
    total = findings.peak_bytes
    rows: list[list[Any]] = [
        [CATEGORY_LABELS[name], size, size / (total or 1)] for name, size in findings.by_category.items()
    ]
    columns = [Column("category"), Column("GiB", _OF_PEAK, "size_bytes"), Column("share", PERCENT, "share_fraction")]
    return Table("peak", "At the peak", columns, [*rows, ["peak", total, 1.0]], "GiB", has_total=True)


def _phase_table(findings: Findings) -> Table:
    names = [n for n in CATEGORIES if any(p.by_category.get(n, 0) >= _COLUMN_BYTES for p in findings.phases)]
    rows = [
        [phase.phase, phase.allocated_bytes, *(phase.by_category.get(name) for name in names)]
        for phase in findings.phases
    ]
    columns = [Column("phase"), Column("peak", _OF_PEAK, "peak_bytes"), *_sizes(names)]
    caption = "GiB; the most that was allocated in a phase, over all steps"
    return Table("phases", "Each phase's peak", columns, rows, caption)


def _part_table(findings: Findings) -> Table:
    """Bytes at the peak by part of the model; small categories are together in one column, small parts in one row."""
    sizes, peak_bytes, common = findings.by_category, findings.peak_bytes, _common(findings)
    known = [name for name in CATEGORIES if sizes.get(name, 0) >= _COLUMN_BYTES]
    large = [name for name in known if sizes[name] >= _COLUMN_FRACTION * peak_bytes]
    names = known if len(known) - len(large) < 2 else large

    def row(label: str, of_part: Mapping[Category, int]) -> list[Any]:
        rest = sum(size for name, size in of_part.items() if name not in names) or None
        return [
            label,
            sum(of_part.values()),
            *(of_part.get(name) for name in names),
            *([rest] if names != known else []),
        ]

    rows, others = [], []
    for part, of_part in findings.by_part.items():
        if sum(of_part.values()) < _PART_FRACTION * peak_bytes:
            others.append(Counter(of_part))
        else:
            rows.append(row(_part(part, common), of_part))
    if others:
        rows.append(row(f"{len(others)} more part{'s' if len(others) > 1 else ''}", sum(others, Counter())))
    rest = [Column("rest", _OF_PEAK, "rest_bytes")] if names != known else []
    columns = [Column("part", narrowing="fold"), Column("all", _OF_PEAK, "all_bytes"), *_sizes(names), *rest]
    caption = (
        "GiB at the peak, by the module that made it (in the backward: whose output's gradient came last), or whose "
        f"parameter it belongs to; * is any block{f'; all are in {common[:-1]}' if common else ''}"
    )
    return Table("parts", "By part of the model", columns, rows if any(findings.by_part) else [], caption)


def _part(owner: str, common: str) -> str:
    return owner.removeprefix(common) or "(none)"


def _common(findings: Findings) -> str:
    """What every part's path begins with, such as `network.`: it tells nothing. Parts around it keep their names."""
    known = [part.split(".") for part in findings.by_part if part]
    deepest = max(known, key=len, default=[])
    shared = 0
    for end in range(1, len(deepest)):
        # What is listed stays with its list: `blocks.*`.
        is_listed = "*" in deepest[: end + 1]
        if is_listed or any(part[:end] != deepest[:end][: len(part)] for part in known):
            break
        shared = end
    return "".join(f"{name}." for name in deepest[:shared])


def _frame(text: str) -> str:
    path, _, name = text.rpartition(" ")
    return f"{path.rpartition('/')[2]} {name}".strip()


def _largest_table(findings: Findings, top: int) -> Table:
    """The largest allocations at the peak, with the first frame of the user's code."""

    def looks(row: Allocation) -> tuple[object, ...]:
        return row.size_bytes, row.count, row.category, row.phase, row.owner, row.user_frame

    common, first, rest = _common(findings), findings.largest[:top], findings.largest[top:]
    alike = Counter(map(looks, first))
    rows: list[list[Any]] = []
    for row in first:
        # What saved them tells apart what would look alike.
        saved_by = f"saved by {row.operator}" if row.operator and alike[looks(row)] > 1 else ""
        where = ", ".join(filter(None, (_part(row.owner, common), _frame(row.user_frame), saved_by)))
        category, phase = CATEGORY_LABELS[row.category], row.phase or "before"
        rows.append([row.size_bytes, row.count, row.total_bytes, category, phase, where])
    if rest:
        total, number = sum(row.total_bytes for row in rest), sum(row.count for row in rest)
        rows.append([None, number, total, f"{len(rest)} more kinds", "", ""])
    columns = [
        Column("MiB", _MIB, "size_bytes"), Column("n", COUNT, "count"), Column("GiB", _OF_PEAK, "total_bytes"),
        Column("category"), Column("phase"), Column("part, line", narrowing="fold"),
    ]  # fmt: skip
    caption = "each in MiB, n alike, together GiB; the first frame that is not PyTorch's or Lightning's"
    return Table("largest", "Largest at the peak", columns, rows, caption)


def _allocations(largest: Sequence[Allocation]) -> Table:
    """What is held at the peak, alike blocks in a row."""
    names = [field.name for field in fields(Allocation)[:-1]]
    columns = [Column(name, COUNT if name.endswith(("bytes", "count")) else WORDS, name) for name in names]
    rows = [[getattr(row, name) for name in names] for row in largest]
    return Table("allocations", "Held at the peak", columns, rows)


def _saved_table(findings: Findings) -> Table:
    """What the forward leaves for the backward, by block of the model."""
    rows: list[list[Any]] = []
    common = _common(findings)
    for row in findings.saved:
        first = _part(row.first, common)
        name = first if row.count == 1 else f"{first} .. {row.last.rpartition('.')[2]}"
        rows.append([name, row.count, row.each_bytes, row.total_bytes])
    columns = [
        Column("block", narrowing="fold"), Column("n", COUNT, "count"), Column("MiB each", _MIB, "each_bytes"),
        Column("GiB", _OF_PEAK, "total_bytes"),
    ]  # fmt: skip
    return Table(
        "saved", "Saved for the backward", columns, rows, "storages made in the forward, each once, without parameters"
    )


def _operator_table(findings: Findings) -> Table:
    """The operators that saved it."""
    sums: Counter[str] = Counter()
    for row in findings.saved:
        sums.update({operator: size * row.count for operator, size in row.by_operator.items()})
    total = sum(sums.values()) or 1
    columns = [
        Column("operator", narrowing="fold"), Column("GiB", _OF_PEAK, "size_bytes"),
        Column("share", PERCENT, "share_fraction"),
    ]  # fmt: skip
    return Table(
        "operators", "Saved by which operators", columns,
        [[operator, size, size / total] for operator, size in sums.most_common()],
        "of several operators that save a storage, the one nearest to where it was made",
    )  # fmt: skip


def _closing(findings: Findings) -> list[Line]:
    """The stream between the blocks, and what was recorded and how it agrees."""
    played, notes, lines = findings.played, findings.notes, []
    if (residual := findings.residual) is not None:
        computed = "not known" if residual.computed_bytes is None else f"{_mib(residual.computed_bytes)} MiB"
        seen = ", ".join(f"{number} of {_mib(size)} MiB" for size, number in residual.seen_bytes.items()) or "none"
        lines.append(Line(
            "residual",
            f"the stream between blocks, batch x context x d_model: {computed} by the shape; outputs of blocks in the "
            f"history: {seen}; {residual.at_peak} of them are held at the peak",
        ))  # fmt: skip
    lines.append(
        Line("free", f"{gib(played.free_bytes)} at the end, the largest piece {gib(played.largest_free_bytes)}")
    )
    pending, steps = int(played.pending_bytes[findings.peak]), len(findings.attribution.bands.steps)
    of_steps = f", {steps} step{'s' if steps != 1 else ''}" if steps else ""
    whose = "" if notes is not None else ", without lmbench's notes: categories by stacks"
    waiting = f"; {gib(pending)} more wait for another stream at the peak" if pending else ""
    lines.append(Line("history", f"device {played.device}, {played.entry_count:,} entries{of_steps}{whose}{waiting}"))
    if findings.attribution.unmatched:
        lines.append(Line("notes", f"{findings.attribution.unmatched:,} noted storages are in no block of the history"))
    if notes is not None and notes.peaks is not None:
        peaks = notes.peaks
        lines.append(Line(
            "allocator",
            f"its own peaks: {gib(peaks.allocated_bytes)} allocated, {gib(peaks.requested_bytes)} asked for "
            f"(replayed: {gib(findings.peak_requested_bytes)}), {gib(peaks.reserved_bytes)} reserved; "
            f"{gib(peaks.allocated_bytes - findings.peak_bytes)} allocated are ends of blocks that it left whole",
        ))  # fmt: skip
    if findings.run is not None and findings.run.run_id:
        lines.append(Line("run", findings.run.run_id))
    return [*lines, Line("snapshot", str(findings.path), is_whole=True)]


# a run that ran out of memory


def shortage_answer(shortage: Shortage) -> Answer:
    """What was asked for where, what the device held, and a row for each change with its predicted peak."""
    error, refused = shortage.run.error, shortage.refused
    where = f" in {error.phase}" if error and error.phase else ""
    message = shorten(error.message or "", 160, placeholder=" ...") if error else "nothing more is known"
    lines = [Line("outcome", f"out of memory{where}: {message}")]
    if refused is not None:
        asked = f"{gib(refused.requested_bytes)} more in {refused.phase}, with {gib(refused.device_free_bytes)} free"
        parts = {
            "parameters": refused.parameters_bytes, "gradients": refused.gradients_bytes,
            "optimizer state": refused.optimizer_state_bytes, "activations and the rest": refused.rest_bytes,
        }  # fmt: skip
        held = ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
        device_bytes = shortage.run.memory.device_total_bytes
        lines += [
            Line("asked", asked),
            Line("held", f"{gib(refused.allocated_bytes)} of {gib(device_bytes)}: {held}"),
            Line("fragmented", f"{gib(shortage.unused_bytes)} reserved and not allocated"),
        ]
    elif shortage.is_of_host:
        whose = "the host's memory, not the device's: fewer or smaller loader workers, or more of it"
        lines.append(Line("whose", whose))
    changes = [shortage.as_it_is, *shortage.remedies]
    reasons = dict.fromkeys(change.reason for change in changes if change.reason)
    notes = [*(Line("not known", reason) for reason in reasons), Line("do", advice(shortage))]
    has_table = bool(shortage.remedies) or shortage.as_it_is.forecast is not None
    figures = {
        "error": error, "refused": refused, "unused_bytes": shortage.unused_bytes, "gpu": shortage.gpu,
        "as_it_is": shortage.as_it_is, "remedies": shortage.remedies, "advice": advice(shortage),
    }  # fmt: skip
    tables = [_remedies_table(shortage, changes)] if has_table else []
    return Answer(headline=lines, tables=tables, notes=notes, figures={"shortage": figures})


def _remedies_table(shortage: Shortage, changes: Sequence[Remedy]) -> Table:
    gpu = shortage.gpu
    rows = []
    for change in changes:
        options = " ".join(word.removeprefix("--") for word in change.words) or change.change
        sizes: tuple[int | None, ...] = (None, None)
        fits = "not known"
        if (forecast := change.forecast) is not None:
            sizes = forecast.highest.total_bytes, forecast.reserved_bytes
            fits = "" if forecast.fits is None else "yes" if forecast.fits else "no"
        rows.append([options, *sizes, fits])
    columns = [
        Column("options"), Column("peak", _GIB, "peak_bytes"), Column("reserved", _GIB, "reserved_bytes"),
        Column("fits"),
    ]  # fmt: skip
    caption = f"on {gpu.name} with {gib(gpu.total_bytes)}; GiB" if gpu is not None else "GiB"
    return Table("remedies", "What would fit, predicted", columns, rows, caption)


def advice(shortage: Shortage) -> str:
    """The first thing to do, in a sentence."""
    if shortage.is_fragmented:
        return f"{EXPANDABLE}: what was asked for is there, in pieces; set it before the run"
    if shortage.refused is None and shortage.is_of_host:
        return "give the host more memory, or let loaders keep less of it"
    fitting = [change for change in shortage.remedies if change.forecast is not None and change.forecast.fits]
    if fitting:
        # The one with the highest peak changes the least that has to be changed.
        least = max(fitting, key=lambda change: change.peak_bytes)
        return f"{least.change}: {shlex.join(least.words)}"
    forecast = shortage.as_it_is.forecast
    largest = forecast and forecast.largest_batch_size
    if largest and largest.value:
        return f"a batch of {largest.value} fits: --data.batch_size={largest.value}"
    if any(change.forecast is not None for change in shortage.remedies):
        return "none of these is enough alone; combine them, and ask: lmbench memory --config CONFIG OPTIONS"
    return "nothing could be predicted; make the batch or the context smaller"


# a configuration to come


def forecast_answer(forecast: Forecast) -> Answer:
    """Each phase's peak by category, what reaches the highest, whether it fits, and what else would."""
    optimizer = next((peak.total_bytes for peak in forecast.phases if peak.phase == "optimizer"), -1)

    def is_shown(peak: PhasePeak) -> bool:
        # Clipping that does not happen has a border all the same.
        return peak.phase in _FORECAST_PHASES and (peak.phase != "clip" or peak.total_bytes > optimizer)

    # Less is nothing in GiB with three decimals.
    peaks, least = [peak for peak in forecast.phases if is_shown(peak)], 2**19
    rows: list[list[Any]] = [
        [CATEGORY_LABELS[name], *(size if (size := peak.peak[name]) >= least else None for peak in peaks)]
        for name in CATEGORIES
        if any(peak.peak[name] >= least for peak in peaks)
    ]
    rows.append(["all", *(peak.total_bytes for peak in peaks)])
    context = "" if forecast.context_length is None else f", context {count(forecast.context_length)}"
    compiled = "compiled" if forecast.is_compiled else "eager"
    caption = (
        f"batch {forecast.batch_size}{context}, {forecast.precision}, {compiled}, zero_grad {forecast.zero_grad}; GiB"
    )
    columns = [Column("category"), *(Column(peak.phase, _GIB, f"{peak.phase}_bytes") for peak in peaks)]
    highest = forecast.highest
    peak = f"{gib(highest.total_bytes)} in {highest.phase}, at {highest.operator}"
    notes = [
        Line("peak", f"{peak}; {gib(forecast.reserved_bytes)} reserved"), Line("verdict", verdict(forecast)),
        *(Line("note", note) for note in forecast.notes),
        Line("predicted", f"from {forecast.method}, in {forecast.took_s:.0f} s, without a GPU"),
    ]  # fmt: skip
    table = Table("predicted", "Predicted peak of each phase", columns, rows, caption, has_total=True)
    figures = {name: getattr(forecast, name) for name in forecast.__struct_fields__ if name != "notes"}
    return Answer(tables=[table], notes=notes, figures=figures)


def verdict(forecast: Forecast) -> str:
    """Whether it fits, and the largest batch and context that do."""
    gpu = forecast.gpu
    if gpu is None:
        return "no GPU here: name one with --gpu, as in --gpu H200, and it is said whether this fits and what does"
    size = f"{gib(gpu.total_bytes)} here" if gpu.is_here else f"about {gib(gpu.total_bytes)} of it"
    clauses = [f"{'fits' if forecast.fits else 'does not fit'} on {gpu.name} ({size})"]
    for name, largest in (("batch", forecast.largest_batch_size), ("context", forecast.largest_context_length)):
        if largest is not None:
            clauses.append(_largest(name, largest))
    return "; ".join(clauses)


def _largest(name: str, largest: Largest) -> str:
    if largest.value is None:
        return f"no {name} does, not even the smallest"
    more = " and above" if largest.has_more else ""
    return f"largest {name} {largest.value:,}{more} ({gib(largest.reserved_bytes)} reserved)"
