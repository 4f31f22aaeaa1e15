"""The words that the Tab key offers, and the options that are known without PyTorch."""

from __future__ import annotations

import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from refusals import usage_error
from runs import make_run
from tables import cases, stored

from lmbench.fit.command_line import CommandLine
from lmbench.fit_options import check_options, option_names

#: The folders of `lmbench` and of the programs that the scripts call.
PATH = f"{Path(sys.executable).parent}:/usr/bin:/bin"
CASES = stored("completion")
SHELLS = {
    "bash": 'COMP_WORDS=({words}); COMP_CWORD={last}; _lmbench lmbench; printf "%s\\n" "${{COMPREPLY[@]}}"',
    "zsh": "words=({words}); CURRENT=$(({last} + 1)); _lmbench",
}
#: Replacements for functions of zsh that exist only during a completion.
ZSH = "compdef() { }; compadd() { print -l ${(P)2} }; _files() { };"


@cases("line | some", *CASES["offered"].items())
def test_the_tab_key_offers_the_words_that_may_follow(line, some, here, printed):
    make_run(here / "results" / "a run", {})
    (here / "results" / "baseline").symlink_to("a run")
    assert set(printed("completion", "--words", *line.split()).splitlines()) == set(some)


def output_of(shell, script, folder=None):
    words = [shell, "-c", script]
    return subprocess.run(words, env={"PATH": PATH}, capture_output=True, text=True, check=True, cwd=folder).stdout


@cases("shell", *SHELLS)
def test_the_script_of_a_shell_asks_and_gets_an_answer(shell, printed):
    if shutil.which(shell) is None:
        pytest.skip(f"no {shell} here")
    script = printed("completion", shell)
    call = SHELLS[shell].format(words="lmbench fit --trainer.precision bf16-m", last=3)
    before = ZSH if shell == "zsh" else ""
    assert output_of(shell, f"{before}\n{script}\n{call}").split() == ["bf16-mixed"]


@cases("name", "x;touch PWNED;#", "$(touch PWNED)", "`touch PWNED`*", "a'b\"c", "~", "a b")
def test_bash_gets_the_name_of_a_folder_quoted(name, tmp_path, printed):
    make_run(tmp_path / "results" / name, {})
    call = SHELLS["bash"].format(words="lmbench show results/", last=2)
    # What the shell makes of the word that was completed.
    script = f'{printed("completion", "bash")}\n{call} >/dev/null\neval "printf %s ${{COMPREPLY[0]}}"'
    output = output_of("bash", script, tmp_path)
    assert (output, sorted(path.name for path in tmp_path.iterdir())) == (f"results/{name}", ["results"])


@cases("name", "line\nfeed", "\x1b[31mred", "right\u202eleft", "caf\udce9")
def test_a_name_that_a_terminal_would_obey_is_not_offered(name, here, printed):
    make_run(here / "results" / name, {})
    (here / "results" / "--json").symlink_to(name)
    assert printed("completion", "--words", "show", "").split() == ["last", "last~1"]


def test_every_option_that_the_real_parser_has_is_known_without_it():
    actual = CommandLine("validate", ["--config=smoke"])._parser._option_string_actions
    known = {option for option in option_names() if "." in option}
    grouped = {name.removeprefix("--") for name in actual if "." in name}
    assert known == {name.removesuffix("+") for name in grouped if name.count(".") == 1 and "help" not in name}
    options = [name for name in actual if name.startswith("--") and name != "--print_shtab"]
    check_options([word for name in options for word in (name, "smoke" if name == "--config" else "x")])


@cases("words | near", *CASES["near"].items())
def test_a_misspelt_option_is_reported_with_the_nearest_one(words, near, here):
    Path("mine.yaml").touch()
    expectation = usage_error(f"unknown option.*{near}") if near else nullcontext()
    with expectation:
        check_options(words.split())
