"""What a record and its steps may hold when others made them: everything is bounded, and said in one line."""

from __future__ import annotations

import json
import os
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from report_results import make_record, write_run

from lmbench.configs import parse_yaml
from lmbench.errors import UsageError
from lmbench.records.load import MAX_STEPS, find_runs, load_run

MIB = 2**20


def _damage(folder: Path) -> str:
    found = load_run(folder)
    assert found.outcome == "damaged"
    assert found.damage is not None
    assert "\n" not in found.damage
    return found.damage


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (os.mkfifo, "run.json is not read: it is a pipe, no file"),
        (os.mkdir, "run.json is not read: it is a folder, no file"),
        (lambda path: path.symlink_to("/dev/zero"), "run.json is not read: it is a link that leads out of its folder"),
        (lambda path: path.symlink_to(path), "run.json is not read: it is a link that leads out of its folder"),
        (lambda path: path.write_bytes(b" " * 9 * MIB), "run.json is not read: it holds more than 8 MiB"),
        (lambda path: path.write_bytes(b"\xef\xbb\xbf{}"), "run.json is damaged: it is no JSON"),
        (lambda path: path.write_bytes(b"\xff\xfe{}"), "run.json is damaged: it is no JSON"),
    ],
)  # fmt: skip
def test_a_run_json_that_is_no_plain_file_is_a_damaged_run(
    make: Callable[[Path], Any], told: str, tmp_path: Path
) -> None:
    make(tmp_path / "run.json")
    assert find_runs([tmp_path]) == [tmp_path]
    assert _damage(tmp_path).startswith(told)


@pytest.mark.parametrize(
    ("edit", "told"),
    [
        (lambda run: run["config"].update(deep=json.loads("[" * 200 + "]" * 200)), "nested too deeply"),
        (lambda run: run.update(pid=10**30), "pid is a number of more than 64 bits"),
        (lambda run: run["config"].update(n=10**4000), "config.n is a number of more than 64 bits"),
        (lambda run: run.update(nonfinite={"model": "nan"}), "nonfinite.model is 'nan', or leads to no number"),
        (lambda run: run.update(nonfinite={"outcome": "nan"}), "nonfinite.outcome is 'nan', or leads to no number"),
        (lambda run: run.update(nonfinite={"loss.last": "12"}), "nonfinite.loss.last is '12', or leads to no number"),
        (lambda run: run["phases"]["step"].update(mean_s="x"), "phases.step.mean_s is text"),
    ],
)  # fmt: skip
def test_a_field_that_nothing_could_work_with_is_damage(
    edit: Callable[[dict[str, Any]], Any], told: str, tmp_path: Path
) -> None:
    write_run(tmp_path / "run", make_record({}))
    path = tmp_path / "run" / "run.json"
    record = json.loads(path.read_text())
    edit(record)
    path.write_text(json.dumps(record))
    assert told in _damage(tmp_path / "run")


def _peak_bytes(folder: Path) -> tuple[str | None, int, int]:
    tracemalloc.start()
    try:
        found = load_run(folder)
        return found.damage, len(found.steps), tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_steps_without_end_are_read_in_bounded_memory(tmp_path: Path) -> None:
    write_run(tmp_path / "run", make_record({}))
    steps = tmp_path / "run" / "steps.jsonl"
    steps.write_bytes(b"\n" * 2 * MIB + b'{"step": 7}\n')
    damage, count, peak = _peak_bytes(tmp_path / "run")
    assert (damage, count) == (None, 1)
    assert peak < 32 * MIB
    # One long line of zeros that no disk holds.
    steps.write_bytes(b'{"step": 1}\n')
    os.truncate(steps, 200 * MIB)
    damage, count, peak = _peak_bytes(tmp_path / "run")
    assert (damage, count) == ("steps.jsonl: 1 unreadable line, the first is line 2", 1)
    assert peak < 32 * MIB


def test_no_more_steps_are_kept_than_a_run_ever_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_STEPS >= 1_000_000
    monkeypatch.setattr("lmbench.records.load.MAX_STEPS", 10)
    write_run(tmp_path / "run", make_record({}))
    (tmp_path / "run" / "steps.jsonl").write_bytes(b"{}\n" * 11)
    found = load_run(tmp_path / "run")
    assert (len(found.steps), found.damage) == (10, "steps.jsonl: more than 10 steps; the others are not read")


def test_a_folder_that_contains_itself_by_a_link_is_walked_once(tmp_path: Path) -> None:
    write_run(tmp_path / "a" / "run", make_record({}))
    (tmp_path / "a" / "again").symlink_to(tmp_path)
    assert find_runs([tmp_path]) == [tmp_path / "a" / "run"]


def test_a_name_that_no_file_can_have_is_a_mistake_of_the_user() -> None:
    for name in ("a" * 5000, "a\0b"):
        with pytest.raises(UsageError, match="does not exist"):
            find_runs([name])


_DOUBLED = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 10)}]\n" for i in range(8)
)
_CHAIN = "k0: &k0 [1]\n" + "".join(f"k{i}: &k{i} [*k{i - 1}]\n" for i in range(1, 3000))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (_DOUBLED, "with its aliases written out it has more than 200,000 values"),
        (_DOUBLED.replace("[", "{<<: [").replace("]", "]}").replace("{<<: [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]}", "{x: 1}"),
         "with its aliases written out it has more than 200,000 values"),
        (_CHAIN, "contains itself, or is nested more than 50 levels deep"),
        ("a: &a [*a]", "contains itself"),
        ("&a {b: *a}", "contains itself"),
        ("[" * 100_000, "nested more than 50 levels deep"),
        ("a: 0x" + "f" * 6000, "is no YAML"),
        ("a: 2026-99-99", "is no YAML"),
        ("x: !!python/object/apply:os.system [ls]", "is no YAML"),
        ("--- 1\n--- 2", "is no YAML"),
    ],
)  # fmt: skip
def test_yaml_that_multiplies_or_has_no_bottom_is_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_yaml(text, "file")
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_yaml_with_ordinary_aliases_is_read() -> None:
    assert parse_yaml("a: &x {b: 1}\nc: {<<: *x, d: *x}", "file") == {"a": {"b": 1}, "c": {"b": 1, "d": {"b": 1}}}
