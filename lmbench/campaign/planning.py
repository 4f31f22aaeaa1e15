"""A memory plan, written, or proven: measure the times of a block, then the best point, and plan again by both."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, product
from pathlib import Path

from lmbench.campaign.sides import read_settings
from lmbench.campaign.stages import Stages
from lmbench.errors import ExitCode, Failure, UsageError, tell
from lmbench.fit_options import check_options, option_words
from lmbench.memory.block_times import block_times, measured_step, times_of, with_times
from lmbench.memory.chain import FEW_BLOCKS
from lmbench.memory.forecast import CONTEXT_BYTES, TargetGpu, gpu_for
from lmbench.memory.plan import MemoryPlan, PlanRequest, ask_plan
from lmbench.memory.recipe import Recipe, predicted_peak, recipes_of
from lmbench.records.store import write_or_refuse
from lmbench.report.units import gib
from lmbench.sweep.file import Options
from lmbench.tune.answer import tuned_config
from lmbench.tune.proof import ProvenPoint

#: Points of the plan that are measured at most.
_POINTS = 8
#: Fractions of the budget after which no time of blocks, and no point, is measured.
_BLOCKS, _PROOF = 0.5, 1.0


def write_plan(
    options: Options, gpu: TargetGpu, run: Path | None, path: Path, also: Sequence[str]
) -> tuple[MemoryPlan, dict[str, MemoryPlan]]:
    """Plan a configuration for a GPU, and write the configuration that fits, if there is one.

    Args:
        options: the configuration, as options of `lmbench fit`.
        gpu: the GPU, or only its memory.
        run: a folder with times of blocks; without it recipes are ranked by their work.
        path: the YAML file to write.
        also: changes of the configuration, each `NAME=VALUE,NAME=VALUE`.

    Returns:
        The configuration's plan, and the plan of each change.

    Raises:
        UsageError: the options are wrong, the folder has no times, or nothing can be planned.
    """
    words = option_words(options)
    changed = {change: option_words({**options, **read_settings(change)}) for change in also}
    for each in (words, *changed.values()):
        check_options(each)
    times, steps = times_of(run) if run is not None else ([], [])
    plan = ask_plan(words, PlanRequest(gpu, times, steps=steps))
    if plan.best is not None:
        write_or_refuse(path, tuned_config({**options, **plan.best.options}), "give another --results_dir")
    return plan, {change: ask_plan(each, PlanRequest(gpu)) for change, each in changed.items()}


def prove(stages: Stages, trusts: bool) -> tuple[MemoryPlan, list[ProvenPoint]]:
    """Plan for the memory of the stages, or of the GPU here if that is less, and measure the plan's best point.

    What a point took corrects the prediction of recipes like it, and may make another point the best. So this plans
    again, until the best point is one that was measured. The fastest measured point that keeps to the memory is
    written to tuned.yaml.

    Raises:
        UsageError: neither memory nor a GPU is given, or nothing can be planned.
        Failure: nothing fits.
    """
    gpu, most_bytes = gpu_for(None), stages.most_bytes
    if most_bytes is not None and (gpu is None or most_bytes < gpu.room_bytes):
        gpu = TargetGpu(gib(most_bytes), most_bytes + CONTEXT_BYTES, gpu.workspace_bytes if gpu else 0)
    if gpu is None:
        raise UsageError("--for memory needs a GPU, or the memory to plan for, such as --at_most 40GiB")
    words = option_words(stages.base)
    with stages.begun(trusts):
        plan = ask_plan(words, PlanRequest(gpu, checks=0))
        blocks = few_blocks(plan)
        measured = stages.measure("blocks", stages.short, blocks, _BLOCKS)
        times = block_times(chain.from_iterable(measured))
        try:
            with_times(plan.chains, times)
        except UsageError:
            if not all(measured):
                raise UsageError("the budget has no time for the runs of few blocks; give a larger --budget") from None
            tell("tune: the times of a block are unclear, as on a busy machine: they are measured again")
            again = stages.measure("again", stages.short, blocks, _BLOCKS)
            times += block_times(chain.from_iterable(again))
            # Without times the plan would rank recipes by their FLOPs, which are no seconds.
            with_times(plan.chains, times)
        proven = list[ProvenPoint]()
        while len(proven) < _POINTS:
            steps = [proof.step for proof in proven if proof.step is not None]
            failed = [proof.point.recipe for proof in proven if proof.step is None]
            plan = ask_plan(words, PlanRequest(gpu, times, plan.chains, steps, failed))
            best = plan.best
            if best is None or any(proof.point.recipe == best.recipe for proof in proven):
                break
            (runs,) = stages.measure("points", stages.long, {best.recipe.words: best.options}, _PROOF)
            if not runs:
                break
            proven.append(ProvenPoint(best, runs[0], measured_step(runs[0], best.reserved_bytes)))
    if not proven and plan.best is None:
        least = gib(plan.points[-1].reserved_bytes)
        raise Failure(f"nothing fits {gpu.name}: the least is {least} reserved, as predicted", ExitCode.OUT_OF_MEMORY)
    keeping = [
        (proof.step.step_s, proof) for proof in proven if proof.step and stages.is_allowed(proof.step.reserved_bytes)
    ]
    if keeping:
        _, fastest = min(keeping, key=lambda pair: pair[0])
        fastest.is_answer = True
        stages.write("tuned.yaml", tuned_config({**stages.base, **fastest.point.options}))
    return plan, proven


def few_blocks(plan: MemoryPlan) -> dict[str, Options]:
    """The runs of few blocks whose differences are the times of a block: each treatment, in the two largest
    micro-batches of which anything fits. In smaller ones the host may set the time, which differs between processes.

    Raises:
        UsageError: the blocks are of several kinds.
    """
    if not plan.chains[0].is_alike:
        raise UsageError(
            "--for memory measures few of the module's blocks, which are of several kinds; "
            "`lmbench memory CONFIG --fit` plans without measuring"
        )
    fewer, more = FEW_BLOCKS
    samples = plan.chains[0].batch_size
    fitting = {
        chain.batch_size
        for chain in plan.chains
        if any(plan.gpu.fits(predicted_peak(chain, recipe)) for recipe in recipes_of(chain, samples))
    }
    whole = [chain for chain in plan.chains if not chain.is_chunked]
    kinds = [("none", more, False), *((name, fewer, False) for name in whole[0].blocks)]
    if len(whole) < len(plan.chains):
        kinds.append(("none", fewer, True))
    points = dict[str, Options]()
    sizes = [chain.batch_size for chain in whole if chain.batch_size in fitting or not fitting]
    for size, (name, blocks, is_chunked) in product(sizes[:2], kinds):
        options = Recipe(size, 1, name, is_chunked=is_chunked).options
        if "data.batch_size" not in plan.points[0].options:
            del options["data.batch_size"]
        label = f"{name}, {blocks} blocks, batch {size}{', chunked' if is_chunked else ''}"
        points[label] = {**options, "measure.blocks": blocks}
    return points
