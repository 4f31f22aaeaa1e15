"""Plans for the memory of a GPU, proven on it, beside a sweep over the same axes:

    for model in large 2.7b llama gpt2 own; do
        PYTHONPATH=tests/support python tests/experiments/memory_plans.py FOLDER SECONDS $model &
    done; wait

SECONDS of device time a model; `tiny` tries this file without a GPU. Writes FOLDER/MODEL/plans.csv and sweep.csv, and
goes on with what is in the folder. Only one of the processes measures at a time, while the others plan.
"""

from __future__ import annotations

import fcntl
import json
import sys
from pathlib import Path

import pandas as pd
import yaml

from lmbench.campaign.planning import prove
from lmbench.campaign.stages import Stages
from lmbench.memory.forecast import TargetGpu, gpu_for
from lmbench.memory.recipe import predicted_peak, recipes_of

#: Options of each model, and the budgets in GiB.
MODELS = yaml.safe_load("""
large: [&shape {config: large_bf16, data.context_length: 1024, data.batch_size: 16}, [60, 40, 22]]
2.7b: [{config: 2_7b_bf16, data.context_length: 512, data.batch_size: 8}, [76, 68, 58]]
llama:
- <<: *shape
  model: lmbench.HuggingFace
  measure.zero_grad: after_step
  model.config:
    {model_type: llama, hidden_size: 2048, intermediate_size: 5632, num_hidden_layers: 22, num_attention_heads: 32,
     num_key_value_heads: 4, vocab_size: 32000, max_position_embeddings: 2048}
- [60, 40, 28]
gpt2:
- <<: *shape
  model: lmbench.HuggingFace
  measure.zero_grad: after_step
  model.config: {model_type: gpt2, n_embd: 1280, n_layer: 36, n_head: 20, n_positions: 1024}
- [60, 40, 20]
own:
- <<: *shape
  model: own_blocks.OwnBlocks
  model.width: 1024
  model.layers: 24
  model.heads: 16
  model.vocab_size: 10000
- [40, 24, 12]
tiny:
- {config: smoke, model.d_model: 64, model.d_ff: 128, model.num_layers: 6, model.num_heads: 2, model.vocab_size: 256,
   data.context_length: 64, data.batch_size: 2}
- [1]
""")
RUN = {"measure.warmup_steps": 3, "measure.steps": 6, "measure.min_window_s": 1.0, "measure.probe_steps": 0}
GIB = 2**30


class Alone(Stages):
    """Stages of which only one measures at a time, of all processes of the folder."""

    def measure(self, *args, **kwargs):
        with (self.path.parent / "gpu.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            return super().measure(*args, **kwargs)


def stages_of(folder, name, seconds):
    options = dict(MODELS[name][0])
    if "model.config" in options:
        path = folder / f"{name}.json"
        path.write_text(json.dumps(options["model.config"]))
        options["model.config"] = str(path)
    command = f"python tests/experiments/memory_plans.py FOLDER SECONDS {name}".split()
    return Alone(folder / name, {**RUN, **options}, seconds, None, command)


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


def main(folder, seconds, name):
    folder.mkdir(parents=True, exist_ok=True)
    stages, rows = stages_of(folder, name, seconds), []
    for budget in MODELS[name][1]:
        stages.most_bytes = budget * GIB
        plan, proven = prove(stages, trusts=True)
        for point in proven:
            rows.append({
                "model": name, "budget_gib": budget,
                "recipe": f"batch {point.point.recipe.batch_size}, {point.point.recipe.words}",
                "predicted_gib": point.point.peak_bytes / GIB, "predicted_step_s": point.point.work,
                **row_of(point.run), "is_answer": point.is_answer,
            })  # fmt: skip
        pd.DataFrame(rows).to_csv(stages.path / "plans.csv", index=False)
    points = grid(plan, gpu_for(None) or TargetGpu("no GPU", 80 * GIB, 0))
    with stages.begun(trusts=True):
        runs = zip(points, stages.measure("grid", stages.base, points, 1.0), strict=True)
        swept = pd.DataFrame({"model": name, "recipe": recipe, **row_of(run[0])} for recipe, run in runs if run)
    swept.to_csv(stages.path / "sweep.csv", index=False)
    for budget in MODELS[name][1]:
        fitting = swept[(swept["outcome"] == "ok") & (swept["reserved_gib"] <= budget)]
        print(f"{name}, {budget} GiB: the fastest that was swept takes {fitting['step_s'].min():.4f} s")
    print(pd.DataFrame(rows).to_string())


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), float(sys.argv[2]), sys.argv[3])
