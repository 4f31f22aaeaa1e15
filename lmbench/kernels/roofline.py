"""What a run's matrix products, its optimizer and its norms attain, against the datasheet and what was measured.

Work is the least that the mathematics needs: model FLOPs, and every tensor read and written once. Kernels that compute
again, or read a tensor twice, attain less of it; tensors of a few MB may stay in the device's cache and attain more.
"""

from __future__ import annotations

from dataclasses import dataclass

from lmbench.hardware import Peak, find_gpu, peak_flops
from lmbench.kernels.ceiling import Ceiling
from lmbench.kernels.findings import Findings
from lmbench.kernels.kinds import MATMUL
from lmbench.kernels.tables import MS, NUMBER, SHARE, Row, row, table_of
from lmbench.precision import find_precision
from lmbench.records.environment import Gpu
from lmbench.records.run import RunRecord
from lmbench.records.vocabulary import Phase
from lmbench.report.answer import Answer, Cell, Line
from lmbench.report.units import WORDS

#: Bytes per parameter of one step of AdamW, in multiples of a parameter's size: it reads the parameter, its gradient
#: and both moments (torch.optim.AdamW keeps them in the parameter's type) and writes all but the gradient.
ADAMW_READS, ADAMW_WRITES = 4, 3
#: Tensors of the residual stream's shape that a norm needs. Forward reads its input and writes its output; backward
#: reads input and output's gradient and writes the input's. Weights and row sums are less than a thousandth of it.
NORM_TENSORS: dict[Phase, int] = {"forward": 2, "backward": 3}
_WORDS = {
    "fp32": "fp32: precision 32-true with float32 matmul highest, no TF32",
    "tf32": "tf32: precision 32-true with float32 matmul {matmul}",
    "bf16": "bf16: {precision} runs matrix products in it",
    "fp16": "fp16: {precision} runs matrix products in it",
}


@dataclass(frozen=True)
class Attained:
    """One kind of work per step, in FLOPs, or in bytes where it `is_copy`. `work` is None where `reason` says why, the
    ceilings in FLOP/s or byte/s also where nothing is known of the device."""

    name: str
    seconds: float | None
    is_copy: bool
    work: float | None
    datasheet_per_s: float | None
    burst_per_s: float | None
    sustained_per_s: float | None
    reason: str = ""

    @property
    def per_s(self) -> float | None:
        return self.work / self.seconds if self.work and self.seconds else None


def roofline(findings: Findings, ceiling: Ceiling | None = None) -> Answer | None:
    """What the trace's kernels attain: a table, and whose peak and which record of `lmbench ceiling` it is held
    against; None of a trace without kernels or without its run."""
    run = findings.run
    if findings.why_no_kernels or run is None:
        return None
    gpu, matmul = (run.environment.gpu if run.environment else Gpu()).name or "", str(run.matmul_precision)
    peak = peak_flops(gpu, str(run.precision), matmul)
    dtype = f"unknown: the datasheet of {gpu or 'this device'} in {run.precision} is not known"
    dtype = _WORDS[peak.dtype].format(precision=run.precision, matmul=matmul) if peak else dtype
    rows = _attained(findings, run, peak, ceiling)
    notes = [Line("peak", dtype)]
    notes += [Line("", f"no figure for {each.name}: {each.reason}") for each in rows if each.reason]
    if any(each.name.startswith("attention") for each in rows):
        unmasked = "fused attention: products of the unmasked half, without what its backward computes again"
        notes.append(Line("", unmasked))
    measured = "none of this GPU beside the results: `lmbench ceiling` measures it"
    if ceiling is not None:
        measured = f"{ceiling.path} ({ceiling.note})" if ceiling.note else str(ceiling.path)
    caption = (
        "ms of its kernels per step; least work that it needs; attained: that work by the time, and its share of "
        "the datasheet's rate and of what `lmbench ceiling` measured, burst and sustained"
    )
    table = table_of(
        "roofline", "Roofline", caption, map(_shown, rows), ("work", WORDS, "name"), ("ms", MS, "seconds"),
        ("per step", NUMBER, "work"), ("attained", NUMBER, "per_s"),
        *((name, SHARE, f"{name}_fraction") for name in ("sheet", "burst", "sustained")),
    )  # fmt: skip
    figures = {"matmul_dtype": dtype, "ceiling": measured, "rows": rows}
    return Answer(tables=[table], notes=[*notes, Line("ceiling", measured)], figures={"roofline": figures})


