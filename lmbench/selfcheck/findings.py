"""Are planted allocations, synchronizes, dead weights and losses found where they were planted?"""

from __future__ import annotations

import torch
from torch import Tensor

from lmbench.flops import counter_flops, forward_flops
from lmbench.measure.schedule import Schedule
from lmbench.model.language_model import LanguageModel
from lmbench.records.field import PerPhase
from lmbench.records.measured import TrainingFacts
from lmbench.records.vocabulary import Phase
from lmbench.selfcheck.planted import Block, Planted, Work, measure, nothing
from lmbench.selfcheck.result import CheckResult, judged, needs_gpu

PLANTED_BYTES = 512 * 2**20
SCHEDULE = Schedule(warmup_steps=1, steps=4, probe_steps=1)


def allocations(device: torch.device) -> list[CheckResult]:
    """A temporary allocation shows in the peak of the phase it was planted in, and in no other."""
    if device.type == "cpu":
        return [needs_gpu("planted allocation", "PyTorch does not account for host memory")]

    def allocate() -> None:
        torch.empty(PLANTED_BYTES, dtype=torch.uint8, device=device)

    modules: dict[Phase, Planted] = {
        "forward": Planted([Block(allocate, nothing)]),
        "backward": Planted([Block(nothing, allocate)]),
        "optimizer": Planted([Block(nothing, nothing)], allocate),
    }
    results = []
    for phase, module in modules.items():
        peaks = dict((measure(module, device, SCHEDULE).run.memory.phase_peak_allocated_bytes or PerPhase()).items())
        highest = max(peaks, key=peaks.__getitem__)
        others = max(peak for name, peak in peaks.items() if name != phase)
        extra = peaks[phase] - others
        results.append(
            judged(
                f"planted allocation in {phase}",
                highest == phase and abs(extra - PLANTED_BYTES) <= 2**20,
                f"{PLANTED_BYTES >> 20} MiB in {phase}",
                f"{extra / 2**20:.1f} MiB in {highest}",
                "1 MiB",
            )
        )
    return results


class _Peeking(Planted):
    """Looks at its loss on the host, as many training loops do."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.seen = loss.item()
        return loss


def hidden_syncs(device: torch.device) -> list[CheckResult]:
    """A planted `.item()` is found with its line; a clean module has none."""
    if device.type == "cpu":
        return [needs_gpu("planted .item()", "nothing is asynchronous there")]
    found = measure(_Peeking([Block(nothing, nothing)]), device, SCHEDULE).run.probe.hidden_syncs or []
    places = [sync.location for sync in found]
    clean = measure(Planted([Block(nothing, nothing)]), device, SCHEDULE).run.probe.hidden_syncs or []
    return [
        judged("planted .item()", any("loss.item()" in p for p in places), "found", "; ".join(places) or "none"),
        judged("no planted sync", not clean, "none", "; ".join(s.location for s in clean) or "none"),
    ]


def training(device: torch.device) -> list[CheckResult]:
    """A weight that gets no gradient, and one that the optimizer does not know, are named."""
    module = Planted([Block(nothing, nothing) for _ in range(3)])
    module.unused = torch.nn.Parameter(torch.ones(3))
    facts = measure(module, device, SCHEDULE).run.probe.training or TrainingFacts()
    moved = not facts.unmoved_parameters
    return [
        judged("weight without a gradient", facts.missing_gradients == ["unused"], "unused",
               ", ".join(facts.missing_gradients) or "none"),
        judged("the other weights moved", moved, "all", "all" if moved else ", ".join(facts.unmoved_parameters or ())),
    ]  # fmt: skip


class _Counting(Planted):
    """Its loss in step k is k."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * 0.0 + batch_idx


def losses(device: torch.device) -> list[CheckResult]:
    """Every step's loss is recorded with its own step."""
    window = measure(_Counting([Block(nothing, nothing)]), device, Schedule(2, 200)).window
    wrong = [step for step in window if step.loss != step.step]
    return [judged("each step has its own loss", not wrong, "200 right", f"{len(window) - len(wrong)} right")]


def flops(device: torch.device) -> list[CheckResult]:
    """The formula's model FLOPs equal those that PyTorch's counter sees in the naive model."""
    results = []
    for size, context in (("tiny", 64), ("small", 128)):
        module = LanguageModel(size=size, context_length=context, attention="naive")
        with torch.device("meta"):
            module.configure_model()
            batch = (torch.zeros(2, context, dtype=torch.int64), torch.zeros(2, context, dtype=torch.int64))
        counted = counter_flops(module, batch, 2 * context).per_token_flops
        formula = forward_flops(module.shape, context).per_token_flops
        results.append(
            judged(
                f"model FLOPs of {size}",
                counted == formula,
                f"{formula:,}/token",
                f"{counted:,}/token",
                "exact",
            )
        )
    return results


CHECKS = (allocations, hidden_syncs, training, losses, flops)

__all__ = ["CHECKS", "Work"]
