"""What `lmbench memory` says: of a history, of a run that ran out of memory, of a configuration to come."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from textwrap import shorten
from typing import Any

import pandas as pd
from msgspec.structs import asdict

from lmbench.memory.findings import Findings
from lmbench.memory.forecast import Forecast
from lmbench.memory.recorded import CATEGORIES, CATEGORY_LABELS, Category
from lmbench.memory.shortage import EXPANDABLE, Remedy, Shortage
from lmbench.memory.timeline import memory_chart, memory_timeline
from lmbench.records.guard import not_passed
from lmbench.records.instruments import SavedPerBlock
from lmbench.records.vocabulary import STEP
from lmbench.report.answer import Answer, Column, Line, Table
from lmbench.report.units import COUNT, PERCENT, WORDS, Unit, count, gib, percent

#: Parts with less of the peak than this are together in one row.
_PART_FRACTION = 0.005
#: A category with less of the peak than this has no column of its own beside the model's parts.
_COLUMN_FRACTION = 0.03
#: A column with less in every row is left out.
_COLUMN_BYTES = 2**20
#: Phases of a forecast that do the work; another one is shown only where it has the highest peak.
_FORECAST_PHASES = ("forward", "backward", "optimizer")
#: Headings of narrow columns, by the key; others are the key in words.
_HEADINGS = {
    "parameters_bytes": "params", "gradients_bytes": "grads", "optimizer_state_bytes": "optim",
    "activations_bytes": "acts", "temporaries_bytes": "temps", "workspaces_bytes": "work", "count": "n",
    "size_bytes": "GiB", "total_bytes": "GiB", "each_bytes": "MiB each",
}  # fmt: skip
#: The folder of a line of code.
_FOLDER = re.compile(r"^.*[/\\](?=[^/\\]*:\d)")
#: What makes less of the largest category, each in a clause.
_REMEDIES: Mapping[Category, str] = {
    "parameters": "a lower precision of the weights (bf16-true), or fewer of them on each device",
    "gradients": "gradients set to none before the forward, a lower precision of the weights, or fewer on each device",
    "optimizer_state": "an optimizer with less state, or its state over several ranks; a smaller batch changes nothing",
    "activations": "checkpoints (torch.utils.checkpoint; lmbench's model: --model.checkpoint block or selective), or a "
    "smaller batch accumulated",
    "logits": "a loss in pieces of the vocabulary or of the sequence, or a smaller batch accumulated",
    "temporaries": "a smaller batch accumulated, or compiling, which does without most of them",
    "inputs": "fewer batches on the device at a time",
}


# The captions or headings name these units, once for all columns.
_GIB = Unit("", 2.0**-30, lambda size_bytes: f"{size_bytes / 2**30:,.3f}")
_MIB = Unit("", 2.0**-20, lambda size_bytes: f"{size_bytes / 2**20:,.2f}")
_UNITS = {"bytes": _GIB, "fraction": PERCENT, "count": COUNT, "value": COUNT}


def _table(
    name: str, title: str, frame: Any, caption: str = "GiB", extra: Sequence[str] = (), has_total: bool = False
) -> Table:
    """A frame as a table: a column's unit is what its key ends in, with MiB for `each_bytes`; a category's key is its
    name. `extra` are left out first where the screen is narrow."""
    frame = frame.rename(columns={category: f"{category}_bytes" for category in CATEGORIES}).astype(object)
    columns = []
    for key in frame:
        stem, _, ending = key.rpartition("_")
        unit = _MIB if key == "each_bytes" else _UNITS.get(ending, WORDS)
        heading = _HEADINGS.get(key, (stem or key).replace("_", " ") if unit is not WORDS else key.replace("_", " "))
        columns.append(Column(heading, unit, key, "fold" if key in ("part", "figure") else "keep", key in extra))
    rows = frame.where(frame.notna(), None).to_numpy().tolist()
    return Table(name, title, columns, rows, caption, has_total)


# a recorded history


def history_answer(findings: Findings, top: int = 15) -> Answer:
    """What the peak is made of, where it is from, and how to make it smaller; `top` of the largest allocations."""
    played, run, notes = findings.played, findings.run, findings.notes
    entry_count = played.entry_count if played.has_history else 0
    by_category = {CATEGORY_LABELS[name]: size for name, size in findings.by_category.items()}
    peak = pd.DataFrame({**by_category, "peak": findings.peak_bytes}.items(), columns=["category", "size_bytes"])
    peak["share_fraction"] = peak["size_bytes"] / (findings.peak_bytes or 1)
    used = [name for name in CATEGORIES if (findings.phases[name] >= _COLUMN_BYTES).any()]
    segments = played.segments.groupby("kind", as_index=False).agg(
        count=("total_bytes", "size"), total_bytes=("total_bytes", "sum"), free_bytes=("free_bytes", "sum"),
        largest_free_bytes=("largest_free_bytes", "max"),
    )  # fmt: skip
    saved = pd.DataFrame(map(asdict, findings.saved), columns=SavedPerBlock.__struct_fields__)
    saved["total_bytes"] = saved["count"] * saved["each_bytes"]
    operators = findings.saved_storages.groupby("operator", sort=False, as_index=False)["size_bytes"].sum()
    operators = operators.sort_values("size_bytes", ascending=False, kind="stable")
    operators["share_fraction"] = operators["size_bytes"] / operators["size_bytes"].sum()
    tables = [
        _table("peak", "At the peak", peak, has_total=True),
        _table(
            "phases", "Each phase's peak", findings.phases[["peak_bytes", *used]].reset_index(),
            "GiB; the most that was allocated in a phase, over all steps",
        ),
        _part_table(findings),
        _largest_table(findings, top),
        _table("segments", "Segments", segments, "GiB reserved when the snapshot was taken; free: in no block"),
        _table(
            "saved", "Saved for the backward", saved, "storages made in the forward, each once, without parameters"
        ),
        _table(
            "operators", "Saved by which operators", operators,
            "of several operators that save a storage, the one nearest to where it was made",
        ),
        _recorded_table(findings),
    ]  # fmt: skip
    figures = {
        "path": str(findings.path), "device": played.device, "entries": entry_count,
        "is_complete": findings.is_complete, "cuts": findings.cuts,
        "peak": {
            "allocated_bytes": findings.peak_bytes, "requested_bytes": findings.peak_requested_bytes,
            "reserved_bytes": findings.peak_reserved_bytes,
            "phase": findings.peak_phase, "step": findings.peak_step,
        },
        "allocator": notes and notes.peaks,
        "guards": findings.guards, "unmatched": findings.unmatched,
    }  # fmt: skip
    name, steps = (run and run.run_id) or findings.path.name, len(findings.bands[STEP])
    history = f"device {played.device}, {entry_count:,} entries, {steps} steps"
    return Answer(
        headline=_head(findings),
        tables=[table for table in tables if table.rows],
        notes=[
            Line("history", history if notes else f"{history}, without lmbench's notes: categories by stacks"),
            Line("snapshot", str(findings.path), is_whole=True),
        ],
        charts=lambda: [memory_chart(f"Memory over time: {name}", memory_timeline(findings))],
        figures=figures,
        data=lambda: _table("allocations", "Held at the peak", findings.largest),
        first=("peak",) if run else ("peak", "largest") if played.has_history else ("peak", "segments", "largest"),
    )  # fmt: skip


def _head(findings: Findings) -> list[Line]:
    """What is missing in the history, what the peak is made of, what makes it smaller, and guards that did not pass."""

    def share(name: str, size_bytes: int) -> str:
        return f"{name} {gib(size_bytes)} ({percent(size_bytes / (findings.peak_bytes or 1))})"

    lines = []
    if not findings.is_complete:
        lines += [Line("INCOMPLETE", "; ".join(findings.cuts)), Line("", findings.remedy_of_cuts)]
    step = f" of step {findings.peak_step}" if findings.peak_step else ""
    largest = sorted(findings.by_category.items(), key=lambda item: -item[1])
    made_of = ", ".join(share(CATEGORY_LABELS[name], size) for name, size in largest[:3])
    when = f"in {findings.peak_phase}{step}" if findings.played.has_history else "held at the end"
    lines.append(Line("peak", f"{gib(findings.peak_bytes)} {when}: {made_of}"))
    most = findings.parts.sum(axis=1)
    if not any(most.index):
        by_line = findings.largest.groupby("user_frame")["total_bytes"].sum().sort_values(ascending=False)
        most = by_line.rename(index=lambda line: _FOLDER.sub("", line))
    lines += [Line("most", share(name, size)) for name, size in most.items() if name][:1]
    reserved, unused = findings.peak_reserved_bytes, findings.peak_reserved_bytes - findings.peak_bytes
    # Segments may be missing in somebody else's snapshot.
    if unused >= 0:
        fraction = percent(unused / (reserved or 1))
        lines.append(Line("reserved", f"{gib(reserved)} at the peak, {gib(unused)} ({fraction}) of it in no block"))
    if largest and largest[0][0] in _REMEDIES:
        lines.append(Line("do", _REMEDIES[largest[0][0]]))
    if findings.blocks["operator"].str.startswith("CompiledFunction").any():
        lines.append(
            Line("compiled", "each compiled region is one operator here; an eager run tells its modules apart")
        )
    for guard in not_passed(findings.guards):
        if guard.name == "memory_history":
            continue
        lines += [Line(guard.status.upper(), guard.message), Line("", guard.advice)]
    return lines


def _part_table(findings: Findings) -> Table:
    """Bytes at the peak by part of the model; small categories are together in one column."""
    sizes, shared = findings.parts, findings.shared_path
    names = [name for name in sizes if sizes[name].sum() >= _COLUMN_FRACTION * findings.peak_bytes]
    frame = sizes[names].assign(rest_bytes=sizes.drop(columns=names).sum(axis=1, min_count=1))
    frame.insert(0, "part", [part.removeprefix(shared) or "(none)" for part in sizes.index])
    frame.insert(1, "all_bytes", sizes.sum(axis=1))
    is_large = frame["all_bytes"] >= _PART_FRACTION * findings.peak_bytes
    caption = (
        f"GiB at the peak, by the module inside {shared[:-1] or 'the model'} that made it (in the backward: "
        "whose output's gradient came last), or whose parameter it belongs to; * is any block; "
        f"{(~is_large).sum()} smaller parts have {gib(frame['all_bytes'][~is_large].sum())}"
    )
    return _table("parts", "By part of the model", frame[is_large], caption)


def _largest_table(findings: Findings, top: int) -> Table:
    """The largest allocations at the peak, with the first frame of the user's code."""
    rows = findings.largest.replace({"category": CATEGORY_LABELS, "phase": {"": "before"}})
    rows = rows.rename(columns={"size_bytes": "each_bytes", "operator": "saved_by"})
    rows["part"] = rows["owner"].str.removeprefix(findings.shared_path)
    # The file without its folder, and without the function.
    rows["line"] = rows["user_frame"].str.replace(_FOLDER, "", regex=True).str.partition(" ")[0]
    keys = ["each_bytes", "count", "total_bytes", "category", "part", "line", "phase", "saved_by"]
    keys = [key for key in keys if (rows[key] != "").any()]
    caption = "n alike, together GiB; the first line that is not PyTorch's or Lightning's, or the operator"
    if len(rows) > top:
        caption += f"; {len(rows) - top} more kinds have {gib(rows['total_bytes'][top:].sum())}"
    return _table("largest", "Largest at the peak", rows[keys][:top], caption, extra=("phase", "saved_by"))


