"""The field registry: one meaning per name, units in names, and a table for the README."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from lmbench.records.fields import FIELD, FIELDS, absent, unregistered
from lmbench.records.fields_table import field_table
from lmbench.records.old_field import PLACEHOLDERS
from lmbench.records.summary import summarize_steps
from lmbench.records.vocabulary import PHASES

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


def test_every_name_stands_for_one_field():
    names = [field.name for field in FIELDS]
    assert len(names) == len(set(names))


@pytest.mark.parametrize("field", FIELDS, ids=lambda field: field.name)
def test_a_number_with_a_unit_ends_in_it_and_no_other_name_does(field):
    if field.unit in SUFFIXES:
        assert field.name.endswith(SUFFIXES[field.unit])
    else:
        endings = tuple(ending for suffixes in SUFFIXES.values() for ending in suffixes)
        assert not field.name.endswith(endings)
    assert field.meaning.endswith(".")
    assert field.title
    assert field.better is None or field.is_number


def test_concrete_names_find_their_pattern_filled_in():
    field = FIELD["phases.backward.lag.min_s"]
    assert (field.name, field.unit, field.better) == ("phases.backward.lag.min_s", "s", None)
    assert "backward" in field.meaning
    assert "<" not in field.meaning
    assert FIELD["lag_step_s"].title == "lag at step's end"


@pytest.mark.parametrize("name", ["phases.sideways.mean_s", "lag_other_s", "windowXwall_s", "window", ""])
def test_unknown_names_are_not_found(name):
    assert name not in FIELD


def test_unregistered_names_are_listed_with_their_path():
    run = {
        "window": {"wall_s": 1.0, "wall_ms": 1000.0},
        "phases": {"forward": {"mean": 1.0}},
        "colour": "red",
    }
    assert unregistered(run, "run") == ["window.wall_ms", "phases.forward.mean", "colour"]
    assert unregistered({"step": 0, "wall_s": 1.0}, "step") == ["wall_s"]


def test_trees_and_null_parts_are_registered():
    run = {
        "config": {"model": {"anything": 1}},
        "error": None,
        "memory": {},
        "device_state": {"open": None},
        "phases": {"clip": None},
        "rank": 0,
    }
    assert unregistered(run, "run") == []
    assert unregistered({"rank": 0, "nonfinite": {"loss": "nan"}}, "step") == []


def test_a_null_part_under_an_unknown_name_is_unregistered():
    assert unregistered({"extra": None, "phases": {"sideways": None}}, "run") == ["extra", "phases.sideways"]


def test_absent_names_every_missing_field_but_none_below_a_null_part():
    missing = absent({"error": None, "window": {"wall_s": None}}, "run")
    assert "error.kind" not in missing
    assert "window.wall_s" not in missing
    assert "window.steps" in missing
    assert "rank" in missing
    assert not [name for name in missing if "<" in name]


def test_a_step_summary_is_registered_completely():
    steps = [
        {"stage": "window", "micro_batches": 1, **{f"{phase}_s": 1.0 + step for phase in (*PHASES, "step")}}
        for step in range(30)
    ]
    summary = summarize_steps(steps)
    assert unregistered({"phases": summary}, "run") == []
    described = {field.name for field in FIELDS if field.name.startswith("phases.<phase>.")}
    stored = {f"phases.<phase>.{name}" for name in _dotted(summary["forward"])}
    assert stored == described


def _dotted(summary):
    for key, value in summary.items():
        yield from (f"{key}.{name}" for name in value) if isinstance(value, dict) else (key,)


def test_the_table_has_every_field_once_in_rows_of_four_cells():
    table = field_table()
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert sorted(re.match(r"\| `([^`]+)`", row)[1] for row in rows) == sorted(f.name for f in FIELDS)
    assert len(rows) == len(FIELDS)
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 5 for row in rows)
    headings = [line for line in table.splitlines() if line.startswith("#### ")]
    assert len(headings) == len(set(headings))
    outside = re.sub(r"`[^`]*`", "", table)
    assert not any(placeholder in outside for placeholder in PLACEHOLDERS)


def test_results_need_neither_torch_nor_lightning_nor_numpy():
    code = (
        "import sys, pkgutil, importlib, json, lmbench.records as r\n"
        "[importlib.import_module(f'lmbench.records.{m.name}') for m in pkgutil.iter_modules(r.__path__)]\n"
        "print(json.dumps([n for n in ('torch', 'lightning', 'numpy', 'scipy') if n in sys.modules]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []
