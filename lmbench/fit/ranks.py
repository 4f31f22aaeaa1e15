"""Ranks of one measurement: forked from one process, watched until all have ended, and told in one record.

A launcher that exists (torchrun, srun, mpirun) starts the processes itself; otherwise they are started here, by a fork
of the process that has imported everything and understood the command line. It has not touched a GPU by then.
"""

from __future__ import annotations

import faulthandler
import math
import multiprocessing
import os
import re
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, suppress
from multiprocessing.connection import wait
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NamedTuple

from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.distributed import _set_num_threads_if_needed
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.fabric.utilities.warnings import PossibleUserWarning

from lmbench.errors import ExitCode, UsageError
from lmbench.files import ScratchFolder
from lmbench.fit.trainer import BenchTrainer
from lmbench.instruments.ending import COLLECTIVE_FAILED, Ending, failed
from lmbench.python_process import die_with_parent
from lmbench.records.load import Run, load_known
from lmbench.records.vocabulary import KILLED, RUNNING
from lmbench.sweep.fork_server import end_after

#: Once a rank has failed, the others have this time to end by themselves: they may wait for it in a collective.
GRACE_S = 5.0

#: A rank that another launcher started has this time to write down why it failed.
ANOTHERS_END_S = 2.0
#: The variable that tells a rank where its log is.
_LOG = "RANK_LOG_OF_LMBENCH"
_STACK = "stack-of-lmbench"
_LAUNCHERS = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment)


def rank_of_process() -> int:
    """The rank of this process, by what its launcher set; 0 of a process that was started alone."""
    return _get_rank() or 0


def count_to_start(flags: dict[str, Any]) -> int:
    """How many ranks this process has to start: 1 for one device, or where a launcher has started them.

    Args:
        flags: the Trainer's.

    Raises:
        UsageError: several nodes without a launcher, or flags that the Trainer refuses.
    """
    if flags["num_nodes"] == 1 and str(flags["devices"]) == "1":
        return 1
    # Lightning warns where `srun` is installed and did not start this process.
    with warnings.catch_warnings(action="ignore", category=PossibleUserWarning):
        if any(launcher.detect() for launcher in _LAUNCHERS):
            return 1
        if "LOCAL_RANK" in os.environ:
            if "MASTER_ADDR" not in os.environ:
                raise UsageError(
                    "LOCAL_RANK is set, and MASTER_ADDR is not; unset it, or start every rank by `torchrun`"
                )
            return 1
        if flags["num_nodes"] > 1:
            raise UsageError(
                f"trainer.num_nodes is {flags['num_nodes']}, and no launcher started this process; start it on every "
                "node, by `srun` or `torchrun --nnodes`"
            )
        names = ("accelerator", "devices", "strategy")
        return BenchTrainer(logger=False, **{name: flags[name] for name in names}).world_size


class End(NamedTuple):
    """How a rank ended: its exit code, or minus the number of the signal that ended it; what it printed, or its stack;
    and whether it had to be ended after another one had failed, or still runs."""

    rank: int
    code: int
    log: str
    was_waited_for: bool


def run_ranks(path: Path, count: int, measure: Callable[[], int]) -> list[End]:
    """Fork `count` ranks that call `measure`, which returns an exit code; returns how they ended, in that order.

    They leave their records in `path`, the run's folder; one that ends without closing its record has failed.

    Rank 0 prints where this process prints, the others into a log. All have ended when this returns or raises.
    """
    # Made before the fork: what a process makes is its own.
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port()), "WORLD_SIZE": str(count)}
    context = multiprocessing.get_context("fork")
    ends: list[End] = []
    with ScratchFolder("ranks") as folder:
        logs = [Path(folder, f"rank{rank}.log") for rank in range(count)]
        each = [{**variables, "LOCAL_RANK": str(rank), _LOG: str(logs[rank])} for rank in range(count)]
        ranks = [context.Process(target=_be_rank, args=(each[rank], rank, measure)) for rank in range(count)]
        try:
            for process, log in zip(ranks, logs, strict=True):
                log.touch()
                process.start()
            running, late, deadline_s = set(range(count)), set[int](), math.inf
            while running:
                timeout_s = None if deadline_s == math.inf else max(deadline_s - time.monotonic(), 0.0)
                if not wait([ranks[rank].sentinel for rank in running], timeout_s):
                    late = set(running)
                    for rank in late:
                        # It tells its log where it is, also where Python hears of no signal.
                        os.kill(ranks[rank].pid or 0, signal.SIGURG)
                    time.sleep(0.2)
                    _end(ranks)
                for rank in [rank for rank in running if not ranks[rank].is_alive()]:
                    running.discard(rank)
                    code = ranks[rank].exitcode or int(_run_of(path, rank).outcome == KILLED)
                    ends.append(End(rank, code, logs[rank].read_text(errors="replace"), rank in late))
                    if code:
                        deadline_s = min(deadline_s, time.monotonic() + GRACE_S)
        finally:
            _end(ranks)
    return ends


def _end(ranks: list[ForkProcess]) -> None:
    """End what still runs: by SIGTERM, and what waits in a collective, where Python hears of no signal, by SIGKILL."""
    for stop in (ForkProcess.terminate, ForkProcess.kill):
        running = [process for process in ranks if process.pid is not None and process.is_alive()]
        for process in running:
            stop(process)
        deadline_s = time.monotonic() + 2.0
        for process in running:
            process.join(max(deadline_s - time.monotonic(), 0.0))