def _recorded_table(findings: Findings) -> Table:
    """What else was recorded, and how the replay agrees with the allocator's own counters."""
    played, peaks = findings.played, findings.notes and findings.notes.peaks
    sizes = {
        "free at the end": played.free_bytes, "largest free piece at the end": played.largest_free_bytes,
        "waiting for another stream at the peak": int(played.pending_bytes[findings.peak]),
        "asked for at the peak, replayed": findings.peak_requested_bytes,
    }  # fmt: skip
    if peaks:
        sizes |= {
            "allocator's peak of what was asked for": peaks.requested_bytes,
            "allocator's peak, with ends of blocks that it left whole": peaks.allocated_bytes,
            "allocator's peak of reserved memory": peaks.reserved_bytes,
        }
    sizes |= {f"{number} blocks' outputs in the history": size for size, number in findings.streams.items()}
    if findings.stream_bytes:
        sizes["a block's output (batch x context x d_model) by the shape"] = findings.stream_bytes
    return _table("recorded", "Recorded", pd.DataFrame(sizes.items(), columns=["figure", "size_bytes"]))


# a run that ran out of memory


def shortage_answer(shortage: Shortage) -> Answer:
    """What was asked for where, what the device held, and a row for each change with its predicted peak."""
    error, refused = shortage.run.error, shortage.run.memory.refused
    message = shorten((error and error.message) or "nothing more is known", 160, placeholder=" ...")
    lines = [Line("outcome", f"out of memory in {(error and error.phase) or 'no phase'}: {message}")]
    if refused is not None:
        parts = {
            "parameters": refused.parameters_bytes, "gradients": refused.gradients_bytes,
            "optimizer state": refused.optimizer_state_bytes, "activations and the rest": refused.rest_bytes,
        }  # fmt: skip
        held = ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
        device_bytes, free_bytes = shortage.run.memory.device_total_bytes, refused.device_free_bytes
        lines += [
            Line("asked", f"{gib(refused.requested_bytes)} more in {refused.phase}, with {gib(free_bytes)} free"),
            Line("held", f"{gib(refused.allocated_bytes)} of {gib(device_bytes)}: {held}"),
            Line("fragmented", f"{gib(shortage.unused_bytes)} reserved and not allocated"),
        ]
    changes = [shortage.as_it_is, *shortage.remedies]
    reasons = dict.fromkeys(change.reason for change in changes if change.reason)
    figures = {
        "error": error, "refused": refused, "unused_bytes": shortage.unused_bytes, "gpu": shortage.gpu,
        "as_it_is": shortage.as_it_is, "remedies": shortage.remedies, "advice": advice(shortage),
    }  # fmt: skip
    return Answer(
        headline=lines,
        tables=[_remedies_table(shortage, changes)],
        notes=[*(Line("not known", reason) for reason in reasons), Line("do", advice(shortage))],
        figures={"shortage": figures},
    )