def _shown(each: Attained) -> Row:
    unit, work, per_s = "B" if each.is_copy else "FLOP", each.work, each.per_s
    peaks = {"sheet": each.datasheet_per_s, "burst": each.burst_per_s, "sustained": each.sustained_per_s}
    shares = {f"{name}_fraction": per_s / peak if per_s and peak else None for name, peak in peaks.items()}
    if work is None or per_s is None:
        return row(each, **shares)
    amount = f"{work / 1e12:.3g} T{unit}" if work >= 1e12 else f"{work / 1e9:.3g} G{unit}"
    return row(each, work=Cell(work, text=amount), per_s=Cell(per_s, text=f"{per_s / 1e12:.3g} T{unit}/s"), **shares)


def _attained(findings: Findings, run: RunRecord, peak: Peak | None, ceiling: Ceiling | None) -> list[Attained]:
    """Matrix products of forward, backward and both, fused attention apart; the optimizer; norms."""
    work, flops, window = findings.work, run.flops, run.window
    gpu = find_gpu((run.environment.gpu if run.environment else Gpu()).name or "")
    none = (None, None)
    products = peak and peak.flops_per_s, *(ceiling.rates(peak.dtype) if ceiling and peak else none)
    copies = gpu and gpu.memory_bytes_per_s, *(ceiling.rates("copy") if ceiling else none)

    def kind(name: str, seconds: float, work: float, *reasons: tuple[object, str], is_copy: bool = False) -> Attained:
        """A kind of work, which is not known for the first of the reasons that holds."""
        reason = next((text for holds, text in reasons if holds), "")
        return Attained(
            name, seconds or None, is_copy, None if reason else work, *(copies if is_copy else products), reason
        )

    tokens = window.tokens / window.steps / (run.world_size or 1) if window.tokens and window.steps else 0.0
    full, causal = flops.per_token_flops or 0.0, flops.causal_per_token_flops or 0.0
    rows = []
    for phase in ("forward", "backward"):
        if phase not in work.phases:
            continue
        kinds_s = work.seconds("kind", phase)
        seconds, fused_s = kinds_s.get(MATMUL, 0.0), kinds_s.get("attention", 0.0)
        # Backward has twice forward's products; fused attention leaves the masked half out.
        count = (2 if phase == "backward" else 1) * tokens / (flops.multiplier or 1)
        attention = 2 * (full - causal) * count if fused_s else 0.0
        unknown = [
            (flops.per_token_flops is None or not flops.multiplier,
             flops.reason or "the module does not tell its FLOPs"),
            (flops.causal_per_token_flops is None,
             "a count of the module's operators has other FLOPs than matrix products in it"),
            (not tokens, window.tokens_reason or "the number of tokens is not known"),
            (phase == "backward" and flops.recomputed_per_token_flops,
             "activation checkpointing computes a part of the forward again in it"),
        ]  # fmt: skip
        no_kernels = (not seconds, "no kernel is a matrix product")
        rows.append(kind(f"matmul {phase}", seconds, full * count - attention, *unknown, no_kernels))
        if fused_s and not any(holds for holds, _ in unknown):
            rows.append(kind(f"attention {phase}", fused_s, attention / 2))
    known = [each for each in rows if each.name.startswith("matmul") and each.work]
    if len(known) > 1:
        rows.append(kind("matmul step", *(sum(getattr(each, name) for each in known) for name in ("seconds", "work"))))
    # Parameters and the residual stream have one type: under mixed precisions autocast converts at each product.
    precision = find_precision(str(run.precision))
    weight_bytes, model = precision.weight_bytes if precision is not None else 4, run.model
    if "optimizer" in work.phases:
        optimizer, parameters = model.optimizer or "", model.trainable_parameter_count
        rows.append(kind(
            "optimizer", work.total("optimizer")["kernel_s"],
            (parameters or 0) * (ADAMW_READS + ADAMW_WRITES) * weight_bytes,
            (not optimizer.startswith("AdamW"), f"reads and writes of {optimizer or 'this optimizer'} are unknown"),
            (parameters is None, "the number of trained parameters is unknown"), is_copy=True,
        ))  # fmt: skip
    for name, tensors in NORM_TENSORS.items():
        if name in work.phases:
            parts_s = work.seconds("part", name)
            is_fused = any("+" in part and "norm" in part.split("+") for part in parts_s)
            seconds = 0.0 if is_fused else parts_s.get("norm", 0.0)
            # Two in each block and one before the head.
            norms = 2 * (model.num_layers or 0) + 1
            rows.append(kind(
                f"norm {name}", seconds, tensors * norms * tokens * (model.d_model or 0) * weight_bytes,
                (None in (model.num_layers, model.d_model), "the model's norms are not known"),
                (is_fused, "fused with other parts: the time of norms alone is unknown"),
                (not seconds or not tokens, "no kernel of a norm alone"), is_copy=True,
            ))  # fmt: skip
    return rows
