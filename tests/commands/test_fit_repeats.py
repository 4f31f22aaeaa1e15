"""`lmbench fit --repeats`: fresh processes by the sweep's engine, and a verdict against an earlier result."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fit_process import QUICK, SMALL

import lmbench
from lmbench.cli import main


@pytest.mark.usefixtures("warm_sweeps")
def test_repeats_are_processes_of_one_cell_and_compare_decides(here, capsys, refused):
    smoke = ["fit", "smoke", *QUICK, *SMALL, "--measure.mode=forward"]
    assert main([*smoke, "--repeats=3", "--measure.run_id=before", "--quiet"]) == 0
    assert capsys.readouterr() == ("results/before\n", "")
    code = main([*smoke, "--model.num_layers=2", "--compare=last", "--gate=5%", "--json"])
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert "lmbench: repeats: cells: 1, repeats: 3" in err
    assert "lmbench: compare: 3 and 3 processes can tell a change " in err
    assert "up to 10 % may be a drift: `lmbench compare --run` takes turns" in err
    # The verdict depends on the machine's load.
    assert (code, answer["a"]["given"]) == (answer["exit_code"], "results/before")
    (cell,) = answer["cells"]
    assert [len(cell["used_a"]), len(cell["used_b"])] == [3, 3]
    setting, *consequences = cell["differences"]
    assert setting == {"name": "model.num_layers", "a": "1", "b": "2"}
    assert [difference["name"] for difference in consequences] == ["model.parameter_count", "flops.per_token_flops"]
    before = [run.record for run in lmbench.load("results/before")]
    assert [(run.mode, run.sweep.repeat) for run in before] == [("forward", 0), ("forward", 1), ("forward", 2)]
    assert len({run.pid for run in before}) == 3
    host = before[0].environment.host.hostname
    for path in Path("results/before/runs").glob("*/run.json"):
        path.write_text(path.read_text().replace(f'"{host}"', '"elsewhere"'))
    reason = f"results/before was measured on elsewhere, and this is {host}"
    assert reason in refused(*smoke, "--compare=results/before")
