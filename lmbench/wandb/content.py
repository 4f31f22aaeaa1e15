"""What of a result arrives at W&B: a name, a flat configuration, series, a summary of what decides, and tables.

Measured on two busy cores by tests/experiments/wandb_costs.py: a process that writes 1 step takes 1.7 s, 100 steps 2.1
s, 10 000 steps 5.4 s (1.5 s of it are start-up), for files of 0.01, 0.09 and 7.8 MB.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

from lmbench.masking import masked, masked_words
from lmbench.precision import short_label
from lmbench.records.codec import as_dict
from lmbench.records.load import Run
from lmbench.records.passes import TIMING, pass_of
from lmbench.records.run import RunRecord
from lmbench.records.schema import fields, recorded, value_at
from lmbench.records.step import StepRecord
from lmbench.report import logged
from lmbench.report.facts import EAGER, FACT, Planned, Value, fact_of, other_axes, read_facts
from lmbench.report.run import phase_table
from lmbench.text import shown

#: Facts that stand in the configuration beside those of FACTS: name, and where the record has them.
_FACTS = {
    "mode": "mode",
    "study": "sweep.study",
    "sweep": "sweep.name",
    "cell": "sweep.cell",
    "repeat": "sweep.repeat",
    "run": "run_id",
    "command": "command",
    "replay": "replay_command",
    "started_at": "started_at",
    "ended_at": "ended_at",
    "clock": "clock",
    "device": "device_type",
    "gpu": "environment.gpu.name",
    "gpu_power_limit_w": "environment.gpu.power_limit_w",
    "cpu": "environment.host.cpu_model",
    "cores": "environment.host.core_count",
    "module": "model.name",
    "parameters": "model.parameter_count",
    "layers": "model.num_layers",
    "d_model": "model.d_model",
    "d_ff": "model.d_ff",
    "heads": "model.num_heads",
    "vocab": "model.vocab_size",
    "source": "data.source",
    "flop_per_token": "flops.per_token_flops",
    "peak_flop_per_s": "flops.peak_flops_per_s",
    "python": "environment.versions.python",
    "cuda": "environment.versions.cuda",
    "cudnn": "environment.versions.cudnn",
    "driver": "environment.versions.driver",
    "lightning": "environment.versions.lightning",
    "lmbench": "environment.versions.lmbench",
    "lmbench_commit": "environment.code.lmbench.commit",
}

#: Options that facts tell, or that say where a result goes and not what is measured.
_NOT_OPTIONS = (
    "wandb", "measure.results_dir", "measure.run_id", "measure.mode", "trainer.logger", "trainer.default_root_dir",
    "model.d_model", "model.d_ff", "model.num_layers", "model.num_heads", "model.vocab_size", "model.context_length",
    "model.optimizer", "data.vocab_size", "data.source", "data.cache_dir", "timer.clock",
    "measure.strict", "memory", "trainer.enable_progress_bar", "trainer.enable_model_summary",
    "trainer.enable_checkpointing", "trainer.enable_autolog_hparams", "trainer.fast_dev_run",
    "trainer.num_sanity_val_steps", "trainer.overfit_batches", "trainer.reload_dataloaders_every_n_epochs",
)  # fmt: skip

#: Facts that a run's name tells, in its order.
_NAMED = ("size", "mode", "precision", "compile", "batch", "context")
_USUAL_MODE = "train_step"
_BRIEF = {"batch": "b{}", "context": "c{}", "compile": "compiled {}"}
_NAME_WIDTH = 120


def facts_of(record: RunRecord) -> dict[str, Value]:
    """What tells this run from others: the facts of a report, and axes of its sweep that no fact stands for."""
    axes = _axes(record)
    found = read_facts(record, Planned(axes, {}, record.config or {}))
    return {**found, **{name: masked(value, name) for name, value in other_axes(axes).items()}}


def _axes(record: RunRecord) -> Mapping[str, Any]:
    return record.sweep.axes if record.sweep and record.sweep.axes else {}


def name_of(record: RunRecord) -> str:
    """`small bf16-mixed compiled b4 c512 r0`: what was measured, and which repeat in a sweep."""
    repeat = record.sweep.repeat if record.sweep else None
    return f"{label_of(record)}{'' if repeat is None else f' r{repeat}'}"


def label_of(record: RunRecord) -> str:
    """`small bf16-mixed compiled b4 c512`: what was measured, the same for all repeats of a cell."""
    facts = facts_of(record)
    if "precision" in facts:
        matmul = facts.get("matmul")
        facts["precision"] = short_label(str(facts["precision"]), None if matmul is None else str(matmul))
    words = [_word(name, facts[name]) for name in _NAMED if name in facts]
    axes = _axes(record)
    told = {*_NAMED, "matmul"}
    for name in dict.fromkeys(map(fact_of, axes)):
        if name in facts and name not in told:
            words.append(f"{name.rpartition('.')[2]}={facts[name]}")
    if (looked_at := pass_of(record, axes).name) != TIMING:
        words.append(looked_at)
    return shown(" ".join(word for word in words if word))[:_NAME_WIDTH] or str(record.run_id)


def _word(name: str, value: Value) -> str:
    if value == EAGER:
        return EAGER
    if name == "mode":
        return "" if value == _USUAL_MODE else str(value)
    if name == "compile" and value == "default":
        return "compiled"
    return _BRIEF.get(name, "{}").format(value)


def config_of(record: RunRecord) -> dict[str, Any]:
    """Facts by their names (`size`, `precision`, `batch`), then every other option as `trainer/max_steps`: each thing
    once, and no name with a dot, which W&B would take for a path."""
    found: dict[str, Any] = {"label": label_of(record), "pass": pass_of(record, _axes(record)).name}
    found |= {name.replace(".", "/"): value for name, value in facts_of(record).items()}
    for name, field in _FACTS.items():
        if (value := value_at(record, field)) is not None:
            found.setdefault(name, masked(value, field))
    if "sweep" in found:
        found.setdefault("study", found["sweep"])
    for name, value in _options(record):
        found.setdefault(name.replace(".", "/"), value)
    return found


def _options(record: RunRecord) -> Iterator[tuple[str, Any]]:
    """Options that no fact tells, and what module and data say of themselves."""
    told = {name for fact in FACT.values() for name in fact.settings} | set(_NOT_OPTIONS)
    for name, value in recorded(record).items():
        option = name.removeprefix("config.")
        if name.startswith(("model.described.", "data.described.")):
            option = name.replace("described.", "")
        elif option == name:
            continue
        if not any(option == known or option.startswith(f"{known}.") for known in told):
            yield option, masked(value, option)


def summary_of(record: RunRecord, outcome: str) -> dict[str, Any]:
    """What decides, by the names of logged.py; how the run ended; which guards did not pass; and verdicts.

    `outcome` is the outcome as a reader sees it: a run that was killed says `running` itself.
    """
    found: dict[str, Any] = {"outcome": outcome, **logged.of_run(record)}
    if record.error is not None:
        told = {"kind": record.error.kind, "message": record.error.message, "phase": record.error.phase}
        found |= {f"error/{name}": value for name, value in told.items() if value is not None}
    if record.guards:
        for status, name in (("fail", "failed"), ("warn", "warned")):
            names = [guard.name for guard in record.guards if guard.status == status]
            found |= {f"guards/{name}_count": len(names), f"guards/{name}": ", ".join(names)}
    if record.probe.verdicts is not None:
        found |= {f"verdict/{span}": verdict.verdict for span, verdict in record.probe.verdicts.items()}
    return {name: value for name, value in found.items() if value is not None}


def series_of(run: Run) -> Iterator[dict[str, Any]]:
    """A row for each step, at the time when it ended."""
    record = run.record
    rates = logged.Rates.of(record)
    # On a CPU the host's spans are the device's.
    is_host = record.clock == "host"
    for step, ended_at in zip(run.steps, _ends(record, run.steps), strict=True):
        row = logged.of_step(step, rates)
        if is_host:
            row = {name: value for name, value in row.items() if not name.startswith("host/")}
        yield {logged.STEP: step.step, **row, **({} if ended_at is None else {"_timestamp": ended_at})}


def _ends(record: RunRecord, steps: list[StepRecord]) -> Iterator[float | None]:
    """When each step ended, in seconds of Unix time, as near as the record's times are: about a second."""
    began = began_at(record)
    ready_s = record.milestones.ready_s
    at = None if began is None or ready_s is None else began + ready_s
    for step in steps:
        if at is not None:
            at += (step.step_s or 0.0) + (step.excluded_s or 0.0)
        yield at


