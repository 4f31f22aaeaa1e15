"""The answers of `lmbench memory`: for a recorded history, for a run that ran out of memory, and for a prediction."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from msgspec.structs import asdict

from lmbench.errors import ExitCode, UsageError
from lmbench.fit_options import option_words
from lmbench.memory.blocks import CATEGORIES, CATEGORY_LABELS
from lmbench.memory.chain import FEW_BLOCKS
from lmbench.memory.findings import Findings
from lmbench.memory.forecast import CONTEXT_BYTES, Forecast
from lmbench.memory.fragmentation import expandable_bytes, gaps
from lmbench.memory.plan import MemoryPlan, PlanPoint, plan_after
from lmbench.memory.timeline import memory_chart
from lmbench.python_process import ProcessFailed
from lmbench.records.run import RunRecord
from lmbench.records.vocabulary import STEP, Values
from lmbench.report.answer import Answer, Chart, Line, Table, guard_lines
from lmbench.report.charts import picture
from lmbench.report.described import table
from lmbench.report.run import refusal
from lmbench.report.units import gib, milliseconds, percent

#: The table of parts leaves out parts with a smaller share of the peak, and columns of categories with a smaller share.
_PART_FRACTION = 0.005
_COLUMN_FRACTION = 0.03
#: The table of phases leaves out categories with less in every phase.
_COLUMN_BYTES = 2**20
#: A forecast always shows these phases; another one only if it has the highest peak.
_FORECAST_PHASES = ("forward", "backward", "optimizer")
#: The column of each category.
_KEYS = {name: f"{name}_bytes" for name in CATEGORIES}
#: The folder in the text of a frame, such as `/home/me/model.py:88 forward`.
_FOLDER = re.compile(r"^.*[/\\](?=[^/\\]*:\d)")
#: The advice on how to reduce each category, as a clause.
_REMEDIES = {
    "parameters": "a lower precision of the weights (bf16-true), or fewer of them on each device",
    "gradients": "gradients set to none before the forward, a lower precision of the weights, or fewer on each device",
    "optimizer_state": "an optimizer with less state, or its state over several ranks",
    "activations": "computing blocks again (--trainer.recompute.keep inputs, or matmuls), or a smaller batch "
    "accumulated",
    "logits": "a loss in pieces of the vocabulary or of the sequence, or a smaller batch accumulated",
    "temporaries": "a smaller batch accumulated, or compiling, which does without most of them",
    "inputs": "fewer batches on the device at a time",
}


# a recorded history


def history_answer(findings: Findings) -> Answer:
    """The contents of a recorded peak, where they come from, and how to reduce them."""
    played, run, notes, peak = findings.played, findings.run, findings.notes, findings.peak
    entry_count = len(played.entries) if played.has_history else 0
    sizes = pd.Series(findings.by_category, dtype=np.int64).rename(CATEGORY_LABELS)
    sizes["peak"] = peak["allocated_bytes"]
    contents = sizes.rename_axis("category").reset_index(name="size_bytes")
    contents["share_fraction"] = contents["size_bytes"] / (peak["allocated_bytes"] or 1)
    used = [name for name in CATEGORIES if (findings.phases[name] >= _COLUMN_BYTES).any()]
    operators = findings.saved_operators
    largest = findings.largest.replace({"category": CATEGORY_LABELS, "phase": {"": "before"}})
    largest = largest.rename(columns={"size_bytes": "each_bytes", "operator": "saved_by", "owner": "part"})
    tables = [
        table("memory/peak", contents),
        table("memory/phases", findings.phases[["peak_bytes", *used]].rename(columns=_KEYS).reset_index()),
        _part_table(findings),
        table("memory/largest", _with_lines(largest)),
        table("memory/gaps", _with_lines(gaps(findings).replace({"category": CATEGORY_LABELS}))),
        table("memory/saved", findings.saved),
        table("memory/saved_operators", operators, block=next(iter(operators["block"]), "")),
    ]
    keys = ("allocated_bytes", "requested_bytes", "reserved_bytes", "phase", "step")
    history = f"device {played.device}, {entry_count:,} entries, {len(findings.bands[STEP].names)} steps"
    name = (run and run.run_id) or findings.path.name
    return Answer(
        headline=_headline(findings),
        tables=[table for table in tables if table.rows],
        notes=[
            Line("history", history if notes else f"{history}, without lmbench's notes: categories by stacks"),
            Line("snapshot", str(findings.path), is_whole=True),
        ],
        charts=lambda: [memory_chart(f"Memory over time: {name}", findings)],
        figures={
            "device": played.device, "entries": entry_count, "is_complete": not findings.cuts, "cuts": findings.cuts,
            "peak": {key: peak[key] for key in keys}, "refused": findings.refused, "guards": findings.guards,
        },
        data=lambda: table("memory/allocations", findings.largest),
        first=("peak",) if run else ("peak", "largest"),
    )  # fmt: skip


def _headline(findings: Findings) -> list[Line]:
    """Lines for guards that did not pass, for the contents of the peak, and for how to reduce them."""
    peak = findings.peak
    peak_bytes = peak["allocated_bytes"]
    reserved = peak["reserved_bytes"]

    def shares(sizes: Any, count: int) -> str:
        """The names of the largest sizes, each with its size and its share of the peak."""
        largest = sizes.sort_values(ascending=False, kind="stable")[:count].items()
        return ", ".join(f"{name} {gib(size)} ({percent(size / (peak_bytes or 1))})" for name, size in largest)

    lines = [*refusal(findings.refused), *guard_lines(findings.guards)]
    step = f" of step {peak['step']}" if peak["step"] else ""
    when = f"in {peak['phase']}{step}" if findings.played.has_history else "held at the end"
    sizes = pd.Series(findings.by_category, dtype=np.int64)
    lines.append(Line("peak", f"{gib(peak_bytes)} {when}: {shares(sizes.rename(CATEGORY_LABELS), 3)}"))
    parts = findings.parts.sum(axis=1)
    if not any(parts.index):
        by_line = findings.largest.groupby("user_frame")["total_bytes"].sum()
        parts = by_line.rename(index=lambda line: _FOLDER.sub("", line))
    if any(parts.index):
        lines.append(Line("most", shares(parts.drop("", errors="ignore"), 1)))
    # A snapshot that lmbench did not record may lack segments, and so reserved bytes.
    if reserved >= peak_bytes:
        unused = f"{gib(reserved - peak_bytes)} ({percent((reserved - peak_bytes) / (reserved or 1))})"
        lines.append(Line("reserved", f"{gib(reserved)} at the peak, {unused} of it in no block"))
    if (expandable := expandable_bytes(findings)) is not None and expandable < reserved:
        saved = f"{gib(expandable)}, {gib(reserved - expandable)} less (simulated)"
        lines.append(Line("expandable", f"PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True would reserve {saved}"))
    largest = sizes.idxmax() if len(sizes) else ""
    if largest in _REMEDIES:
        lines.append(Line("do", _REMEDIES[largest]))
    if findings.blocks["operator"].str.startswith("CompiledFunction").any():
        lines.append(
            Line("compiled", "each compiled region is one operator here; an eager run tells its modules apart")
        )
    return lines


def _part_table(findings: Findings) -> Table:
    """Bytes at the peak by part of the model, with a column for each large category."""
    sizes = findings.parts.drop("", errors="ignore")
    peak_bytes = findings.peak["allocated_bytes"]
    columns = [name for name in sizes if sizes[name].sum() >= _COLUMN_FRACTION * peak_bytes]
    rows = sizes[columns].rename(columns=_KEYS).rename_axis("part").reset_index()
    rows["all_bytes"] = sizes.sum(axis=1).to_numpy()
    return table("memory/parts", rows[rows["all_bytes"] >= _PART_FRACTION * peak_bytes])


def lines_of(rows: Any) -> Any:
    """The line of each row's `user_frame`, without folder and function: `model.py:88`."""
    return rows["user_frame"].str.replace(_FOLDER, "", regex=True).str.split(" ").str[0]


