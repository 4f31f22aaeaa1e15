"""What W&B gets of a sweep: its runs in one group, each with its cell as config, when the sweep is done."""

from __future__ import annotations

import pytest
from wandb_loopback import PLANTED_KEY, Server

from lmbench.cli import main
from lmbench.records.load import find_runs, load_run
from lmbench.wandb.child import stable_id

# One cell that ends well, one that wants 2^58 bytes.
FILE = """
base: {config: smoke, model.vocab_size: 64, data.context_length: 16, measure.steps: 3, measure.probe_steps: 0}
matrix: {model.d_ff: [64, 1125899906842624]}
repeats: 1
timeout_s: 120
"""


@pytest.fixture(autouse=True)
def _wandb(no_account, monkeypatch):
    """W&B is on."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("WANDB_MODE", raising=False)


def sweep(tmp_path, *words, content=FILE):
    file = tmp_path / "study.yaml"
    file.write_text(content)
    assert main(["sweep", str(file), "--results_dir", str(tmp_path), "--measure.min_window_s=0", *words]) == 0
    return tmp_path / "study"


def test_a_sweeps_runs_are_one_group_with_their_cells_and_are_uploaded_once(tmp_path, monkeypatch, capsys):
    folder = sweep(tmp_path)
    captured = capsys.readouterr()
    assert f"W&B: offline, beside the results; upload: lmbench upload {folder}\n" in captured.out
    assert "writing 2 runs for W&B" in captured.err
    written = {path: path.stat().st_mtime_ns for path in folder.glob("runs/*/wandb/offline-run-*/*.wandb")}
    assert len(written) == 2
    # What is there is not written again when the sweep goes on, and what is skipped only where it is uploaded.
    sweep(tmp_path, "--repeats", "2")
    assert "writing 1 run for W&B" in capsys.readouterr().err
    assert {path: path.stat().st_mtime_ns for path in written} == written

    runs = [load_run(path) for path in find_runs([folder])]
    ids = {stable_id(run.record): run for run in runs}
    assert len(ids) == 4
    monkeypatch.setenv("WANDB_API_KEY", PLANTED_KEY)
    with Server() as server:
        monkeypatch.setenv("WANDB_BASE_URL", server.url)
        assert main(["upload", str(folder)]) == 0
        told = capsys.readouterr().out.splitlines()
        assert main(["upload", str(folder)]) == 0
        again = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in told] == ["uploaded"] * 4
    assert [line.split("  ")[0] for line in again] == ["already uploaded"] * 4
    assert set(server.filed) == set(ids)
    for run_id, run in ids.items():
        assert server.filed[run_id]["groupName"] == "study"
        place = run.record.sweep
        assert server.filed[run_id]["displayName"].endswith(f"d_ff={place.axes['model.d_ff']} r{place.repeat}")
        assert server.config[run_id]["run"] == run.run_id
        assert server.config[run_id]["cell"] == place.cell
        assert server.summary[run_id]["outcome"] == run.outcome
        if run.outcome != "skipped":
            assert server.summary[run_id]["cost/total_s"] == place.cost.total_s


def test_a_wandb_that_cannot_be_imported_costs_a_sweep_one_line_and_one_that_is_off_nothing(
    tmp_path, monkeypatch, capsys
):
    site = tmp_path / "site"
    site.mkdir()
    (site / "wandb.py").write_text("raise ImportError('this wandb is broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    one = FILE.replace("64, 1125899906842624", "64")
    folder = sweep(tmp_path, content=one)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "W&B did not get" in line]
    assert "this wandb is broken" in line
    assert line.endswith(f"later: lmbench upload {folder}")
    folder = sweep(tmp_path, "--wandb.mode=disabled", "--name", "off", content=one)
    captured = capsys.readouterr()
    assert "W&B" not in captured.out + captured.err
    assert not list(folder.rglob("wandb"))
