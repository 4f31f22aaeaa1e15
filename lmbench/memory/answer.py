"""What `lmbench memory` says: of a history, of a run that ran out of memory, of a configuration to come."""

from __future__ import annotations

import re
import shlex
from textwrap import shorten
from typing import Any

import numpy as np
import pandas as pd
from msgspec.structs import asdict

from lmbench.memory.blocks import CATEGORIES, CATEGORY_LABELS
from lmbench.memory.findings import Findings
from lmbench.memory.forecast import Forecast, Shortage
from lmbench.memory.timeline import memory_chart
from lmbench.records.measured import RunError, SavedPerBlock
from lmbench.records.vocabulary import STEP
from lmbench.report.answer import Answer, Line, Table, guard_lines
from lmbench.report.described import table
from lmbench.report.units import count, gib, percent

#: Parts with less of the peak than this have no row.
_PART_FRACTION = 0.005
#: A category with less of the peak than this has no column of its own beside the model's parts.
_COLUMN_FRACTION = 0.03
#: A column with less in every row is left out.
_COLUMN_BYTES = 2**20
#: Phases of a forecast that do the work; another one is shown only where it has the highest peak.
_FORECAST_PHASES = ("forward", "backward", "optimizer")
#: A category's column.
_KEYS = {name: f"{name}_bytes" for name in CATEGORIES}
#: The folder of a line of code.
_FOLDER = re.compile(r"^.*[/\\](?=[^/\\]*:\d)")
#: What makes less of the largest category, each in a clause.
_REMEDIES = {
    "parameters": "a lower precision of the weights (bf16-true), or fewer of them on each device",
    "gradients": "gradients set to none before the forward, a lower precision of the weights, or fewer on each device",
    "optimizer_state": "an optimizer with less state, or its state over several ranks; a smaller batch changes nothing",
    "activations": "checkpoints (torch.utils.checkpoint; lmbench's model: --model.checkpoint block or selective), or a "
    "smaller batch accumulated",
    "logits": "a loss in pieces of the vocabulary or of the sequence, or a smaller batch accumulated",
    "temporaries": "a smaller batch accumulated, or compiling, which does without most of them",
    "inputs": "fewer batches on the device at a time",
}


# a recorded history


def history_answer(findings: Findings) -> Answer:
    """What the peak is made of, where it is from, and how to make it smaller."""
    played, run, notes, peak = findings.played, findings.run, findings.notes, findings.peak
    entry_count = len(played.entries) if played.has_history else 0
    sizes = pd.Series(findings.by_category, dtype=np.int64).rename(CATEGORY_LABELS)
    sizes["peak"] = peak["allocated_bytes"]
    made_of = sizes.rename_axis("category").reset_index(name="size_bytes")
    made_of["share_fraction"] = made_of["size_bytes"] / (peak["allocated_bytes"] or 1)
    used = [name for name in CATEGORIES if (findings.phases[name] >= _COLUMN_BYTES).any()]
    sums = {"count": "sum", "total_bytes": "sum", "free_bytes": "sum", "largest_free_bytes": "max"}
    segments = played.segments.groupby("kind", as_index=False).agg(sums)
    saved = pd.DataFrame(map(asdict, findings.saved), columns=SavedPerBlock.__struct_fields__)
    saved["total_bytes"] = saved["count"] * saved["each_bytes"]
    tables = [
        table("memory/peak", made_of),
        table("memory/phases", findings.phases[["peak_bytes", *used]].rename(columns=_KEYS).reset_index()),
        _part_table(findings),
        _largest_table(findings),
        table("memory/segments", segments),
        table("memory/saved", saved),
    ]
    keys = ("allocated_bytes", "requested_bytes", "reserved_bytes", "phase", "step")
    history = f"device {played.device}, {entry_count:,} entries, {len(findings.bands[STEP].names)} steps"
    name = (run and run.run_id) or findings.path.name
    return Answer(
        headline=_head(findings),
        tables=[table for table in tables if table.rows],
        notes=[
            Line("history", history if notes else f"{history}, without lmbench's notes: categories by stacks"),
            Line("snapshot", str(findings.path), is_whole=True),
        ],
        charts=lambda: [memory_chart(f"Memory over time: {name}", findings)],
        figures={
            "device": played.device, "entries": entry_count, "is_complete": not findings.cuts, "cuts": findings.cuts,
            "peak": {key: peak[key] for key in keys}, "guards": findings.guards,
        },
        data=lambda: table("memory/allocations", findings.largest),
        first=("peak",) if run else ("peak", "largest") if played.has_history else ("peak", "segments", "largest"),
    )  # fmt: skip