def _with_lines(rows: Any) -> Any:
    """Rows with their `line`, without empty columns."""
    rows = rows.assign(line=lines_of(rows))
    return rows.loc[:, (rows != "").any()]


# a run that ran out of memory


def shortage_answer(run: RunRecord, config: Path) -> Answer:
    """The refused request, what the device held, and the plan that fits.

    `config` is the configuration in the run's folder.
    """
    error, refused = run.failure, run.memory.refused
    message = error.brief or "nothing more is known"
    lines = [Line("outcome", f"out of memory in {error.phase or 'no phase'}: {message}")]
    if refused is not None:
        parts = {
            "parameters": refused.parameters_bytes, "gradients": refused.gradients_bytes,
            "optimizer state": refused.optimizer_state_bytes, "activations and the rest": refused.rest_bytes,
        }  # fmt: skip
        held = ", ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
        asked, free, held_bytes = refused.requested_bytes, refused.device_free_bytes, refused.allocated_bytes or 0
        lines += [
            Line("asked", f"{gib(asked)} more in {refused.phase}, with {gib(free)} free"),
            Line("held", f"{gib(held_bytes)} of {gib(run.memory.device_total_bytes)}: {held}"),
            Line("fragmented", f"{gib((refused.reserved_bytes or 0) - held_bytes)} reserved and not allocated"),
        ]
    try:
        plan = plan_after(run, config)
    except (UsageError, ProcessFailed) as problem:
        reason = str(problem)
        return Answer([*lines, Line("no plan", reason)], figures={"shortage": {"refused": refused, "reason": reason}})
    words = ["--config", str(config), *option_words(plan.best.options if plan.best else {})]
    planned = plan_answer(plan, words)
    figures = {**planned.figures, "shortage": {"refused": refused, "reason": ""}}
    return replace(planned, headline=[*lines, *planned.headline], figures=figures)


