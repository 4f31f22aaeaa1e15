"""`lmbench selfcheck`: plant known truths in a training loop, and check that a measurement on this machine finds them.

Each truth, such as a duration, an allocation or a synchronize, must be found in the right place and size.
"""

from __future__ import annotations

import gc
import logging
import math
import time
import warnings
from collections.abc import Callable, Iterator
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lmbench.callbacks import MeasurementSession, MemoryRecorder, PhaseTimer, SyncFinder, TrainingCheck
from lmbench.device import DEVICES, best_device, device_of, synchronize
from lmbench.errors import ExitCode, UsageError, unknown
from lmbench.files import ScratchFolder
from lmbench.fit.trainer import TRAINER_DEFAULTS
from lmbench.instruments.host import host_state, read_host
from lmbench.instruments.window import Schedule
from lmbench.progress import progress
from lmbench.python_process import run_python
from lmbench.records.field import PerPhase
from lmbench.records.guards import busy_machine
from lmbench.records.load import find_runs, load_run
from lmbench.records.measured import PhaseSummary, TrainingFacts
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.summary import complete_run, late_rank
from lmbench.records.vocabulary import Phase, Span
from lmbench.report.answer import Answer, Cell, Column, Line, Table, Value, labelled, listed

# Modules with planted truths, and a small measured run of one.

Work = Callable[[], None]
SeeLoss = Callable[[Tensor, int], Tensor]


def nothing() -> None:
    """Plant nothing."""


class PlantedBlock(nn.Module):
    """A tiny matrix product, with planted work in its forward and other planted work in its backward."""

    def __init__(self, forward_work: Work = nothing, backward_work: Work = nothing) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(8))
        self.forward_work, self.backward_work = forward_work, backward_work

    def forward(self, x: Tensor) -> Tensor:
        self.forward_work()
        y = x @ self.weight
        y.register_hook(lambda _: self.backward_work())
        return y


class Planted(LightningModule):
    """A stack of blocks with planted work.

    Args:
        blocks: the blocks; one without planted work by default.
        optimizer_work: planted work at the end of the optimizer's step.
        see_loss: takes each step's loss and index, and returns the loss to use.
    """

    def __init__(
        self, *blocks: PlantedBlock, optimizer_work: Work = nothing, see_loss: SeeLoss = lambda loss, _: loss
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks or [PlantedBlock()])
        self.optimizer_work, self.see_loss = optimizer_work, see_loss

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        for block in self.blocks:
            batch = block(batch)
        return self.see_loss(batch.square().mean(), batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.01)
        optimizer.register_step_post_hook(lambda *_: self.optimizer_work())
        return optimizer


class Measured(NamedTuple):
    """The steps of the window, and the record of the run."""

    window: list[StepRecord]
    run: RunRecord

    def median_s(self, span: Span) -> float:
        return (self.run.phases.get(span) or PhaseSummary()).median_s or 0.0


def measure(
    module: LightningModule,
    device: torch.device,
    schedule: Schedule,
    clock: Literal["events", "sync"] = "events",
) -> Measured:
    """Train `module` on one small batch that stays on the device, under lmbench's own callbacks."""
    # A Trainer is a reference cycle. Collect the last one now, or its memory is freed in the middle of these peaks.
    gc.collect()
    timer, session = PhaseTimer(clock), MeasurementSession(schedule)
    trainer = Trainer(
        accelerator=device.type,
        callbacks=[timer, MemoryRecorder(), TrainingCheck(), SyncFinder(), session],
        **TRAINER_DEFAULTS,
    )
    trainer.fit(module, repeat(torch.rand(8, 8, device=device)))
    complete_run(session.run, timer.records, session.raw_wall_s)
    return Measured([step for step in timer.records if step.stage == "window"], session.run)


# The checks.


class Truth(NamedTuple):
    """A planted truth, the value that is expected with its limits, the measured value, and whether that is right."""

    name: str
    is_right: bool
    expected: str
    measured: str


def within_1_percent(name: str, expected_s: float, measured_s: float) -> Truth:
    error = measured_s / expected_s - 1.0
    measured = f"{measured_s * 1e3:.3f} ms ({error:+.2%})"
    return Truth(name, abs(error) <= 0.01, f"{expected_s * 1e3:.3f} ms within 1%", measured)


# Do phases take as long as the work planted in them, and do the clocks agree?

# Planted durations. They differ, so that no phase passes with another phase's time. They are long enough that 0.2 ms
# of a slow host around them stays well under 1 %.
LENGTHS_S: dict[Phase, float] = {"forward": 0.060, "backward": 0.080, "optimizer": 0.040}
TIMING = Schedule(warmup_steps=2, steps=12)


