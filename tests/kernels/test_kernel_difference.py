"""Two traces side by side: every sum adds up, and against sums that are made here from the events alone."""

from __future__ import annotations

import gzip
import json
import random
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from paths import GOLDEN, TRACES
from trace_events import AUTOGRAD, HandWritten

from lmbench.cli import main
from lmbench.errors import UsageError
from lmbench.kernels.difference import Difference, difference, difference_markdown, difference_record
from lmbench.kernels.trace.findings import examine

EAGER, COMPILED = TRACES / "small_fp32_inference", TRACES / "small_bf16_compiled"
AXES = ("kinds", "parts", "kernels")


@pytest.fixture(scope="module")
def found() -> Difference:
    return difference(examine(EAGER), examine(COMPILED))


def plain_sums(folder: Path) -> dict[str, float]:
    """Kernel seconds per step by phase, from the events of the file: launch by correlation, phase by time."""
    document = json.loads(gzip.decompress((folder / "trace.json.gz").read_bytes()))
    events = [event for event in document["traceEvents"] if event.get("ph") == "X"]
    launches = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event["cat"] in ("cuda_runtime", "cuda_driver") and "correlation" in event["args"]
    }
    phases = [
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix("lmbench.phase:"))
        for event in events
        if event["cat"] == "user_annotation" and event["name"].startswith("lmbench.phase:")
    ]
    sums: dict[str, float] = defaultdict(float)
    for event in events:
        if event["cat"] in ("kernel", "gpu_memcpy", "gpu_memset"):
            moment = launches[event["args"]["correlation"]]
            (phase,) = [name for start, end, name in phases if start <= moment < end]
            sums[phase] += event["dur"] / 1e6 / document["lmbench"]["steps"]
    return sums


def test_the_same_work_over_another_number_of_steps_is_the_same(tmp_path: Path) -> None:
    chance = random.Random(0)
    work = [(f"k{number}", chance.uniform(1, 90)) for number in range(30)]
    sides = []
    for steps in (1, 3):
        trace, at = HandWritten(), 0.0
        for step in range(steps):
            trace.step(step, at, 5000)
            trace.phase("forward", at, 5000)
            for number, (name, duration) in enumerate(work, start=100 * step + 1):
                trace.launch(number, at + 150 * (number % 100))
                trace.kernel(number, name, at + 150 * (number % 100) + 10, round(duration, 3))
            at += 5000
        sides.append(examine(trace.write(tmp_path / f"{steps}.json")))
    same = difference(*sides)
    assert {change.change for change in same.step.kernels} == {"same"}
    assert {change.share_fraction for change in same.step.kernels} == {None}
    assert "27 more kernels" in difference_markdown(same, 3, None)