# a plan

#: The table of a plan shows at most so many points.
_MOST_POINTS = 14


def plan_answer(plan: MemoryPlan, words: list[str], others: Mapping[str, MemoryPlan] | None = None) -> Answer:
    """The recipe of least time that fits, the frontier of time against memory, and how to run the recipe.

    `words` are those of `lmbench fit` for the recipe; `others` are plans with other settings, by their words.
    """
    gpu, best = plan.gpu, plan.best
    gpu_text = f"{gpu.name} ({gib(gpu.total_bytes)})"
    time = "time by measured times of a block" if plan.is_timed else "time by recomputed FLOPs and bytes, not measured"
    beside = f"reserved, beside {gib(CONTEXT_BYTES)} of the process itself"
    if best is None:
        smallest = min(plan.points, key=lambda point: point.reserved_bytes)
        least = f"{gib(smallest.reserved_bytes)} {beside}"
        less = "a shorter context, a smaller model"
        if "data.batch_size" not in smallest.options:
            less += ", a smaller batch of your loader"
        lines = [Line("plan", f"nothing fits on {gpu_text}; the least is {least}; give {less}, or try `--also`")]
    else:
        recipe = best.recipe
        step = f"{milliseconds(best.work)} ms a step, " if plan.is_timed else ""
        lines = [
            Line("plan", f"batch {recipe.batch_size} x {recipe.micro_batches}, recomputed: {recipe.words}"),
            Line("peak", f"{gib(best.peak_bytes)}, {gib(best.reserved_bytes)} {beside}: fits on {gpu_text}"),
            Line("time", f"{step}{percent(best.extra_fraction)} more than without a limit; {time}"),
            Line("use", shlex.join(["lmbench", "fit", *words]), is_whole=True),
        ]
    chain = plan.chains[0]
    few = "{} and {} of".format(*FEW_BLOCKS) if chain.is_alike else "all"
    # A point that just misses the memory, and is near the plan, may have taken its place among the points.
    by_recipe = {point.recipe: point for point in (*plan.points, *plan.fitting[:1])}
    points = sorted(by_recipe.values(), key=lambda point: point.work)
    rows = pd.DataFrame(
        {
            **_point_row(point),
            **({"step_s": point.work} if plan.is_timed else {}),
            "note": "the plan" if best and point.recipe == best.recipe else "",
        }
        for point in points
    )  # fmt: skip
    places = np.linspace(0, len(rows) - 1, _MOST_POINTS).round()
    shown = rows[rows.index.isin(places) | (rows["note"] != "")]
    return Answer(
        headline=lines,
        tables=[
            table("memory/plan", shown, gpu=gpu_text, time=time),
            *([_beside_others({"as given": plan, **others})] if others else []),
        ],
        notes=[
            Line(
                "predicted", f"{plan.tried:,} recipes from steps of {few} {chain.count} blocks, in "
                f"{plan.took_s:.0f} s; the plan's peak from a step of all blocks",
            )
        ],
        charts=lambda: [_frontier_chart(rows, plan)],
        figures={"gpu": gpu, "is_timed": plan.is_timed, "fitting": plan.fitting},
        exit_code=ExitCode.OK if best else ExitCode.OUT_OF_MEMORY,
        data=lambda: table("memory/plan", rows, gpu=gpu_text, time=time),
    )  # fmt: skip


def _point_row(point: PlanPoint) -> Values:
    """A recipe and its predictions, for a table of plans."""
    recipe = point.recipe
    return {
        "recomputed": recipe.words, "batch_size": recipe.batch_size, "micro_batches": recipe.micro_batches,
        "peak_bytes": point.peak_bytes, "reserved_bytes": point.reserved_bytes, "extra_fraction": point.extra_fraction,
    }  # fmt: skip


def _beside_others(plans: Mapping[str, MemoryPlan]) -> Table:
    """The recipe of each plan: the one of least time that fits, else that of least memory."""
    rows = []
    for words, plan in plans.items():
        point = plan.best or min(plan.points, key=lambda point: point.reserved_bytes)
        rows.append({"settings": words, "fits": "yes" if plan.best else "no", **_point_row(point)})
    return table("memory/plan_others", pd.DataFrame(rows))


