"""Start the ranks of one measurement, watch them until all have ended, and find the rank that ended the measurement.

Under a launcher (torchrun, srun, mpirun) the launcher starts the processes. Otherwise this process forks them once it
has imported everything and parsed the command line, before it touches a GPU. Where the imported code has touched one,
as transformers does beside torchao, a fork could not use it: the ranks then start anew.
"""

from __future__ import annotations

import atexit
import faulthandler
import math
import multiprocessing
import os
import re
import shutil
import signal
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.context import ForkContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from traceback import FrameSummary
from typing import NamedTuple

import torch
from lightning.fabric.plugins.environments.lightning import find_free_network_port
from lightning.fabric.plugins.environments.lsf import LSFEnvironment
from lightning.fabric.plugins.environments.mpi import MPIEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.distributed import _destroy_dist_connection, _set_num_threads_if_needed
from lightning.fabric.utilities.rank_zero import _get_rank
from lightning.fabric.utilities.warnings import PossibleUserWarning

from lmbench.code_owners import responsible_frame
from lmbench.errors import ExitCode, UsageError, tell
from lmbench.files import ScratchFolder
from lmbench.fit.trainer import BenchTrainer
from lmbench.instruments.ending import Ending, failed
from lmbench.instruments.flight_recorder import read_stop, recording_variables
from lmbench.python_process import die_with_parent
from lmbench.records.load import StoredRun, load_known
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.vocabulary import DAMAGED, KILLED, RUNNING, Values
from lmbench.sweep.fork_server import end_after

#: Time for the other ranks to end by themselves after one has failed; they may wait for it in a collective.
GRACE_OF_RANKS_S = 5.0
#: Such time after NCCL's watchdog has aborted a rank: those of the other ranks that wait abort them at the same time.
_GRACE_AFTER_ABORT_S = 2.0

#: Time for a rank that a launcher started to record why it failed.
RECORDING_S = 2.0
#: The file in a rank's folder with what the rank printed, if the measurement failed.
LOG_FILE = "log.txt"
#: The environment variable with the path of a rank's log.
_LOG = "RANK_LOG_OF_LMBENCH"
_STACK = "stack-of-lmbench"
_LAUNCHERS = (TorchElasticEnvironment, SLURMEnvironment, LSFEnvironment, MPIEnvironment)


def rank_of_process() -> int:
    """The rank of this process from its launcher's variables; 0 for a process that was started alone."""
    return _get_rank() or 0


def count_to_start(flags: Values) -> int:
    """How many ranks this process has to start: 1 for one device, or if a launcher has started all ranks.

    Args:
        flags: the Trainer's flags; accelerator, devices, strategy and num_nodes are read.

    Raises:
        UsageError: several nodes without a launcher, LOCAL_RANK without MASTER_ADDR, or flags that the Trainer refuses.
    """
    if flags["num_nodes"] == 1 and str(flags["devices"]) == "1":
        return 1
    # Lightning warns if `srun` is installed and did not start this process.
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


class RankEnd(NamedTuple):
    """How a rank ended.

    Attributes:
        rank: the rank.
        run: its result, without steps; `damaged` if it made none.
        code: its exit code, or minus the number of the signal that ended it.
        log: what it printed, or its stack.
        was_waited_for: whether it still ran when it had been waited for after another rank had ended.
    """

    rank: int
    run: StoredRun
    code: int
    log: str
    was_waited_for: bool