def began_at(record: RunRecord) -> float | None:
    """When the run's process began, in seconds of Unix time, to a second; None where the record does not tell."""
    ended, started, reached = _unix(record.ended_at), _unix(record.started_at), record.milestones
    if ended is not None and reached.closed_s is not None:
        return ended - reached.closed_s
    # The folder was made when the command line was understood.
    return None if started is None else started - (reached.parsed_s or 0.0)


def _unix(at: str | None) -> float | None:
    try:
        return None if at is None else datetime.fromisoformat(at).timestamp()
    except (ValueError, OverflowError):
        return None


def runtime_s(record: RunRecord) -> float | None:
    """How long the process ran, up to the closing of its record."""
    if record.milestones.closed_s is not None:
        return record.milestones.closed_s
    started, ended = _unix(record.started_at), _unix(record.ended_at)
    return None if started is None or ended is None else ended - started


def tables_of(record: RunRecord) -> dict[str, list[dict[str, Any]]]:
    """Rows of the phases with their statistics, of the guards, and of the whole record in SI units with what the schema
    says of each number; of a run that did not come so far those that there are."""
    known = fields("run")
    plain: Mapping[str, Any] = masked(recorded(record))
    if record.argv:
        plain = {**plain, "argv": masked_words(record.argv)}
    rows = [
        {"field": name, "value": str(value), "unit": known[name].unit, "meaning": known[name].meaning}
        if name in known
        else {"field": name, "value": str(value), "unit": "", "meaning": ""}
        for name, value in plain.items()
        if name != "guards"
    ]
    step = record.phases.step
    tables: dict[str, list[dict[str, Any]]] = {
        "tables/phases": phase_table(record, step).records() if step is not None else [],
        "tables/guards": [as_dict(guard) for guard in record.guards],
        "tables/record": rows,
    }
    return {name: rows for name, rows in tables.items() if rows}
