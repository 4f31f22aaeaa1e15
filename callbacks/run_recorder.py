"""Writes the result folder: every step as it happens, the run's record at its beginning and end."""

from __future__ import annotations

import shlex
import shutil
from datetime import UTC, datetime
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lmbench.callbacks.phase_timer import PhaseTimer
from lmbench.callbacks.session import Observer
from lmbench.errors import ExitCode, UsageError
from lmbench.measure.environment import capture_environment
from lmbench.measure.host import process_identity
from lmbench.measure.losses import loss_facts
from lmbench.measure.oom import out_of_memory
from lmbench.measure.phases import phase_of
from lmbench.measure.subject import describe_data, describe_flops, describe_model
from lmbench.results.assemble import complete_run
from lmbench.results.fields import SCHEMA_VERSION
from lmbench.results.load import load_run
from lmbench.results.store import RunFolder


class RunRecorder(Observer):
    """Records a run under `results_dir/<run_id>/` (run.json, steps.jsonl).

    Args:
        results_dir: folder of result folders.
        facts: what only the caller knows of the run (command line, resolved config, mode); kept as it is.
        config_yaml: a configuration file that repeats the run; stored beside it as config.yaml.

    `run` is the record as last written, `folder` where it lies, `exit_code` None while the run goes on.
    """

    def __init__(
        self,
        results_dir: str = "results",
        facts: dict[str, Any] | None = None,
        config_yaml: str | None = None,
    ) -> None:
        self.results_dir = results_dir
        self.given = dict(facts or {})
        self.config_yaml = config_yaml
        self.run: dict[str, Any] = {}
        self.folder: RunFolder | None = None
        self.exit_code: ExitCode | None = None
        self._lost: OSError | None = None

    # hooks

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._trainer, self._module = trainer, pl_module
        self.folder = RunFolder.create(self.results_dir)
        self.run = {
            "schema_version": SCHEMA_VERSION,
            "run_id": self.folder.run_id,
            "outcome": "running",
            "error": None,
            "exit_code": None,
            **process_identity(),
            "started_at": _now(),
            "ended_at": None,
            **self.given,
            "rank": trainer.global_rank,
            "world_size": trainer.world_size,
            "precision": str(trainer.precision),
            "device_type": trainer.strategy.root_device.type,
            "is_profiled": False,
            "repairs": getattr(trainer, "repairs", []),
        }
        if self.config_yaml is not None:
            path = self.folder.path / "config.yaml"
            path.write_text(self.config_yaml)
            command = str(self.run.get("command", "fit"))
            self.run["replay_command"] = shlex.join(["lmbench", command, "--config", str(path)])
        self.folder.write_run(self.run)

    def run_started(self) -> None:
        self.run["environment"] = capture_environment(self.session.device)
        run = self.run
        gpu_name = (run["environment"].get("gpu") or {}).get("name")
        mode = run.get("mode") or ("train_step" if self._trainer.state.fn == "fit" else "inference")
        run["mode"] = mode
        matmul_precision = torch.get_float32_matmul_precision()
        run["matmul_precision"] = matmul_precision
        run["model"] = describe_model(self._module)
        run["flops"] = describe_flops(self._module, mode, run["precision"], matmul_precision, gpu_name)
        run["data"] = describe_data(self._trainer)
        assert self.folder is not None
        self.folder.write_run(self.run)
        for observer in self.session.observers:
            if isinstance(observer, PhaseTimer):
                observer.sinks.append(self._append)

    def _append(self, records: list[dict[str, Any]]) -> None:
        assert self.folder is not None
        if self._lost is None:
            self.folder.append_steps(records)

    def run_failed(self, trainer: Trainer, exception: BaseException) -> None:
        if self.folder is None:
            return
        if isinstance(exception, UsageError | MisconfigurationException):
            # Nothing was measured: leave no half-made result behind.
            shutil.rmtree(self.folder.path)
            self.folder = None
            return
        has_begun = "environment" in self.run
        self._finish(*judge_exception(exception, phase_of(exception) if has_begun else "setup"))

    def run_ended(self) -> None:
        self._finish("ok", ExitCode.OK, None)

    def _finish(self, outcome: str, exit_code: ExitCode, error: dict[str, Any] | None) -> None:
        assert self.folder is not None
        self.run.update(self.session.facts)
        self.run.update(outcome=outcome, error=error, ended_at=_now())
        self.folder.close()
        steps = load_run(self.folder.path).steps
        self.run["loss"] = loss_facts(steps)
        complete_run(self.run, steps)
        failed = [guard for guard in self.run["guards"] if guard["status"] == "fail"]
        if exit_code is ExitCode.OK and failed and self.given.get("strict"):
            exit_code = ExitCode.GUARD_FAILED
        self.exit_code = exit_code
        self.run["exit_code"] = int(exit_code)
        self.folder.write_run(self.run)


def judge_exception(exception: BaseException, phase: str) -> tuple[str, ExitCode, dict[str, Any]]:
    """Outcome, exit code and the record's `error` for what ended a run."""
    error: dict[str, Any] = {
        "kind": type(exception).__name__,
        "message": " ".join(str(exception).split())[:2000],
        "phase": phase,
        "requested_bytes": None,
        "where": None,
    }
    memory = out_of_memory(exception)
    if memory is not None:
        error.update(message=memory.message, requested_bytes=memory.requested_bytes, where=memory.where)
        return "oom", ExitCode.OUT_OF_MEMORY, error
    if isinstance(exception, SIGTERMException):
        return "interrupted", ExitCode.TERMINATED, error
    if isinstance(exception, KeyboardInterrupt):
        return "interrupted", ExitCode.INTERRUPTED, error
    return "error", ExitCode.INTERNAL, error


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