def _remedies_table(shortage: Shortage, changes: Sequence[Remedy]) -> Table:
    rows = []
    for change in changes:
        options = " ".join(word.removeprefix("--") for word in change.words) or change.change
        forecast = change.forecast
        known = (forecast.highest.total_bytes, forecast.reserved_bytes, forecast.fits) if forecast else (None,) * 3
        rows.append((options, *known))
    frame = pd.DataFrame(rows, columns=["options", "peak_bytes", "reserved_bytes", "fits"])
    frame["fits"] = frame["fits"].map({True: "yes", False: "no"}).fillna("not known")
    gpu = shortage.gpu
    caption = f"on {gpu.name} with {gib(gpu.total_bytes)}; GiB" if gpu is not None else "GiB"
    return _table("remedies", "What would fit, predicted", frame, caption)


def advice(shortage: Shortage) -> str:
    """The first thing to do, in a sentence."""
    if shortage.is_fragmented:
        return f"{EXPANDABLE}: what was asked for is there, in pieces; set it before the run"
    if shortage.run.error is not None and shortage.run.error.where == "host":
        return "the host's memory ended, not the device's: give it more, or let loaders keep less of it"
    fitting = [change for change in shortage.remedies if change.forecast is not None and change.forecast.fits]
    if fitting:
        # The one with the highest peak changes the least that has to be changed.
        least = max(fitting, key=lambda change: change.peak_bytes)
        return f"{least.change}: {shlex.join(least.words)}"
    return "none of these is enough alone; combine them, and ask: lmbench memory --config CONFIG OPTIONS"


