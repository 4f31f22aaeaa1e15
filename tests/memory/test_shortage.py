"""The explanation of a run that ran out of memory: what was held, and which changes are predicted to fit."""

from __future__ import annotations

import json

import pytest
import torch
from planted_memory import notes_of, planted_run, write
from runs import ended, make_run
from torch import nn

from lmbench.cli import main
from lmbench.errors import UsageError
from lmbench.memory import forecast as shortage_module
from lmbench.memory.answer import advice
from lmbench.memory.forecast import Forecast, Largest, PhasePeak, explain
from lmbench.memory.recording import held_by
from lmbench.python_process import ProcessFailed
from lmbench.records.codec import as_dict
from lmbench.records.load import load_run
from lmbench.records.measured import RefusedAllocation

GIB = 2**30


REFUSED = RefusedAllocation("forward", 2 * GIB, 137 * GIB, 138 * GIB, GIB // 2, 4 * GIB, 4 * GIB, 8 * GIB, 121 * GIB)


def out_of_memory(folder, **changes):
    """Write the folder of a run on an H200, in float32 with naive attention, that was refused 2 GiB."""
    memory = {"device_total_bytes": 140 * GIB, "refused": as_dict(REFUSED)}
    settings = {"data.batch_size": 96, "model.attention": "naive", "model.checkpoint": "none"}
    make_run(folder, settings, {**ended("oom", "forward"), "memory": memory, **changes})
    (folder / "config.yaml").write_text("{}")
    return load_run(folder).record


#: Predicted peaks in GiB by the changed option.
PEAKS = {
    "": 150,
    "--trainer.precision=bf16-mixed": 141,
    "--trainer.precision=bf16-true": 80,
    "--model.attention=sdpa": 120,
    "--model.checkpoint=block": 40,
    "--model.checkpoint=selective": 90,
    "--data.batch_size=48": 75,
}


def ask(words, request, heard):
    """A forecast with a peak from PEAKS."""
    assert words[0].startswith("--config=")
    peak = PEAKS[words[1] if len(words) > 1 else ""] * GIB
    phases = [PhasePeak("forward", {"activations": peak}, "aten.mm")]
    forecast = Forecast(96, 512, "", "train_step", "", False, phases, peak, "", request.gpu, peak < 135 * GIB)
    forecast.largest_batch_size = Largest(80, 139 * GIB) if request.finds_largest else None
    return forecast


def test_every_change_that_may_help_is_predicted_and_the_smallest_that_fits_is_advised(tmp_path):
    shortage = explain(out_of_memory(tmp_path / "run"), tmp_path / "run", ask)
    assert [change.words[0] for change in shortage.remedies] == [
        "--model.checkpoint=block", "--data.batch_size=48", "--trainer.precision=bf16-true",
        "--model.checkpoint=selective", "--model.attention=sdpa", "--trainer.precision=bf16-mixed",
    ]  # fmt: skip
    batch = next(change for change in shortage.remedies if "batch_size" in change.words[0])
    assert batch.words[1] == "--trainer.accumulate_grad_batches=2"
    assert advice(shortage) == "fused attention: --model.attention=sdpa"


def test_no_change_is_predicted_that_the_run_has_or_that_its_module_lacks(tmp_path):
    run = out_of_memory(tmp_path / "run", **{"model.name": "my.Net", "precision": "bf16-true"})
    shortage = explain(run, tmp_path / "run", ask)
    assert [change.words[0] for change in shortage.remedies] == ["--data.batch_size=48"]


def test_a_run_whose_configuration_may_run_code_is_not_predicted(tmp_path):
    run = out_of_memory(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text("model: {attention: 'evil:attend'}")
    shortage = explain(run, tmp_path / "run", ask)
    assert shortage.as_it_is.reason.startswith("model.attention may run code; if you trust it: lmbench memory --config")
    assert shortage.remedies == []


@pytest.mark.parametrize("error", [UsageError("training_step reads values"), ProcessFailed("killed")])
def test_a_change_that_cannot_be_predicted_has_a_reason_and_others_stand(tmp_path, error):
    def refuses(words, request, heard):
        if "--model.attention=sdpa" in words:
            raise error
        return ask(words, request, heard)

    shortage = explain(out_of_memory(tmp_path / "run"), tmp_path / "run", refuses)
    assert (shortage.remedies[-1].forecast, shortage.remedies[-1].reason) == (None, str(error))
    assert advice(shortage) == "selective checkpoints: --model.checkpoint=selective"


def test_the_command_prints_held_memory_fitting_changes_and_the_history(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(shortage_module.explain, "__defaults__", (ask,))
    out_of_memory(tmp_path / "run")
    step = planted_run()
    write(tmp_path / "run" / "memory_snapshot.pickle", step.memory)
    (tmp_path / "run" / "memory_notes.json").write_bytes(notes_of(step))
    assert main(["memory", str(tmp_path / "run")]) == 0
    out = capsys.readouterr().out
    words = (
        "2.00 GiB more in forward, with 0.50 GiB free", "parameters 4.00 GiB, gradients 4.00 GiB",
        "model.checkpoint=block", "0.25 GiB in backward of step 7",
    )  # fmt: skip
    assert sorted(words, key=out.index) == list(words)
    assert main(["memory", str(tmp_path / "run"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["sections"][0]["peak"]["allocated_bytes"] == 252 << 20
    assert answer["shortage"]["refused"]["allocated_bytes"] == 137 * GIB
    assert len(answer["shortage"]["remedies"]) == 6


def test_a_lack_of_host_memory_is_not_explained_by_the_device(tmp_path):
    error = {"kind": "OutOfMemoryKill", "message": "the kernel ended it", "where": "host"}
    run = out_of_memory(tmp_path / "run", error=error)
    run.memory.refused = None
    assert "host" in advice(explain(run, tmp_path / "run", ask))


def test_memory_of_a_module_is_counted_by_storage():
    net = nn.Sequential(nn.Linear(128, 128, bias=False), nn.Linear(128, 128, bias=False))
    net[1].weight = net[0].weight
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)
    net(torch.ones(1, 128)).sum().backward()
    optimizer.step()
    # AdamW has two moments, and a step count in a block of its own.
    assert held_by(net, [optimizer], "cpu") == (65536, 65536, 2 * 65536 + 512)
