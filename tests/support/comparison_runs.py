"""Result folders with chosen step times, for tests of comparisons: records as `lmbench fit` writes them."""

from __future__ import annotations

import copy
import json

from runs import BASE, pids, put

from lmbench.compare.comparison import CellComparison, Figure, decide
from lmbench.compare.noise import NoiseEntry, measure_noise, noise_facts, store_noise
from lmbench.records.load import load_run

#: Step times of repeats in seconds, and those of repeats that take 4 % longer.
TIMES, SLOWER = (0.0500, 0.0501, 0.0499), (0.0520, 0.0521, 0.0519)
_PHASES = {"step": 1.0, "data": 0.001, "forward": 0.3, "backward": 0.6, "optimizer": 0.09, "other": 0.009}
_SETTINGS = {
    "precision": "bf16-mixed",
    "config.trainer.precision": "bf16-mixed",
    "model.attention": "sdpa",
    "config.model.attention": "sdpa",
    "environment.code.project": {"commit": "aaaa"},
    "memory": {"steady_peak_allocated_bytes": 4 * 2**30, "run_peak_allocated_bytes": 5 * 2**30},
}


def make_run(folder, step_s=0.05, /, **changes):
    """Writes one result of a new process to `folder`. `changes` are by dotted name, with `__` for the dot."""
    number = next(pids)
    run = put(copy.deepcopy(BASE), copy.deepcopy(_SETTINGS))
    # Start times depend on the position in the folder, so that no side looks as if measured before the other.
    order = len(list(folder.glob("*")))
    run |= {"pid": number, "started_at": f"2026-11-21T00:{order // 60:02}:{order % 60:02}"}
    run["window"] |= {"steps": 100, "wall_s": step_s * 100, "tokens": 204_800}
    run["phases"] = {name: {"mean_s": share * step_s, "n": 100} for name, share in _PHASES.items()}
    path = folder / changes.get("run_id", f"run-{number}")
    put(run, {"run_id": path.name, **{name.replace("__", "."): change for name, change in changes.items()}})
    path.mkdir(parents=True)
    (path / "run.json").write_text(json.dumps(run))
    return path


def make_runs(folder, step_times_s, **changes):
    """Writes a folder of repeats."""
    for step_s in step_times_s:
        make_run(folder, step_s, **changes)
    return folder


def make_sides(folder, times_b=SLOWER, common=None, **changes):
    """Writes folders of repeats of A and B. `common` are changes of both, `changes` those of B."""
    make_runs(folder / "a", TIMES, **(common or {}))
    make_runs(folder / "b", times_b, **{**(common or {}), **changes})
    return str(folder / "a"), str(folder / "b")


def make_sweep(folder, times, **changes):
    """Writes a sweep over model sizes. `times` has the step times of the repeats of each size."""
    for size, step_times_s in times.items():
        for repeat, step_s in enumerate(step_times_s):
            sweep = {"name": folder.name, "cell": f"cell-{size}", "axes": {"model.size": size}, "repeat": repeat}
            rest = {"run_id": f"cell-{size}-r{repeat}", "config__model__size": size, **changes}
            make_run(folder / "runs", step_s, sweep=sweep, **rest)
    (folder / "sweep.json").write_text("{}")
    return folder


def store_floor(folder, run, step_times_s, days=2):
    """Writes the noise floor of a run's configuration, from step times of repeats of some days, to noise.json."""
    facts = noise_facts(load_run(run).record)
    store_noise(folder, [NoiseEntry(facts, {"step_s": measure_noise(step_times_s)}, days)])


def decided(ratio, tolerance=0.01, adjusted_p=None, floor=None, family=1, is_time=True, **of_cell):
    """The decision on a figure with this ratio, whose p value is the corrected one by default, in a cell so made."""
    adjusted_p = ratio.p if adjusted_p is None else adjusted_p
    figure = Figure("", "", "s" if is_time else "bytes", 1.0, ratio.point, ratio, floor, adjusted_p)
    return decide(figure, CellComparison("", [], [], [], [], bool(ratio.differences), **of_cell), tolerance, family)
