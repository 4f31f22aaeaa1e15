"""A plan: which blocks to compute again, in which micro-batches, so that a model trains in the given memory in the
least time. Works without torch.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from shlex import quote

from msgspec import Struct

from lmbench.configs import may_run, read_yaml
from lmbench.errors import UsageError
from lmbench.masking import leaves
from lmbench.memory.block_times import BlockTime, MeasuredStep
from lmbench.memory.chain import Chain
from lmbench.memory.forecast import TargetGpu, ask, gpu_of
from lmbench.memory.recipe import Recipe
from lmbench.progress import progress
from lmbench.records.run import RunRecord
from lmbench.records.vocabulary import Values


class PlanPoint(Struct):
    """A recipe with its predictions: the peak that the walk tells, and what the allocator reserves for it.

    `is_checked` says that a fake step of all blocks told both. `work` is that of a step; `extra_fraction` is that above
    the least of all recipes.
    """

    recipe: Recipe
    options: Values
    peak_bytes: float
    reserved_bytes: float
    work: float
    extra_fraction: float = 0.0
    is_checked: bool = False


class PlanRequest(Struct, tag=True):
    """What a planning process is asked: the GPU, and how many fitting points to check.

    `times` are measured times of blocks, `chains` those of an earlier plan for the same configuration and GPU. Recipes
    like those of `steps` are predicted by what these took; `failed` are those that did not run.
    """

    gpu: TargetGpu
    times: list[BlockTime] = []
    chains: list[Chain] = []
    steps: list[MeasuredStep] = []
    failed: list[Recipe] = []
    checks: int = 1


class MemoryPlan(Struct):
    """The points of least work for their memory, from the least work to the least memory.

    `fitting` are the first of them that fit, as far as they were checked; `chains` are the facts behind them.
    `is_timed` says that work is in seconds, by measured times of blocks, and not in FLOPs. `tried` counts recipes.
    """

    points: list[PlanPoint]
    fitting: list[PlanPoint]
    gpu: TargetGpu
    is_timed: bool
    chains: list[Chain]
    tried: int
    took_s: float = 0.0

    @property
    def best(self) -> PlanPoint | None:
        """The point of least work that fits; None if none does."""
        return self.fitting[0] if self.fitting else None


#: A point of the frontier takes at least so much less memory than the one before.
_STEP_FRACTION = 0.02


def frontier(points: Iterable[PlanPoint]) -> list[PlanPoint]:
    """The points that no other point beats in both memory and work, the least work first, without near ones."""
    kept = list[PlanPoint]()
    for point in sorted(points, key=lambda point: (point.work, point.reserved_bytes)):
        if not kept or point.reserved_bytes < kept[-1].reserved_bytes * (1 - _STEP_FRACTION):
            kept.append(point)
    return kept


def ask_plan(words: list[str], request: PlanRequest) -> MemoryPlan:
    """The plan for a configuration, with its progress shown. Raises as `ask` does, also without a list of blocks."""
    with progress("planning memory") as task:
        return ask(words, request, MemoryPlan, task.note)


def plan_after(run: RunRecord, config: Path) -> MemoryPlan:
    """The plan that fits for a run that ran out of memory; it takes about a minute.

    Nothing is planned for a configuration that may run code other than lmbench's own: the run may come from anywhere.

    Args:
        run: the run's record.
        config: the configuration in the run's folder.

    Raises:
        UsageError, ProcessFailed: there is no plan, for the reason in the message.
    """
    gpu = gpu_of(run)
    if run.error is not None and run.error.where == "host":
        raise UsageError("the host's memory ended, not the device's")
    if gpu is None:
        raise UsageError("the memory of the run's GPU is not known")
    for name, value in leaves(read_yaml(config, "config.yaml")[1], into_lists=True):
        if may_run(value, config.parent) and not name.startswith(("measure.", "wandb.")):
            command = f"lmbench memory --config {quote(str(config))} --fit {quote(gpu.name)}"
            raise UsageError(f"{name} may run code; if you trust it: {command}")
    return ask_plan([f"--config={config}"], PlanRequest(gpu))
