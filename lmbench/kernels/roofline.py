"""What a run's matrix products, its optimizer and its norms attain, against the datasheet and what was measured.

Work is the least that the mathematics needs: model FLOPs, and every tensor read and written once. Kernels that compute
again, or read a tensor twice, attain less of it; tensors of a few MB may stay in the device's cache and attain more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from lmbench.hardware import find_gpu, peak_flops
from lmbench.kernels.ceiling import Ceiling
from lmbench.kernels.trace.findings import Findings
from lmbench.kernels.trace.kinds import MATMUL
from lmbench.kernels.trace.shares import PhaseShares
from lmbench.precision import find_precision
from lmbench.records.environment import Gpu
from lmbench.records.run import RunRecord
from lmbench.records.vocabulary import Phase
from lmbench.report.table import Entry, Table, fact, numbers, words
from lmbench.report.units import MISSING, milliseconds, percent

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
BYTES_PER_S, FLOPS_PER_S = "B/s", "FLOP/s"
_TERA, _GIGA = 1e12, 1e9


@dataclass(frozen=True)
class Attained:
    """One kind of work per step. `work` is in FLOPs or bytes and `unit` that per second; all after it are None where
    `reason` says why, the ceilings also where nothing is known of the device."""

    name: str
    seconds: float | None
    work: float | None
    unit: str
    per_s: float | None
    datasheet_per_s: float | None
    burst_per_s: float | None
    sustained_per_s: float | None
    reason: str = ""


@dataclass(frozen=True)
class Roofline:
    """All kinds of work of a run; `dtype` says in words which type's peak the products are held against."""

    rows: list[Attained]
    dtype: str
    ceiling: Ceiling | None


def roofline(found: Findings, ceiling: Ceiling | None = None) -> Roofline | None:
    """What the trace's kernels attain; None of a trace without kernels or without its run."""
    if not found.has_kernels or found.run is None:
        return None
    shares = {share.phase: share for share in found.phases}
    maker = _Maker(found.run, found.steps, ceiling)
    rows = maker.products(shares)
    if "optimizer" in shares:
        rows.append(maker.optimizer(shares["optimizer"]))
    rows += [maker.norm(phase, shares[phase]) for phase in NORM_TENSORS if phase in shares]
    return Roofline(rows, maker.words, ceiling)


class _Maker:
    def __init__(self, run: RunRecord, steps: int, ceiling: Ceiling | None) -> None:
        self.run, self.steps, self.ceiling = run, steps, ceiling
        gpu = (run.environment.gpu if run.environment else Gpu()).name or ""
        precision, matmul = str(run.precision), str(run.matmul_precision)
        self.peak = peak_flops(gpu, precision, matmul)
        self.gpu = find_gpu(gpu)
        unknown = f"unknown: the datasheet of {gpu or 'this device'} in {precision} is not known"
        self.words = _WORDS[self.peak.dtype].format(precision=precision, matmul=matmul) if self.peak else unknown
        # Parameters and the residual stream have one type: under mixed precisions autocast converts at each product.
        found = find_precision(precision)
        self.bytes = found.weight_bytes if found is not None else 4
        window = run.window
        self.tokens = window.tokens / window.steps / (run.world_size or 1) if window.tokens and window.steps else None

    def products(self, shares: Mapping[str, PhaseShares]) -> list[Attained]:
        """Matrix products of forward, backward and both; fused attention apart, with its masked half left out."""
        flops = self._flops()
        rows, sums = [], {"seconds": 0.0, "work": 0.0}
        for phase, times in (("forward", 1), ("backward", 2)):
            if phase not in shares:
                continue
            kinds = shares[phase].kinds_s
            fused_s = kinds.get("attention", 0.0) / self.steps
            own_s = kinds.get(MATMUL, 0.0) / self.steps
            if isinstance(flops, str):
                rows.append(self._blank(f"matmul {phase}", own_s, FLOPS_PER_S, flops))
                continue
            if phase == "backward" and self.run.flops.recomputed_per_token_flops:
                again = "activation checkpointing computes a part of the forward again in it"
                rows.append(self._blank(f"matmul {phase}", own_s, FLOPS_PER_S, again))
                continue
            full, attention = (times * value for value in flops)
            work = full - attention if fused_s else full
            rows.append(self._product(f"matmul {phase}", own_s, work))
            sums["seconds"] += own_s
            sums["work"] += work
            if fused_s:
                rows.append(self._product(f"attention {phase}", fused_s, attention / 2))
        if len([row for row in rows if row.name.startswith("matmul") and not row.reason]) > 1:
            rows.append(self._product("matmul step", sums["seconds"], sums["work"]))
        return rows

    def _flops(self) -> tuple[float, float] | str:
        """FLOPs of a step's forward, and those of them that are attention's products; or why they are not known."""
        flops = self.run.flops
        if flops.per_token_flops is None or not flops.multiplier:
            return flops.reason or "the module does not tell its FLOPs"
        if flops.causal_per_token_flops is None:
            return "a count of the module's operators has other FLOPs than matrix products in it"
        if self.tokens is None:
            return self.run.window.tokens_reason or "the number of tokens is not known"
        attention = 2 * (flops.per_token_flops - flops.causal_per_token_flops)
        return flops.per_token_flops / flops.multiplier * self.tokens, attention / flops.multiplier * self.tokens

    def optimizer(self, share: PhaseShares) -> Attained:
        """AdamW's reads and writes over all kernels of the optimizer's phase."""
        seconds, name = share.kernel_s / self.steps, "optimizer"
        kind, count = self.run.model.optimizer or "", self.run.model.trainable_parameter_count
        if not kind.startswith("AdamW"):
            return self._blank(
                name, seconds, BYTES_PER_S, f"reads and writes of {kind or 'this optimizer'} are unknown"
            )
        if count is None:
            return self._blank(name, seconds, BYTES_PER_S, "the number of trained parameters is unknown")
        return self._moved(name, seconds, count * (ADAMW_READS + ADAMW_WRITES) * self.bytes)

    def norm(self, phase: Phase, share: PhaseShares) -> Attained:
        """All norms of the model over all kernels that do nothing else."""
        name, seconds = f"norm {phase}", share.parts_s.get("norm", 0.0) / self.steps
        layers, width = self.run.model.num_layers, self.run.model.d_model
        if layers is None or width is None:
            return self._blank(name, seconds or None, BYTES_PER_S, "the model's norms are not known")
        if any("+" in part and "norm" in part.split("+") for part in share.parts_s):
            return self._blank(name, None, BYTES_PER_S, "fused with other parts: the time of norms alone is unknown")
        if not seconds or self.tokens is None:
            return self._blank(name, None, BYTES_PER_S, "no kernel of a norm alone")
        # Two in each block and one before the head.
        tensors = NORM_TENSORS[phase] * (2 * layers + 1)
        return self._moved(name, seconds, tensors * self.tokens * width * self.bytes)

    def _product(self, name: str, seconds: float, flops: float) -> Attained:
        if not seconds:
            return self._blank(name, None, FLOPS_PER_S, "no kernel is a matrix product")
        rates = self.ceiling.rates(self.peak.dtype) if self.ceiling and self.peak else (None, None)
        datasheet = self.peak.flops_per_s if self.peak else None
        return Attained(name, seconds, flops, FLOPS_PER_S, flops / seconds, datasheet, *rates)

    def _moved(self, name: str, seconds: float, size_bytes: float) -> Attained:
        rates = self.ceiling.rates("copy") if self.ceiling else (None, None)
        datasheet = self.gpu.memory_bytes_per_s if self.gpu else None
        return Attained(name, seconds, size_bytes, BYTES_PER_S, size_bytes / seconds, datasheet, *rates)

    def _blank(self, name: str, seconds: float | None, unit: str, reason: str) -> Attained:
        return Attained(name, seconds, None, unit, None, None, None, None, reason)


def roofline_record(found: Roofline | None) -> dict[str, Any] | None:
    """Everything as plain JSON values, in SI units; work and seconds are per step."""
    if found is None:
        return None
    return {
        "matmul_dtype": found.dtype,
        "ceiling": found.ceiling.as_dict() if found.ceiling else None,
        "rows": [asdict(row) for row in found.rows],
    }


def roofline_table(found: Roofline) -> Table:
    """A row for each kind of work; shares are of the datasheet's rate and of what was measured on this device."""
    headings = [*words("work"), *numbers("ms", "per step", "attained", "sheet", "burst", "sustained")]
    caption = (
        "ms of its kernels per step; least work that it needs; attained: that work by the time, and its share of "
        "the datasheet's rate and of what `lmbench ceiling` measured, burst and sustained"
    )
    return Table("Roofline", caption, headings, [_row(row) for row in found.rows], name="roofline")


def _row(row: Attained) -> list[Entry]:
    work = MISSING
    if row.work is not None:
        scale, prefix = (_TERA, "T") if row.work >= 1e3 * _GIGA else (_GIGA, "G")
        work = f"{row.work / scale:.3g} {prefix}{'FLOP' if row.unit == FLOPS_PER_S else 'B'}"
    tera = "TFLOP/s" if row.unit == FLOPS_PER_S else "TB/s"
    rate = MISSING if row.per_s is None else f"{row.per_s / _TERA:.3g} {tera}"
    peaks = (row.datasheet_per_s, row.burst_per_s, row.sustained_per_s)
    shares = (percent(row.per_s / peak if row.per_s is not None and peak else None) for peak in peaks)
    return [fact(row.name), *map(Entry, (milliseconds(row.seconds), work, rate, *shares))]


def roofline_lines(found: Roofline) -> list[tuple[str, str]]:
    """Whose peak, why a figure is missing, and which record of `lmbench ceiling` it is held against."""
    lines = [("peak", found.dtype)]
    lines += [("", f"no figure for {row.name}: {row.reason}") for row in found.rows if row.reason]
    if any(row.name.startswith("attention") for row in found.rows):
        lines.append(("", "fused attention: products of the unmasked half, without what its backward computes again"))
    if found.ceiling is None:
        lines.append(("ceiling", "none of this GPU beside the results: `lmbench ceiling` measures it"))
    else:
        note = f" ({found.ceiling.note})" if found.ceiling.note else ""
        lines.append(("ceiling", f"{found.ceiling.path}{note}"))
    return lines
