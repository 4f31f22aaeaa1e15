"""The checks of `lmbench selfcheck`: is what was planted found where, and as long as, it was planted?"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from rich.console import Console
from torch import Tensor

from lmbench.errors import ExitCode, UsageError
from lmbench.flops import counter_flops, forward_flops
from lmbench.instruments.clock import synchronize
from lmbench.instruments.host_load import host_state, read_host
from lmbench.instruments.schedule import Schedule
from lmbench.model.language_model import LanguageModel
from lmbench.records.field import PerPhase
from lmbench.records.guards import busy_machine
from lmbench.records.measured import TrainingFacts
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.vocabulary import Phase, Span
from lmbench.report.screen import print_table
from lmbench.report.table import Entry, Table, fact, words
from lmbench.selfcheck.planted import Block, Measured, Planted, Work, measure, nothing, spin

Status = Literal["pass", "fail", "busy", "n/a"]


@dataclass(frozen=True)
class CheckResult:
    """One line of the table: what was planted, what came back, and how far off it may be."""

    name: str
    status: Status
    expected: str
    found: str
    limit: str = ""


Check = Callable[[torch.device], list[CheckResult]]


def judged(name: str, is_right: bool, expected: str, found: str, limit: str = "") -> CheckResult:
    return CheckResult(name, "pass" if is_right else "fail", expected, found, limit)


def within(name: str, expected_s: float, found_s: float, fraction: float) -> CheckResult:
    """A duration that must come back within a fraction of itself."""
    error = found_s / expected_s - 1.0
    return judged(
        name,
        abs(error) <= fraction,
        f"{expected_s * 1e3:.3f} ms",
        f"{found_s * 1e3:.3f} ms ({error:+.2%})",
        f"{fraction:.1%}",
    )


def needs_gpu(name: str, why: str) -> CheckResult:
    """A check that says nothing on a CPU, with the reason."""
    return CheckResult(name, "n/a", "", f"on a CPU {why}")


# Are phases as long as the work that was planted in them, and do the clocks agree?

# Planted lengths, all different so that no phase can pass with another's time, and long enough for the 0.2 ms that a
# slow host needs around them to stay well under 1 %.
FORWARD_S, BACKWARD_S, OPTIMIZER_S = 0.060, 0.080, 0.040
TIMING = Schedule(warmup_steps=2, steps=12)


def known_durations(device: torch.device) -> list[CheckResult]:
    """Work of a known length in each phase comes back within 1 %, and the steps sum to the window."""
    lengths: dict[Span, float] = {"forward": FORWARD_S, "backward": BACKWARD_S, "optimizer": OPTIMIZER_S}
    works: dict[Span, Work] = {}
    truths: dict[Span, Callable[[], float]] = {}
    for phase, length in lengths.items():
        works[phase], truths[phase] = _work_of(length, device)
    module = Planted([Block(works["forward"], works["backward"])], works["optimizer"])
    run = measure(module, device, TIMING)
    results = [within(f"known duration in {phase}", truths[phase](), run.median_s(phase), 0.01) for phase in lengths]
    return [*results, _identity(run, device)]


def _work_of(length_s: float, device: torch.device) -> tuple[Work, Callable[[], float]]:
    """Work of about this length, and a way to learn its true one by an independent clock."""
    if device.type == "cpu":
        return spin(length_s), lambda: length_s
    cycles = int(length_s / _synchronized_s(lambda: torch.cuda._sleep(10**7), device) * 10**7)

    def work() -> None:
        torch.cuda._sleep(cycles)

    return work, lambda: _synchronized_s(work, device)


def _synchronized_s(work: Work, device: torch.device, repeats: int = 10) -> float:
    """Seconds a kernel takes, by the host's clock around a queue of several between two synchronizes."""
    work()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        work()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


def _identity(run: Measured, device: torch.device) -> CheckResult:
    limit = 1e-3 if device.type == "cuda" else 5e-3
    error = run.identity_error_fraction
    return judged("steps sum to the window", abs(error) <= limit, "0 %", f"{error:+.4%}", f"{limit:.1%}")


def clocks_agree(device: torch.device) -> list[CheckResult]:
    """Whole steps by device events, by a synchronize at each border, and by one synchronize a step."""
    name = "events and sync agree per step"
    if device.type == "cpu":
        return [needs_gpu(name, "both are the host's clock")]
    work, _ = _work_of(FORWARD_S, device)
    module = Planted([Block(work, work) for _ in range(3)], work)
    by_events = measure(module, device, TIMING).median_s("step")
    by_sync = measure(module, device, TIMING, clock="sync").median_s("step")
    return [within(name, by_sync, by_events, 0.01)]


# Does the lag tell a device that waits for the host from one that is busy?

LAGS = Schedule(warmup_steps=3, steps=10, probe_steps=10)
BLOCKS = 8


def verdicts(device: torch.device) -> list[CheckResult]:
    """Planted hosts and devices that are too slow, each with the verdict its forward must get."""
    if device.type == "cpu":
        return [needs_gpu("host-bound verdicts", "host and device are one")]
    heavy, tiny = _matmuls(device, 12), _tiny_kernels(device)

    def stack(work: Work, last: Work | None = None) -> Planted:
        blocks = [Block(work, work) for _ in range(BLOCKS - 1)]
        return Planted([*blocks, Block(last or work, work)])

    cases = (
        ("host sleep in forward", stack(lambda: time.sleep(2e-3)), "host-bound"),
        ("loop of tiny kernels", stack(tiny), "host-bound"),
        ("queue of large matmuls", stack(heavy), "queued"),
        ("heavy kernel ends a starved phase", stack(tiny, _matmuls(device, 60)), "host-bound"),
        ("one slow block among heavy ones", _one_slow(heavy), "host-bound"),
    )
    return [_judge(name, module, expected, device) for name, module, expected in cases]


