"""The schema: every field has a title and a meaning, and its name ends in its unit."""

from __future__ import annotations

from tables import rows

from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.schema import fields, value_at

SUFFIXES = {
    unit: tuple(endings.split())
    for unit, endings in rows("""
s | _s
bytes | _bytes _bytes.<phase>
W | _w
J | _j
Hz | _hz
°C | _c
FLOP | _flops
FLOP/s | _flops_per_s
tokens/s | _tokens_per_s .tokens_per_s
bytes/s | _bytes_per_s
bytes/step | bytes_per_step
fraction | _fraction
""")
}
ENDINGS = tuple(ending for suffixes in SUFFIXES.values() for ending in suffixes)


def test_a_number_with_a_unit_ends_in_it_and_no_other_name_does():
    for field in [*fields("step").values(), *fields("run").values()]:
        assert field.pattern.endswith(SUFFIXES.get(field.unit, ENDINGS)) == (field.unit in SUFFIXES), field.pattern
        assert field.about.meaning.endswith("."), field.pattern
        assert field.title, field.pattern
        assert field.about.better is None or field.about.is_number, field.pattern


def test_a_dotted_name_is_followed_through_records_and_mappings_to_a_part_that_is_off_or_lacking():
    record = RunRecord(SCHEMA_VERSION, "ok", "a", config={"trainer": {"compile": False, "devices": 2}})
    values = {
        name: value_at(record, name, "lacking")
        for name in rows("""
        config.trainer.devices
        config.trainer.compile.mode
        config.trainer.nodes
        config.trainer.devices.count
        model.size
        model.width
    """)
    }
    assert list(values.values()) == [2, None, "lacking", "lacking", None, "lacking"]
