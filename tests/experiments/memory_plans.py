"""Plans for the memory of a GPU, measured on it, beside a sweep over the same axes:

    PYTHONPATH=tests/support python tests/experiments/memory_plans.py FOLDER SECONDS MODEL...

MODEL is large, 2.7b, llama, gpt2, own, or tiny, which tries this file without a GPU.
Writes FOLDER/plans.csv and FOLDER/sweep.csv; SECONDS of device time a model.
On an idle machine a plan takes about a minute of one core, and a model about four minutes of a GPU.
"""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import pandas as pd
from msgspec.structs import replace

from lmbench.campaign.planning import few_blocks
from lmbench.campaign.tuning import Stages
from lmbench.fit_options import option_words
from lmbench.memory.forecast import CONTEXT_BYTES, TargetGpu, ask, gpu_for
from lmbench.memory.plan import MemoryPlan, PlanRequest, predicted_peak, recipes_of, times_of
from lmbench.tune.search import goal_of

LLAMA = {
    "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 1280, "n_layer": 36, "n_head": 20, "n_positions": 1024}
SHAPE = {"config": "large_bf16", "data.context_length": 1024, "data.batch_size": 16}
HF = {**SHAPE, "model": "lmbench.HuggingFace", "measure.zero_grad": "after_step"}
#: Options of each model, and the budgets in GiB.
MODELS = {
    "large": (SHAPE, (60, 40, 22)),
    "2.7b": ({**SHAPE, "config": "2_7b_bf16", "data.context_length": 512, "data.batch_size": 8}, (76, 68, 58)),
    "llama": ({**HF, "model.config": LLAMA}, (60, 40, 28)),
    "gpt2": ({**HF, "model.config": GPT2}, (60, 40, 20)),
    "own": ({**SHAPE, "model": "own_blocks.OwnBlocks", "model.width": 1024, "model.layers": 24, "model.heads": 16,
             "model.vocab_size": 10000}, (40, 24, 12)),
    "tiny": ({"config": "smoke", "model.d_model": 64, "model.d_ff": 128, "model.num_layers": 6, "model.num_heads": 2,
              "model.vocab_size": 256, "data.context_length": 64, "data.batch_size": 2}, (1,)),
}  # fmt: skip
RUN = {"measure.warmup_steps": 3, "measure.steps": 6, "measure.min_window_s": 1.0, "measure.probe_steps": 0}
GIB = 2**30


def stages_of(folder, name, seconds):
    options = dict(MODELS[name][0])
    if "model.config" in options:
        path = folder / f"{name}.json"
        path.write_text(json.dumps(options["model.config"]))
        options["model.config"] = str(path)
    return Stages(folder / name, {**RUN, **options}, goal_of("peak"), seconds, None)


def grid(plan, gpu):
    """Recipes over the axes: each treatment of all and of half the blocks, groups, micro-batches, loss in chunks."""
    sizes = sorted({chain.batch_size for chain in plan.chains}, reverse=True)[:2]
    known, points = {*plan.points[0].options, "model.loss"}, {}
    for chain in plan.chains:
        for recipe in recipes_of(chain, sizes[0]) if chain.batch_size in sizes else ():
            is_kept = recipe.first in (None, chain.count // 2) and recipe.group in (1, 2, 4)
            is_kept &= not recipe.is_chunked or (recipe.first is None and recipe.group == 1)
            if is_kept and predicted_peak(chain, recipe) < gpu.total_bytes - 3 * GIB:
                options = {name: value for name, value in recipe.options.items() if name in known}
                points[f"batch {recipe.batch_size}, {recipe.words}"] = options
    return points


def row_of(run):
    memory, step = run.record.memory, run.record.phases.step
    return {
        "outcome": run.outcome, "step_s": step and step.median_s,
        "peak_gib": (memory.run_peak_allocated_bytes or 0) / GIB,
        "reserved_gib": (memory.run_peak_reserved_bytes or 0) / GIB,
    }  # fmt: skip


def measured(stage, name, points):
    """The rows of points that were run, by the points' names."""
    runs = zip(points, stage.measure(name, stage.base, points, 1.0), strict=True)
    return {point: row_of(run[0]) for point, run in runs if run}


def bests_of(stage, name, gpu, times, chains):
    """The plan's best point for each budget, by the times of blocks; several budgets are planned at a time."""

    def best(budget):
        target = replace(gpu, total_bytes=budget * GIB + CONTEXT_BYTES)
        return planned(stage, PlanRequest(target, times, chains)).best

    budgets = MODELS[name][1]
    with ThreadPoolExecutor() as pool:
        return dict(zip(budgets, pool.map(best, budgets), strict=True))


def planned(stage, request):
    return ask(option_words(stage.base), request, MemoryPlan, lambda _: None)


def row_of_plan(name, budget, best, proven, swept):
    fitting = [
        row["step_s"] for row in swept if row["outcome"] == "ok" and row["reserved_gib"] <= budget
    ]  # fmt: skip
    return {
        "model": name, "budget_gib": budget,
        "plan": best and f"batch {best.recipe.batch_size}, {best.recipe.words}",
        "predicted_gib": best and best.peak_bytes / GIB, "predicted_step_s": best and best.work,
        **(proven.get(str(best.recipe), {}) if best else {}), "fastest_swept_s": min(fitting, default=None),
    }  # fmt: skip


def main(folder, seconds, names):
    folder.mkdir(parents=True, exist_ok=True)
    gpu = gpu_for(None) or TargetGpu("no GPU", 80 * GIB, 0)
    stages = {name: stages_of(folder, name, seconds) for name in names}
    rows, swept = [], []
    # The processor plans while the GPU measures: other models, or the grid of the same.
    with ThreadPoolExecutor() as pool, ExitStack() as begun:
        first = {name: pool.submit(planned, stages[name], PlanRequest(gpu, checks=0)) for name in names}
        bests = {}
        for name, stage in stages.items():
            if refusal := first[name].exception():
                print(f"{name}: {refusal}", flush=True)
                continue
            begun.enter_context(stage.begun(trusts=True))
            plan = first[name].result()
            measured(stage, "blocks", few_blocks(plan))
            bests[name] = pool.submit(bests_of, stage, name, gpu, times_of(stage.path), plan.chains)
        for name, best in bests.items():
            stage, found = stages[name], best.result()
            # One recipe may be the best for several budgets.
            proven = measured(stage, "plans", {str(point.recipe): point.options for point in found.values() if point})
            # Written before the sweep too, which may be cut off.
            for is_swept in (False, True):
                grid_rows = measured(stage, "grid", grid(first[name].result(), gpu)) if is_swept else {}
                own = [{"model": name, "recipe": recipe, **row} for recipe, row in grid_rows.items()]
                now = [row_of_plan(name, budget, point, proven, own) for budget, point in found.items()]
                pd.DataFrame([*rows, *now]).to_csv(folder / "plans.csv", index=False)
                pd.DataFrame([*swept, *own]).to_csv(folder / "sweep.csv", index=False)
            rows, swept = [*rows, *now], [*swept, *own]
            print(pd.DataFrame(now).to_string(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), float(sys.argv[2]), sys.argv[3:])
