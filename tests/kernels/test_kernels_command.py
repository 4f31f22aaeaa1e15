"""`lmbench kernels`: its forms of output, its width, its errors and exit codes."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from paths import GOLDEN, TRACES
from torch import nn
from trace_events import HandWritten, record_steps

from lmbench.commands.kernels import run
from lmbench.instruments.ranges import ModuleRanges

COMPILED, INFERENCE = str(TRACES / "small_bf16_compiled"), str(TRACES / "small_fp32_inference")


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert run(["kernels", *words]) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def _narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")


@pytest.mark.parametrize("folder", [COMPILED, INFERENCE])
def test_the_screen_needs_eighty_columns(capsys: pytest.CaptureFixture[str], folder: str) -> None:
    lines = shown(capsys, folder, "--all").splitlines()
    # A path stays whole, to be copied.
    assert max(len(line) for line in lines if str(TRACES) not in line) <= 80
    assert not any(line != line.rstrip() for line in lines)


@pytest.mark.parametrize("folder", [path.parent.name for path in sorted(TRACES.glob("*/trace.json.gz"))])
def test_the_first_screen_is_the_answer(capsys: pytest.CaptureFixture[str], folder: str) -> None:
    text = shown(capsys, str(TRACES / folder / "trace.json.gz"))
    lines = text.splitlines()
    assert len(lines) <= 24
    assert max(len(line) for line in lines if str(TRACES) not in line) <= 80
    # Tables follow by name, without the answer, or all of them after it.
    assert "tables     phases, kinds" in text
    clocks = shown(capsys, str(TRACES / folder / "trace.json.gz"), "--table", "clocks")
    assert clocks.splitlines()[1].startswith("Clocks: ")
    whole = shown(capsys, str(TRACES / folder / "trace.json.gz"), "--all")
    assert [line for line in lines[:-2] if line not in whole and str(TRACES) not in line] == []


def test_the_first_screen_is_what_it_was_found_right(capsys: pytest.CaptureFixture[str]) -> None:
    expected = (GOLDEN / "kernels_answer.txt").read_text(encoding="utf-8")
    assert shown(capsys, COMPILED) == expected


def test_the_screen_tells_all_that_the_issue_asks_for(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, INFERENCE, "--all")
    for words in (
        "1,102 kernels, 2 steps", "81.3 % of inference", "Kernel time by phase", "Kernel time by kind",
        "Kernel time by part", "Top kernels of forward", "Clocks", "Launches", "Inside attention", "forward    queued",
        "the lag of the unprofiled steps agrees", "guards",
    ):  # fmt: skip
        assert words in text, words
    assert "host-bound" in shown(capsys, COMPILED)


def test_the_head_says_in_a_line_whether_the_trace_is_complete(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "\ncomplete   1,518 kernels, each with its launch, none before it\n" in shown(capsys, COMPILED, "--all")
    trace = HandWritten()
    trace.phase("forward", 0, 1_000)
    for number, (launched, started) in enumerate(((10, 50), (20, 15), (30, 90)), start=1):
        trace.launch(number, launched)
        trace.kernel(number, "kernel", started, 4)
    trace.launch(4, 100)
    trace.kernel(None, "kernel", 200, 4)
    text = shown(capsys, str(trace.write(tmp_path / "t.json")), "--all")
    assert "incomplete 4 kernels, 1 without launch, 1 launch without kernel, 1 up to" in text
    assert "5.0 us before it" in " ".join(text.split())


def test_launches_stand_beside_their_mean_queued_gap(capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads(shown(capsys, INFERENCE, "--json"))
    (clock,) = [one for one in record["clocks"]["phases"] if one["phase"] == "forward"]
    table = shown(capsys, INFERENCE, "--table", "launches").partition("Launches: ")[2].partition("\n\n")[0]
    heading, _, *rows = table[table.index("phase  ") :].splitlines()
    (row,) = [row for row in rows if row.startswith("forward")]
    gap_us = float(dict(zip(heading.split(), row.split(), strict=False))["gap"])
    assert gap_us == pytest.approx(clock["queued_gap_s"] / clock["queued_gaps"] * 1e6, abs=0.05)
    assert 0.5 < gap_us < 3


@pytest.mark.parametrize("form", [["--all"], ["--format", "markdown"], ["--format", "csv"]], ids=str)
def test_what_cannot_be_seen_in_a_kernels_name_is_written_out(
    form: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = HandWritten()
    trace.phase("forward", 0, 1_000)
    trace.launch(1, 10)
    trace.kernel(1, "\x1b[31mred\x00\nnext\ud800\u202e", 50, 4)
    text = shown(capsys, str(trace.write(tmp_path / "t.json")), *form)
    assert r"red\x00\nnext" in text.replace("\\\\", "\\")
    assert not any(ord(character) < 32 and character != "\n" for character in text)
    text.encode()


def test_with_many_long_phases_the_screen_still_needs_eighty_columns(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = HandWritten()
    for number, phase in enumerate(("forward", "backward", "clip", "optimizer"), start=1):
        trace.phase(phase, 1_000 * number, 1_000)
        trace.launch(number, 1_000 * number + 10)
        trace.kernel(number, f"gemm_{phase}", 1_000 * number + 50, 900 - 100 * number)
    lines = shown(capsys, str(trace.write(tmp_path / "t.json")), "--all").splitlines()
    assert max(len(line) for line in lines if not line.startswith("trace ")) <= 80
    assert any("optimizer within all only" in line for line in lines)


def test_parts_are_not_shown_where_most_of_them_are_unknown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = HandWritten()
    # That communication is known tells nothing of the parts of the model.
    kernels = (("gemm", 140), ("vectorized_layer_norm_kernel", 60), ("ncclDevKernel_AllReduce_Sum_f32_RING_LL", 800))
    for number, (name, duration) in enumerate(kernels, start=1):
        trace.launch(number, 1_000 * number)
        trace.kernel(number, name, 1_000 * number + 50, duration)
    text = shown(capsys, str(trace.write(tmp_path / "t.json")), "--all")
    assert "Kernel time by part" not in text
    told = " ".join(text.partition("\nparts ")[2].split())
    assert told.startswith("not shown: the trace has no ranges of modules")
    assert "14.0 % of kernel time" in told
    assert "unclassified" not in text
    assert "Launches: in the whole trace" in text


def test_a_forward_pass_that_nothing_tells_is_said_to_be_outside(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = HandWritten()
    trace.add("user_annotation", "Optimizer.step#SGD.step", 500, 100)
    for number, at in enumerate((10, 510), start=1):
        trace.launch(number, at)
        trace.kernel(number, "gemm", at + 10, 50)
    told = " ".join(shown(capsys, str(trace.write(tmp_path / "t.json"))).split())
    assert "nothing in the trace tells forward and backward: they are outside" in told


def test_top_sets_the_number_of_kernels_and_counts_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, INFERENCE, "--top", "3", "--table", "kernels")
    table = text.partition("Top kernels of forward")[2].partition("\n\n")[0]
    rows = table.split("─\n")[1].splitlines()
    assert len(rows) == 4
    assert rows[-1].startswith("18 more kernels")


def test_a_folder_and_the_trace_in_it_show_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, INFERENCE) == shown(capsys, f"{INFERENCE}/trace.json.gz")
    assert shown(capsys, INFERENCE) == shown(capsys, f"{INFERENCE}/run.json")


def test_json_is_strict_and_whole(capsys: pytest.CaptureFixture[str]) -> None:
    record = json.loads(shown(capsys, COMPILED, "--json"), parse_constant=pytest.fail)
    assert record["completeness"]["kernels"] == 1518
    total = sum(phase["kernel_s"] for phase in record["phases"])
    assert total == pytest.approx(record["captured_s"])
    assert sum(row["total_s"] for phase in record["phases"] for row in phase["kernels"]) == pytest.approx(total)
    assert {one["phase"]: one["verdict"] for one in record["clocks"]["phases"]}["forward"] == "host-bound"
    assert record["matmul_fractions"]["step"] == pytest.approx(0.51, abs=0.01)


def test_csv_has_every_kernel_with_both_names(capsys: pytest.CaptureFixture[str]) -> None:
    rows = list(csv.DictReader(io.StringIO(shown(capsys, INFERENCE, "--format", "csv"))))
    assert sum(int(row["instances"]) for row in rows) == 1102
    assert {row["phase"] for row in rows} == {"forward", "other"}
    assert any(row["name"] != row["short_name"] for row in rows)


def test_markdown_has_whole_tables(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, INFERENCE, "--format", "markdown")
    tables = [line for line in text.splitlines() if line.startswith("|")]
    assert len(tables) > 40
    assert "**Kernel time by part**" in text
    assert ".." not in text.replace("...", "")


def test_a_cpu_trace_gives_operators_and_says_that_they_are_no_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64))
    ModuleRanges(net, uses_nvtx=False)
    # Much work, and not for the first time: operators fill their phases.
    x = torch.randn(16_384, 64)
    net(x)
    path = record_steps(tmp_path / "t.json", lambda: net(x).sum(), torch.optim.SGD(net.parameters(), 0.1))
    text = shown(capsys, str(path), "--all")
    assert "no kernels in this trace" in text
    for phase, operator in (("forward", "aten::addmm"), ("backward", "aten::mm"), ("optimizer", "aten::add_")):
        table = text.partition(f"Top operators of {phase}")[2].partition("\n\n")[0]
        assert operator in table
    record = json.loads(shown(capsys, str(path), "--json"))
    assert not record["has_kernels"]
    # Each operator's own time: all of them together are no longer than the phase's range.
    recorded = json.loads(path.read_text())["traceEvents"]
    span_us = sum(event["dur"] for event in recorded if event.get("name") == "lmbench.phase:forward")
    assert 0.3 * span_us < sum(row["self_s"] for row in record["operators"]["forward"]) * 1e6 < span_us


def test_a_trace_of_other_origin_says_where_its_phases_come_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = HandWritten()
    trace.add("user_annotation", "Optimizer.step#AdamW.step", 0, 50)
    trace.launch(1, 10)
    trace.launch(2, 60)
    trace.kernel(1, "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<int>(int)", 20, 5)
    trace.kernel(2, "mystery", 70, 5)
    text = shown(capsys, str(trace.write(tmp_path / "t.json")), "--all")
    assert "not recorded by lmbench" in text
    assert "steps unknown" in text
    assert "WARN" in text
    assert "50.0 % of kernel time has no kind" in text
    assert "outside" in text


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ([], "required"),
        (["nowhere"], "does not exist"),
        ([INFERENCE, "--top", "0"], "1 or more"),
        ([INFERENCE, "--top", "many"], "1 or more"),
        ([INFERENCE, "--format", "html"], "invalid choice"),
        ([INFERENCE, "--json", "--format", "csv"], "not allowed with"),
        ([INFERENCE, "--wat"], "unknown option"),
        ([INFERENCE, "--table", "clock,parts"], "choose among phases, kinds, parts"),
        ([INFERENCE, "--table", "clocks", "--all"], "--all has every table"),
        ([INFERENCE, "--table", "clocks", "--json"], "other forms of output have everything"),
    ],
    ids=str,
)
def test_mistakes_end_with_2_and_one_line(capsys: pytest.CaptureFixture[str], words: list[str], reason: str) -> None:
    assert run(["kernels", *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert captured.err.startswith("lmbench: ")
    assert reason in captured.err


def test_help_ends_with_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert "RUN|TRACE" in shown(capsys, "-h")


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; from lmbench.commands.kernels import run; run(['kernels', sys.argv[1], '--json']); "
        "sys.exit('torch' in sys.modules or 'lightning' in sys.modules)"
    )
    assert (
        subprocess.run([sys.executable, "-c", code, INFERENCE], stdout=subprocess.DEVNULL, check=False).returncode == 0
    )
