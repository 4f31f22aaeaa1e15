"""`lmbench sweep STUDY`: measure a grid of configurations, each cell in a process of its own."""

from __future__ import annotations

import os
import re
import shlex
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from textwrap import shorten

from lmbench.commands.parser import Result
from lmbench.commands.words import read_options
from lmbench.configs import find_shipped, is_yaml, shipped_studies
from lmbench.errors import ExitCode, UsageError
from lmbench.masking import shown
from lmbench.records.store import RESULTS, SWEEP_FILE, check_name, file_name
from lmbench.standard_output import write_result
from lmbench.sweep.engine import OnInterrupt
from lmbench.sweep.file import SweepFile, read_sweep_file
from lmbench.sweep.folder import read_sweep_folder
from lmbench.sweep.plan import make_plan


@dataclass(frozen=True)
class SweepOptions:
    """Which part of a sweep is measured, where and how.

    Args:
        results_dir: where the sweep's folder goes
        name: name of the sweep's folder, the file's by default
        rounds: only these repeats, counted from 0, such as 2,5
        merge: first add the runs of this other folder of the sweep
        on: local, slurm, or an engine's class
        on_interrupt: ask, leave or cancel its tasks
        dry_run: check as a start would, and list cells and runs
        trust: go on with a folder that you did not begin here
        new: write a commented study with all fields to STUDY
        repeats: processes of each cell, instead of the file's
        timeout_s: seconds a run may take, instead of the file's
    """

    results_dir: Path = RESULTS
    name: str | None = None
    rounds: str | None = None
    merge: Path | None = None
    on: str = "local"
    on_interrupt: OnInterrupt = "ask"
    dry_run: bool = False
    trust: bool = False
    new: bool = False
    repeats: int | None = None
    timeout_s: float | None = None


def sweep(study: Result, *, how: SweepOptions, settings: list[str]) -> int:
    """Measures every cell of a grid, each repeat in a fresh process.

    STUDY is a YAML file, a shipped study by name, or the folder of a sweep to go on with. Finished runs are not done
    again; a run that fails is a row with its outcome, and the others go on. Further options (--data.batch_size 2) are
    for every cell.

    A file has base (options of every cell; config names a configuration), matrix, include, exclude, modes, passes
    (timing, sync, kernels, memory, dtypes), environments (python, revision, variables), repeats, timeout_s, view, and
    largest: an option (data.batch_size) of which each cell finds the largest value that fits.

    With --on slurm each round of repeats is a task of a job array, in a folder that the nodes share (--slurm.partition,
    .time in minutes, .gpus_per_node, .constraint, .account, .setup, .array_parallelism, .additional
    k=v); --on my_module.MyEngine is an engine of yours (lmbench.sweep.engine.Engine).

    Args:
        study: a file, a study's name, or the folder of a sweep
        settings: options of `lmbench fit` for every cell
    """
    from lmbench.campaign.sweep import Sweep
    from lmbench.sweep.merging import merge_runs
    from lmbench.sweep.tasks import make_engine

    if how.new:
        _write_study(Path(study))
        return ExitCode.OK
    path, file, places = _find(study, how)
    options = read_options(settings)
    engine = make_engine(how.on, options)
    file = file.changed(options, how.repeats, how.timeout_s)
    if file.sides and how.rounds is None:
        raise UsageError(f"{study!r} has sides to compare; `lmbench compare --run FOLDER` goes on with it")
    plan = make_plan(path.name, file, how.rounds)
    if places is not None:
        repeats = [] if how.repeats is None else ["--repeats", str(how.repeats)]
        plan = replace(plan, command=["lmbench", "sweep", study, *repeats, *settings])
    if how.merge is not None:
        merge_runs(plan, path, how.merge, how.dry_run)
    measured = Sweep(plan, path, places=places or {}, engine=engine, on_interrupt=how.on_interrupt)
    try:
        return measured.carry_out(how.dry_run)
    finally:
        measured.conclude()


def _write_study(path: Path) -> None:
    """Write the example of a study with all fields. Raises UsageError where that fails, or the file is there."""
    if not is_yaml(path):
        raise UsageError(f"--new writes a study to a file of YAML, not to {str(path)!r}; name it {path.name}.yaml")
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write((files("lmbench.sweep") / "new.yaml").read_text("utf-8"))
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be written: {error.strerror}; give a new file's name") from error
    write_result(shown(f"{path}: change it, then `lmbench sweep {shlex.quote(str(path))} --dry_run` checks it") + "\n")


def _find(study: str, how: SweepOptions) -> tuple[Path, SweepFile, dict[str, str] | None]:
    """The folder of a sweep, its file, and where the file's settings stand in it; None for a folder to go on with."""
    if os.path.lexists(Path(study) / SWEEP_FILE):
        if how.name is not None:
            raise UsageError("--name names a new sweep; a sweep's folder has its name")
        return Path(study).absolute(), read_sweep_folder(Path(study), how.trust), None
    problem = f"sweep {study!r} is no file, no sweep's folder and no study"
    source = find_shipped(study, shipped_studies(), "sweeps", problem)
    file, places = read_sweep_file(source)
    name = file_name(source.stem) if how.name is None else how.name
    check_name("--name", name)
    return how.results_dir / name, file, places


def more_help() -> str:
    """The shipped studies, one line each, with the first clause of the file's comment."""
    lines = ["studies (tiny_NAME is the same for a CPU, in a minute or two):"]
    for name, path in shipped_studies().items():
        comment = path.read_text("utf-8").replace("\n# ", " ").lstrip("# ")
        question = re.split(r"[.:;](?=\s|$)", comment)[0]
        if not name.startswith("tiny_"):
            lines.append(f"  {name:<19} {shorten(question, 56, placeholder=' ...')}")
    return "\n".join(lines)