def _one_slow(heavy: Work) -> Planted:
    """The host sleeps through everything that was queued before it: the device starves once in the forward."""
    blocks = [Block(heavy, nothing) for _ in range(BLOCKS)]
    blocks[4] = Block(lambda: time.sleep(0.25), nothing)
    return Planted(blocks)


def _judge(name: str, module: Planted, expected: str, device: torch.device) -> CheckResult:
    verdicts = measure(module, device, LAGS).run.probe.verdicts
    forward = verdicts.forward if verdicts is not None else None
    if forward is None:
        return judged(name, False, expected, "no verdict")
    found = f"{forward.verdict} (min lag {(forward.min_lag_s or 0.0) * 1e3:.3f} ms)"
    return judged(name, forward.verdict == expected, expected, found)


def _matmuls(device: torch.device, count: int) -> Work:
    a = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)

    def work() -> None:
        with torch.no_grad():
            for _ in range(count):
                a @ a

    return work


def _tiny_kernels(device: torch.device) -> Work:
    x = torch.zeros(8, device=device)

    def work() -> None:
        with torch.no_grad():
            for _ in range(200):
                x.add_(1.0)

    return work


# Are planted allocations, synchronizes, dead weights and losses found where they were planted?

PLANTED_BYTES = 512 * 2**20
FINDINGS = Schedule(warmup_steps=1, steps=4, probe_steps=1)


def allocations(device: torch.device) -> list[CheckResult]:
    """A temporary allocation shows in the peak of the phase it was planted in, and in no other."""
    if device.type == "cpu":
        return [needs_gpu("planted allocation", "host memory is not counted")]

    def allocate() -> None:
        torch.empty(PLANTED_BYTES, dtype=torch.uint8, device=device)

    modules: dict[Phase, Planted] = {
        "forward": Planted([Block(allocate, nothing)]),
        "backward": Planted([Block(nothing, allocate)]),
        "optimizer": Planted([Block(nothing, nothing)], allocate),
    }
    results = []
    for phase, module in modules.items():
        peaks = dict((measure(module, device, FINDINGS).run.memory.phase_peak_allocated_bytes or PerPhase()).items())
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
        return [needs_gpu("planted .item()", "nothing is asynchronous")]
    found = measure(_Peeking([Block(nothing, nothing)]), device, FINDINGS).run.probe.hidden_syncs or []
    places = [sync.location for sync in found]
    clean = measure(Planted([Block(nothing, nothing)]), device, FINDINGS).run.probe.hidden_syncs or []
    return [
        judged("planted .item()", any("loss.item()" in p for p in places), "found", "; ".join(places) or "none"),
        judged("no planted sync", not clean, "none", "; ".join(s.location for s in clean) or "none"),
    ]


def training(device: torch.device) -> list[CheckResult]:
    """A weight that gets no gradient, and one that the optimizer does not know, are named."""
    module = Planted([Block(nothing, nothing) for _ in range(3)])
    module.unused = torch.nn.Parameter(torch.ones(3))
    facts = measure(module, device, FINDINGS).run.probe.training or TrainingFacts()
    moved = not facts.unmoved_parameters
    return [
        judged("weight without a gradient", facts.missing_gradients == ["unused"], "unused",
               ", ".join(facts.missing_gradients or ()) or "none"),
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


#: Those of clocks, which other work on the machine can fail.
TIMED: tuple[Check, ...] = (known_durations, clocks_agree, verdicts)
CHECKS: tuple[Check, ...] = (
    known_durations, clocks_agree, verdicts, allocations, hidden_syncs, training, losses, flops,
)  # fmt: skip


def selfcheck(wanted: str | None, console: Console) -> ExitCode:
    """Run every check and print what came back; 1 where one failed, 11 where a busy machine left one undecided.

    Args:
        wanted: `cpu` or `cuda`; None takes a GPU where there is one.

    Raises:
        UsageError: there is no GPU to check.
    """
    has_gpu = torch.cuda.is_available()
    if wanted == "cuda" and not has_gpu:
        raise UsageError("no CUDA device here; use `lmbench selfcheck cpu`")
    device = torch.device(wanted or ("cuda" if has_gpu else "cpu"))
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    console.print(f"selfcheck on {name}, torch {torch.__version__}")
    load = ""
    results = []
    for check in CHECKS:
        found, told = _checked(check, device)
        results += found
        load = load or told
    rows = [[Entry(r.status, "outcome"), fact(r.name), fact(r.expected), fact(r.found), fact(r.limit)] for r in results]
    headings = words("", "check", "expected", "found", "limit")
    print_table(Table("Planted truths", "what came back of each", headings, rows), console)
    passed, failed, undecided = (sum(r.status == status for r in results) for status in ("pass", "fail", "busy"))
    skipped = len(results) - passed - failed - undecided
    console.print(f"{passed} passed, {failed} failed" + (f", {skipped} need a GPU" if skipped else ""))
    if undecided:
        console.print(f"{undecided} cannot be decided: {load}; check again when it is quiet")
    return ExitCode.INTERNAL if failed else ExitCode.UNDECIDED if undecided else ExitCode.OK


def _checked(check: Check, device: torch.device) -> tuple[list[CheckResult], str]:
    """What a check finds; one of clocks that fails on a busy machine is undecided, and what made it busy is told."""
    before = read_host()
    results = check(device)
    state = host_state(before, read_host())
    load = busy_machine(RunRecord(SCHEMA_VERSION, "ok", device_type=device.type, host_state=state), [])
    if check not in TIMED or load.status != "warn":
        return results, ""
    return [replace(each, status="busy") if each.status == "fail" else each for each in results], load.message