def _head(findings: Findings) -> list[Line]:
    """Guards that did not pass; what the peak is made of, and what makes it smaller."""
    peak = findings.peak
    peak_bytes, reserved = peak["allocated_bytes"], peak["reserved_bytes"]

    def shares(sizes: Any, most: int) -> str:
        """The largest of some sizes."""
        named = sizes.sort_values(ascending=False, kind="stable")[:most].items()
        return ", ".join(f"{name} {gib(size)} ({percent(size / (peak_bytes or 1))})" for name, size in named)

    lines = guard_lines(findings.guards)
    step = f" of step {peak['step']}" if peak["step"] else ""
    when = f"in {peak['phase']}{step}" if findings.played.has_history else "held at the end"
    sizes = pd.Series(findings.by_category, dtype=np.int64)
    lines.append(Line("peak", f"{gib(peak_bytes)} {when}: {shares(sizes.rename(CATEGORY_LABELS), 3)}"))
    parts = findings.parts.sum(axis=1)
    if not any(parts.index):
        by_line = findings.largest.groupby("user_frame")["total_bytes"].sum()
        parts = by_line.rename(index=lambda line: _FOLDER.sub("", line))
    lines += [Line("most", shares(parts.drop("", errors="ignore"), 1))] if any(parts.index) else []
    # Segments may be missing in somebody else's snapshot.
    if reserved >= peak_bytes:
        unused = f"{gib(reserved - peak_bytes)} ({percent((reserved - peak_bytes) / (reserved or 1))})"
        lines.append(Line("reserved", f"{gib(reserved)} at the peak, {unused} of it in no block"))
    largest = sizes.idxmax() if len(sizes) else ""
    lines += [Line("do", _REMEDIES[largest])] if largest in _REMEDIES else []
    if findings.blocks["operator"].str.startswith("CompiledFunction").any():
        lines.append(
            Line("compiled", "each compiled region is one operator here; an eager run tells its modules apart")
        )
    return lines


def _part_table(findings: Findings) -> Table:
    """Bytes at the peak by part of the model, with columns for large categories."""
    sizes, peak_bytes = findings.parts.drop("", errors="ignore"), findings.peak["allocated_bytes"]
    names = [name for name in sizes if sizes[name].sum() >= _COLUMN_FRACTION * peak_bytes]
    frame = sizes[names].rename(columns=_KEYS).rename_axis("part").reset_index()
    frame["all_bytes"] = sizes.sum(axis=1).to_numpy()
    return table("memory/parts", frame[frame["all_bytes"] >= _PART_FRACTION * peak_bytes])


def _largest_table(findings: Findings) -> Table:
    """The largest allocations at the peak, with the first frame of the user's code."""
    rows = findings.largest.replace({"category": CATEGORY_LABELS, "phase": {"": "before"}})
    rows = rows.rename(columns={"size_bytes": "each_bytes", "operator": "saved_by", "owner": "part"})
    # The file without its folder, and without the function.
    rows["line"] = rows["user_frame"].str.replace(_FOLDER, "", regex=True).str.partition(" ")[0]
    return table("memory/largest", rows.loc[:, (rows != "").any()])


# a run that ran out of memory