def test_traces_without_phases_are_compared_whole(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.launch(1, 10)
    trace.kernel(1, "k", 20, 30)
    found = examine(trace.write(tmp_path / "t.json"))
    assert difference(found, found).step.total.a_s == pytest.approx(30e-6)


def test_the_phases_are_what_the_events_sum_to(found: Difference) -> None:
    mine, theirs = plain_sums(EAGER), plain_sums(COMPILED)
    assert {one.phase for one in found.phases} == {*mine, *theirs}
    for one in found.phases:
        assert one.total.a_s == pytest.approx(mine.get(one.phase, 0.0), abs=1e-9)
        assert one.total.b_s == pytest.approx(theirs.get(one.phase, 0.0), abs=1e-9)
    assert found.step.total.difference_s == pytest.approx(sum(theirs.values()) - sum(mine.values()), abs=1e-9)


def test_every_axis_adds_up_to_its_phase_and_the_phases_to_the_step(found: Difference) -> None:
    for one in (*found.phases, found.step):
        for axis in (*AXES, *(["part_groups"] if one.part_groups else [])):
            changes = getattr(one, axis)
            for name in ("a_s", "b_s", "difference_s", "a_count", "b_count"):
                assert sum(getattr(c, name) for c in changes) == pytest.approx(getattr(one.total, name), abs=1e-9)
            shares = [change.share_fraction for change in changes]
            assert None in shares or sum(shares) == pytest.approx(1.0)
            assert all(sum(c.by_phase_s.values()) == pytest.approx(c.difference_s, abs=1e-12) for c in changes)
            sizes = [abs(change.difference_s) for change in changes]
            assert sizes == sorted(sizes, reverse=True)
    assert sum(one.total.difference_s for one in found.phases) == pytest.approx(found.step.total.difference_s)


def test_clocks_consist_of_their_parts(found: Difference) -> None:
    for one in found.clocks:
        assert one.window_s == pytest.approx(
            one.busy_s + one.queued_gap_s + one.host_wait_s + one.other_idle_s, abs=1e-9
        )
        assert one.window_s == pytest.approx(one.b_window_s - one.a_window_s)


def test_a_trace_differs_from_itself_in_nothing() -> None:
    same = difference(examine(EAGER), examine(EAGER))
    assert same.settings == []
    for axis in AXES:
        assert {c.change for c in getattr(same.step, axis)} == {"same"}
        assert {c.difference_s for c in getattr(same.step, axis)} == {0.0}
    assert {c.share_fraction for c in same.step.kinds} == {None}


def test_the_other_way_round_everything_has_the_other_sign(found: Difference) -> None:
    back = {change.name: change for change in difference(examine(COMPILED), examine(EAGER)).step.parts}
    words = {"new": "gone", "gone": "new", "grew": "shrank", "shrank": "grew", "same": "same"}
    for change in found.step.parts:
        assert back[change.name].difference_s == pytest.approx(-change.difference_s)
        assert back[change.name].change == words[change.change]


def test_what_vanished_into_a_fused_kernel_stands_beside_it(found: Difference) -> None:
    parts = {change.name: change for change in found.step.parts}
    assert (parts["mask"].change, parts["softmax"].change) == ("gone", "gone")
    assert parts["mask+softmax+values"].change == "new"
    groups = {change.name: change for change in found.step.part_groups}
    joined = groups["mask, softmax, values"]
    names = ("mask", "softmax", "values", "mask+softmax+values")
    assert joined.difference_s == pytest.approx(sum(parts[name].difference_s for name in names))


def written(path: Path, kernels: dict[str, float], steps: int = 1) -> Path:
    """A trace whose forward has these kernels (us each), in each of its steps."""
    trace = HandWritten()
    number = 0
    for step in range(steps):
        begin = 10_000.0 * step
        trace.step(step, begin, 9_000)
        trace.phase("forward", begin, 4_000)
        trace.phase("backward", begin + 4_000, 5_000)
        for place, (name, duration) in enumerate(kernels.items()):
            number += 1
            trace.op("aten::mm", begin + 10 + 20 * place, 12)
            trace.launch(number, begin + 12 + 20 * place)
            trace.kernel(number, name, begin + 100 + 900 * place, duration)
    trace.op("autograd::engine::evaluate_function: MmBackward0", 4_100, 10, AUTOGRAD)
    return trace.write(path)


def test_each_change_has_its_word_and_steps_are_divided_out(tmp_path: Path) -> None:
    a = written(tmp_path / "a.json", {"gone_kernel": 100, "kept": 50, "slower": 30, "faster": 60})
    b = written(tmp_path / "b.json", {"kept": 50, "slower": 45, "faster": 20, "new_kernel": 10}, steps=3)
    kernels = {change.name: change for change in difference(examine(a), examine(b)).step.kernels}
    assert {name: change.change for name, change in kernels.items()} == {
        "gone_kernel": "gone", "kept": "same", "slower": "grew", "faster": "shrank", "new_kernel": "new",
    }  # fmt: skip
    assert list(kernels) == ["gone_kernel", "faster", "slower", "new_kernel", "kept"]
    assert kernels["slower"].difference_s == pytest.approx(15e-6)
    assert kernels["new_kernel"].b_count == pytest.approx(1.0)
    assert kernels["faster"].share_fraction == pytest.approx(40 / 115)


def test_shares_are_left_out_where_what_grew_and_what_shrank_cancel(tmp_path: Path) -> None:
    a = written(tmp_path / "a.json", {"one": 500, "two": 100})
    b = written(tmp_path / "b.json", {"one": 100, "two": 501})
    cancelled = difference(examine(a), examine(b))
    assert {change.share_fraction for change in cancelled.step.kernels} == {None}
    assert {change.share_fraction for change in cancelled.step.kinds} == {1.0}
    assert "cancel out" in difference_markdown(cancelled, 5, None)


def test_the_table_is_as_it_was_found_right(found: Difference) -> None:
    text = difference_markdown(found, 8, None).replace(str(TRACES), "TRACES")
    assert text == (GOLDEN / "kernels_difference.md").read_text(encoding="utf-8")


def test_on_a_screen_no_line_is_wider_than_80(capsys: Any) -> None:
    for words in ([], ["--phase", "forward", "--all"], ["--top", "3", "--table", "kernels"]):
        assert main(["compare", "--kernels", str(EAGER), str(COMPILED), *words]) == 0
        out = capsys.readouterr().out
        lines = [line for line in out.splitlines() if str(TRACES) not in line]
        assert max(map(len, lines)) <= 80
        assert words or len(lines) <= 24
    assert "more kernels" in out


def test_json_has_everything(capsys: Any, found: Difference) -> None:
    assert main(["compare", "--kernels", str(EAGER), str(COMPILED), "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert json.loads(json.dumps(difference_record(found))).items() <= record.items()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["A"], "two results"),
        (["A", "B", "--phase", "sideways"], "--phase is 'sideways'"),
        (["A", "B", "--top", "0"], "--top is 0"),
        (["A", "B", "--gate", "2%"], "with --kernels there is none"),
        (["A", "/nowhere"], "does not exist"),
    ],
)  # fmt: skip
def test_mistakes_are_one_line(words: list[str], told: str, capsys: Any) -> None:
    named = [str({"A": EAGER, "B": COMPILED}.get(word, word)) for word in words]
    assert main(["compare", "--kernels", *named]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert told in lines[0]


def test_options_of_kernels_without_kernels_are_refused(capsys: Any) -> None:
    assert main(["compare", str(EAGER), str(COMPILED), "--top", "3"]) == 2
    assert "--kernels" in capsys.readouterr().err


def test_a_trace_without_kernels_is_refused(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.op("aten::mm", 0, 10)
    with pytest.raises(UsageError, match="no kernels"):
        difference(examine(EAGER), examine(trace.write(tmp_path / "cpu.json")))


if __name__ == "__main__":
    both = difference(examine(EAGER), examine(COMPILED))
    text = difference_markdown(both, 8, None).replace(str(TRACES), "TRACES")
    (GOLDEN / "kernels_difference.md").write_text(text, encoding="utf-8")