def known_durations(device: torch.device) -> Iterator[Truth]:
    """Work of a known duration in each phase is measured within 1 %, and the steps sum to the window."""
    forward, backward, optimizer = works = [_work_of(length_s, device) for length_s in LENGTHS_S.values()]
    measured = measure(Planted(PlantedBlock(forward, backward), optimizer_work=optimizer), device, TIMING)
    for (phase, length_s), work in zip(LENGTHS_S.items(), works, strict=True):
        # A kernel's true duration comes from an independent clock.
        truth_s = length_s if device.type == "cpu" else _synchronized_s(work, device)
        yield within_1_percent(f"known duration in {phase}", truth_s, measured.median_s(phase))
    error = measured.run.window.identity_error_fraction
    if error is None:
        error = math.nan
    limit = 5e-3 if device.type == "cpu" else 1e-3
    yield Truth("steps sum to the window", abs(error) <= limit, f"0% within {limit:.1%}", f"{error:+.4%}")


def _work_of(length_s: float, device: torch.device) -> Work:
    """Work that takes about `length_s` on a GPU, or exactly that on the host of a CPU run."""
    if device.type == "cuda":
        cycles = int(length_s / _synchronized_s(lambda: torch.cuda._sleep(10**7), device) * 10**7)
        return lambda: torch.cuda._sleep(cycles)

    def spin() -> None:
        end = time.perf_counter() + length_s
        while time.perf_counter() < end:
            pass

    return spin


#: Kernels between two synchronizes.
_QUEUED = 10


def _synchronized_s(work: Work, device: torch.device) -> float:
    """Seconds that a kernel takes, by the host's clock around queued kernels between two synchronizes."""
    for count in (1, _QUEUED):
        start = time.perf_counter()
        for _ in range(count):
            work()
        synchronize(device)
    return (time.perf_counter() - start) / _QUEUED


def clocks_agree(device: torch.device) -> Iterator[Truth]:
    """Steps timed by device events take as long as steps timed with a synchronize at each border."""
    work = _work_of(LENGTHS_S["forward"], device)
    module = Planted(*(PlantedBlock(work, work) for _ in range(3)), optimizer_work=work)
    by_events, by_sync = (measure(module, device, TIMING, clock).median_s("step") for clock in ("events", "sync"))
    yield within_1_percent("events and sync agree per step", by_sync, by_events)


# Does the lag distinguish a device that waits for the host from a busy device?

LAGS = Schedule(warmup_steps=3, steps=10, probe_steps=10)
BLOCKS = 8


def verdicts(device: torch.device) -> Iterator[Truth]:
    """Forwards with a planted slow host or a planted busy device get the right verdict."""
    matrix = torch.randn(4096, 4096, device=device, dtype=torch.bfloat16)
    vector = torch.zeros(8, device=device)

    @torch.no_grad()
    def heavy(count: int = 12) -> None:
        for _ in range(count):
            matrix @ matrix

    @torch.no_grad()
    def tiny() -> None:
        for _ in range(200):
            vector.add_(1.0)

    def stack(work: Work, last: Work | None = None) -> list[PlantedBlock]:
        return [*(PlantedBlock(work, work) for _ in range(BLOCKS - 1)), PlantedBlock(last or work, work)]

    # The host sleeps longer than the queued work takes, so the device starves once in the forward.
    slow = [PlantedBlock(heavy) for _ in range(BLOCKS)]
    slow[4] = PlantedBlock(lambda: time.sleep(0.25))
    cases = {
        "host sleep in forward": stack(lambda: time.sleep(2e-3)),
        "loop of tiny kernels": stack(tiny),
        "queue of large matmuls": stack(heavy),
        "heavy kernel ends a starved phase": stack(tiny, lambda: heavy(60)),
        "one slow block among heavy ones": slow,
    }
    for name, blocks in cases.items():
        expected = "queued" if name.startswith("queue") else "host-bound"
        forward = measure(Planted(*blocks), device, LAGS).run.probe.lags.get("forward")
        measured = f"{forward.verdict} (min lag {(forward.min_lag_s or 0.0) * 1e3:.3f} ms)" if forward else "no verdict"
        yield Truth(name, forward is not None and forward.verdict == expected, expected, measured)


# Are planted allocations, synchronizes, dead weights and losses found where they were planted?

PLANTED_MIB = 512
FINDINGS = Schedule(warmup_steps=1, steps=4, probe_steps=1)