# a configuration to come


def forecast_answer(forecast: Forecast) -> Answer:
    """Each phase's peak by category, what reaches the highest, whether it fits, and what else would."""
    peaks = [peak for peak in forecast.phases if peak.phase in _FORECAST_PHASES or peak == forecast.highest]
    # Less is nothing in GiB with three decimals.
    sizes = pd.DataFrame({f"{peak.phase}_bytes": peak.peak for peak in peaks}).astype("Int64")
    sizes = sizes.where(sizes >= 2**19).dropna(how="all").rename(index=CATEGORY_LABELS)
    sizes.loc["all"] = [peak.total_bytes for peak in peaks]
    context = "" if forecast.context_length is None else f", context {count(forecast.context_length)}"
    compiled = "compiled" if forecast.is_compiled else "eager"
    caption = (
        f"batch {forecast.batch_size}{context}, {forecast.precision}, {compiled}, zero_grad {forecast.zero_grad}; GiB"
    )
    frame = sizes.rename_axis("category").reset_index()
    tables = [_table("predicted", "Predicted peak of each phase", frame, caption, has_total=True)]
    borders = {"batch size": forecast.largest_batch_size, "context length": forecast.largest_context_length}
    largest = [(name, each.value, each.reserved_bytes, each.has_more) for name, each in borders.items() if each]
    if largest:
        frame = pd.DataFrame(largest, columns=["option", "value", "reserved_bytes", "more_fit"])
        caption = "GiB; no value where not even the smallest fits"
        tables.append(_table("largest", "The largest that fits", frame, caption))
    highest, gpu = forecast.highest, forecast.gpu
    peak = f"{gib(highest.total_bytes)} in {highest.phase}, at {highest.operator}"
    fits = "no GPU here: name one with --gpu, as in --gpu H200, and it is said whether this fits and what does"
    if gpu is not None:
        fits = f"{'fits' if forecast.fits else 'does not fit'} on {gpu.name} ({gib(gpu.total_bytes)})"
    return Answer(
        tables=tables,
        notes=[
            Line("peak", f"{peak}; {gib(forecast.reserved_bytes)} reserved"), Line("verdict", fits),
            *(Line("note", note) for note in forecast.notes),
            Line("predicted", f"from {forecast.method}, in {forecast.took_s:.0f} s, without a GPU"),
        ],
        figures={name: getattr(forecast, name) for name in forecast.__struct_fields__ if name != "notes"},
    )  # fmt: skip
