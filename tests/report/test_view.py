"""Views: a study of one's own is one file, columns are any number of a record, a mistake is one line."""

from __future__ import annotations

import pytest
from runs import make_sweep
from tables import cases, rows

from lmbench.catalogue import make_catalogue
from lmbench.records.schema import fields
from lmbench.sweep.file import read_sweep_file

STUDY = """\
base: {config: smoke}
matrix:
  data.batch_size: [1, 8]
  cooling:
    - {model.size: small}
    - {model.size: medium}
repeats: 2
view:
  title: Power and heat
  question: What does a bigger batch draw?
  baseline: {batch: 1}
  tables:
    - title: Power by batch
      rows: [size, batch]
      columns: [device_state.mean_power_w, phases.step.p95_s, peak_bytes, speedup]
    - {title: Hottest, rows: [size], among: [batch], columns: [step_s]}
  charts:
    - {title: Power, kind: lines, y: device_state.mean_power_w, x: batch, series: [size]}
"""


@pytest.fixture
def study(tmp_path):
    path = tmp_path / "mine" / "heat.yaml"
    path.parent.mkdir()
    path.write_text(STUDY)
    return path


def test_a_study_of_ones_own_is_one_file(study, tmp_path, monkeypatch, printed):
    monkeypatch.setattr("lmbench.sweep.execute.Execution.check", lambda *_: None)
    printed("sweep", study, "--dry_run")
    axes, view = {"model.size": ["small", "medium"], "data.batch_size": [1, 8]}, read_sweep_file(study)[0].view
    home = make_sweep(tmp_path / "results" / "heat", axes, view=view, repeats=2, change=lambda run, repeat: {
        "device_state.mean_power_w": 300.0 + 40 * run["data"]["batch_size"] + repeat, "phases.step.p95_s": 0.0125,
    })  # fmt: skip
    # Its results carry the view: neither the file nor the folder is needed any more.
    study.unlink()
    text = printed("report", home, "--format=markdown")
    assert text.startswith("## Power and heat\n\n- **question**: What does a bigger batch draw?\n")
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if "|" in line]
    assert lines[0] == ["size", "batch", "mean power (W)", "step p95 (ms)", "peak memory (GiB)", "speed-up vs batch 1"]
    assert [line[:4] for line in lines[2:4]] == [["small", "1", "340.5", "12.50"], ["small", "8", "620.5", "12.50"]]
    assert ["size", "fastest", "step (ms)"] in [line[:3] for line in lines]


def test_every_number_of_a_record_is_a_column_with_its_unit():
    catalogue = make_catalogue()
    # Titles name tokens/s and mJ/token.
    words = {"s": "ms", "bytes": "GiB", "fraction": "%", "tokens/s": "", "J/token": ""}
    for name, field in fields("run").items():
        if field.about.is_number:
            column = catalogue.column(name)
            assert column.unit.word in words.get(field.unit, field.unit)
    for name, title, unit in rows("""
device_state.open.sm_clock_hz | open sm clock | Hz
phases.backward.lag.median_s | backward lag median | ms
memory.phase_peak_allocated_bytes.forward | peak in forward | GiB
window.skipped_count | skipped steps | -
throughput.model_flops_per_s | model flops | FLOP/s
device_state.energy_j | energy | J
loss.last | last loss | nat
"""):
        column = catalogue.column(name)
        assert (column.title, column.unit.word) == (title, unit)


@cases(
    """
right | wrong | message
title: Power and heat | titel: Power and heat | unknown field 'titel'; allowed: title,
columns: [device_state.mean_power_w | colums: [device_state.mean_power_w | 'colums'; allowed: title, columns,
device_state.mean_power_w, | device_state.mean_powr_w, | did you mean device_state.mean_power_w?
phases.step.p95_s | step | did you mean step_s?
phases.step.p95_s | phases.*.p98_s | no column is like 'phases.*.p98_s'
phases.step.p95_s | environment.gpu.name | column 'environment.gpu.name' is text
rows: [size, batch] | rows: [size, batches] | fact 'batches' is unknown
kind: lines | kind: line | unknown chart kind 'line'; choose one of bars, lines
baseline: {batch: 1} | baseline: {bach: 1} | did you mean batch?
columns: [step_s | columns: [peak_bytes, step_s | `among` it takes one
kind: lines | hue: batch | charts[0]: unknown field 'hue'; allowed: title, kind, y, x, series, of
kind: lines, | - | charts[0]: there is no field 'kind'; allowed: title, kind, y, x, series, of
kind: lines | kind: stack | 'stack' lacks `of`; give it a list
series: [size] | series: size | charts[0].series: expected a list such as [a, b], got text
question: What | answers: [{kind: bst}] # | answers[0].kind: unknown value 'bst'; allowed: against, best,
question: What | answers: [best] # | answers[0]: expected a mapping such as {a: 1}, got text; allowed: kind, y, x,
question: What | answers: [{kind: best}] # | 'best' lacks `x`; give it one fact
rows: [size, batch] | rows: 3 | tables[0].rows: expected a list such as [a, b], got a whole number
phases.step.p95_s | phases.step.p98_s | `lmbench guide columns` has all
repeats: 2 | repeats: [2] | repeats: expected a whole number, got a list such as [a, b]
repeats: 2 | environments: {now: {pyhton: x}} | allowed: python, revision, variables; did you mean python?
""",
    ("view:\n", "view: 5\nviews:\n", "unknown field 'views'; allowed: base,"),
)
def test_a_mistake_in_a_view_is_one_line(right, wrong, message, study, tmp_path, refused):
    assert right in STUDY
    study.write_text(STUDY.replace(right, wrong, 1))
    err = refused("sweep", study, "--dry_run")
    assert err.count("\n") == 1
    assert message.replace("`", "") in err.replace("`", "")
