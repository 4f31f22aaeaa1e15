"""`lmbench compare` from the command line: verdicts, exit codes, forms of output, bad input."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from comparison_runs import make_runs, make_sweep
from fit_process import start_fit

from lmbench.cli import main
from lmbench.commands.compare import parse_gate
from lmbench.compare import comparison
from lmbench.compare.metrics import METRICS, Metric
from lmbench.compare.noise import NoiseEntry, NoiseSubject, measure_noise, noise_key, store_noise
from lmbench.errors import UsageError
from lmbench.records.load import load_run

TIMES = (0.0500, 0.0501, 0.0499)


def sides(tmp_path, factor=1.0, **changes):
    make_runs(tmp_path / "a", TIMES)
    make_runs(tmp_path / "b", [value * factor for value in TIMES], **changes)
    return [str(tmp_path / "a"), str(tmp_path / "b")]


@pytest.mark.parametrize(
    ("factor", "gate", "code", "word"),
    [
        (1.0, "1%", 0, "SAME"),
        (0.9, "1%", 0, "FASTER"),
        (1.1, "1%", 10, "SLOWER"),
        (1.015, "1%", 10, "SLOWER"),
        (1.015, "2%", 0, "SAME"),
        (1.0, "0.1%", 11, "UNDECIDED"),
    ],
)
def test_the_exit_code_is_the_verdicts(tmp_path, capsys, factor, gate, code, word):
    assert main(["compare", *sides(tmp_path, factor), "--gate", gate]) == code
    assert capsys.readouterr().out.startswith(f"verdict    {word}: ")


def test_what_is_not_comparable_exits_with_12(tmp_path, capsys):
    assert main(["compare", *sides(tmp_path, precision="32-true")]) == 12
    assert "INVALID: the precision differs: A bf16-mixed, B 32-true" in " ".join(capsys.readouterr().out.split())


def test_json_has_everything_in_si_units(tmp_path, capsys):
    assert main(["compare", *sides(tmp_path, 1.1), "--json"]) == 10
    found = json.loads(capsys.readouterr().out)
    assert (found["verdict"], found["exit_code"], found["tolerance_fraction"]) == ("slower", 10, 0.01)
    (cell,) = found["cells"]
    step = cell["metrics"][0]
    assert (step["name"], step["unit"], step["finding"]) == ("step_s", "s", "slower")
    assert step["a"]["geometric_mean"] == pytest.approx(0.05, rel=1e-3)
    assert step["ratio"] == pytest.approx(1.1)
    assert step["ratio_low"] < 1.1 < step["ratio_high"]
    assert len(cell["a"]["used"]) == 3


def test_markdown_can_be_pasted_and_is_identical_for_identical_input(tmp_path, capsys):
    words = ["compare", *sides(tmp_path, 1.1), "--format", "markdown"]
    assert main(words) == 10
    text = capsys.readouterr().out
    assert "- **verdict**: SLOWER: +10.00 %" in text
    assert "| step        | 50.00 ms | 55.00 ms | 1.1000 |" in text
    assert main(words) == 10
    assert capsys.readouterr().out == text


def test_a_figure_is_shown_in_the_unit_that_the_schema_gives_it(tmp_path, capsys, monkeypatch):
    added = {"power": ("mean_power_w", 612.5), "clock drop": ("sm_clock_drop_fraction", 0.02)}
    metrics = [Metric(name, title, f"device_state.{name}") for title, (name, _) in added.items()]
    monkeypatch.setattr(comparison, "METRICS", (*METRICS, *metrics, Metric("tokens", "tokens", "window.tokens")))
    values = {f"device_state__{name}": value for name, value in added.values()}
    make_runs(tmp_path / "a", TIMES, **values)
    make_runs(tmp_path / "b", TIMES, **values)
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--format", "markdown"]) == 0
    rows = [re.split(r" *\| *", line) for line in capsys.readouterr().out.splitlines()]
    figures = {row[1]: row[2] for row in rows if len(row) > 2}
    assert figures["step"] == "50.00 ms"
    assert figures["run peak"] == "5.00 GiB"
    assert (figures["power"], figures["clock drop"], figures["tokens"]) == ("612.5 W", "2 %", "204,800")


def test_many_cells_are_one_table_and_the_reasons(tmp_path, capsys):
    make_sweep(tmp_path / "a", {"small": TIMES, "medium": TIMES})
    slow = [value * 1.05 for value in TIMES]
    make_sweep(tmp_path / "b", {"small": TIMES, "medium": slow}, environment__code__project__commit="bbbb")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 10
    answer = capsys.readouterr().out
    assert answer.startswith("verdict    SLOWER: of 2 cells 1 slower, 1 same\nslower     size medium: +5.00 % (+4.")
    assert len(answer.splitlines()) <= 24
    assert "tables     cells, changes; --table" in answer
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--table", "changes"]) == 10
    assert capsys.readouterr().out.startswith("\nPhases and memory: ")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b"), "--all"]) == 10
    text = " ".join(capsys.readouterr().out.split())
    assert "size medium 3 / 3 50.00 ms 52.50 ms 1.0500" in text
    assert "size medium forward 15.00 ms 15.75 ms" in text
    assert "after Holm over 2 (size medium)" in text


def test_every_figure_fits_into_80_columns_or_is_printed_whole(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["compare", *sides(tmp_path, 1.1)]) == 10
    out = capsys.readouterr().out
    assert "…" not in out
    assert max(len(line) for line in out.splitlines() if "tmp" not in line) <= 80


def test_a_noise_floor_beside_the_results_is_found(tmp_path, capsys):
    words = sides(tmp_path, 1.03)
    run = load_run(next((tmp_path / "a").iterdir())).record
    noise = measure_noise([0.050, 0.051, 0.052, 0.053, 0.054, 0.055])
    store_noise(tmp_path, [NoiseEntry(noise_key(run), NoiseSubject(), "", {"step_s": noise})])
    assert main(["compare", *words]) == 11
    assert "is not above the A/A noise floor of" in " ".join(capsys.readouterr().out.split())
    (tmp_path / "noise.json").write_text("{")
    assert main(["compare", *words]) == 10
    text = " ".join(capsys.readouterr().out.split())
    assert "noise.json' cannot be read (it is no JSON: Input data was truncated); remove it" in text
    assert "no A/A noise floor is known; `lmbench noise` measures it" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["A"], "compare takes two results, A and B; 1 given"),
        ([], "compare takes two results, A and B; 0 given"),
        (["A", "B", "C"], "compare takes two results, A and B; 3 given"),
        (["A", "B", "--gate", "2"], "--gate is '2'; give a percentage"),
        (["A", "B", "--gate", "0%"], "--gate is '0%'"),
        (["A", "B", "--gate"], "expected one argument"),
        (["A", "B", "--bogus"], "unknown option --bogus"),
        (["A", "B", "--json", "--format", "markdown"], "two forms of one output"),
        (["A", "B", "--json", "--all"], "other forms of output have everything"),
        (["A", "B", "--table", "cells"], "choose among figures"),
        (["A", "nowhere"], "'nowhere' does not exist"),
        (["A", "A"], "are the same results"),
        (["A", "B", "--about", "nothing"], "these runs record nothing of that name"),
    ],
)
def test_mistakes_are_one_line_and_exit_2(tmp_path, capsys, words, message):
    a, b = sides(tmp_path)
    assert main(["compare", *({"A": a, "B": b}.get(word, word) for word in words)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("lmbench: ")
    assert captured.err.count("\n") == 1
    assert message in captured.err


def test_gates_are_percentages():
    assert parse_gate("2%") == parse_gate(" 2.0 % ") == 0.02
    for text in ("two", "100%", "-1%", "1.2.3%", "%"):
        with pytest.raises(UsageError):
            parse_gate(text)


def test_help_exits_with_0(capsys):
    assert main(["compare", "-h"]) == 0
    assert "exit codes: 0 same or faster, 10 slower" in capsys.readouterr().out


def test_real_runs_are_compared(tmp_path, capsys):
    words = ("--measure.steps", "6", "--measure.probe_steps", "0", "--model.num_layers", "1")
    for side in "ab":
        assert start_fit(tmp_path / side, *words).wait() == 0
    results = [str(tmp_path / side / "results") for side in "ab"]
    assert main(["compare", *results, "--json"]) == 11
    found = json.loads(capsys.readouterr().out)
    (cell,) = found["cells"]
    assert cell["reasons"][0].startswith("A has 1 repeat, B has 1; a verdict takes 3 a side")
    assert cell["differences"] == []
    assert {"step_s", "forward_s", "backward_s", "host_peak_rss_bytes"} <= {m["name"] for m in cell["metrics"]}


def test_compare_and_noise_work_without_torch(tmp_path):
    a, b = sides(tmp_path)
    make_runs(tmp_path / "n", [0.05 + i * 1e-4 for i in range(6)])
    code = (
        "import sys; from lmbench.cli import main; "
        f"codes = main(['compare', {a!r}, {b!r}]), main(['noise', {str(tmp_path / 'n')!r}]); "
        "print(codes, [name for name in ('torch', 'lightning', 'wandb') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "(0, 0) []"
