"""The words of a command line before Lightning's parser sees them: shipped configurations, output flags, variables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from importlib.resources import files
from pathlib import Path

from lmbench.errors import UsageError

PREFIX = "LMBENCH_"
KERNEL_PROFILER = "lmbench.KernelProfiler"


def take_flag(words: list[str], flag: str) -> tuple[bool, list[str]]:
    """Whether `flag` is among the words, and the words without it."""
    return flag in words, [word for word in words if word != flag]


def shipped_configs() -> dict[str, Path]:
    """The configurations that ship with lmbench, by name."""
    folder = Path(str(files("lmbench.configs")))
    return {path.stem: path for path in sorted(folder.glob("*.yaml"))}


def expand_profiler(words: list[str]) -> list[str]:
    """Replace the short name `kernels` by the profiler's class, so that its options can follow it:
    `--trainer.profiler kernels --trainer.profiler.steps 5`."""
    expanded = list(words)
    for place, word in enumerate(words):
        if word == "kernels" and place and words[place - 1] == "--trainer.profiler":
            expanded[place] = KERNEL_PROFILER
        elif word == "--trainer.profiler=kernels":
            expanded[place] = f"--trainer.profiler={KERNEL_PROFILER}"
    return expanded


def expand_configs(words: list[str]) -> list[str]:
    """Replace the name of a shipped configuration by its path: `--config large_bf16`.

    A file of the user's own comes first; `configs/large_bf16.yaml` also finds the shipped one where there is no such
    file.

    Raises:
        UsageError: neither a file nor the name of a shipped configuration.
    """
    expanded = list(words)
    for place, word in enumerate(words):
        if word in ("--config", "-c") and place + 1 < len(words):
            expanded[place + 1] = _find(words[place + 1])
        elif word.startswith("--config="):
            expanded[place] = "--config=" + _find(word.removeprefix("--config="))
    return expanded


def _find(given: str) -> str:
    # A configuration may also be given as YAML or JSON text.
    if Path(given).exists() or ":" in given:
        return given
    path, shipped = Path(given), shipped_configs()
    is_named = path.parent.name in ("", "configs") and not path.is_absolute() and path.suffix in ("", ".yaml")
    if is_named and path.stem in shipped:
        return str(shipped[path.stem])
    near = get_close_matches(path.stem, shipped, 1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise UsageError(f"config {given!r} is no file and no shipped configuration ({', '.join(shipped)}){hint}")


def check_variables(environment: Mapping[str, str], command: str, commands: Iterable[str], options: list[str]) -> None:
    """Refuse misspelt `LMBENCH_*` variables, which the parser would ignore in silence.

    A value for `--model.size` of `lmbench fit` is `LMBENCH_FIT__MODEL__SIZE`. Other commands' variables are left alone.

    Raises:
        UsageError: a variable of this command that names none of its options, or of no command at all.
    """
    known = {f"{PREFIX}{command}__{option.replace('.', '__')}".upper() for option in options}
    others = tuple(f"{PREFIX}{name}__".upper() for name in commands if name != command)
    for name in environment:
        if not name.startswith(PREFIX) or name in known or name.startswith(others):
            continue
        near = get_close_matches(name, known, 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UsageError(f"environment variable {name} sets nothing{hint}")