def allocations(device: torch.device) -> Iterator[Truth]:
    """A temporary allocation raises the peak of the phase that it was planted in, and of no other phase."""

    def allocate() -> None:
        torch.empty(PLANTED_MIB << 20, dtype=torch.uint8, device=device)

    modules: dict[Phase, Planted] = {
        "forward": Planted(PlantedBlock(allocate)),
        "backward": Planted(PlantedBlock(nothing, allocate)),
        "optimizer": Planted(optimizer_work=allocate),
    }
    for phase, module in modules.items():
        peaks = dict((measure(module, device, FINDINGS).run.memory.phase_peak_allocated_bytes or PerPhase()).items())
        highest = max(peaks, key=peaks.__getitem__)
        extra_mib = (peaks[phase] - max(peak for name, peak in peaks.items() if name != phase)) / 2**20
        is_right = highest == phase and abs(extra_mib - PLANTED_MIB) <= 1
        measured = f"{extra_mib:.1f} MiB in {highest}"
        yield Truth(f"planted allocation in {phase}", is_right, f"{PLANTED_MIB} MiB in {phase} within 1", measured)


def hidden_syncs(device: torch.device) -> Iterator[Truth]:
    """A planted `.item()` is found with its line, and a clean module has no hidden synchronize."""

    def peek(loss: Tensor, _: int) -> Tensor:
        """Read the loss on the host, as many training loops do."""
        loss.item()
        return loss

    planted, clean = (
        "; ".join(sync.location for sync in measure(module, device, FINDINGS).run.probe.hidden_syncs or [])
        for module in (Planted(see_loss=peek), Planted())
    )
    yield Truth("planted .item()", "loss.item()" in planted, "found", planted or "none")
    yield Truth("no planted sync", not clean, "none", clean or "none")


def training(device: torch.device) -> Iterator[Truth]:
    """A weight without a gradient is named, and no other weight is reported as unmoved."""
    module = Planted(PlantedBlock(), PlantedBlock(), PlantedBlock())
    module.unused = torch.nn.Parameter(torch.ones(3))
    facts = measure(module, device, FINDINGS).run.probe.training or TrainingFacts()
    missing, unmoved = (", ".join(names or ()) for names in (facts.missing_gradients, facts.unmoved_parameters))
    yield Truth("weight without a gradient", missing == "unused", "unused", missing or "none")
    yield Truth("the other weights moved", not unmoved, "all", unmoved or "all")


def losses(device: torch.device) -> Iterator[Truth]:
    """The loss, which is k in step k, is recorded with its own step."""
    window = measure(Planted(see_loss=lambda loss, k: loss * 0.0 + k), device, Schedule(2, 200)).window
    right = sum(step.loss == step.step for step in window)
    yield Truth("each step has its own loss", right == len(window), "200 right", f"{right} right")


# Are a late rank and a slow collective found by a run of two ranks?

#: Planted seconds; on a CPU ranks share its cores, and a short sleep would vary more.
LATE_S, COLLECTIVE_S, RANK_TOLERANCE_FRACTION = 0.040, 0.060, 0.1


class PlantedRanks(Planted):
    """A block for two ranks, whose rank 1 works longer in its forward, or whose collective takes longer.

    Args:
        late_s: planted work in the forward of rank 1.
        collective_s: planted work before each bucket of gradients is reduced, on all ranks.
    """

    def __init__(self, late_s: float = 0.0, collective_s: float = 0.0) -> None:
        block = PlantedBlock()
        super().__init__(block)
        self.block, self.late_s, self.collective_s = block, late_s, collective_s

    def on_train_start(self) -> None:
        """Plant the work, once the device is known."""
        if self.late_s and self.global_rank == 1:
            self.block.forward_work = _work_of(self.late_s, self.device)
        if self.collective_s:
            work = _work_of(self.collective_s, self.device)

            # DDP refuses a hook with annotations other than its own types.
            def reduce(group, bucket):  # type: ignore[no-untyped-def]
                work()
                return allreduce_hook(group, bucket)

            model: Any = self.trainer.strategy.model
            model.register_comm_hook(None, reduce)

    def train_dataloader(self) -> Iterator[Tensor]:
        return repeat(torch.rand(8, 8))