def shortage_answer(shortage: Shortage) -> Answer:
    """What was asked for where, what the device held, and a row for each change with its predicted peak."""
    error, refused, gpu = shortage.run.error or RunError(), shortage.run.memory.refused, shortage.gpu
    message = shorten(error.message or "nothing more is known", 160, placeholder=" ...")
    lines = [Line("outcome", f"out of memory in {error.phase or 'no phase'}: {message}")]
    if refused is not None:
        parts = {
            "parameters": refused.parameters_bytes, "gradients": refused.gradients_bytes,
            "optimizer state": refused.optimizer_state_bytes, "activations and the rest": refused.rest_bytes,
        }  # fmt: skip
        held = ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
        device_bytes, free_bytes = shortage.run.memory.device_total_bytes, refused.device_free_bytes
        held_bytes = refused.allocated_bytes or 0
        lines += [
            Line("asked", f"{gib(refused.requested_bytes)} more in {refused.phase}, with {gib(free_bytes)} free"),
            Line("held", f"{gib(held_bytes)} of {gib(device_bytes)}: {held}"),
            Line("fragmented", f"{gib((refused.reserved_bytes or 0) - held_bytes)} reserved and not allocated"),
        ]
    changes = [shortage.as_it_is, *shortage.remedies]
    rows = []
    for change in changes:
        forecast = change.forecast
        known = (forecast.highest.total_bytes, forecast.reserved_bytes, forecast.fits) if forecast else (None,) * 3
        rows.append((" ".join(word.removeprefix("--") for word in change.words) or change.change, *known))
    frame = pd.DataFrame(rows, columns=["options", "peak_bytes", "reserved_bytes", "fits"])
    frame["fits"] = frame["fits"].map({True: "yes", False: "no"}).fillna("not known")
    where = f"on {gpu.name} with {gib(gpu.total_bytes)}; " if gpu is not None else ""
    reasons = dict.fromkeys(change.reason for change in changes if change.reason)
    figures = {
        "refused": refused, "gpu": gpu, "as_it_is": shortage.as_it_is, "remedies": shortage.remedies,
        "advice": advice(shortage),
    }  # fmt: skip
    return Answer(
        headline=lines,
        tables=[table("memory/remedies", frame, gpu=where)],
        notes=[*(Line("not known", reason) for reason in reasons), Line("do", advice(shortage))],
        figures={"shortage": figures},
    )


def advice(shortage: Shortage) -> str:
    """The first thing to do, in a sentence."""
    if shortage.run.error is not None and shortage.run.error.where == "host":
        return "the host's memory ended, not the device's: give it more, or let loaders keep less of it"
    fitting = [change for change in shortage.remedies if change.forecast is not None and change.forecast.fits]
    if fitting:
        # The one with the highest peak changes the least that has to be changed.
        least = max(fitting, key=lambda change: change.peak_bytes)
        return f"{least.change}: {shlex.join(least.words)}"
    return "no change alone is known to be enough; combine some, and ask: lmbench memory --config CONFIG OPTIONS"


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
    rank = f"rank 0 of {forecast.world_size} ({forecast.strategy}), each " if forecast.world_size > 1 else ""
    settings = f"{rank}batch {forecast.batch_size}{context}, {forecast.precision}, {compiled}"
    settings += f", zero_grad {forecast.zero_grad}"
    tables = [table("memory/predicted", sizes.rename_axis("category").reset_index(), settings=settings)]
    borders = {"batch size": forecast.largest_batch_size, "context length": forecast.largest_context_length}
    largest = [{"option": name, **asdict(each)} for name, each in borders.items() if each]
    if largest:
        tables.append(table("memory/borders", pd.DataFrame(largest), name="largest"))
    highest, gpu = forecast.highest, forecast.gpu
    peak = f"{gib(highest.total_bytes)} in {highest.phase}, at {highest.operator}"
    fits = "no GPU here: name one with --gpu, as in --gpu H200, and it is said whether this fits and what does"
    if gpu is not None:
        ranks, size = forecast.world_size, gib(gpu.total_bytes)
        gpus = f"{ranks} {gpu.name} ({size} each)" if ranks > 1 else f"{gpu.name} ({size})"
        fits = f"{'fits' if forecast.fits else 'does not fit'} on {gpus}{_enough(forecast)}"
    if forecast.run_peak_bytes > highest.total_bytes:
        peak += f"; up to {gib(forecast.run_peak_bytes)} in the second step, while NCCL holds DDP's first buckets"
    return Answer(
        tables=tables,
        notes=[
            Line("peak", f"{peak}; {gib(forecast.reserved_bytes)} reserved"), Line("verdict", fits),
            Line("predicted", f"from {forecast.method}, in {forecast.took_s:.0f} s, without a GPU"),
        ],
        figures=asdict(forecast),
    )  # fmt: skip


def _enough(forecast: Forecast) -> str:
    """How many GPUs are enough, where that is another number than was asked for."""
    count = forecast.fewest_gpus
    if count == forecast.world_size or forecast.is_sharded is None or (forecast.fits and not forecast.is_sharded):
        return ""
    if count is not None:
        return f"; {count} {'are' if count > 1 else 'is'} enough"
    if forecast.is_sharded:
        return "; no number of GPUs is enough: what they do not share is too much"
    return "; more GPUs change nothing, since each has all parameters; --trainer.strategy fsdp2 shares them"
