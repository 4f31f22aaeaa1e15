"""The README is true: its definitions are the registry's, its commands run, its Python runs."""

from __future__ import annotations

import json
import re
import shlex
import sys

import pytest
import warm_server
from paths import ROOT

from lmbench.cli import COMMANDS
from lmbench.errors import ExitCode

from conftest import Sleeper, SlowBatches

README = ROOT / "README.md"
TEXT = README.read_text()
QUICK = ["--measure.steps=3", "--measure.min_window_s=0", "--measure.probe_steps=1"]
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", TEXT, re.DOTALL | re.MULTILINE)


def block(language, holding):
    (match,) = [text for lang, text in BLOCKS if lang == language and holding in text]
    return match


def commands(text):
    """The words of a shell block's `lmbench` commands, also behind a prompt or at the end of a chain."""
    words = []
    for line in text.splitlines():
        start = re.search(r"^(?:\$ )?lmbench |&& \S*/lmbench ", line)
        if start:
            words.append(shlex.split(line[start.end() :], comments=True))
    return words


def quickened(words):
    """A short version of a command. One that needs a GPU, a cluster or an idle machine is only parsed."""
    match "" if "slurm" in words else words[0]:
        case "fit" | "validate":
            is_quick = "smoke" in " ".join(words) or "--model" in words
            return [*words, *(QUICK if is_quick else ["--print_config"])]
        case "sweep":
            # A study that is not tiny needs a GPU.
            return [*words, *(["--repeats=1", "--measure.steps=3"] if "tiny" in words[1] else ["--dry_run"])]
        case "noise" | "compare" if "--run" in words:
            return [*words, *QUICK, *(["--budget=0.1s"] if words[0] == "compare" else [])]
        case "memory" if "--config" in words:
            return [*words, "--model.num_layers=2"]
        case "show" | "report" | "compare" | "noise" | "kernels":
            return words
    return [words[0], "-h"]


#: A small config for `--model.config`, since the README's model has a billion parameters.
LLAMA = """{
"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 100,
"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64
}"""


def write_examples(folder):
    """The files that the README's examples name."""
    (folder / "my_module.py").write_text(block("python", "class MyModule"))
    (folder / "llama_1b.json").write_text(LLAMA)


EXAMPLES = [words for language, text in BLOCKS if language in ("", "bash", "console") and (words := commands(text))]
VERDICTS = (ExitCode.OK, ExitCode.SLOWER, ExitCode.UNDECIDED, ExitCode.INVALID)


@pytest.mark.parametrize("examples", EXAMPLES, ids=[" ".join(example[0][:3]) for example in EXAMPLES])
def test_the_commands_of_every_example_run_one_after_the_other(examples, tmp_path):
    (tmp_path / "configs").symlink_to(README.parent / "configs")
    write_examples(tmp_path)
    for words in examples:
        done = warm_server.run(*quickened(words), folder=tmp_path)
        allowed = VERDICTS if words[0] == "compare" else (ExitCode.OK,)
        assert done.returncode in allowed, (words, done.stderr)
        assert done.stdout
        if quickened(words)[1:] == ["-h"]:
            options = [word for word in words if word.startswith("--") and "." not in word]
            assert [option for option in options if option not in done.stdout] == []


def test_the_notebook_runs_and_shows_the_run_as_html(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    write_examples(tmp_path)
    kernel = tmp_path / "kernels" / "python3"
    kernel.mkdir(parents=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(json.dumps({"argv": command, "display_name": "python3", "language": "python"}))
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    code = block("python", "lmbench.measure(").replace("steps=20", "steps=3, min_window_s=0.0, probe_steps=0")
    *lines, last = code.strip().splitlines()
    cells = [
        nbformat.v4.new_code_cell(cell) for cell in ("\n".join(lines), f"print(run)\n{last}", "lmbench.measure(data)")
    ]
    cells[-1].metadata["tags"] = ["raises-exception"]
    notebook = nbformat.v4.new_notebook(cells=cells)
    nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(tmp_path)}}).execute()
    outputs = [[output for output in cell.outputs if output.output_type == "execute_result"] for cell in notebook.cells]
    assert "throughput.tokens_per_s" in outputs[0][0].data["text/plain"]
    assert "forward" in outputs[1][0].data["text/html"]
    (mistake,) = cells[-1].outputs
    assert mistake.traceback == [f"UsageError: {mistake.evalue}"]
    # Only the two figures are printed. Importing Lightning may warn of a progress bar for notebooks.
    streams = [output.text for cell in notebook.cells for output in cell.outputs if output.output_type == "stream"]
    _, figures = (text for text in streams if "TqdmWarning" not in text)
    assert " ms (std" in figures, streams
    assert len(list((tmp_path / "results").iterdir())) == 1


def test_the_callbacks_example_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace = {}
    exec(block("python", "PhaseTimer()").replace("max_steps=20,", "max_steps=20, accelerator='cpu',"), namespace)
    namespace["trainer"].fit(Sleeper(), SlowBatches())
    assert len(namespace["timer"].records) == 20
    assert len(list((tmp_path / "results").glob("*/steps.jsonl"))) == 1


def test_the_example_of_a_study_is_one(tmp_path, printed):
    (tmp_path / "mine.yaml").write_text(block("yaml", "matrix:"))
    assert "cells: 4, repeats: 3, runs: 12" in printed("sweep", tmp_path / "mine.yaml", "--dry_run")


def test_exit_codes_and_commands_are_named():
    for code in ("0 fine", "2 usage", "3 out of memory", "130 interrupted"):
        assert code in TEXT
    for command in COMMANDS:
        assert f"lmbench {command}" in TEXT or f"`{command}`" in TEXT, command
