"""`lmbench completion bash|zsh`: what the Tab key offers, in a tenth of a second."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

from lmbench.commands import COMMANDS, MEASURING
from lmbench.commands.fit_help import OPTIONS
from lmbench.commands.signatures import GROUPS, arguments, group_options
from lmbench.configs import shipped_configs, shipped_studies
from lmbench.errors import ExitCode, tell
from lmbench.records.named import RESULTS, given_names
from lmbench.standard_output import write_result

_SHELLS = ("bash", "zsh")
#: What a command takes beside results.
_OFFERED = {
    "sweep": shipped_studies(), "board": shipped_studies(), "memory": shipped_configs(), "compare": shipped_configs(),
    "noise": shipped_configs(), "completion": _SHELLS,
}  # fmt: skip
_WITHOUT_RESULTS = ("board", "ceiling", "completion", "fields", "numerics", "overhead", "selfcheck")
_HELP = """usage: lmbench completion bash|zsh

Prints the script that completes commands, configurations, studies, options and names of
results with the Tab key.

In ~/.bashrc:  eval "$(lmbench completion bash)"
In ~/.zshrc:   eval "$(lmbench completion zsh)", below compinit
"""


def run(args: list[str]) -> int:
    """Print a shell's script; after `--words` what the last of the words may become."""
    if args[1:2] == ["--words"]:
        # bash takes an equals sign for a word of its own.
        words = [word for word in args[2:-1] if word != "="] + ["" if args[-1] == "=" else args[-1]]
        offered = dict.fromkeys(candidates(words))
        write_result("".join(f"{word}\n" for word in offered if word.startswith(words[-1])))
    elif args[1:] in (["-h"], ["--help"]):
        print(_HELP, end="")
    elif len(args) == 2 and args[1] in _SHELLS:
        write_result(Path(__file__).with_suffix(f".{args[1]}").read_text(encoding="utf-8"))
    else:
        tell(f"completion was given {' '.join(args[1:])!r}; it takes one of {', '.join(_SHELLS)}")
        return ExitCode.USAGE
    return ExitCode.OK


def candidates(words: Sequence[str]) -> Iterable[str]:
    """What may stand in the place of the last word, after `lmbench` and the words before it."""
    command, current, previous = words[0], words[-1], words[-2] if words[1:] else ""
    option, equals, _ = current.partition("=")
    if equals:
        return [f"{option}={value}" for value in candidates([*words[:-1], option, ""])]
    daily = {name: (value, text) for options in OPTIONS.values() for name, value, text in options}
    value, text = daily.get(previous, ("", ""))
    is_measuring = command in MEASURING
    if not words[1:] or command in ("help", "nsys"):
        first = MEASURING if command == "nsys" else COMMANDS
        return candidates(words[1:]) if words[2:] else first
    if value in ("NAME", "SIZE", "true"):
        return [part.split()[0] for part in text.split(", ")] if value != "true" else ["true", "false"]
    if previous in ("--config", "-c") or (is_measuring and len(words) == 2 and not current.startswith("-")):
        return shipped_configs()
    if current.startswith("-"):
        own = arguments(f"lmbench.commands.{command}", command)
        options = [f"--{name}" for name in own if name != "settings"] + ["--json"] * ("format" in own)
        if is_measuring or "settings" in own:
            group = current.removeprefix("--").partition(".")[0]
            options += [*daily, "--config", *(f"--{name}" for name in GROUPS.get(group, ()) and group_options(group))]
        return ["-h", *options]
    results = [] if command in _WITHOUT_RESULTS or (is_measuring and value != "RESULT") else _results()
    return [*results, *_OFFERED.get(command, ())]


def _results() -> list[str]:
    folders = sorted(RESULTS.iterdir()) if RESULTS.is_dir() else []
    return ["last", "last~1", *given_names(), *(str(path) for path in folders if not path.is_symlink())]