@contextmanager
def in_its_log() -> Iterator[None]:
    """What this rank writes on standard error within, the process that started it prints if this rank is the cause."""
    with ExitStack() as stack:
        if is_watched():
            stack.enter_context(redirect_stderr(stack.enter_context(Path(os.environ[_LOG]).open("a"))))
        yield


def _be_rank(variables: dict[str, str], rank: int, measure: Callable[[], int]) -> None:
    """In a fork: measure as this rank, and end the process as Python would."""
    die_with_parent()
    os.environ.update(variables)
    # As Lightning's own launcher does: the ranks of a host share its cores.
    _set_num_threads_if_needed(int(variables["WORLD_SIZE"]))
    output = os.open(variables[_LOG], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    _tell_stack(output)
    if rank:
        os.dup2(output, 1)
        os.dup2(output, 2)
    end_after(lambda: sys.exit(measure()))


def _tell_stack(file: int) -> None:
    """Let this process write down where it is when it is asked to, also while Python hears of no signal."""
    # A Trainer that ended in this process put back the default, and faulthandler does not notice: it would go on
    # believing that it has the signal.
    faulthandler.unregister(signal.SIGURG)
    # Nobody else uses this signal, and unasked it does nothing: SIGUSR1 is Lightning's under SLURM.
    faulthandler.register(signal.SIGURG, file, all_threads=False)


def tell_stack() -> None:
    """Let a rank that another launcher started be asked where it is, by `ends_by_records` on its machine."""
    if hasattr(os, "memfd_create") and _get_rank() is not None and not is_watched():
        _tell_stack(os.memfd_create(f"{_STACK}{os.getpid()}"))


def _stack_of(pid: int | None) -> str:
    """Where a process of this machine is that tells it; nothing of one that is gone."""
    with suppress(OSError, ValueError):
        (stack,) = (file for file in Path(f"/proc/{pid}/fd").iterdir() if f"{_STACK}{pid} " in file.readlink().name)
        os.kill(pid or 0, signal.SIGURG)
        time.sleep(0.2)
        return stack.read_text()
    return ""


def ends_by_records(path: Path, count: int) -> list[End]:
    """How ranks ended that another launcher started, by their records in the run's folder; the others have some time
    to tell more than that they heard of another one's end."""
    deadline_s = time.monotonic() + ANOTHERS_END_S
    while True:
        runs = [_run_of(path, rank) for rank in range(count)]
        ends = [End(rank, int(run.outcome != "ok"), "", run.outcome == RUNNING) for rank, run in enumerate(runs)]
        if min(_silence(path, end) for end in ends) < 2 or time.monotonic() > deadline_s:
            return [
                end._replace(log=_stack_of(runs[end.rank].record.pid)) if end.was_waited_for else end for end in ends
            ]
        time.sleep(0.1)


def _silence(path: Path, end: End) -> int:
    """How little a rank's record says of why the measurement ended: of one that was killed, or failed by itself, all;
    of one that heard of it in a collective or by a signal, or that has no record, ever less."""
    run = _run_of(path, end.rank)
    if run.outcome == KILLED:
        return 0
    if run.record.error is None:
        return 3
    return 2 if run.outcome == "interrupted" or run.record.error.kind == COLLECTIVE_FAILED else 1


def cause_of(path: Path, ends: list[End]) -> End | None:
    """The rank that ended a measurement; None where all ended well.

    Args:
        path: the run's folder.
        ends: how its ranks ended; of those that say as much it is the first.
    """
    failures = [end for end in ends if end.code and not end.was_waited_for]
    return min(failures, key=lambda end: _silence(path, end), default=None)


def ending_of(path: Path, cause: End, ends: list[End]) -> Ending | None:
    """The ending that a failed rank makes of its measurement; None where that of rank 0 is recorded and says all.

    Of one that waited too long for another, that one's place comes first.
    """
    run = _run_of(path, cause.rank)
    if (error := run.record.error) is None:
        how = "left in the middle" if run.outcome == KILLED else f"ended with exit code {cause.code}"
        if cause.code < 0:
            how = f"was ended by {signal.Signals(-cause.code).name}"
        last = next((f": {line}" for line in reversed(cause.log.splitlines()) if line.strip()), "")
        return failed("RankLost", f"rank {cause.rank} {how}, and the measurement with it{last}", None)
    late = list[str]()
    if re.search("timed? ?out", str(error.message), re.I):
        for end in (end for end in ends if end.was_waited_for):
            # By the stack in its log: its innermost line of no library.
            stack = end.log.rpartition("(most recent call first):")[2]
            frames = re.findall(r'^  File "(.+)", line (\d+) in (.+)$', stack, re.M)
            frames.sort(key=lambda frame: bool(re.search(r"/(torch|lightning)/", frame[0])))
            places = (f"{name} at {file}:{line}" for file, line, name in frames)
            late.append(f"rank {end.rank} hung in {next(places, 'no place that it could tell')}; ")
    if not cause.rank and not late:
        return None
    error.message = f"{''.join(late)}rank {cause.rank}: {error.message}"
    return Ending(run.outcome, ExitCode(run.record.exit_code or 0), error)


def is_watched() -> bool:
    """Whether this process is a rank that `run_ranks` started, and watches."""
    return _LOG in os.environ


def _run_of(path: Path, rank: int) -> Run:
    """A rank's run without its steps."""
    return load_known(path / f"rank{rank}" if rank else path)
