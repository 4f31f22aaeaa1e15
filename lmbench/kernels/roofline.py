"""What a run's matrix products, its optimizer and its norms attain, against the datasheet and what was measured.

Work is the least that the mathematics needs: model FLOPs, and every tensor read and written once. Kernels that compute
again, or read a tensor twice, attain less of it; tensors of a few MB may stay in the device's cache and attain more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

from lmbench.hardware import find_gpu, peak_flops
from lmbench.kernels.ceiling import Ceiling
from lmbench.kernels.findings import Findings
from lmbench.kernels.kinds import MATMUL
from lmbench.kernels.tables import MS, NUMBER, SHARE, row, table_of
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
    is_copy: bool = False
    work: float | None = None
    datasheet_per_s: float | None = None
    burst_per_s: float | None = None
    sustained_per_s: float | None = None
    reason: str = ""

    @property
    def per_s(self) -> float | None:
        return self.work / self.seconds if self.work and self.seconds else None


def roofline(findings: Findings, ceiling: Ceiling | None = None) -> Answer | None:
    """What the trace's kernels attain: a table, and whose peak and which record of `lmbench ceiling` it is held
    against; None of a trace without kernels or without its run."""
    if not findings.has_kernels or findings.run is None:
        return None
    work = _Work(findings, findings.run, ceiling)
    rows = list(work.rows())
    notes = [Line("peak", work.dtype)]
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
    figures = {"matmul_dtype": work.dtype, "ceiling": measured, "rows": rows}
    return Answer(tables=[table], notes=[*notes, Line("ceiling", measured)], figures={"roofline": figures})


def _shown(each: Attained) -> SimpleNamespace:
    unit, work, per_s = "B" if each.is_copy else "FLOP", each.work, each.per_s
    peaks = {"sheet": each.datasheet_per_s, "burst": each.burst_per_s, "sustained": each.sustained_per_s}
    shares = {f"{name}_fraction": per_s / peak if per_s and peak else None for name, peak in peaks.items()}
    if work is None or per_s is None:
        return row(each, **shares)
    amount = f"{work / 1e12:.3g} T{unit}" if work >= 1e12 else f"{work / 1e9:.3g} G{unit}"
    return row(each, work=Cell(work, text=amount), per_s=Cell(per_s, text=f"{per_s / 1e12:.3g} T{unit}/s"), **shares)


class _Work:
    """The kinds of work of a run; `dtype` says in words which type's peak the products are held against."""

    def __init__(self, findings: Findings, run: RunRecord, ceiling: Ceiling | None) -> None:
        self._run, self._ceiling = run, ceiling
        self._shares = {share.phase: share for share in findings.phases}
        gpu = (run.environment.gpu if run.environment else Gpu()).name or ""
        precision, matmul = str(run.precision), str(run.matmul_precision)
        self._peak, self._gpu = peak_flops(gpu, precision, matmul), find_gpu(gpu)
        self.dtype = f"unknown: the datasheet of {gpu or 'this device'} in {precision} is not known"
        if self._peak:
            self.dtype = _WORDS[self._peak.dtype].format(precision=precision, matmul=matmul)
        # Parameters and the residual stream have one type: under mixed precisions autocast converts at each product.
        known = find_precision(precision)
        self._bytes = known.weight_bytes if known is not None else 4
        window = run.window
        self._tokens = window.tokens / window.steps / (run.world_size or 1) if window.tokens and window.steps else None

    def rows(self) -> Iterator[Attained]:
        """Matrix products of forward, backward and both, fused attention apart; the optimizer; norms."""
        products = [each for phase in ("forward", "backward") for each in self._products(phase)]
        yield from products
        whole = [each for each in products if each.name.startswith("matmul") and each.work]
        if len(whole) > 1:
            seconds, amount = (sum(getattr(each, name) for each in whole) for name in ("seconds", "work"))
            yield self._product("matmul step", seconds, amount)
        if "optimizer" in self._shares:
            yield self._optimizer(self._shares["optimizer"].kernel_s)
        yield from (self._norm(phase) for phase in NORM_TENSORS if phase in self._shares)

    def _products(self, phase: str) -> Iterator[Attained]:
        """Matrix products of a phase, of which backward has twice forward's; with fused attention's masked half left
        out."""
        if phase not in self._shares:
            return
        run, flops, kinds_s = self._run, self._run.flops, self._shares[phase].kinds_s
        seconds, fused_s = kinds_s.get(MATMUL, 0.0), kinds_s.get("attention", 0.0)
        reason = ""
        if flops.per_token_flops is None or not flops.multiplier:
            reason = flops.reason or "the module does not tell its FLOPs"
        elif flops.causal_per_token_flops is None:
            reason = "a count of the module's operators has other FLOPs than matrix products in it"
        elif self._tokens is None:
            reason = run.window.tokens_reason or "the number of tokens is not known"
        elif phase == "backward" and flops.recomputed_per_token_flops:
            reason = "activation checkpointing computes a part of the forward again in it"
        else:
            tokens = (2 if phase == "backward" else 1) * self._tokens / flops.multiplier
            whole = flops.per_token_flops * tokens
            attention = 2 * (flops.per_token_flops - flops.causal_per_token_flops) * tokens
            yield self._product(f"matmul {phase}", seconds, whole - attention if fused_s else whole)
            if fused_s:
                yield self._product(f"attention {phase}", fused_s, attention / 2)
            return
        yield Attained(f"matmul {phase}", seconds, reason=reason)

    def _optimizer(self, seconds: float) -> Attained:
        """AdamW's reads and writes over all kernels of the optimizer's phase."""
        kind, count = self._run.model.optimizer or "", self._run.model.trainable_parameter_count
        if not kind.startswith("AdamW"):
            reason = f"reads and writes of {kind or 'this optimizer'} are unknown"
            return Attained("optimizer", seconds, is_copy=True, reason=reason)
        if count is None:
            reason = "the number of trained parameters is unknown"
            return Attained("optimizer", seconds, is_copy=True, reason=reason)
        return self._moved("optimizer", seconds, count * (ADAMW_READS + ADAMW_WRITES) * self._bytes)

    def _norm(self, phase: Phase) -> Attained:
        """All norms of the model over all kernels that do nothing else."""
        name, parts_s = f"norm {phase}", self._shares[phase].parts_s
        seconds, layers, width = parts_s.get("norm", 0.0), self._run.model.num_layers, self._run.model.d_model
        if layers is None or width is None:
            return Attained(name, seconds or None, is_copy=True, reason="the model's norms are not known")
        if any("+" in part and "norm" in part.split("+") for part in parts_s):
            reason = "fused with other parts: the time of norms alone is unknown"
            return Attained(name, None, is_copy=True, reason=reason)
        if not seconds or self._tokens is None:
            return Attained(name, None, is_copy=True, reason="no kernel of a norm alone")
        # Two in each block and one before the head.
        tensors = NORM_TENSORS[phase] * (2 * layers + 1)
        return self._moved(name, seconds, tensors * self._tokens * width * self._bytes)

    def _product(self, name: str, seconds: float, flops: float) -> Attained:
        if not seconds:
            return Attained(name, None, reason="no kernel is a matrix product")
        rates = self._ceiling.rates(self._peak.dtype) if self._ceiling and self._peak else (None, None)
        return Attained(name, seconds, False, flops, self._peak.flops_per_s if self._peak else None, *rates)

    def _moved(self, name: str, seconds: float, size_bytes: float) -> Attained:
        rates = self._ceiling.rates("copy") if self._ceiling else (None, None)
        return Attained(name, seconds, True, size_bytes, self._gpu.memory_bytes_per_s if self._gpu else None, *rates)
