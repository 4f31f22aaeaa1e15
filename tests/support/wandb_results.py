"""A small result for the tests of what W&B gets, written by hand."""

from __future__ import annotations

import msgspec
import yaml
from paths import DATA

from lmbench.records.run import RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.store import RunFolder
from lmbench.records.summary import complete_run


def step(index, **changed):
    record = {
        "step": index, "rank": 0, "stage": "window" if index >= 2 else "warmup", "is_warmup": index < 2,
        "micro_batches": 1, "tokens": 64, "loss": 9.0 - index / 7, "is_skipped": False, "excluded_s": 0.0,
        "step_s": 0.010 + index * 1e-4, "forward_s": 0.004, "backward_s": 0.005, "clip_s": None,
        "other_s": 0.001 + index * 1e-4, "forward_host_s": 0.003, "lag_forward_s": None,
    }  # fmt: skip
    return msgspec.convert({**record, **changed}, StepRecord)


def write_result(results, steps=9, **changed):
    """A closed result with a window of all but two steps; returns its folder."""
    folder = RunFolder.create(results)
    records = [step(index) for index in range(steps)]
    window = {"warmup_steps": 2, "micro_batches": 1, "steps": steps - 2, "tokens": 64 * (steps - 2)}
    run = yaml.safe_load((DATA / "wandb_run.yaml").read_text()) | {"run_id": folder.run_id, "window": window}
    run.update(changed)
    record = msgspec.convert(run, RunRecord)
    if record.outcome == "ok":
        complete_run(record, records)
    folder.append_steps(records)
    folder.close()
    folder.write_run(record)
    return folder.path
