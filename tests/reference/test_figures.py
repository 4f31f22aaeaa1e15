"""Every figure of README and of lmbench/reference has its row in a CSV of the tree, and names its runs' commit."""

import json
import re

import pytest
from figures import has_figures, read_rows, tables_of, without_row
from paths import ROOT
from runs import make_sweep
from tables import cases, flat

from lmbench.cli import main
from lmbench.precision import named_gpu
from lmbench.reference import FOLDER

PAGES = {path.name: path.read_text() for path in FOLDER.glob("*.md") if path.with_suffix(".csv").is_file()}
ROWS = read_rows(*(FOLDER / name.replace(".md", ".csv") for name in PAGES))
README = (ROOT / "README.md").read_text()
#: Headings of tables that were measured by hand before there was `report --publish`. No table is added here.
BY_HAND = {
    "h200.md": {"Where the step of `flagship_bf16` goes", "Several GPUs", "Memory of several GPUs"},
    "h100.md": {"The same loops without lmbench", "Memory, measured and predicted"},
}


@cases("name", *PAGES)
def test_every_table_of_a_page_of_the_reference_has_its_rows(name):
    assert without_row(PAGES[name], ROWS) <= BY_HAND.get(name, set())


@cases("name", *PAGES)
def test_a_published_page_names_the_one_commit_of_its_rows(name):
    if "--publish" not in PAGES[name]:
        pytest.skip("made by hand, before there was `report --publish`")
    assert is_of_one_commit(PAGES[name], read_rows(FOLDER / name.replace(".md", ".csv")))


def is_of_one_commit(page, rows):
    """Whether a page names one commit without changes, and all rows of runs that were measured are of it.

    The commit is that of the code from which the runs started, where lmbench was installed as a wheel.
    """
    commits = {row.get("commit") for row in rows if row.get("outcome") == "ok"}
    named = set(re.findall(r"(?:lmbench commit|code at) (\w+)", page))
    return len(named) == 1 and commits <= named and ", with changes" not in page


def test_the_mfu_of_others_trainings_follows_from_their_figures_by_one_definition():
    rows = read_rows(FOLDER / "trainings.csv")
    assert without_row((FOLDER / "README.md").read_text(), rows) == set()
    for row in rows:
        if "parameters" in row:
            parameters, layers, width, context = (
                int(row[name]) for name in ("parameters", "layers", "width", "context")
            )
            assert int(row["flops_per_token"]) == 6 * parameters + 12 * layers * width * context
        if "mfu_fraction" in row:
            flops_per_s = float(row["flops_per_token"]) * float(row["tokens_per_s"])
            peak_flops_per_s = named_gpu("H100 80GB HBM3").flops_per_s("bf16")
            assert float(row["mfu_fraction"]) == pytest.approx(flops_per_s / peak_flops_per_s, abs=1e-4)


def first_screen():
    """The figures of README's first screen, under the headings that a report has."""
    screen = README[: README.index("repeat       lmbench fit")]
    texts = {
        "step (ms)": r"mean step +([\d.,]+ ± [\d.,]+) ms", "tokens/s": r"throughput +([\d,]+) tokens/s",
        "MFU (%)": r"MFU +([\d.]+) %", "peak memory (GiB)": r"peak memory +([\d.]+) GiB",
    }  # fmt: skip
    figures = {heading: re.search(pattern, screen)[1] for heading, pattern in texts.items()}
    for phase in ("forward", "backward", "optimizer"):
        mean, std = re.search(rf"^{phase} +([\d.]+) +([\d.]+) ", screen, re.MULTILINE).groups()
        figures[f"{phase} (ms)"] = f"{mean} ± {std}"
    return figures


def test_readmes_first_screen_is_a_process_in_the_reference():
    assert any(has_figures(row, first_screen()) for row in ROWS)


def test_readmes_mean_over_processes_is_a_cell_in_the_reference():
    step = re.search(r"three processes, whose mean step is ([\d.,]+ ± [\d.]+) ms", README)[1]
    assert any(has_figures(row, {"step (ms)": step}) and row["ok_runs"] == "3" for row in ROWS)


def test_readmes_plan_is_in_the_reference():
    recomputed, peak = re.search(r"recomputed: (.+)\npeak +([\d.]+) GiB measured", README).groups()
    figures = {"checkpoint": recomputed, "peak memory (GiB)": peak}
    assert any(has_figures(row, figures) and "repeat" in row for row in ROWS)


REVISION = {"commit": "c0ffee" * 6, "is_dirty": False}
CODE = {"lmbench": REVISION, "project": REVISION}


def publish(folder):
    """The page and the rows of a results folder's report."""
    assert main(["report", str(folder), "--publish", str(folder / "h9")]) == 0
    return (folder / "h9.md").read_text(), read_rows(folder / "h9.csv")


