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
from pathlib import Path

import pandas as pd
from msgspec.structs import replace

from lmbench.campaign.proving import few_blocks, words_of
from lmbench.campaign.tuning import Stages
from lmbench.memory.forecast import CONTEXT_BYTES, TargetGpu, ask, gpu_for
from lmbench.memory.plan import MemoryPlan, PlanRequest, predicted_peak, recipes_of, times_of
from lmbench.standard_output import result_alone
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
RUN = {"measure.warmup_steps": 3, "measure.steps": 8, "measure.min_window_s": 1.0, "measure.probe_steps": 0}
GIB = 2**30


def stages_of(folder, name, seconds):
    options = dict(MODELS[name][0])
    if "model.config" in options:
        path = folder / f"{name}.json"
        path.write_text(json.dumps(options["model.config"]))
        options["model.config"] = str(path)
    return Stages(folder / name, {**RUN, **options}, goal_of("peak"), seconds, None)


def ask_quietly(words, request):
    return ask(words, request, MemoryPlan, heard=lambda text: None)


def grid(plan, gpu, samples):
    """Recipes over the axes: each treatment of all and of half the blocks, groups, micro-batches, loss in chunks."""
    sizes = sorted({chain.batch_size for chain in plan.chains}, reverse=True)[:2]
    points = {}
    for chain in plan.chains:
        if chain.batch_size not in sizes:
            continue
        for recipe in recipes_of(chain, samples):
            is_kept = recipe.first in (0, chain.count, chain.count // 2) and recipe.group in (1, 2, 4)
            is_kept &= not recipe.is_chunked or (recipe.first in (0, chain.count) and recipe.group == 1)
            if is_kept and predicted_peak(chain, recipe) < gpu.total_bytes - 3 * GIB:
                known = {*plan.points[0].options, "model.loss"}
                options = {name: value for name, value in recipe.options(chain.count).items() if name in known}
                points[f"batch {recipe.batch_size}, {recipe.words(chain.count)}"] = options
    return points


def row_of(run):
    memory, step = run.record.memory, run.record.phases.step
    return {
        "outcome": run.outcome, "step_s": step and step.median_s,
        "peak_gib": (memory.run_peak_allocated_bytes or 0) / GIB,
        "reserved_gib": (memory.run_peak_reserved_bytes or 0) / GIB,
    }  # fmt: skip


def main(folder, seconds, names):
    folder.mkdir(parents=True, exist_ok=True)
    gpu = gpu_for(None) or TargetGpu("no GPU", 80 * GIB, 0)
    with ThreadPoolExecutor(8) as pool:
        stages = {name: stages_of(folder, name, seconds) for name in names}
        first = {name: pool.submit(ask_quietly, words_of(stages[name]), PlanRequest(gpu, checks=0)) for name in names}
        rows, swept = [], []
        for name in names:
            stage, plan = stages[name], first[name].result()
            print(f"{name}: {plan.tried} recipes in {plan.took_s:.0f} s", flush=True)
            stage.begin(trusts=True)
            with result_alone(), stage.cache:
                stage.measure("blocks", stage.base, few_blocks(plan), 1.0)
            times = times_of(stage.path)
            asked = []
            for budget in MODELS[name][1]:
                target = replace(gpu, total_bytes=budget * GIB + CONTEXT_BYTES)
                asked.append(pool.submit(ask_quietly, words_of(stage), PlanRequest(target, times, plan.chains)))
            plans = [each.result() for each in asked]
            by_budget = dict(zip(MODELS[name][1], plans, strict=True))
            # One recipe may be the best for several budgets.
            points = {each.best.recipe: each.best.options for each in plans if each.best}
            samples = plan.points[0].recipe.batch_size * plan.points[0].recipe.micro_batches
            cells = grid(plan, gpu, samples)
            with result_alone(), stage.cache:
                proven = dict(
                    zip(
                        points,
                        stage.measure(
                            "plans", stage.base, {str(recipe): options for recipe, options in points.items()}, 1.0
                        ),
                        strict=True,
                    )
                )
                measured = dict(zip(cells, stage.measure("grid", stage.base, cells, 1.0), strict=True))
            stage.executor.end()
            grid_rows = [{"model": name, "recipe": key, **row_of(runs[0])} for key, runs in measured.items() if runs]
            swept += grid_rows
            for budget, each in by_budget.items():
                runs = proven.get(each.best.recipe) if each.best else None
                if not runs:
                    reason = "not run" if each.best else "nothing fits"
                    rows.append({"model": name, "budget_gib": budget, "plan": reason})
                    continue
                found, best = row_of(runs[0]), each.best
                fitting = [row for row in grid_rows if row["outcome"] == "ok" and row["reserved_gib"] <= budget]
                fastest = min(fitting, key=lambda row: row["step_s"], default=None)
                rows.append({
                    "model": name, "budget_gib": budget, **found,
                    "plan": f"batch {best.recipe.batch_size}, {best.words}",
                    "predicted_gib": best.peak_bytes / GIB, "predicted_reserved_gib": best.reserved_bytes / GIB,
                    "predicted_step_s": best.work, "fits": found["reserved_gib"] <= budget,
                    "peak_error": best.peak_bytes / GIB / found["peak_gib"] - 1 if found["peak_gib"] else None,
                    "step_error": best.work / found["step_s"] - 1 if found["step_s"] else None,
                    "fastest_swept": fastest and fastest["recipe"], "fastest_step_s": fastest and fastest["step_s"],
                    "over_fastest": fastest and found["step_s"] and found["step_s"] / fastest["step_s"] - 1,
                })  # fmt: skip
            pd.DataFrame(rows).to_csv(folder / "plans.csv", index=False)
            pd.DataFrame(swept).to_csv(folder / "sweep.csv", index=False)
            print(pd.DataFrame(rows).to_string(), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), float(sys.argv[2]), sys.argv[3:])