def run_ranks(
    path: Path, count: int, measure: Callable[[], int], measure_anew: Callable[[], int], patience_s: float
) -> tuple[list[RankEnd], str | None]:
    """Start `count` ranks that call `measure`, and return how they ended, in the order in which they ended.

    The collective in which they stopped is returned, too, where NCCL noticed.

    Rank 0 prints where this process prints. The others, and the C++ code of rank 0, print into a log, which is kept in
    the rank's folder of results if a rank failed. All ranks have ended when this function returns or raises.

    Args:
        path: the run's folder, with the records of the ranks; a rank that ends without closing its record has failed.
        count: ranks.
        measure: measures as one rank in a fork, and returns an exit code.
        measure_anew: the same in a new process, and can be pickled.
        patience_s: time that the other ranks have to end once rank 0 has, which completes the record.
    """
    # Chosen before the ranks start, since all of them need the same port.
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(find_free_network_port()), "WORLD_SIZE": str(count)}
    context: ForkContext | SpawnContext = multiprocessing.get_context("fork")
    if torch.cuda.is_initialized():
        tell("the configuration's code used the GPU when it was imported, so each rank imports it anew")
        context, measure = multiprocessing.get_context("spawn"), measure_anew
    ends, stop = list[RankEnd](), None
    with ScratchFolder("ranks") as folder:
        logs = [Path(folder, f"rank{rank}.log") for rank in range(count)]
        variables |= recording_variables(Path(folder))
        environments = [{**variables, "LOCAL_RANK": str(rank), _LOG: str(log)} for rank, log in enumerate(logs)]
        ranks = [context.Process(target=_be_rank, args=(environment, measure)) for environment in environments]
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
                        with logs[rank].open("a") as log_file:
                            log_file.write(_stack_of(ranks[rank].pid))
                    _end(ranks)
                for rank in [rank for rank in running if not ranks[rank].is_alive()]:
                    running.discard(rank)
                    run = _run_of(path, rank, ranks[rank].pid)
                    code = ranks[rank].exitcode or int(run.outcome == KILLED)
                    ends.append(RankEnd(rank, run, code, logs[rank].read_text(errors="replace"), rank in late))
                    grace_s = math.inf if rank else patience_s
                    if code:
                        grace_s = _GRACE_AFTER_ABORT_S if code == -signal.SIGABRT else GRACE_OF_RANKS_S
                    deadline_s = min(deadline_s, time.monotonic() + grace_s)
        finally:
            _end(ranks)
        if any(end.code for end in ends):
            stop = read_stop(Path(folder), count)
            for end in ends:
                if end.run.outcome != DAMAGED:
                    with suppress(OSError):
                        shutil.copyfile(logs[end.rank], end.run.path / LOG_FILE)
    return ends, stop


def _end(ranks: Sequence[BaseProcess]) -> None:
    """End running ranks by SIGTERM, then by SIGKILL: Python handles no signal while a rank waits in a collective."""
    for stop in (BaseProcess.terminate, BaseProcess.kill):
        running = [process for process in ranks if process.pid is not None and process.is_alive()]
        for process in running:
            stop(process)
        deadline_s = time.monotonic() + 2.0
        for process in running:
            process.join(max(deadline_s - time.monotonic(), 0.0))


