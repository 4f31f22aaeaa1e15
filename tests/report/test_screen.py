"""What people see: readable at 80 columns, without colour and in a log file; commands stay whole, to be copied."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import rich.console
import torch
from comparison_runs import make_runs
from paths import RUNS
from rich.console import Console

from lmbench.callbacks import progress_line
from lmbench.callbacks.progress_line import ProgressLine
from lmbench.cli import main
from lmbench.instruments.schedule import Schedule
from lmbench.records.codec import decode_run
from lmbench.records.guard import Guard
from lmbench.records.measured import RunError
from lmbench.records.run import Compile, RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.vocabulary import Stage
from lmbench.report.screen import make_console, print_table
from lmbench.report.table import Entry, Heading, Table, fact, numbers, words
from lmbench.report.terminal import print_run
from lmbench.report.text import folded
from lmbench.report.units import mean_and_std
from lmbench.standard_output import write_what_can_be

DATA = (RUNS / "h200_run.json").read_bytes()
H200 = decode_run(DATA)
QUICK = ["--measure.steps", "6", "--measure.min_window_s", "0", "--measure.probe_steps", "2"]
DEEP = Path("/a/folder/of/results/whose/path/is/longer/than/a/terminal/is/wide") / str(H200.run_id)
TO_COPY = ("result ", "repeat ", "upload ")


def shown(run, path=DEEP, **options):
    stream = io.StringIO()
    print_run(run, path, Console(file=stream, width=80, highlight=False, **options))
    return stream.getvalue()


def test_everything_but_what_is_to_be_copied_fits_80_columns():
    lines = shown(H200).splitlines()
    assert [line for line in lines if len(line) > 80 and not line.startswith(TO_COPY)] == []
    assert [line for line in lines if line != line.rstrip()] == []
    assert f"result       {DEEP}" in lines
    assert f"repeat       {H200.replay_command}" in lines


def test_what_decides_comes_before_the_table_and_all_of_it_on_the_first_screen():
    run = decode_run(DATA)
    run.guards = [*run.guards, Guard("spread", "warn", message="steps vary", advice="measure longer")]
    answer, phases, rest = shown(run).split("\n\n", 1)[1].partition("\ndevice span in ms")
    assert answer.splitlines() == [
        "mean step    50.59 ± 0.12 ms: backward 64.0 %, forward 33.9 %",
        "limited by   the device: it always has work queued",
        "throughput   40,482 tokens/s",
        "MFU          47.3 % (45.5 % with causal attention counted half)",
        "peak memory  4.14 GiB allocated, 4.33 GiB reserved of 139.80 GiB; in the window",
        "             4.14 GiB",
        "WARN         steps vary",
        "             measure longer",
    ]
    assert phases
    assert "power" not in answer
    assert "guards       3 pass, 1 warn" in rest
    run.probe.verdicts.forward.verdict = "host-bound"
    assert "the device, but in forward (33.9 % of the step), where it waits for the host" in " ".join(
        shown(run).split()
    )
    run.probe.verdicts.backward.verdict = "host-bound"
    told = "limited by the host: the device waits for it in 97.9 % of the step (forward, backward)"
    assert told in " ".join(shown(run).split())


def test_guards_that_did_not_pass_are_coloured_on_a_terminal_only():
    run = decode_run(DATA)
    run.guards = [Guard("spread", "warn", message="steps vary", advice="look at [steps]")]
    assert "\x1b[33mWARN" in shown(run, force_terminal=True, color_system="standard", _environ={})
    assert "\x1b" not in shown(run)
    assert "look at [steps]" in shown(run)


def test_a_log_file_gets_no_colour_and_80_columns(tmp_path, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    write_what_can_be()
    with (tmp_path / "log").open("w", encoding="ascii", errors="lmbench.plain") as file:
        console = make_console(file)
        assert console.width == 80
        print_run(H200, DEEP, console)
    text = (tmp_path / "log").read_text(encoding="ascii")
    assert "\x1b" not in text
    assert re.search(r"^forward +\| +17.13 ", text, re.MULTILINE)


def test_a_run_that_came_to_nothing_says_only_what_is_known():
    run = RunRecord(1, "error", error=RunError(phase="setup", message="no"))
    assert shown(run, Path("r")).splitlines() == ["outcome      error in setup: no", "result       r"]


def test_show_prints_what_fit_printed_and_the_printed_commands_work(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["fit", "--config", "smoke", "--model.num_layers", "1", *QUICK]) == 0
    printed = capsys.readouterr().out
    board = printed.splitlines()[-2:]
    assert main(["show", "results"]) == 0
    assert capsys.readouterr().out.splitlines() == printed.splitlines()[:-2]
    assert board[0] == "W&B          offline, beside the result"
    words = {line.split()[0]: shlex.split(line)[2:] for line in printed.splitlines() if line.startswith(TO_COPY[1:])}
    assert words["upload"] == ["upload", str(next((tmp_path / "results").iterdir()))]
    assert main([*words["repeat"], "--wandb.mode", "disabled"]) == 0
    assert len(list((tmp_path / "results").iterdir())) == 2


def test_show_tells_of_a_run_that_was_killed_and_of_one_that_is_damaged(tmp_path, capsys):
    killed, damaged = tmp_path / "a", tmp_path / "b"
    for folder in (killed, damaged):
        folder.mkdir()
        (folder / "steps.jsonl").write_text('{"step":0}\n{"step":1}\n')
    (killed / "run.json").write_text(json.dumps({"schema_version": 1, "outcome": "running", "pid": 2**22 + 1}))
    (damaged / "run.json").write_text("{")
    assert main(["show", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "outcome      killed\nsteps        2 recorded, without a summary: the run was not closed\n" in out
    assert "outcome      damaged\nsteps        2 recorded\ndamage       run.json is damaged: " in out


@pytest.mark.parametrize(("flag", "lines"), [("--quiet", 1), ("--json", None)])
def test_output_for_scripts_is_nothing_else(flag, lines, tmp_path, capsys):
    words = ["--model.num_layers", "1", *QUICK, "--measure.results_dir", str(tmp_path)]
    assert main(["fit", "--config", "smoke", *words, flag]) == 0
    printed = capsys.readouterr()
    (folder,) = tmp_path.iterdir()
    if lines is not None:
        assert printed.out == f"{folder}\n"
    else:
        assert json.loads(printed.out) == json.loads((folder / "run.json").read_text())
    assert printed.err == ""


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_the_live_line_is_written_over_itself_and_wiped_at_the_end():
    terminal = Terminal()
    line = ProgressLine(terminal)
    line._show("window 3/20 steps")
    line._show("short")
    line._show("")
    seen = terminal.getvalue().split("\r")
    assert seen[1:] == ["window 3/20 steps", "short            ", "     ", ""]


WIDE = Table(
    "Wide", "", [*words("cell"), *numbers("mean", "std"), Heading("max", is_extra=True), *words("verdict")],
    [[fact("one"), *map(Entry, ("123.45 ms", "0.12 ms", "130.00 ms")), fact("slower")]],
)  # fmt: skip


@pytest.mark.parametrize(
    ("width", "told"),
    [
        (47, "cell       mean      std        max  verdict"),
        (36, "1 more column with COLUMNS=44: max"),
        (30, "2 more columns with"),
        (20, "3 more columns with"),
    ],
)
def test_a_table_too_wide_leaves_out_columns_with_a_word_and_cuts_no_cell(width, told):
    print_table(WIDE, Console(file=(stream := io.StringIO()), width=width))
    lines = stream.getvalue().splitlines()
    assert told in lines
    assert max(map(len, lines)) <= width
    shown = next(line for line in lines if line.startswith("one"))
    assert set(re.split(r"  +", shown.strip())) <= {entry.full_text for entry in WIDE.rows[0]}
    assert shown.endswith("slower")


def test_a_report_keeps_to_a_terminals_width_and_is_markdown_elsewhere(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "60")
    make_runs(tmp_path, [0.05, 0.06])
    assert main(["report", str(tmp_path)]) == 0
    assert "| ----" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdout", terminal := Terminal())
    assert main(["report", str(tmp_path)]) == 0
    lines = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()).splitlines()
    assert max(map(len, lines)) <= 60
    assert any(line.lstrip().startswith("55.0 ± 7.1") for line in lines)
    assert any("more column" in line for line in lines)


def test_colours_of_a_table_are_no_text():
    console = make_console(stream := Terminal())
    console._color_system = rich.console.ColorSystem.STANDARD
    print_table(WIDE, console)
    assert "\\x1b" not in stream.getvalue()


def test_an_encoding_without_the_signs_gets_plain_ones(tmp_path):
    def told(errors):
        stream = io.TextIOWrapper(raw := io.BytesIO(), encoding="ascii", errors=errors)
        with contextlib.redirect_stdout(stream):
            write_what_can_be()
            print("443 ± 112 ≤ ─ ü")
            stream.flush()
        return raw.getvalue()

    assert told("strict") == b"443 +- 112 <= - ?\n"


@pytest.mark.parametrize(
    ("mean_s", "std_s", "text"),
    [
        (0.44321, 0.1125, "443 ± 112"),
        (0.05059, 0.00012, "50.59 ± 0.12"),
        (0.05059, 0.0, "50.59 ± 0.00"),
        (0.002, 0.000004, "2.000 ± 0.004"),
        (0.02, 0.0034, "20.0 ± 3.4"),
        (2.5, 0.01, "2,500 ± 10"),
        (0.02, None, "20.00"),
    ],
)
def test_digits_follow_the_spread(mean_s, std_s, text):
    assert mean_and_std(mean_s, std_s) == text


def in_a_run(line, device="cpu", **places):
    """The line as it is asked in a run at some place."""
    schedule = Schedule(warmup_steps=5, steps=20, min_window_s=3.0, probe_steps=5)
    run = RunRecord(1, "running", compile=Compile(is_enabled=True))
    given = {"stage": Stage.WARMUP, "steps_done": 0, "window_steps": 0, "window_elapsed_s": 0.0} | places
    line._session = SimpleNamespace(schedule=schedule, run=run, device=torch.device(device), **given)
    return line


def test_a_log_file_gets_a_line_now_and_then_that_says_all(monkeypatch):
    log = io.StringIO()
    line = in_a_run(ProgressLine(log), stage=Stage.WINDOW, window_steps=12, window_elapsed_s=1.2)
    line.run_started()
    line.before_window()
    records = [StepRecord(step_s=0.1, tokens=2048), StepRecord(step_s=0.3, tokens=2048)]
    line.steps_recorded(records)
    assert log.getvalue() == ""
    monkeypatch.setattr(progress_line, "LOG_EVERY_S", 0.0)
    line.steps_recorded(records)
    line.run_ended()
    # What the 3 s of the window still want, and 10 probe steps at the window's pace of 0.1 s.
    assert re.fullmatch(r"step 12/20, 200 ms/step, 10,240 tokens/s, [0-9.]+ [MG]iB, 2.8 s left\n", log.getvalue())


def test_the_wait_for_a_first_step_that_compiles_is_told_and_ends_with_the_window(monkeypatch):
    monkeypatch.setattr(progress_line, "_LIVE_EVERY_S", 0.01)
    line = in_a_run(ProgressLine(terminal := Terminal()))
    line.run_started()
    while "compiling" not in terminal.getvalue():
        time.sleep(0.01)
    assert "compiling, 0.0 s so far" in terminal.getvalue()
    line.before_window()
    assert not any(thread.name == "lmbench-progress" for thread in threading.enumerate())


def test_a_narrow_terminal_keeps_the_step_and_the_time_that_is_left(monkeypatch):
    monkeypatch.setenv("COLUMNS", "30")
    line = in_a_run(ProgressLine(terminal := Terminal()), stage=Stage.WINDOW, window_steps=12, window_elapsed_s=2.4)
    line.steps_recorded([StepRecord(step_s=0.2, tokens=2048)])
    assert terminal.getvalue() == "\rstep 12/20, 3.6 s left"


def test_a_dumb_terminal_is_a_log_file(monkeypatch):
    monkeypatch.setenv("TERM", "dumb")
    ProgressLine(terminal := Terminal())._end()
    assert terminal.getvalue() == ""


def test_a_path_too_long_for_its_column_goes_on_in_the_next_line() -> None:
    path = "model.layers.*.self_attention.rotary_embedding.inverse_frequencies"
    lines = folded(f"{path}, modeling.py:82 forward", 34)
    assert lines == [
        "model.layers.*.self_attention.",
        "rotary_embedding.",
        "inverse_frequencies,",
        "modeling.py:82 forward",
    ]
    assert all(len(line) <= 34 for line in lines)
    assert folded("x" * 25, 10) == ["x" * 10, "x" * 10, "x" * 5]
