"""W&B around a measurement: its logger is held while the run goes on, and served when the result is closed."""

from __future__ import annotations

import inspect
import os
import shlex
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jsonargparse import Namespace
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import WandbLogger

from lmbench.callbacks import RunRecorder
from lmbench.errors import UsageError
from lmbench.records.vocabulary import Record
from lmbench.wandb.held_run import HeldRun
from lmbench.wandb.mirror import ensure_mirror
from lmbench.wandb.offline_run import DEFAULT_PROJECT
from lmbench.wandb.place import Place
from lmbench.wandb.problem import BoardProblem
from lmbench.wandb.upload import DEFAULT_TIMEOUT_S, upload

#: The default of `--trainer.logger`.
WANDB_LOGGER: Record = {"class_path": "lightning.pytorch.loggers.WandbLogger", "init_args": {"offline": True}}

_FILING = ("project", "entity", "name", "notes", "tags", "group", "job_type")
# A run's own: a replay is another run.
_IDENTITY = ("id", "version")
_TAKEN = (*_FILING, *_IDENTITY, "offline", "prefix")


@dataclass
class WandbSettings:
    """What goes to W&B beyond figures, and how long that may take.

    Args:
        artifact: the result folder goes along as an artifact.
        timeout_s: for the upload at the end of the run (with --trainer.logger.init_args.offline false).
    """

    artifact: bool = False
    timeout_s: float = DEFAULT_TIMEOUT_S


@dataclass(frozen=True)
class Closed:
    """What became of W&B's copy, in one line; `command` uploads it, where it is complete and was not asked for."""

    line: str
    is_problem: bool
    command: str | None = None


class RunBoard:
    """One run's W&B. Without a WandbLogger in the configuration it does nothing.

    Args:
        trainer_config: the `trainer` part of the parsed configuration. What is a run's own, and what is only a
            default, is taken out of it, so that what is stored repeats the run on any machine.
        settings: the command line's group `--wandb.*`.

    Raises:
        UsageError: a setting of the logger that has no effect here.
    """

    def __init__(self, trainer_config: Namespace, settings: WandbSettings) -> None:
        if not settings.timeout_s > 0:
            raise UsageError(f"wandb.timeout_s is {settings.timeout_s:g}; it must be above 0")
        self.settings = settings
        self.facts: Record | None = None
        self.held: HeldRun | None = None
        specs = list(_wandb_loggers(trainer_config.get("logger")))
        if len(specs) > 1:
            raise UsageError("trainer.logger names two WandbLoggers; one is all a run has")
        for spec in specs:
            given = {**spec.init_args.as_dict(), **(spec.get("dict_kwargs") or {})}
            self._take(given)
            _strip(spec.init_args)

    def _take(self, given: Record) -> None:
        defaults = _defaults()
        for name, value in given.items():
            if name not in _TAKEN and value not in (None, defaults.get(name)):
                where = "W&B's files lie in the result folder; see --measure.results_dir" if "dir" in name else ""
                raise UsageError(
                    f"trainer.logger.init_args.{name} is {value!r}, which lmbench does not use; "
                    f"{where or 'it uses ' + ', '.join(_TAKEN)}"
                )
        run_id = given.get("version") or given.get("id")
        self.facts = {
            **{name: given.get(name) for name in _FILING},
            "project": given.get("project") or os.environ.get("WANDB_PROJECT"),
            "id": run_id,
            "uploads": not given.get("offline"),
            "artifact": self.settings.artifact,
        }
        self.held = HeldRun(run_id or "")

    def make_logger(self, logger_class: type[WandbLogger], *args: Any, **kwargs: Any) -> WandbLogger | None:
        """Build the logger (an instantiator of jsonargparse) without starting W&B; None where it is not installed."""
        if not _is_installed():
            return None
        assert self.facts is not None
        changed = {
            "experiment": self.held,
            # Also where the result is uploaded: the run itself never is online.
            "offline": True,
            "project": self.facts["project"] or DEFAULT_PROJECT,
        }
        return _held_class(logger_class)(*args, **{**kwargs, **changed})

    def loggers(self, built: Any) -> Any:
        """The Trainer's `logger`, without the one that could not be built."""
        if isinstance(built, list):
            return [logger for logger in built if logger is not None]
        return False if built is None and self.held is not None else built

    def close(self, folder: Path, is_interrupted: bool) -> Closed | None:
        """Write the closed result for W&B, and upload it where that was asked for. Never raises.

        None where there is no W&B.
        """
        if self.facts is None or self.held is None:
            return None
        command = shlex.join(["lmbench", "upload", str(folder)])
        later = f"later: {command}"
        uploads = self.facts["uploads"] and os.environ.get("WANDB_MODE") not in ("offline", "dryrun")
        try:
            self.held.write(folder)
            if os.environ.get("WANDB_MODE") == "disabled":
                # Of a sweep's runs W&B gets its copy when the sweep is done.
                return None
            with Place(folder).locked(self.settings.timeout_s):
                ensure_mirror(folder)
        # Whatever it is, a second Ctrl-C included: the result is complete, and the run ends as it ended.
        except BaseException as exc:
            return Closed(f"W&B got nothing of this run: {_reason(exc)}; {later}", True)
        if not uploads:
            return Closed(f"offline, beside the result{self._unkept()}", False, command)
        if is_interrupted:
            return Closed(f"not uploaded, as the run was interrupted{self._unkept()}; {later}", True)
        return self._upload(folder, later)

    def _upload(self, folder: Path, later: str) -> Closed:
        try:
            done = upload(folder, self.settings.timeout_s)
        except BaseException as exc:
            return Closed(f"not uploaded to W&B: {_reason(exc)}; {later}", True)
        return Closed(f"uploaded: {done.url or 'the server told no address'}{self._unkept()}", False)

    def _unkept(self) -> str:
        assert self.held is not None
        names = ", ".join(sorted(self.held.unkept))
        return f" (without what the module sent by {names})" if names else ""


