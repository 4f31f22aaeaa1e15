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
from test_clocks import launched
from trace_events import AUTOGRAD, HandWritten

from lmbench.cli import main
from lmbench.errors import UsageError
from lmbench.kernels.difference import Change, Difference, answer_of
from lmbench.kernels.findings import examine
from lmbench.report.render import render

EAGER, COMPILED = TRACES / "small_fp32_inference", TRACES / "small_bf16_compiled"
AXES = ("kinds", "parts", "kernels")


@pytest.fixture(scope="module")
def found() -> Difference:
    return Difference(examine(EAGER), examine(COMPILED))


def markdown(difference: Difference, top: int = 5) -> str:
    return render(answer_of(difference, top), "markdown").replace(str(TRACES), "TRACES")


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
    work = [(f"k{number}", round(chance.uniform(1, 90), 3)) for number in range(30)]
    sides = []
    for steps in (1, 3):
        trace = HandWritten()
        for step in range(steps):
            trace.step(step, 5000 * step, 5000)
            trace.phase("forward", 5000 * step, 5000)
            for number, (name, duration) in enumerate(work):
                launched(trace, 5000 * step + 150 * number, name, 5000 * step + 150 * number + 10, duration)
        sides.append(examine(trace.write(tmp_path / f"{steps}.json")))
    same = Difference(*sides)
    assert {(change.change, change.share_fraction) for change in same.axes()["kernels"]} == {("same", None)}
    assert "27 more kernels" in markdown(same, 3)


def test_the_phases_are_what_the_events_sum_to(found: Difference) -> None:
    mine, theirs = plain_sums(EAGER), plain_sums(COMPILED)
    assert {change.name for change in found.phases} == {*mine, *theirs}
    for change in found.phases:
        sides = (mine.get(change.name, 0.0), theirs.get(change.name, 0.0))
        assert (change.a_s, change.b_s) == pytest.approx(sides, abs=1e-9)
    difference_s = sum(theirs.values()) - sum(mine.values())
    assert found.total().difference_s == pytest.approx(difference_s, abs=1e-9)
    assert sum(change.difference_s for change in found.phases) == pytest.approx(difference_s)


def test_every_axis_adds_up_to_its_phase(found: Difference) -> None:
    for phase in ("step", *(change.name for change in found.phases)):
        for changes in found.axes(phase).values():
            for name in ("a_s", "b_s", "difference_s", "a_count", "b_count"):
                total = getattr(found.total(phase), name)
                assert sum(getattr(change, name) for change in changes) == pytest.approx(total, abs=1e-9)
            shares = [change.share_fraction for change in changes]
            assert None in shares or sum(filter(None, shares)) == pytest.approx(1.0)
            for change in changes:
                assert sum((change.by_phase_s or {}).values()) == pytest.approx(change.difference_s, abs=1e-12)
            sizes = [abs(change.difference_s) for change in changes]
            assert sizes == sorted(sizes, reverse=True)


def test_a_trace_differs_from_itself_in_nothing() -> None:
    axes = Difference(examine(EAGER), examine(EAGER)).axes()
    changes = {(each.change, each.difference_s, each.share_fraction) for axis in AXES for each in axes[axis]}
    assert changes == {("same", 0.0, None)}


def test_what_vanished_into_a_fused_kernel_stands_beside_it(found: Difference) -> None:
    parts = {change.name: change for change in found.axes()["parts"]}
    names = ("mask", "softmax", "values", "mask+softmax+values")
    assert [parts[name].change for name in names] == ["gone", "gone", "shrank", "new"]
    groups = {change.name: change for change in found.axes()["part_groups"]}
    joined = groups["mask, softmax, values"]
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


def changes_of(a: Path, b: Path) -> dict[str, Change]:
    return {change.name: change for change in Difference(examine(a), examine(b)).axes()["kernels"]}


def test_each_change_has_its_word_and_steps_are_divided_out(tmp_path: Path) -> None:
    a = written(tmp_path / "a.json", {"gone_kernel": 100, "kept": 50, "slower": 30, "faster": 60})
    b = written(tmp_path / "b.json", {"kept": 50, "slower": 45, "faster": 20, "new_kernel": 10}, steps=3)
    kernels = changes_of(a, b)
    assert [(name, change.change) for name, change in kernels.items()] == [
        ("gone_kernel", "gone"), ("faster", "shrank"), ("slower", "grew"), ("new_kernel", "new"), ("kept", "same"),
    ]  # fmt: skip
    assert kernels["slower"].difference_s == pytest.approx(15e-6)
    assert kernels["new_kernel"].b_count == pytest.approx(1.0)
    assert kernels["faster"].share_fraction == pytest.approx(40 / 115)


def test_shares_are_left_out_where_what_grew_and_what_shrank_cancel(tmp_path: Path) -> None:
    a = examine(written(tmp_path / "a.json", {"one": 500, "two": 100}))
    cancelled = Difference(a, examine(written(tmp_path / "b.json", {"one": 100, "two": 501})))
    assert {change.share_fraction for change in cancelled.axes()["kernels"]} == {None}
    assert {change.share_fraction for change in cancelled.axes()["kinds"]} == {1.0}
    assert "cancel out" in markdown(cancelled)


def test_the_answer_is_as_it_was_read(found: Difference) -> None:
    assert markdown(found, 8) == (GOLDEN / "kernels_difference.md").read_text(encoding="utf-8")


def test_on_a_screen_no_line_is_wider_than_80(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    for words in ([], ["--phase", "forward", "--all"], ["--top", "3", "--table", "kernels"]):
        assert main(["compare", "--kernels", str(EAGER), str(COMPILED), *words]) == 0
        out = capsys.readouterr().out
        lines = [line for line in out.splitlines() if str(TRACES) not in line]
        assert max(map(len, lines)) <= 80
        assert words or len(lines) <= 26
    assert "more kernels" in out


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["A", "B", "--phase", "sideways"], "--phase is 'sideways'"),
        (["A", "B", "--top", "0"], "--top is 0"),
        (["A", "/nowhere"], "does not exist"),
    ],
)
def test_mistakes_are_one_line(words: list[str], reason: str, capsys: Any) -> None:
    named = [str({"A": EAGER, "B": COMPILED}.get(word, word)) for word in words]
    assert main(["compare", "--kernels", *named]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert reason in line


def test_a_trace_without_kernels_is_refused(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.op("aten::mm", 0, 10)
    with pytest.raises(UsageError, match="no kernels"):
        Difference(examine(EAGER), examine(trace.write(tmp_path / "cpu.json")))
