"""`lmbench completion bash|zsh`: the words that the Tab key offers, in a tenth of a second."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

from lmbench.commands import COMMANDS, MEASURING, function_of
from lmbench.commands.fit import daily_options
from lmbench.configs import shipped_configs, shipped_studies
from lmbench.errors import ExitCode
from lmbench.fit_options import option_names
from lmbench.guide import topics
from lmbench.records.named import given_names
from lmbench.records.store import RESULTS
from lmbench.report.render import FORMATS
from lmbench.standard_output import write_result

#: Words that a command takes beside results.
_OFFERED = {
    **dict.fromkeys(("sweep", "board"), shipped_studies()),
    **dict.fromkeys(("memory", "compare", "noise", "tune", "judge"), shipped_configs()),
    "completion": ("bash", "zsh"), "guide": topics(),
}  # fmt: skip

#: Words that follow another word.
_FOLLOWING: dict[str, Iterable[str]] = {
    **dict.fromkeys(("--config", "-c", *MEASURING), shipped_configs()), "--format": FORMATS,
}  # fmt: skip


def completion(shell: Literal["bash", "zsh"]) -> int:
    """Prints the script that completes commands, configurations, studies, options and results with the Tab key.

      In ~/.bashrc:  eval "$(lmbench completion bash)"
      In ~/.zshrc:   eval "$(lmbench completion zsh)", below compinit

    Args:
        shell: bash or zsh
    """
    write_result(Path(__file__).with_suffix(f".{shell}").read_text("utf-8"))
    return ExitCode.OK


def run(args: list[str]) -> int:
    """Print a shell's script, or after `--words` the completions of the last word."""
    if args[1:2] != ["--words"]:
        # Imported here, since completing a word does not need it.
        from lmbench.commands.parser import run_typed

        return run_typed("completion", completion, args[1:])
    # bash makes an equals sign a word of its own.
    *words, current = (word.removeprefix("=") for word in args[2:])
    option, equals, current = current.rpartition("=")
    offered = candidates([*filter(None, (*words, option)), current])
    # A name that a terminal would obey, or that reads as an option, can only come from a foreign folder.
    words = [word for word in dict.fromkeys(offered) if word.startswith(current) and word.isprintable()]
    write_result("".join(f"{option}{equals}{word}\n" for word in words))
    return ExitCode.OK


def candidates(words: Sequence[str]) -> Iterable[str]:
    """Words that may replace the last of these words, which follow `lmbench` on a command line."""
    if words[0] == "nsys" and words[1:]:
        words = words[1:]
    if words[0] not in COMMANDS or not words[1:]:
        return COMMANDS if len(words) == 1 else ()
    command, previous, current = words[0], *words[-2:]
    function = function_of(command)
    daily = daily_options()
    value, text = daily.get(previous, ("", ""))
    if value in ("NAME", "SIZE"):
        return [part.split()[0] for part in text.split(",")]
    if current.startswith("-"):
        options = ["-h"]
        if function is not None:
            # Imported here, since completing an option of `fit` does not need it.
            from lmbench.commands.parser import CommandParser

            parser = CommandParser(command, function)
            options = [option for option in parser.options if option != "--help"]
            if not parser.takes_settings:
                return options
        group = current.removeprefix("--").partition(".")[0]
        of_group = (f"--{name}" for name in option_names() if name.startswith(f"{group}."))
        return [*options, *daily, "--config", *of_group]
    if previous in _FOLLOWING:
        return _FOLLOWING[previous]
    offered = [*_OFFERED.get(command, ())]
    kinds = getattr(function, "__annotations__", {}).values()
    if value == "RESULT" or any(kind.startswith("Result") for kind in kinds):
        folders = sorted(RESULTS.iterdir()) if RESULTS.is_dir() else []
        offered += ["last", "last~1", *given_names(), *(str(path) for path in folders if not path.is_symlink())]
    return offered