class _Held:
    """Comes before WandbLogger, whose own `experiment` imports wandb even where it has nothing to open."""

    _experiment: HeldRun

    @property
    def experiment(self) -> HeldRun:
        return self._experiment


@cache
def _held_class(logger_class: type[WandbLogger]) -> type[WandbLogger]:
    # Under a private name, which nobody's short `WandbLogger` is taken for.
    return type(f"_Held{logger_class.__name__}", (_Held, logger_class), {})


class InResultFolder(Callback):
    """Tells the held logger its run's id and folder as soon as they are known. Comes after the recorder."""

    def __init__(self, board: RunBoard, recorder: RunRecorder) -> None:
        self._board, self._recorder = board, recorder

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        held, folder = self._board.held, self._recorder.folder
        if held is None or folder is None:
            return
        held.id = held.id or folder.run_id
        held.name = folder.run_id
        for logger in trainer.loggers:
            if isinstance(logger, WandbLogger):
                # Where checkpoints and profilers without a folder of their own put things; there is no public way.
                logger._save_dir = str(folder.path)


def _wandb_loggers(logger: Any) -> Iterator[Namespace]:
    for spec in logger if isinstance(logger, list) else [logger]:
        if isinstance(spec, Namespace) and "class_path" in spec:
            module, _, name = spec.class_path.rpartition(".")
            found = getattr(sys.modules.get(module), name, None)
            if isinstance(found, type) and issubclass(found, WandbLogger):
                yield spec


def _strip(init_args: Namespace) -> None:
    """Leave what differs from the defaults: they are not the same with and without wandb."""
    defaults = _defaults()
    for name, value in init_args.as_dict().items():
        if name in _IDENTITY or (name != "offline" and value in (None, defaults.get(name))):
            init_args.pop(name)


def _defaults() -> Record:
    parameters = inspect.signature(WandbLogger.__init__).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}


def _is_installed() -> bool:
    # A folder `wandb` of earlier runs in the working directory is a package too, of the kind without an origin.
    spec = find_spec("wandb")
    return spec is not None and spec.origin is not None


def _reason(exc: BaseException) -> str:
    if isinstance(exc, KeyboardInterrupt | SystemExit):
        return "stopped"
    if isinstance(exc, BoardProblem):
        return str(exc)
    return f"{type(exc).__name__}: {' '.join(str(exc).split())}"
