"""The schema: one meaning per name, units in names, a table for the README; records that do not fit are damaged."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lmbench.records.codec import DamagedRecord, OtherSchema, as_dict, decode_run, decode_step, encode_run, encode_step
from lmbench.records.guard import Guard
from lmbench.records.measured import PhaseSummary
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.schema import fields, value_at
from lmbench.records.step import StepRecord

SUFFIXES = {
    "s": ("_s",),
    "bytes": ("_bytes", "_bytes.<phase>"),
    "W": ("_w",),
    "J": ("_j",),
    "Hz": ("_hz",),
    "°C": ("_c",),
    "FLOP": ("_flops",),
    "FLOP/s": ("_flops_per_s",),
    "tokens/s": ("_tokens_per_s", ".tokens_per_s"),
    "fraction": ("_fraction",),
}
ALL = [*fields("step").values(), *fields("run").values()]


@pytest.mark.parametrize("found", {found.pattern: found for found in ALL}.values(), ids=lambda found: found.pattern)
def test_a_number_with_a_unit_ends_in_it_and_no_other_name_does(found):
    if found.unit in SUFFIXES:
        assert found.pattern.endswith(SUFFIXES[found.unit])
    else:
        endings = tuple(ending for suffixes in SUFFIXES.values() for ending in suffixes)
        assert not found.pattern.endswith(endings)
    assert found.meaning.endswith(".")
    assert found.title
    assert found.about.better is None or found.about.is_number


def test_a_field_of_a_phase_says_which():
    found = fields("run")["phases.backward.lag.min_s"]
    assert (found.unit, found.about.better, found.pattern) == ("s", None, "phases.<phase>.lag.min_s")
    assert "backward" in found.meaning
    assert "<" not in found.meaning
    assert fields("step")["lag_step_s"].title == "lag at step's end"
    assert fields("run")["memory.phase_peak_allocated_bytes.forward"].title == "peak in forward"


@pytest.mark.parametrize("name", ["phases.sideways.mean_s", "lag_other_s", "windowXwall_s", "window", ""])
def test_unknown_names_are_no_fields(name):
    assert name not in fields("run")
    assert name not in fields("step")


def test_every_field_of_a_record_can_be_read_by_its_name():
    run = RunRecord(SCHEMA_VERSION, "ok")
    run.device_state.close.power_w = 412.5
    run.phases.step = PhaseSummary(p99_s=0.25)
    assert value_at(run, "device_state.close.power_w") == 412.5
    assert value_at(run, "phases.step.p99_s") == 0.25
    assert value_at(run, "phases.forward.p99_s") is None
    assert value_at(run, "kernels.kernel_s") is None


def test_results_need_neither_torch_nor_lightning_nor_numpy():
    code = (
        "import sys, pkgutil, importlib, json, lmbench.records as r\n"
        "[importlib.import_module(f'lmbench.records.{m.name}') for m in pkgutil.iter_modules(r.__path__)]\n"
        "print(json.dumps([n for n in ('torch', 'lightning', 'numpy', 'scipy') if n in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


def _json(**parts: Any) -> bytes:
    return json.dumps({"schema_version": SCHEMA_VERSION, "outcome": "ok", **parts}).encode()


@pytest.mark.parametrize(
    ("parts", "line"),
    [
        ({"phases": {"step": {"mean_s": "fast"}}}, "phases.step.mean_s is text"),
        ({"window": None}, "window is null"),
        ({"window": []}, "window is a list"),
        ({"guards": "none"}, "guards is text"),
        ({"guards": [{"name": "mfu"}]}, "Object missing required field status - at guards[0]"),
        ({"model": {"num_layers": 2.5}}, "model.num_layers is a number"),
        ({"is_profiled": 1}, "is_profiled is a whole number"),
        ({"environment": {"host": {"affinity": ["a"]}}}, "environment.host.affinity[0] is text"),
    ],
)
def test_a_record_that_does_not_fit_says_which_field_in_one_line(parts, line):
    with pytest.raises(DamagedRecord, match=re.escape(line)) as caught:
        decode_run(_json(**parts))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("data", [b"", b"{", b"\0\0", b"\xff\xfe", b"[" * 100_000, b'"text"', b"[1]", b"null"])
def test_what_is_no_record_is_damaged_whatever_it_is(data):
    for decode in (decode_run, decode_step):
        with pytest.raises(DamagedRecord) as caught:
            decode(data)
        assert "\n" not in str(caught.value)


def test_another_schema_version_is_told_apart_from_damage():
    with pytest.raises(OtherSchema) as caught:
        decode_run(b'{"schema_version": 99, "phases": "in another form"}')
    assert caught.value.version == 99
    with pytest.raises(OtherSchema) as caught:
        decode_run(b'{"name": "of somebody else"}')
    assert caught.value.version is None


def test_fields_of_a_later_lmbench_are_left_out():
    assert decode_run(_json(colour="red", window={"wall_s": 1.0, "wall_ms": 1000})).window.wall_s == 1.0


def test_a_record_comes_back_as_it_was():
    run = RunRecord(SCHEMA_VERSION, "ok", argv=["fit"], config={"a": {"b": [1, None, "c"]}}, process_start_s=1 / 3)
    run.guards = [Guard("mfu", "fail", 1.5, 1.0, "fraction", "too good", "check")]
    run.phases.step = PhaseSummary(n=3, mean_s=5e-324, std_s=0.1)
    assert decode_run(encode_run(run)) == run
    step = StepRecord(step=3, loss=0.1, forward_s=2.0**60)
    assert decode_step(encode_step(step)) == step


def test_nonfinite_numbers_are_null_for_strict_readers_and_come_back():
    run = RunRecord(SCHEMA_VERSION, "ok", config={"limits": [1.0, -math.inf]})
    run.loss.first = math.nan
    run.guards = [Guard("finite_loss", "fail", math.inf)]

    def refuse(name):
        raise AssertionError(name)

    strict = json.loads(encode_run(run), parse_constant=refuse)
    assert strict["loss"]["first"] is None
    assert strict["nonfinite"] == {"loss.first": "nan", "config.limits.1": "-inf", "guards.0.value": "inf"}
    strict["nonfinite"].pop("guards.0.value")
    back = decode_run(json.dumps(strict).encode())
    assert math.isnan(back.loss.first)
    assert back.config == {"limits": [1.0, -math.inf]}
    assert back.nonfinite == {}
    step = decode_step(encode_step(StepRecord(step=1, loss=-math.inf)))
    assert (step.loss, step.nonfinite) == (-math.inf, {})


@pytest.mark.parametrize(("path", "word"), [("nowhere.at.all", "nan"), ("loss.first", "much"), ("loss.third", "nan")])
def test_a_nonfinite_name_that_leads_nowhere_is_damage(path, word):
    with pytest.raises(DamagedRecord, match=path):
        decode_run(_json(nonfinite={path: word}))


def test_foreign_values_of_a_config_are_stored_readably():
    config = {
        "path": Path("a/b"),
        "n": np.float32(0.5),
        "k": np.int64(3),
        "dtype": np.dtype("int8"),
        "t": (1, 2),
        5: {2},
    }
    stored = decode_run(encode_run(RunRecord(SCHEMA_VERSION, "ok", config=config))).config
    assert stored == {"path": "a/b", "n": 0.5, "k": 3, "dtype": "int8", "t": [1, 2], "5": [2]}


def test_a_record_as_a_dictionary_has_every_field_that_is_not_of_an_unseen_phase():
    plain = as_dict(RunRecord(SCHEMA_VERSION, "ok"))
    for name in ("window.wall_s", "device_state.open.power_w", "throughput.mfu_fraction"):
        holder, key = name.rpartition(".")[::2]
        found = plain
        for part in holder.split("."):
            found = found[part]
        assert found[key] is None
    assert plain["phases"] == {}