def ranks(device: torch.device) -> Iterator[Truth]:
    """Two ranks tell which of them is late, and for how long a planted collective keeps them from work."""
    run = _run_of_ranks(device, f"--model.late_s={LATE_S}")
    rank, phase, wait_s = late_rank(run) or (None, "", 0.0)
    found = f"rank {rank}, {wait_s * 1e3:.1f} ms in {phase}"
    is_right = (rank, phase) == (1, "forward") and abs(wait_s / LATE_S - 1) < RANK_TOLERANCE_FRACTION
    yield Truth("late rank of two", is_right, f"rank 1, {LATE_S * 1e3:.1f} ms in forward", found)
    probe = _run_of_ranks(device, f"--model.collective_s={COLLECTIVE_S}").probe
    exposed_s = (probe.synchronized_step_s or 0.0) - (probe.unsynchronized_step_s or 0.0)
    is_right = abs(exposed_s / COLLECTIVE_S - 1) < RANK_TOLERANCE_FRACTION
    yield Truth("slow collective", is_right, f"{COLLECTIVE_S * 1e3:.1f} ms exposed", f"{exposed_s * 1e3:.1f} ms")


def _run_of_ranks(device: torch.device, planted: str) -> RunRecord:
    """The record of `lmbench fit` with planted work on two ranks, in processes of their own."""
    with ScratchFolder("selfcheck") as folder:
        run_python(
            "-m", "lmbench", "fit", "--model=lmbench.selfcheck.PlantedRanks", planted, "--trainer.strategy=ddp",
            f"--trainer.accelerator={device.type}", "--trainer.devices=2",
            "--measure.steps=12", "--measure.min_window_s=0", "--measure.probe_steps=1", "--wandb.mode=disabled",
            f"--measure.results_dir={folder}", "--quiet",
        )  # fmt: skip
        return load_run(find_runs([Path(folder)])[0]).record


class Check(NamedTuple):
    """A check, and how many GPUs it needs; 0 for a check that a CPU can run too."""

    run: Callable[[torch.device], Iterator[Truth]]
    gpus: int = 0


CHECKS = {
    "known durations": Check(known_durations),
    "events and sync agree per step": Check(clocks_agree, gpus=1),
    "host-bound verdicts": Check(verdicts, gpus=1),
    "planted allocation": Check(allocations, gpus=1),
    "planted .item()": Check(hidden_syncs, gpus=1),
    "did it train": Check(training),
    "losses": Check(losses),
    "two ranks": Check(ranks, gpus=2),
}


def check_truths(device_type: str | None) -> Answer:
    """Run every check; the exit code is 1 if one failed, or 11 if one is undecided because the machine is busy.

    Args:
        device_type: a key of DEVICES; None takes a GPU if there is one.

    Raises:
        UsageError: lmbench or this machine has no such device.
    """
    if device_type is None:
        device = best_device()
    elif device_type not in DEVICES:
        raise unknown("device", device_type, DEVICES)
    elif not DEVICES[device_type].is_available():
        raise UsageError(f"no {device_type.upper()} device here; use `lmbench selfcheck cpu`")
    else:
        device = torch.device(device_type)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="lightning")
    gpu_count = 0 if device.type == "cpu" else torch.accelerator.device_count()
    checks = {name: check for name, check in CHECKS.items() if check.gpus <= gpu_count}
    truths = list[Truth]()
    before = read_host()
    with progress("selfcheck", len(checks), is_measured_here=True) as task:
        for name, check in checks.items():
            task.begin(name)
            truths += check.run(device)
    state = host_state(before, read_host())
    guard = busy_machine(RunRecord(SCHEMA_VERSION, "ok", device_type=device.type, host_state=state))
    # On a busy machine a failed check decides nothing.
    wrong, wrong_code = ("undecided", ExitCode.UNDECIDED) if guard.status == "warn" else ("failed", ExitCode.INTERNAL)
    rows: list[list[Value | Cell]] = [
        [Cell("pass" if truth.is_right else wrong, style="outcome"), truth.name, *truth[2:]] for truth in truths
    ]
    failed, left_out = sum(not truth.is_right for truth in truths), len(CHECKS) - len(checks)
    result = listed(f"{len(truths) - failed} passed", failed and f"{failed} {wrong}")
    if left_out:
        result += f"; {left_out} checks need {'two GPUs' if gpu_count else 'a GPU'}"
    code = wrong_code if failed else ExitCode.OK
    is_open = code is ExitCode.UNDECIDED
    notes = [Line("result", result), *labelled(wrong, is_open and f"{guard.message}; check again when it is quiet")]
    columns = [
        Column("", name="status"), Column("check"), Column("expected", is_extra=True), Column("found"),
    ]  # fmt: skip
    return Answer(
        headline=[Line("selfcheck", f"{device_of(device).name()}, torch {torch.__version__}")],
        tables=[Table("checks", "Planted truths", columns, rows, "what came back of each")],
        notes=notes,
        exit_code=code,
    )
