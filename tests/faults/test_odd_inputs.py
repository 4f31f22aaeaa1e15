"""Odd files, names and numbers of somebody else's: each is a result or one line, and no traceback."""

from __future__ import annotations

import json
import os
import pickle

import pytest
from runs import make_record, make_run, put, write_run

from lmbench.cli import main
from lmbench.records.load import load_run

_FRAMES = [{"name": "forward", "filename": "model.py", "line": 3}]
_SHORTAGE = {"action": "oom", "size": 2**40, "frames": _FRAMES, "time_us": 1}
SNAPSHOTS = {
    "a shortage without an allocation": [_SHORTAGE],
    "a shortage after a segment": [{"action": "segment_alloc", "size": 2**20, "frames": [], "time_us": 0}, _SHORTAGE],
    "a free without an allocation": [{"action": "free_completed", "addr": 1, "size": 9, "frames": [], "time_us": 1}],
    "nothing": [],
}


def event(name, category, start, duration, **arguments):
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 1,
        "tid": 1,
        "ts": start,
        "dur": duration,
        "args": arguments,
    }


def trace(step, duration, depth=1):
    nested = [event("aten::mm", "cpu_op", index, 2 * depth - 2 * index) for index in range(depth)]
    launch = event("cudaLaunchKernel", "cuda_runtime", 0, 0, correlation=1)
    kernel = event("gemm", "kernel", 0, duration, correlation=1, device=0)
    return [event("ProfilerStep#1", "user_annotation", 0, step), *nested, launch, kernel]


#: Events, the exit code, and a part of what is said.
TRACES = {
    "a step of no duration": (trace(0, 0), 0, "gemm"),
    "a step of no duration with a kernel": (trace(0, 5), 0, "gemm"),
    "20,000 levels": (trace(9, 5, 20_000), 2, "nested more than 1,000 levels deep"),
}
#: Fields of a record, and the field that is said to be wrong.
NUMBERS = [
    {"nonfinite": {"phases.step.mean_s": "nan"}, "phases.step.mean_s": None},
    {"nonfinite": {"phases.step.mean_s": "inf"}, "phases.step.mean_s": None},
    {"phases.step.mean_s": -5.0},
    {"phases.step.std_s": 1e199},
    {"throughput.tokens_per_s": -1.0},
    {"nonfinite": {"throughput.tokens_per_s": "nan"}, "throughput.tokens_per_s": None},
    {"sweep": {"cost": {"total_s": -1e6}}},
]
_HEAD = "gpu,size,step_s,step_std_s,tokens_per_s\n"
#: A reference, the exit code, and a part of what is said.
REFERENCES = {
    "no column for the GPU": ("size,step_s\nsmall,1\n", 2, "is no report's table"),
    "no GPU": (f"{_HEAD},small,0.1,,\n", 0, ""),
    "a short row": ("step_s,gpu\n0.1\n0.2,H200\n", 0, ""),
    "a long row": ("gpu,step_s\nH200,0.1,2,3\n,1,2\n", 0, ""),
    "a long field": (f"{_HEAD}H200,{'x' * 200_000},0.1,,\n", 2, "field larger than field limit"),
    "a large spread": (f"{_HEAD}H200,small,0.1,1e308,\n", 0, ""),
    "a large time": (f"{_HEAD}H200,small,1e308,,\n", 0, ""),
    "not a number": (f"{_HEAD}H200,small,nan,inf,-5\n", 0, ""),
}


@pytest.mark.parametrize("name", SNAPSHOTS)
@pytest.mark.parametrize("words", [[], ["--json"]])
def test_a_snapshot_without_allocations_is_shown(name, words, tmp_path):
    path, segment = tmp_path / "x.pickle", {"device": 0, "address": 0, "total_size": 0, "blocks": []}
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [SNAPSHOTS[name]]}))
    assert main(["memory", str(path), *words]) == 0


@pytest.mark.parametrize("name", TRACES)
def test_an_odd_trace_is_shown_or_one_line(name, tmp_path, capsys):
    events, code, message = TRACES[name]
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert main(["kernels", str(path)]) == code
    printed = capsys.readouterr()
    assert (message in printed.out + printed.err, printed.err.count("\n")) == (True, 1 if code else 0)


@pytest.mark.parametrize("changes", NUMBERS)
def test_a_number_that_no_clock_measures_damages_its_run(changes, tmp_path, capsys):
    write_run(tmp_path / "r", make_record({}))
    path = tmp_path / "r" / "run.json"
    path.write_text(json.dumps(put(json.loads(path.read_text()), changes)))
    run = load_run(tmp_path / "r")
    # The last name in the changes is that of the field.
    field = next(iter(changes["sweep"]["cost"])) if "sweep" in changes else [*changes][-1]
    assert (run.outcome, field in run.damage) == ("damaged", True)
    for command in ("report", "list", "show"):
        assert main([command, str(tmp_path)]) == 0


@pytest.mark.parametrize("name", REFERENCES)
def test_an_odd_reference_is_shown_or_one_line(name, tmp_path, monkeypatch, capsys):
    text, code, message = REFERENCES[name]
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "results" / "a", {})
    (tmp_path / "x.csv").write_text(text)
    assert main(["report", "results", "--reference", "x.csv"]) == code
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("words", ["show", "list", "report"])
def test_a_folder_whose_name_is_not_utf8_is_json(words, tmp_path, printed):
    path = tmp_path / os.fsdecode(b"caf\xe9")
    make_run(path, {})
    assert "caf" in str(json.loads(printed(words, path, "--json")))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("show last~" + "9" * 5000, "number of results in 'results': 1"),
        ("list last --name=--json", "no '.' or '-' first"),
        ("list last --name=-x", "no '.' or '-' first"),
    ],
    ids=["digits", "option", "dash"],
)
def test_an_odd_name_is_one_line(words, message, tmp_path, monkeypatch, refused):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "results" / "a", {})
    assert (message in (error := refused(*words.split())), error.count("\n")) == (True, 1)