def _frontier_chart(rows: pd.DataFrame, plan: MemoryPlan) -> Chart:
    """Time against memory along the frontier, with the memory of the GPU as a rule."""
    points = [
        {
            "series": "frontier", "x": row["reserved_bytes"] / 2**30, "y": 100 * row["extra_fraction"],
            "tip": f"{row['recomputed']}, batch {row['batch_size']}: {gib(row['reserved_bytes'])}",
        }
        for row in rows.to_dict("records")
    ]  # fmt: skip
    x = {"title": "reserved (GiB)", "scale": {"zero": False}}
    limit = {
        "data": {"values": [{"limit": plan.gpu.total_bytes / 2**30}]}, "mark": {"type": "rule", "strokeDash": [4, 4]},
        "encoding": {"x": {**x, "field": "limit"}, "y": None},
    }  # fmt: skip
    title = "more time than the fastest (%)"
    return Chart("Time against memory", picture("lines", points, [limit], x=x, y={"title": title}))


# a configuration to come


def forecast_answer(forecast: Forecast) -> Answer:
    """Each phase's predicted peak by category, the operator that reaches the highest, and whether it and more fits."""
    peaks = [peak for peak in forecast.phases if peak.phase in _FORECAST_PHASES or peak == forecast.highest]
    # Leave out what the table, in GiB with three decimals, would show as zero.
    sizes = pd.DataFrame({f"{peak.phase}_bytes": peak.peak for peak in peaks}).astype("Int64")
    sizes = sizes.where(sizes >= 2**19).dropna(how="all").rename(index=CATEGORY_LABELS)
    sizes.loc["all"] = [peak.total_bytes for peak in peaks]
    context = "" if forecast.context_length is None else f", context {forecast.context_length}"
    compiled = "compiled" if forecast.is_compiled else "eager"
    rank = f"rank 0 of {forecast.world_size} ({forecast.strategy}), each " if forecast.world_size > 1 else ""
    settings = f"{rank}batch {forecast.batch_size}{context}, {forecast.precision}, {compiled}"
    settings += f", zero_grad {forecast.zero_grad}"
    tables = [table("memory/predicted", sizes.rename_axis("category").reset_index(), settings=settings)]
    if forecast.on_gpus:
        targets = pd.DataFrame([{**asdict(target), **asdict(target.gpu)} for target in forecast.on_gpus])
        tables.append(table("memory/on_gpus", targets.replace({"fits": {True: "yes", False: "no"}})))
    highest, gpu_count = forecast.highest, len(forecast.on_gpus)
    peak = f"{gib(highest.total_bytes)} in {highest.phase}, at {highest.operator}"
    fits = "no GPU here: name one with --gpu, such as --gpu H200, to see whether this fits and what would"
    if gpu_count == 1:
        target, ranks = forecast.on_gpus[0], forecast.world_size
        size = gib(target.gpu.total_bytes)
        gpus = f"{ranks} {target.gpu.name} ({size} each)" if ranks > 1 else f"{target.gpu.name} ({size})"
        fits = f"{'fits' if target.fits else 'does not fit'} on {gpus}{_enough(forecast, target.fits)}"
    elif gpu_count:
        fits = f"fits on {sum(target.fits for target in forecast.on_gpus)} of {gpu_count} GPUs"
    if forecast.run_peak_bytes > highest.total_bytes:
        peak += f"; up to {gib(forecast.run_peak_bytes)} in the second step, while NCCL holds DDP's first buckets"
    return Answer(
        tables=tables,
        notes=[
            Line("peak", f"{peak}; {gib(forecast.reserved_bytes)} reserved"), Line("verdict", fits),
            *(Line("assumed", line) for line in forecast.assumed),
            Line("predicted", f"from {forecast.method}, in {forecast.took_s:.0f} s, without a GPU"),
        ],
        figures=asdict(forecast),
    )  # fmt: skip


def _enough(forecast: Forecast, fits: bool) -> str:
    """A clause on how many GPUs are enough, where that is not the number asked about; else empty."""
    count = forecast.fewest_gpus
    if count == forecast.world_size or forecast.is_sharded is None or (fits and not forecast.is_sharded):
        return ""
    if count is not None:
        return f"; {count} {'are' if count > 1 else 'is'} enough"
    if forecast.is_sharded:
        return "; no number of GPUs is enough: what they do not share is too much"
    return "; more GPUs change nothing, since each has all parameters; --trainer.strategy fsdp2 shares them"
