"""Odd files, names and numbers of somebody else's: each is a result or one line, and no traceback."""

from __future__ import annotations

import json
import os
import pickle

import yaml
from runs import make_record, make_run, put, write_run
from tables import cases
from trace_events import HandWritten

from lmbench.cli import main
from lmbench.records.load import load_run

SNAPSHOTS = yaml.safe_load("""
nothing: []
a shortage without an allocation:
- &shortage {action: oom, size: 1099511627776, time_us: 1, frames: [{name: forward, filename: model.py, line: 3}]}
a shortage after a segment:
- {action: segment_alloc, size: 1048576, time_us: 0, frames: []}
- *shortage
a free without an allocation:
- {action: free_completed, addr: 1, size: 9, time_us: 1, frames: []}
""")


HEAD = "gpu,size,step_s,step_std_s,tokens_per_s\n"


@cases("name", *SNAPSHOTS)
@cases("words", [], ["--json"])
def test_a_snapshot_without_allocations_is_shown(name, words, tmp_path, printed):
    path, segment = tmp_path / "x.pickle", {"device": 0, "address": 0, "total_size": 0, "blocks": []}
    path.write_bytes(pickle.dumps({"segments": [segment], "device_traces": [SNAPSHOTS[name]]}))
    printed("memory", path, *words)


@cases("""
- [step, duration, depth, code, message]
# A step of no duration, the same with a kernel, and 20,000 levels.
- [0, 0, 1, 0, gemm]
- [0, 5, 1, 0, gemm]
- [9, 5, 20000, 2, "nested more than 1,000 levels deep"]
""")
def test_an_odd_trace_is_shown_or_one_line(step, duration, depth, code, message, tmp_path, capsys):
    trace = HandWritten()
    trace.range("ProfilerStep#1", 0, step)
    for index in range(depth):
        trace.op("aten::mm", index, 2 * depth - 2 * index)
    trace.launch(1, 0, 0)
    trace.kernel(1, "gemm", 0, duration)
    path = tmp_path / "x.json"
    path.write_text(json.dumps({"traceEvents": trace.events}))
    assert main(["kernels", str(path)]) == code
    printed = capsys.readouterr()
    assert (message in printed.out + printed.err, printed.err.count("\n")) == (True, 1 if code else 0)


@cases("""
- [changes, field]
- [{nonfinite: {phases.step.mean_s: nan}, phases.step.mean_s: null}, phases.step.mean_s]
- [{nonfinite: {phases.step.mean_s: inf}, phases.step.mean_s: null}, phases.step.mean_s]
- [{phases.step.mean_s: -5.0}, phases.step.mean_s]
- [{phases.step.std_s: 1.0e+199}, phases.step.std_s]
- [{throughput.tokens_per_s: -1.0}, throughput.tokens_per_s]
- [{nonfinite: {throughput.tokens_per_s: nan}, throughput.tokens_per_s: null}, throughput.tokens_per_s]
- [{sweep: {cost: {total_s: -1000000.0}}}, total_s]
""")
def test_a_number_that_no_clock_measures_damages_its_run(changes, field, tmp_path, printed):
    write_run(tmp_path / "r", make_record({}))
    path = tmp_path / "r" / "run.json"
    path.write_text(json.dumps(put(json.loads(path.read_text()), changes)))
    run = load_run(tmp_path / "r")
    assert (run.outcome, field in run.damage) == ("damaged", True)
    for command in ("report", "list", "show"):
        printed(command, tmp_path)


# A reference, the exit code, and a part of what is said.
@cases(r"""
- [what, text, code, message]
- [no column for the GPU, "size,step_s\nsmall,1\n", 2, is no report's table]
- [no GPU, "HEAD,small,0.1,,\n", 0, ""]
- [a short row, "step_s,gpu\n0.1\n0.2,H200\n", 0, ""]
- [a long row, "gpu,step_s\nH200,0.1,2,3\n,1,2\n", 0, ""]
- [a long field, "HEADH200,LONG,0.1,,\n", 2, field larger than field limit]
- [a large spread, "HEADH200,small,0.1,1e308,\n", 0, ""]
- [a large time, "HEADH200,small,1e308,,\n", 0, ""]
- [not a number, "HEADH200,small,nan,inf,-5\n", 0, ""]
""")
def test_an_odd_reference_is_shown_or_one_line(what, text, code, message, here, capsys):
    make_run(here / "results" / "a", {})
    (here / "x.csv").write_text(text.replace("HEAD", HEAD).replace("LONG", "x" * 200_000))
    assert main(["report", "results", "--reference", "x.csv"]) == code
    assert message in capsys.readouterr().err


@cases("words", "show", "list", "report")
def test_a_folder_whose_name_is_not_utf8_is_json(words, tmp_path, answered):
    path = tmp_path / os.fsdecode(b"caf\xe9")
    make_run(path, {})
    assert "caf" in str(answered(words, path))


def test_a_number_of_too_many_digits_is_one_line(here, refused):
    make_run(here / "results" / "a", {})
    assert "number of results in 'results': 1" in refused("show", "last~" + "9" * 5000)
