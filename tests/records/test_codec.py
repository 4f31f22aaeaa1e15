"""Records as JSON: they come back unchanged, and data that does not fit its class is described in one line."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from tables import cases, stored

from lmbench.records.codec import DamagedRecord, decode_run, decode_step, encode_run, encode_step
from lmbench.records.measured import Guard
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.step import StepRecord


def _json(**parts):
    return json.dumps({"schema_version": SCHEMA_VERSION, "outcome": "ok", **parts}).encode()


@cases(
    "parts | line",
    *stored("damaged_records"),
    ({"config": {"n": 10**400}}, "it has a number of more than 64 bits"),
    ({"config": {"deep": json.loads("[" * 200 + "]" * 200)}}, "nested too deeply"),
)
def test_damage_names_the_field_that_does_not_fit_in_one_line(parts, line):
    with pytest.raises(DamagedRecord, match=rf"^.*{re.escape(line)}.*\Z"):
        decode_run(_json(**parts))


@cases("data", b"", b"{", b"\0\0", b"\xff\xfe", b"[" * 100_000, b'"text"', b"[1]", b"null")
@cases("decode", decode_run, decode_step)
def test_data_that_is_not_a_record_is_damaged(decode, data):
    with pytest.raises(DamagedRecord, match=r"^.*\Z"):
        decode(data)


def test_unknown_fields_of_a_later_lmbench_are_ignored():
    assert decode_run(_json(colour="red", window={"wall_s": 1.0, "wall_ms": 1000})).window.wall_s == 1.0


@cases("""
- [number, read]
- [1.0e+201, .inf]
- [-1.7e+308, -.inf]
- [1.0e+199, 1.0e+199]
- [9223372036854775808, "0x8000000000000000"]
- [-18446744073709551616, "-0x10000000000000000"]
""")
def test_what_a_user_sets_records_or_logs_comes_back_also_where_it_is_larger_than_a_reader_takes(number, read):
    run = RunRecord(SCHEMA_VERSION, "ok", config={"model": [number]}, rooms={"mine": {"x": number}})
    scalars = {"x": number, "n": math.nan} if isinstance(number, float) else {}
    run.scalars = scalars
    back = decode_run(encode_run(run))
    assert (back.config["model"], back.rooms["mine"]["x"]) == ([read], read)
    for logged in (back.scalars, decode_step(encode_step(StepRecord(step=0, scalars=scalars))).scalars):
        assert logged == {name: pytest.approx(read if name == "x" else math.nan, nan_ok=True) for name in scalars}


def test_nonfinite_numbers_are_stored_as_null_and_come_back():
    run = RunRecord(SCHEMA_VERSION, "ok", config={"limits": [1.0, -math.inf], "1": {"2": math.nan}, "a.b": [math.inf]})
    run.loss.first = math.nan
    run.guards = [Guard("finite_loss", "fail", math.inf)]

    def refuse(name):
        raise AssertionError(name)

    stored = encode_run(run)
    assert json.loads(stored, parse_constant=refuse)["nonfinite"] == {
        "config.limits.1": "-inf", "config.1.2": "nan", "config.a.b.0": "inf", "loss.first": "nan",
        "guards.0.value": "inf",
    }  # fmt: skip
    back = decode_run(stored)
    assert math.isnan(back.loss.first)
    assert (back.config["limits"], back.config["a.b"]) == ([1.0, -math.inf], [math.inf])
    assert (back.guards[0].value, back.nonfinite) == (math.inf, {})
    step = decode_step(encode_step(StepRecord(step=1, loss=-math.inf)))
    assert (step.loss, step.nonfinite) == (-math.inf, {})


def test_values_of_a_config_that_json_cannot_hold_become_readable_text_or_numbers():
    config = {
        "path": Path("a/b"), "n": np.float32(0.5), "k": np.int64(3), "dtype": np.dtype("int8"), "t": (1, 2), 5: {2},
    }  # fmt: skip
    stored = decode_run(encode_run(RunRecord(SCHEMA_VERSION, "ok", config=config))).config
    assert stored == {"path": "a/b", "n": 0.5, "k": 3, "dtype": "int8", "t": [1, 2], "5": [2]}
