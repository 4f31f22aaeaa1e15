"""Results on the disk for tests: folders such as real runs leave, with figures of a simple model.

A record starts from a real run on an H200 (tests/data/runs/h200_run.json, its bulk taken out). Settings are set in its
configuration and where it repeats them; times follow from FLOPs and bytes with a small spread that depends on the
settings alone. Changes are fields of the record by their dotted names: `{"phases.step.mean_s": 0.1}`.
"""

from __future__ import annotations

import copy
import itertools
import json
import random
from collections.abc import Mapping

from paths import RUNS

from lmbench.catalogue import make_catalogue
from lmbench.records.vocabulary import recompute_words
from lmbench.report.results import read_sections, report_on
from lmbench.sizes import SIZES, ModelShape

BASE = json.loads((RUNS / "h200_run.json").read_text())
DEVICE_BYTES = 150_109_880_320
#: Where the record repeats a setting, if not under the setting's own name.
_RECORDED = {
    "measure.matmul_precision": "matmul_precision",
    "trainer.precision": "precision",
}
#: The axes of a sweep of which only the runs matter.
TWO_BATCHES = {"data.batch_size": [4, 8]}
#: Process ids, each given once: one process is one sample.
pids = itertools.count(1000)
_RATE = {("32-true", "highest"): 40e12, ("32-true", "high"): 180e12}
#: By mode: work in forward passes, and the phases' shares of a step.
_MODES = {
    "inference": (1.0, {"forward": 1.0}),
    "forward": (1.0, {"forward": 1.0}),
    "forward_backward": (3.0, {"forward": 0.34, "backward": 0.66}),
    "train_step": (3.2, {"forward": 0.31, "backward": 0.6, "optimizer": 0.09}),
}


def put(record, changes):
    """Set fields by their dotted names."""
    for name, value in changes.items():
        *parents, last = name.split(".")
        holder = record
        for parent in parents:
            holder = holder.setdefault(parent, {})
        holder[last] = value
    return record


def places(tree):
    """Holder and key of everything in a tree of mappings and lists, the root left out."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [place for key, child in pairs for place in ((tree, key), *places(child))]


def make_record(settings, changes=None, *, repeat=0):
    """run.json of a run with these settings (`model.size`, `trainer.precision`, `mode`, ...) and changes."""
    run = copy.deepcopy(BASE) | {"pid": next(pids)}
    for option, value in settings.items():
        put(run, {f"config.{option}": value, _RECORDED.get(option, option): value})
    model, mode = run["model"], run["mode"]
    if "model.d_model" in settings:
        put(run, {"config.model.size": None, "model.size": None})
    elif size := settings.get("model.size"):
        shape = SIZES[size]
        model |= {"d_model": shape.d_model, "d_ff": shape.d_ff, "num_layers": shape.num_layers}
    if "trainer.recompute" in settings:
        recompute = settings["trainer.recompute"]
        model["checkpoint"] = recompute_words(**recompute) if recompute else "none"
    if settings.get("trainer.compile"):
        counts = {"graph_count": 3, "graph_break_count": 2, "window_recompile_count": 0}
        run["compile"] = {"is_enabled": True, "mode": "default", "cache": "shared" if repeat else "private", **counts}

    rng = random.Random(f"{sorted(settings.items(), key=str)}-{repeat}")
    shape = ModelShape(model["d_model"], model["d_ff"], model["num_layers"], 8)
    context, tokens = run["data"]["context_length"], run["data"]["batch_size"] * run["data"]["context_length"]
    token_flops = 2 * shape.parameter_count + 4 * shape.num_layers * context * shape.d_model
    is_compiled, (work, shares) = run["compile"]["is_enabled"], _MODES[mode]
    rate = _RATE.get((run["precision"], run["matmul_precision"]), 380e12) * (1.12 if is_compiled else 1.0)
    device_s = token_flops * work * tokens / rate
    host_s = shape.num_layers * work * (0.25e-3 if is_compiled else 0.55e-3)
    step_s = max(device_s, host_s) * rng.gauss(1.0, 0.002)
    is_fp32 = run["precision"] == "32-true"
    taken = shape.parameter_count * (16 if mode == "train_step" else 8 if "backward" in mode else 4)
    saved = tokens * shape.num_layers * (14 * shape.d_model + 2 * shape.num_heads * context)
    taken += int((4 if is_fp32 else 2.6) * saved)
    run["phases"] = {}
    for phase, share in {
        "step": 1.0,
        **{phase: 0.997 * share for phase, share in shares.items()},
        "other": 0.003,
    }.items():
        mean = step_s * share
        std = mean * 0.004 * rng.uniform(0.8, 1.2)
        run["phases"][phase] = {"mean_s": mean, "std_s": std, "share_fraction": share}
    verdict = {"verdict": "host-bound" if host_s > device_s else "queued"}
    run["probe"]["verdicts"] = dict.fromkeys(shares, verdict)
    run["throughput"] |= {
        "tokens_per_s": tokens / step_s,
        "mfu_fraction": tokens / step_s * token_flops * (3 if work > 1 else 1) / 989.4e12,
    }
    run["memory"]["run_peak_allocated_bytes"] = taken
    run["loss"]["first"] = 9.30756 + (0 if is_fp32 else 0.0021)
    if is_compiled:
        run["compile"]["first_step_s"] = (9.0 + shape.num_layers * 0.9) * (0.2 if repeat else 1)
    return put(run, changes or {})


def ended(outcome, phase, message="", **error):
    """The changes of a run that did not end well: nothing measured."""
    usual = {"oom": "CUDA out of memory.", "timeout": "no end after 60 s"}.get(outcome, "it broke")
    error |= {"message": message or usual, "phase": phase}
    empty = {name: {} for name in ("phases", "probe", "throughput", "loss")}
    return {"outcome": outcome, "error": error, "guards": [], **empty}


def write_run(folder, record, steps=8):
    """A run's folder with a few step records."""
    folder.mkdir(parents=True)
    # Else all runs are copies of one.
    (folder / "run.json").write_text(json.dumps({**record, "run_id": folder.name}))
    if record["phases"]:
        mean, warmup = record["phases"]["step"]["mean_s"], record["window"]["warmup_steps"]
        times = {"step_s": mean, "forward_s": mean * 0.3}
        with (folder / "steps.jsonl").open("w") as file:
            for index in range(steps):
                is_warmup = index < warmup
                line = {"step": index, "rank": 0, "stage": "warmup" if is_warmup else "window", "micro_batches": 1}
                file.write(f"{json.dumps(line | {'is_warmup': is_warmup, **times, 'loss': 9.3})}\n")