def _be_rank(environment: dict[str, str], measure: Callable[[], int]) -> None:
    """Measure as one rank in a process of its own, and end the process with the exit code."""
    die_with_parent()
    os.environ.update(environment)
    # Lightning's own launcher does this too: the ranks of a host share its cores.
    _set_num_threads_if_needed(int(environment["WORLD_SIZE"]))
    output = os.open(environment[_LOG], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    if environment["LOCAL_RANK"] == "0":
        # Python goes on printing to the screen. C++ code prints pages of stacks when another rank has failed.
        sys.stderr = os.fdopen(os.dup(2), "w", buffering=1, encoding=sys.stderr.encoding, errors=sys.stderr.errors)
    else:
        os.dup2(output, 1)
    os.dup2(output, 2)
    end_after(lambda: sys.exit(measure()))


def leave_group() -> None:
    """Let a rank that has failed end at once: leaving the process group would wait for collectives of the others."""
    atexit.unregister(_destroy_dist_connection)


def tell_stack() -> None:
    """Have SIGURG write this rank's stack to a file in memory, even while the rank runs no Python code."""
    if _get_rank() is not None:
        # A Trainer that ended in this process has put the default back. faulthandler does not notice that, and without
        # this call would believe that it still has the signal.
        faulthandler.unregister(signal.SIGURG)
        # Nobody else uses SIGURG, and its default does nothing. SIGUSR1 is taken by Lightning under SLURM.
        faulthandler.register(signal.SIGURG, os.memfd_create(f"{_STACK}{os.getpid()}"), all_threads=False)


def _stack_of(pid: int | None) -> str:
    """The stack of a rank on this machine; empty if the rank is gone, or did not begin to write it within 2 s."""
    with suppress(OSError, ValueError):
        (stack,) = (file for file in Path(f"/proc/{pid}/fd").iterdir() if f"{_STACK}{pid} " in file.readlink().name)
        os.kill(pid or 0, signal.SIGURG)
        deadline_s = time.monotonic() + 2.0
        while not stack.stat().st_size and time.monotonic() < deadline_s:
            time.sleep(0.1)
        time.sleep(0.2)
        return stack.read_text(errors="replace")
    return ""


def ends_by_records(path: Path, count: int) -> list[RankEnd]:
    """How ranks that a launcher started ended, from their records in the run's folder.

    Waits up to `RECORDING_S` for a record that says more than that its rank heard of another rank's failure.
    """
    deadline_s = time.monotonic() + RECORDING_S
    while True:
        runs = [load_known(_folder_of(path, rank)) for rank in range(count)]
        if min(map(_silence, runs)) < 2 or time.monotonic() > deadline_s:
            break
        time.sleep(0.1)
    ends = []
    for rank, run in enumerate(runs):
        hangs = run.outcome == RUNNING
        ends.append(RankEnd(rank, run, int(run.outcome != "ok"), _stack_of(run.record.pid) if hangs else "", hangs))
    return ends


def _silence(run: StoredRun) -> int:
    """How little a rank's record says about why the measurement ended.

    0 if the rank was killed, 1 if it failed by itself, 2 if it heard of another failure in a collective or by a signal,
    and 3 if it recorded no error.
    """
    if run.outcome == KILLED:
        return 0
    if run.record.error is None:
        return 3
    return 2 if run.outcome == "interrupted" or run.record.error.collective else 1


def cause_of(ends: list[RankEnd]) -> RankEnd | None:
    """The rank that ended a measurement; None if all ranks ended well.

    Of ranks whose records say equally much, the first that ended is the cause. A rank that hung is the cause only where
    no other rank failed.
    """
    failures = [end for end in ends if end.code]
    return min(failures, key=lambda end: (end.was_waited_for, _silence(end.run)), default=None)


def ending_of_ranks(cause: RankEnd, ends: list[RankEnd], stop: str | None = None) -> Ending | None:
    """The measurement's ending because of a failed rank; None if rank 0's own record says everything.

    If the failed rank timed out waiting for ranks that hung, the message starts with their locations.
    """
    run = cause.run
    hangs = "".join(f"rank {end.rank} hung in {_innermost(end.log)}; " for end in ends if end.was_waited_for)
    if cause.was_waited_for:
        return failed("RankLost", f"{hangs}the other ranks had ended", None)
    if (error := run.record.error) is None:
        if cause.code == -signal.SIGABRT and stop is not None:
            return failed("CollectiveFailed", f"{hangs}{stop}", None)
        how = "left in the middle" if run.outcome == KILLED else f"ended with exit code {cause.code}"
        if cause.code < 0:
            how = f"was ended by {signal.Signals(-cause.code).name}"
        return failed("RankLost", f"rank {cause.rank} {how}, and the measurement with it", None)
    if not re.search("timed? ?out", str(error.message), re.I):
        hangs = ""
    calls = ""
    for end in ends if error.collective else ():
        other = end.run.record.error
        if other is not None and other.collective not in (None, error.collective):
            calls += f"rank {end.rank} called {other.collective}; "
    if not (cause.rank or hangs or error.collective):
        return None
    error.message = f"{hangs}{calls}rank {cause.rank}: {error.message}"
    return Ending(run.outcome, ExitCode(run.record.exit_code or 0), error)


def _innermost(log: str) -> str:
    """The frame to name, by the last stack in a rank's log."""
    stack = log.rpartition("(most recent call first):")[2]
    lines = re.findall(r'^  File "(.+)", line (\d+) in (.+)$', stack, re.M)
    if not lines:
        return "no place that it could tell"
    frame = responsible_frame([FrameSummary(file, int(line), name) for file, line, name in reversed(lines)])
    return f"{frame.name} at {frame.filename}:{frame.lineno}"


def _run_of(path: Path, rank: int, pid: int | None) -> StoredRun:
    """What a rank recorded; `damaged` if it made no folder, such as where another command had just made this one."""
    run = load_known(_folder_of(path, rank))
    return run if run.record.pid == pid else StoredRun(path, RunRecord(SCHEMA_VERSION, DAMAGED), [], DAMAGED)


def is_watched() -> bool:
    """Whether `run_ranks` started this process as a rank, and watches it."""
    return _LOG in os.environ


def _folder_of(path: Path, rank: int) -> Path:
    """The folder of a rank in the run's folder, which is that of rank 0."""
    return path / f"rank{rank}" if rank else path
