"""Every mistake a user can make gets one line, exit code 2, no traceback and no half-made result folder."""

from __future__ import annotations

import pytest
from tables import rows

from lmbench.cli import main

MISTAKES = rows("""
--trainer.precision=transformer-engine | Requirement 'transformer_engine
--trainer.precision=bf8 | trainer.precision is 'bf8'; allowed:
--model.optimizer=fused | unknown optimizer 'fused'
--model.context_length=8 | set that: --data.context_length 8
--measure.mode=inference | use `lmbench validate`
--trainer.accelerator=gpu | the Trainer refuses its flags
--data.source=text --model.vocab_size=100 | need at least 257
--data.source=text --data.text_files=[empty.txt] | empty
--config=nope.yaml | is no file and no shipped configuration
--config=mine.yaml | unknown option --model.sizee; did you mean --model.size?
--measure.steps=abc | measure.steps is 'abc'; allowed: a whole number
--trainer.profiler=foo | trainer.profiler is 'foo'; allowed: kernels
--measure.results_dir=/proc/x | cannot be written
""")


@pytest.mark.parametrize(("words", "told"), MISTAKES)
def test_a_mistake_gets_one_line_and_exit_code_2(words, told, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.yaml").write_text("model:\n  sizee: tiny\n")
    (tmp_path / "empty.txt").touch()
    assert main(["fit", "--config=smoke", *words.split()]) == 2
    error = capsys.readouterr().err
    assert (told in error, error.startswith("lmbench: "), error.count("\n")) == (True, True, 1)
    assert not list(tmp_path.glob("results/*"))