def make_run(folder, settings, changes=None, *, repeat=0):
    """Write the folder of a run with these settings and changes; returns its record."""
    record = make_record(settings, changes, repeat=repeat)
    write_run(folder, record)
    return record


def write_result(results, **changes):
    """A run of its own name and of nine steps below a folder of results; returns its folder."""
    folder = results / f"run-{len([*results.glob('*')])}"
    write_run(folder, make_record({}, {"run_id": folder.name, **changes}), 9)
    return folder


def make_sweep(home, axes=TWO_BATCHES, *, view=None, fixed=None, repeats=1, steps=8, change=None):
    """A sweep's folder with its runs, one repeat of each pass but the timing one.

    Args:
        axes: the values of each, of which every combination is a cell; or the cells.
        fixed: settings of all cells beside their axes.
        change: changes of a run, from its record and the number of the repeat.
    """
    if isinstance(axes, Mapping):
        axes = [dict(zip(axes, values, strict=True)) for values in itertools.product(*axes.values())]
    cells = []
    for place in axes:
        cell = "-".join(str(value).replace(" ", "_") for value in place.values()) or "cell"
        settings = {**(fixed or {}), **place}
        cells.append({"id": cell, "axes": place, "options": {k: v for k, v in settings.items() if k != "mode"}})
        for repeat in range(repeats if place.get("pass", "timing") == "timing" else 1):
            sweep = {"name": home.name, "cell": cell, "axes": place, "repeat": repeat}
            run = make_record(settings, {"run_id": f"{cell}-r{repeat}", "sweep": sweep}, repeat=repeat)
            if change:
                put(run, change(run, repeat))
            write_run(home / "runs" / run["run_id"], run, steps)
    (home / "sweep.json").write_text(json.dumps({"view": view, "cells": cells, "file": {"repeats": repeats}}))
    return home


def table_of(*columns, **view):
    """A view of one table with these columns."""
    return {"title": "T", "tables": [{"title": "T", "columns": columns}], **view}


def report_of(*folders, **options):
    """What `lmbench report` works out of results; options are those of `read_sections`."""
    return report_on(read_sections(folders, make_catalogue(), **options))


def section_of(*folders, **options):
    """The first section of what `lmbench report` works out of results; options are those of `read_sections`."""
    return report_of(*folders, **options).sections[0]


def rows_of(*folders, **options):
    """A row for each cell, as CSV has them."""
    return report_of(*folders, **options).data().records()


def table_rows(table):
    """The rows of a table by its columns' titles, as they are read; of two with one title the first."""
    titles = [column.title for column in table.columns]
    return [dict(reversed(list(zip(titles, row, strict=True)))) for row in table.texts()]
