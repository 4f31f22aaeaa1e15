"""README and the guide are true: their commands and their Python run, and their pages and links are there."""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from configparser import ConfigParser

import pytest
import torch
import warm_server
from fit_process import QUICK
from fit_process import measure_here as measure
from pages import PAGES, README, block, blocks_of
from paths import ROOT
from strangers import Telling
from tables import cases, flat

import lmbench
from lmbench.catalogue import make_catalogue
from lmbench.cli import COMMANDS, main
from lmbench.errors import ExitCode
from lmbench.guide import INDEX, text, topics
from lmbench.records.guards import rules
from lmbench.records.passes import PASS
from lmbench.records.schema import RECORDS, fields
from lmbench.report.view import AnswerSpec, ChartSpec, TableSpec, View
from lmbench.sweep.file import EnvironmentSpec, LargestSpec, SweepFile, read_sweep_file
from lmbench.tune.space import read_space

from conftest import Sleeper, SlowBatches

TEXT = "\n".join(PAGES.values())
SMALL = [*QUICK, "--model.d_model=32", "--data.context_length=8"]


def commands(page):
    """The words of the `lmbench` commands in a page's blocks, also behind a prompt or at the end of a chain."""
    blocks = [re.sub(r"\n +--", " --", text) for _, text in blocks_of(page)]
    pattern = r"^(?:\$ | +|.*&& \S*/)?lmbench ([a-z].*?)(?: >>.*)?$"
    lines = [line for text in blocks for line in re.findall(pattern, text, re.MULTILINE)]
    return [shlex.split(line, comments=True) for line in lines]


def quickened(words):
    """A short version of a command. One that needs a GPU, a cluster or an idle machine is only parsed."""
    needs_more = {"slurm", "--revision"} & {*words}
    match "" if needs_more else words[0]:
        case "fit" | "validate":
            if "--model" in words:
                return [*words, *QUICK]
            return [*words, *(SMALL if "smoke" in " ".join(words) else ["--print_config"])]
        case "sweep":
            # A study that is not tiny needs a GPU.
            return [*words, *(["--repeats=1", "--measure.steps=3"] if "tiny" in words[1] else ["--dry_run"])]
        case "compare" if "--run" in words:
            return [*words, *SMALL, "--budget=0.1s"]
        case "show" | "report" | "compare" | "kernels" | "dtypes" | "list" | "guide" | "fields":
            return words
    return [words[0], "-h"]


#: A small config for `--model.config`, since the page's model has a billion parameters.
LLAMA = """{
"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 100,
"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64
}"""


def write_examples(folder):
    """The files that the examples name."""
    (folder / "my_module.py").write_text(block("your_model", "python", "class MyModule"))
    (folder / "llama_1b.json").write_text(LLAMA)


EXAMPLES = {topic: words for topic, page in PAGES.items() if (words := commands(page))}
VERDICTS = (ExitCode.OK, ExitCode.SLOWER, ExitCode.UNDECIDED, ExitCode.INVALID)


@pytest.mark.usefixtures("warm_sweeps")
@cases("topic", *EXAMPLES)
def test_the_commands_of_a_page_run_one_after_the_other(topic, here, capsys):
    (here / "configs").symlink_to(ROOT / "configs")
    write_examples(here)
    for words in EXAMPLES[topic]:
        quick = quickened(words)
        if words[0] in ("fit", "validate") and not {"--repeats", "--compare"} & {*words}:
            done = warm_server.run(*quick, folder=here)
            code, out, err = done.returncode, done.stdout, done.stderr
        else:
            code = main(quick)
            out, err = capsys.readouterr()
        allowed = VERDICTS if words[0] == "compare" or "--compare" in words else (ExitCode.OK,)
        assert code in allowed, (words, err)
        assert out or "--output" in words
        if quick[1:] == ["-h"]:
            # `--config` and dotted options are those of `lmbench fit`.
            options = [word for word in words if word.startswith("--") and "." not in word and word != "--config"]
            assert [option for option in options if option not in out] == []