def test_publish_writes_a_row_for_every_figure_and_for_every_process(tmp_path, printed):
    pids = {"32-true": 10, "bf16-mixed": 20}

    def change(run, repeat):
        # A further run of a process is no sample.
        return {"environment.code": CODE, "pid": pids[run["precision"]] + min(repeat, 2)}

    make_sweep(tmp_path / "precision", {"trainer.precision": [*pids]}, view="precision", repeats=4, change=change)
    page, rows = publish(tmp_path)
    assert len(tables_of(page)) == 2
    assert without_row(page, rows) == set()
    assert is_of_one_commit(page, rows)
    assert not is_of_one_commit(page, [*rows, rows[0] | {"commit": "decaf0123"}])
    cells, processes = ([row for row in rows if ("repeat" in row) == is_run] for is_run in (False, True))
    for cell in cells:
        steps_s = [float(row["step_s"]) for row in processes if row["precision"] == cell["precision"]]
        assert float(cell["step_s"]) == pytest.approx(sum(steps_s) / 3)
        assert float(cell["step_low_s"]) < min(steps_s) < max(steps_s) < float(cell["step_high_s"])
    assert "it has no figure" not in printed("report", tmp_path / "precision", "--reference", tmp_path / "h9.csv")


def test_the_answer_of_another_command_is_published_beside_the_runs_and_is_no_reference_for_them(
    tmp_path, capsys, answered
):
    arms = [{"arm": "bare", "step_s": 0.1}, {"arm": "harness", "step_s": 0.1004, "over_bare_s": 0.0004}]
    notes = [["repeat", "lmbench overhead small_fp32"]]
    (tmp_path / "overhead.json").write_text(json.dumps({"tables": {"arms": arms}, "notes": notes}))
    make_sweep(tmp_path / "precision", {"trainer.precision": ["32-true"]}, view="precision")
    page, rows = publish(tmp_path)
    assert re.search(r"\| harness +\| +100.40 \| +0.400 \|", page)
    assert "lmbench overhead small_fp32" in page
    assert without_row(page, rows) == set()
    capsys.readouterr()
    answer = answered("report", tmp_path / "precision", "--reference", tmp_path / "h9.csv")
    assert not [key for key in answer["tables"]["cells"][0] if "no GPU named" in key]


def test_a_folder_of_answers_alone_is_published(tmp_path, refused):
    headline = [["measured", "NVIDIA H9, lmbench commit c0ffeec0f"]]
    answer = {"tables": {"arms": [{"arm": "harness", "step_s": 0.1004}]}, "headline": headline}
    (tmp_path / "overhead.json").write_text(json.dumps(answer))
    (tmp_path / "other.json").write_text('{"tables": {"spans": [{"begin_s": [1, 2]}]}}')
    page, rows = publish(tmp_path)
    assert [row["arm"] for row in rows] == ["harness"]
    assert is_of_one_commit(page, rows)
    assert "does not exist" in refused("report", tmp_path, tmp_path / "other", "--publish", tmp_path / "h9")


def objections(folder, printed, changes):
    """What `report --publish` says to a run of each of these precisions with these changes."""
    make_sweep(folder, {"trainer.precision": [*changes]}, change=lambda run, repeat: changes[run["precision"]])
    return flat(printed("report", folder, "--publish", folder))


def test_publish_objects_to_runs_that_nobody_can_repeat_and_to_few_processes(tmp_path, printed):
    text = objections(tmp_path / "few", printed, {"32-true": {"environment.code": {}}})
    assert "had no commit" in text
    assert "1 of its cells have fewer than 3 processes" in text


def test_publish_objects_to_runs_of_two_commits_of_lmbench(tmp_path, printed):
    code = "environment.code.lmbench.commit"
    text = objections(tmp_path / "s", printed, {"32-true": {code: "c0ffee" * 6}, "bf16-mixed": {code: "decaf0" * 6}})
    assert "runs of 2 commits: c0ffeec0f, decaf0dec; a page is of one" in text


def test_publish_does_not_object_to_a_run_that_was_stopped_before_it_read_its_commit(tmp_path, printed):
    stopped = {"outcome": "interrupted", "environment": {}}
    text = objections(tmp_path / "s", printed, {"32-true": {"environment.code": CODE}, "bf16-mixed": stopped})
    assert "commit" not in text


@cases("""
- [module, is_committed]
- [lmbench.model.LanguageModel, true]
- [mine.Model, false]
""")
def test_a_folder_without_commits_is_an_objection_only_to_code_that_may_lie_there(
    module, is_committed, tmp_path, printed
):
    code = CODE | {"project": {"commit": None, "is_dirty": None}}
    changes = {"environment.code": code, "model.name": module, "data.name": "lmbench.data.datamodule.TokenData"}
    assert ("had no commit" not in objections(tmp_path / "s", printed, {"32-true": changes})) == is_committed
