"""The answer of `lmbench tune --for memory`: a plan's points, predicted beside measured."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmbench.errors import ExitCode
from lmbench.memory.block_times import MeasuredStep
from lmbench.memory.plan import MemoryPlan, PlanPoint
from lmbench.records.load import StoredRun
from lmbench.report.answer import Answer, Column, Line, Table, Value
from lmbench.report.units import COUNT, GIB, MS, PERCENT, gib, milliseconds
from lmbench.tune.answer import use_line


@dataclass
class ProvenPoint:
    """A point of a plan with its run, and what its step took; None if the run failed."""

    point: PlanPoint
    run: StoredRun
    step: MeasuredStep | None
    is_answer: bool = False


def proof_answer(plan: MemoryPlan, proven: list[ProvenPoint], path: Path) -> Answer:
    """The measured points of a plan beside their predictions, and the fastest of them.

    `path` is the folder that holds tuned.yaml.
    """
    rows, best = list[list[Value]](), next((point for point in proven if point.is_answer), None)
    for proof in proven:
        point, step = proof.point, proof.step
        peak, step_s = (step.peak_bytes or None, step.step_s) if step else (None, None)
        outcome = "the answer" if proof.is_answer else proof.run.outcome.replace("ok", "")
        rows.append(
            [
                point.recipe.words, point.recipe.batch_size, point.recipe.micro_batches, point.peak_bytes, peak,
                peak and point.peak_bytes / peak - 1, point.work, step_s, step_s and point.work / step_s - 1, outcome,
            ]
        )  # fmt: skip
    columns = [
        Column("recomputed"), Column("batch", COUNT, name="batch_size"), Column("parts", COUNT, name="micro_batches"),
        Column("peak predicted", GIB, name="predicted_peak_bytes"), Column("measured", GIB, name="peak_bytes"),
        Column("error", PERCENT, name="peak_error_fraction"), Column("step predicted", MS, name="predicted_step_s"),
        Column("measured", MS, name="step_s"), Column("error", PERCENT, name="step_error_fraction"),
        Column("outcome"),
    ]  # fmt: skip
    exit_code: int = ExitCode.OK
    if best is not None and best.step is not None:
        point, step = best.point, best.step
        measured = f"{gib(step.peak_bytes)} measured, " if step.peak_bytes else ""
        lines = [
            Line(
                "proven",
                f"batch {point.recipe.batch_size} x {point.recipe.micro_batches}, recomputed: {point.recipe.words}",
            ),
            Line("peak", f"{measured}{gib(point.peak_bytes)} predicted"),
            Line("step", f"{milliseconds(step.step_s)} ms measured, {milliseconds(point.work)} ms predicted"),
            use_line(path),
        ]
    elif any(proof.step for proof in proven):
        lines = [Line("proven", f"no point: what was measured takes more than {plan.gpu.name}")]
        exit_code = ExitCode.OUT_OF_MEMORY
    else:
        errors = dict.fromkeys(str(error.message) for proof in proven if (error := proof.run.record.error))
        lines = [Line("proven", f"no point: {'; '.join(errors) or 'no time for it'}")]
        codes = [proof.run.record.exit_code or ExitCode.INTERNAL for proof in proven]
        exit_code = max(codes, default=ExitCode.UNDECIDED)
    caption = (
        f"each point was predicted the best of {plan.tried:,} recipes for {plan.gpu.name}, by the times of a block and "
        "of the points above"
    )
    return Answer(lines, [Table("proof", "Predicted beside measured", columns, rows, caption)], exit_code=exit_code)