def test_the_notebook_of_the_python_page_shows_the_run_as_html_and_a_mistake_as_a_line(here, monkeypatch, capsys):
    shell_of = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell
    write_examples(here)
    monkeypatch.syspath_prepend(here)
    monkeypatch.setenv("IPYTHONDIR", str(here))
    shell, quick = shell_of(), "steps=3, min_window_s=0.0, probe_steps=0"
    code = block("python", "python", "lmbench.measure(").replace("steps=20", quick)
    *lines, last = code.strip().splitlines()
    frame = shell.run_cell("\n".join(lines)).result
    assert "throughput.tokens_per_s" in shell.display_formatter.format(frame)[0]["text/plain"]
    assert "forward" in shell.display_formatter.format(shell.run_cell(last).result)[0]["text/html"]
    capsys.readouterr()
    mistake = shell.run_cell("lmbench.measure(data)").error_in_exec
    assert capsys.readouterr().out.strip() == f"UsageError: {mistake}"
    assert len(list((here / "results").iterdir())) == 1


def run_python(topic, holding, **namespace):
    """The names that a block of Python leaves. A Trainer in it uses the CPU, and a measurement is short."""
    code = block(topic, "python", holding).replace("max_steps=20,", "max_steps=20, accelerator='cpu',")
    quick = "steps=3, min_window_s=0.0, probe_steps=0, trainer={'accelerator': 'cpu'}"
    exec(code.replace('precision="bf16-mixed"', quick), namespace)
    return namespace


def test_the_callbacks_of_the_python_page_watch_a_trainer(here, printed):
    names = run_python("python", "PhaseTimer()")
    names["trainer"].fit(Sleeper(), SlowBatches())
    assert len(names["timer"].records) == 20
    assert len(list((here / "results").glob("*/steps.jsonl"))) == 1
    assert "\nwindow       15 steps, after 5 of warm-up\n" in printed("show", "last")


def test_the_python_of_readme_measures_a_module(capsys):
    tokens = torch.ones(2, 8, dtype=torch.long)
    run_python("README", "lmbench.measure(", module=Telling(), data=(tokens, tokens))
    assert all(float(word) > 0 for word in capsys.readouterr().out.split())


def test_the_callback_of_the_extending_page_notes_the_spread_of_losses():
    callback = run_python("extending", "class LossSpread")["LossSpread"]()
    run = measure(trainer={"callbacks": [callback]})
    losses = [step.loss for step in run.steps if step.stage == "window"]
    assert callback.spread == pytest.approx(max(losses) - min(losses))


@pytest.mark.usefixtures("warm_sweeps")
def test_the_study_of_the_sweeps_page_is_one(tmp_path, printed):
    (tmp_path / "mine.yaml").write_text(block("sweeps", "yaml", "matrix:"))
    assert "cells: 4, repeats: 3, runs: 12" in printed("sweep", tmp_path / "mine.yaml", "--dry_run")


def test_every_field_of_a_study_is_in_the_guides_table_and_in_a_new_study_whose_lines_all_fit(tmp_path, printed):
    path = tmp_path / "mine.yaml"
    assert "mine.yaml --dry_run" in printed("sweep", "--new", path)
    assert main(["sweep", "--new", str(path)]) == 2
    text, table = path.read_text(), PAGES["sweeps"].partition("## The fields of a study")[2]
    parts = (SweepFile, EnvironmentSpec, LargestSpec, View, TableSpec, ChartSpec, AnswerSpec)
    names = {name for part in parts for name in part.__struct_fields__}
    assert [name for name in names if f"`{name}`" not in table and f".{name}`" not in table] == []
    assert names <= {*re.findall(r"(\w+):", text)}
    assert all(kind in table and kind in text for kind in ("against", "best", "fastest", "parts", "stack", "curves"))
    left_out = re.findall(r"^ *# (?:- \{|[a-z_]+: ).*$", text, re.MULTILINE)
    assert len(left_out) == 13
    for line in ["", *left_out]:
        (tmp_path / "changed.yaml").write_text(text.replace(line, line.replace("# ", "", 1)))
        study, _ = read_sweep_file(tmp_path / "changed.yaml")
        make_catalogue().view(study.view, study.matrix)


