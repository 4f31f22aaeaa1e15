"""Runs a plan on this machine: round after round of repeats, each run to a complete row.

`local.py` starts the processes; here is what a run's end means for the runs after it.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from lmbench.configs import placed
from lmbench.errors import ExitCode, UsageError
from lmbench.files import ScratchFolder
from lmbench.interruption import held
from lmbench.records.load import is_run_folder, load_run
from lmbench.records.measured import RunError
from lmbench.records.process import now
from lmbench.records.run import RunRecord
from lmbench.records.store import RunFolder
from lmbench.sweep.environments import ServerLost
from lmbench.sweep.file import LargestSpec
from lmbench.sweep.folder import SweepFolder
from lmbench.sweep.local import LocalExecutor
from lmbench.sweep.outcome import Launch, is_hopeless, last_lines, new_record
from lmbench.sweep.plan import GridCell, Job, Plan, as_json
from lmbench.sweep.rows import Rows, SweepHalted

_CHECK_TIMEOUT_S = 300.0
#: How far from the first value the next one is tried, as a part of it; twice as far each time until the border is met.
_FIRST_STRIDE = 1 / 16
#: Rounds of two sides that a server's forks make: imports take longer than a round. What a hash seed or an address
#: layout does to one side persists over these rounds, which the rule of `compare.rounds` allows for.
ROUNDS_PER_SERVER = 4


class CompileCache(ScratchFolder):
    """What runs of a sweep have compiled, for those that compile the same. It lies in the temporary folder: a sweep's
    own may be on a disk that other machines share. Compiled code is run, so none is trusted that another process left.
    """

    def __init__(self) -> None:
        super().__init__("compiled")
        self.done = set[str]()


@dataclass
class Pace:
    """How far a plan is measured, and at which pace.

    `is_enough` is asked after each round with how many have ended, `left_s` before each run with how many seconds it
    may take: at 0 none is begun. `window_options` are the window's settings of the rounds to come, where two sides are
    measured. `cache` and `executor` are those of several plans.
    """

    is_enough: Callable[[int], bool] = lambda rounds: False
    left_s: Callable[[], float] = lambda: math.inf
    window_options: list[str] = field(default_factory=list)
    cache: CompileCache | None = None
    executor: LocalExecutor | None = None


@dataclass
class Execution:
    """A plan being carried out on this machine, with its rows.

    `predict` guesses the largest value of an option that a cell has room for.
    """

    rows: Rows
    executor: LocalExecutor
    predict: Callable[[GridCell, str], int | None]
    pace: Pace = field(default_factory=Pace)
    # By cell: the trial that found the largest value.
    _largest: dict[str, GridCell] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.plan, self.folder = self.rows.plan, self.rows.folder
        self.executor.begin_round(len(self.plan.chosen) - 1)

    def run(self, is_enough: Callable[[int], bool] = lambda rounds: False) -> None:
        """Bring every job to its end, or as many rounds of them as are enough; that is asked after each round.

        Raises:
            SweepHalted: the disk is full, or a process cannot be started.
            KeyboardInterrupt, SystemExit: an interruption; the run that it met is recorded as interrupted.
        """
        spec = self.plan.file.largest
        self._cache = self.pace.cache or CompileCache()
        with nullcontext() if self.pace.cache else self._cache:
            for ended, repeat in enumerate(self.plan.chosen):
                jobs = self.plan.round(repeat)
                if ended and not (self.plan.file.sides and repeat % ROUNDS_PER_SERVER):
                    self.executor.begin_round(len(self.plan.chosen) - ended - 1)
                missing = [job.cell for job in jobs if not is_run_folder(self.folder.runs / job.name)]
                # Start the servers of all environments first, so that start-up load does not bias one of them. A run
                # whose server is lost says so itself.
                with suppress(ServerLost):
                    self.executor.await_ready(cell.environment for cell in missing)
                for job in jobs:
                    if not self.pace.left_s():
                        return
                    if spec is None:
                        self._bring_to_end(job)
                    elif repeat == 0:
                        self._search(job.cell, spec)
                    elif job.cell.id in self._largest:
                        self._bring_to_end(Job(self._largest[job.cell.id], repeat))
                if is_enough(ended + 1):
                    break

    def _search(self, cell: GridCell, spec: LargestSpec) -> None:
        """Try values, each in a process of its own, until the largest that fits is known.

        A value fits if its run ended well, and the allocator never had to give back what it held to go on.
        """
        tried: dict[int, tuple[Job, RunRecord]] = {}

        def fits(value: int) -> bool | None:
            trial = replace(
                cell,
                id=f"{cell.id}-{spec.option.rpartition('.')[2]}-{value}",
                axes={**cell.axes, spec.option: value},
                options={**cell.options, spec.option: value},
            )
            job = Job(trial, 0, searched=cell.id)
            record = self._bring_to_end(job)
            tried[value] = job, record
            if record.outcome not in ("ok", "oom"):
                return None
            return record.outcome == "ok" and not record.memory.run_alloc_retry_count

        first = self.predict(cell, spec.option) or int(cell.options.get(spec.option, 1))
        # Where a run failed for another reason, that run tells it; where nothing fits, the smallest value does.
        job, record = tried[seek(first, spec.most, fits)]
        if record.sweep is not None and record.sweep.search != "largest":
            record.sweep.search = "largest"
            RunFolder(self.folder.runs / job.name).write_run(record)
        if record.outcome == "ok":
            self._largest[cell.id] = job.cell

    def _bring_to_end(self, job: Job) -> RunRecord:
        try:
            record = self.rows.kept(job)
            if record is None:
                record = self._measure(job)
                self.rows.ended(job, record)
        except OSError as error:
            raise SweepHalted(f"{job.name} cannot be run: {error}; mend that, and start the sweep again") from error
        if record.compile.cache == "private":
            self._cache.done.add(job.cell.compiled_as)
        return record

    def _measure(self, job: Job) -> RunRecord:
        words = self._words(job)
        first = self.folder.runs / Job(job.cell, 0).name
        if job.repeat and is_run_folder(first) and is_hopeless(failed := load_run(first, with_steps=False).record):
            record, error = new_record(job.name, words), failed.error or RunError()
            message = f"repeat 0 ended with {failed.outcome}: {error.message}"
            record.outcome, record.error = "skipped", RunError("Skipped", message, error.phase)
            return self.rows.write(job, record)
        self.rows.check_disk()
        cache = Path(self._cache.name, job.cell.compiled_as)
        log = self.folder.log_path(job)
        log.unlink(missing_ok=True)
        started_at = now()
        # Whatever its process leaves in the temporary folder goes with it, also when it was killed.
        with ScratchFolder("cell") as scratch:
            variables = {
                "TMPDIR": scratch,
                "TORCHINDUCTOR_CACHE_DIR": str(cache),
                "TRITON_CACHE_DIR": str(cache / "triton"),
                **job.cell.environment.spec.variables,
            }
            self.folder.begin(job)
            self.rows.progress.begin(job.name)
            nodes, devices = self.plan.ranks(job.cell)
            # Within a task of SLURM, which gave it the nodes. Ranks of one node are forked here.
            srun = ["srun", f"--nodes={nodes}", f"--ntasks-per-node={devices}", "--kill-on-bad-exit=1"]
            launcher = srun if nodes > 1 and "SLURM_JOB_ID" in os.environ else []
            launch = Launch(words, log, job.cell.environment, variables, launcher)
            timeout_s = min(self.plan.file.timeout_s, self.pace.left_s())
            end = self.executor.run(launch, timeout_s, self.rows.progress.show)
        with held():
            try:
                return self.rows.close(job, words, end, started_at)
            finally:
                if end.cause is not None:
                    raise end.cause

    def _words(self, job: Job) -> list[str]:
        words = job.cell.words(self.folder.config_path(job.cell))
        # The cold time is that of repeat 0, whose cache the others, and other passes, take over.
        if job.cell.compiled_as in self._cache.done:
            words.append("--trainer.compile.cache=shared")
        if self.plan.file.sides:
            # What the probes show is known from the first round.
            words += [*self.pace.window_options, *(["--measure.probe_steps=0"] if job.repeat else [])]
        return [*words, f"--measure.results_dir={self.folder.runs}", f"--measure.run_id={job.name}"]


def check_cells(
    plan: Plan,
    folder: SweepFolder,
    executor: LocalExecutor,
    say: Callable[[str], None],
    places: Mapping[str, str],
) -> None:
    """Let the command line parse cells without a run (`--print_config`), as few as have each option with each of its
    values. What a cell's parts refuse when they are built is not noticed: that becomes the cell's own outcome.

    Raises:
        UsageError: options are not understood, each with its place in the sweep's file, or an environment does not
            work.
    """
    seen: set[str] = set()
    wrong = dict[str, str]()
    asked = []
    for cell in plan.cells:
        options = {**cell.options, "command": cell.command, "environment": cell.environment.name, "": cell.config}
        parts = set(map(as_json, options.items()))
        if not parts <= seen and not is_run_folder(folder.runs / Job(cell, 0).name):
            seen |= parts
            asked.append(cell)
    if not asked:
        return
    say(f"asking the command line whether it takes the options ({len(asked)} of the cells have them all)")
    try:
        executor.await_ready(cell.environment for cell in asked)
        with ScratchFolder("check") as scratch:
            config, log = Path(scratch) / "config.yaml", Path(scratch) / "log"
            for cell in asked:
                if cell.config is not None:
                    config.write_text(plan.configs[cell.config], encoding="utf-8")
                words = cell.words(None if cell.config is None else config)
                launch = Launch([*words, "--print_config"], log, cell.environment, {})
                end = executor.run(launch, _CHECK_TIMEOUT_S, lambda: None)
                if end.cause is not None:
                    raise end.cause
                if end.code != ExitCode.OK:
                    line = end.lost or [f"exit code {end.code}", *last_lines(log)][-1].removeprefix("lmbench: ")
                    line = line.replace(str(config), str(cell.config))
                    wrong.setdefault(line, placed(f"cell {cell.id}: {line}", places))
    except ServerLost as lost:
        raise UsageError(str(lost)) from None
    if wrong:
        raise UsageError("; ".join(wrong.values()))


def seek(value: int, most: int, try_value: Callable[[int], bool | None]) -> int:
    """The largest value that fits, the smallest where none does; the value of which `try_value` cannot tell (None).

    Starts at `value`, strides away from it, each time twice as far, until one value fits and a larger one does not,
    and halves what lies between. All values are from 1 to `most`.
    """
    stride, value = max(1, round(value * _FIRST_STRIDE)), min(value, most)
    # The largest value that is known to fit, and the smallest that is known not to.
    fits, fails = 0, most + 1
    while fails - fits > 1:
        does_fit = try_value(value)
        if does_fit is None:
            return value
        fits, fails = (value, fails) if does_fit else (fits, value)
        if fails > most:
            value = min(fits + stride, most)
        elif not fits:
            value = max(fails - stride, 1)
        else:
            value = (fits + fails) // 2
        stride *= 2
    return fits or 1