def test_every_list_of_passes_has_those_of_the_registry(printed):
    new_study = (ROOT / "lmbench" / "sweep" / "new.yaml").read_text()
    for place in (printed("sweep", "-h"), PAGES["sweeps"].replace("`", ""), new_study):
        assert ", ".join(PASS) in flat(place)
    (about,) = re.findall("`instrument`: (.*?) - `seed`", flat(printed("guide", "python")))
    assert [name for name in PASS if name not in about] == []


def test_the_space_of_the_tuning_page_adds_axes_and_takes_one_away(tmp_path):
    (tmp_path / "space.yaml").write_text(block("tuning", "yaml", "axes:"))
    shipped, axes = read_space(None), read_space(tmp_path / "space.yaml")
    assert {axis.name for axis in shipped} ^ {axis.name for axis in axes} == {"compile_whole", "model.width", "loader"}


def test_every_block_of_python_and_yaml_has_a_test():
    """Those above, the module that all examples share, and the package of tests/test_rooms.py; a workflow is read like
    a shell's commands."""
    counts = Counter(language for page in PAGES.values() for language, _ in blocks_of(page))
    assert (counts["python"], counts["yaml"]) == (6, 3)


def test_commands_are_named():
    for command in COMMANDS:
        assert f"lmbench {command}" in TEXT or f"`{command}`" in TEXT, command


def test_readme_is_short_enough_to_be_read():
    assert len(README.splitlines()) <= 250


@cases("topic", *PAGES, INDEX)
def test_every_link_leads_to_a_file(topic):
    folder = ROOT if topic == "README" else ROOT / "lmbench" / "guide"
    links = re.findall(r"\]\(([^)#:]+)\)", PAGES.get(topic) or text(INDEX))
    assert [link for link in links if not (folder / link).is_file()] == []


def test_the_index_lists_every_page():
    pages = {path.stem for path in (ROOT / "lmbench" / "guide").glob("*.md")}
    assert {INDEX, *topics()} == pages


def test_columns_fields_guards_and_the_api_are_written_from_the_code(printed):
    columns, api = printed("guide", "columns"), printed("guide", "python")
    named = {*re.findall(r"^- `([\w.<>-]+)`", columns, re.MULTILINE)}
    every = {field.pattern for kind in RECORDS for field in fields(kind).values()}
    assert every | {*rules()} | {*make_catalogue().columns} == named
    headings = {*re.findall(r"^### ([\w.]+)$", api, re.MULTILINE)}
    assert {f"lmbench.{name}" for name in lmbench.__all__ if name != "__version__"} <= headings
    assert "- `probe_steps`: unmeasured steps after the window" in api


def test_a_terminal_shows_a_page_laid_out_and_a_pipe_gets_its_markdown(printed, monkeypatch):
    markdown = printed("guide", "comparing")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    shown = re.sub(r"\x1b\[[\d;]*m", "", printed("guide", "comparing"))
    assert (markdown.startswith("# Comparing\n"), "# Comparing" in shown) == (True, False)
    assert "see traces." in shown
    assert max(map(len, shown.splitlines())) <= 80


def test_the_house_has_every_layer_in_its_order():
    contracts = ConfigParser(comment_prefixes="#")
    contracts.read(ROOT / ".importlinter")
    layers = contracts["importlinter:contract:layers"]["layers"]
    picture = re.findall(r"^ (\w.*?)(?:   .*)?$", block("house", "", "cli"), re.MULTILINE)[1:]
    drawn = " ".join(picture).split()
    assert drawn == re.findall(r"lmbench\.(\w+)", layers)
