"""The words of a command line before Lightning's parser sees them: output flags, and what has a short name."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lmbench.configs import parse_yaml, read_yaml, shipped_configs
from lmbench.errors import UsageError, suggest

KERNEL_PROFILER = "lmbench.KernelProfiler"


@dataclass(frozen=True)
class Words:
    """A command line: `options` are for the parser, the command first; the flags are about what is printed.

    `as_json` prints the record, `is_quiet` only where the result lies, `only_settings` the settings, and measures
    nothing.
    """

    options: list[str]
    as_json: bool = False
    is_quiet: bool = False
    only_settings: bool = False

    @property
    def is_nothing(self) -> bool:
        """Whether there is no option at all."""
        return len(self.options) == 1


def read(words: list[str]) -> Words:
    """Take the flags out, and replace short names by what they stand for.

    Raises:
        UsageError: a configuration that is neither a file nor a shipped one.
    """
    flags = {"--json", "--quiet", "--print_config"} & set(words)
    options = expand_configs(expand_profiler(named_first([word for word in words if word not in flags])))
    return Words(options, "--json" in flags, "--quiet" in flags, "--print_config" in flags)


def named_first(words: list[str]) -> list[str]:
    """A word without an option, first after the command, names the configuration: `fit smoke`."""
    if len(words) > 1 and not words[1].startswith("-"):
        return [words[0], "--config", *words[1:]]
    return words


def expand_profiler(words: list[str]) -> list[str]:
    """Replace the short name `kernels` by the profiler's class, so that its options can follow it:
    `--trainer.profiler kernels --trainer.profiler.steps 5`."""
    return _replaced(words, ("--trainer.profiler",), lambda name: KERNEL_PROFILER if name == "kernels" else name)


def expand_configs(words: list[str]) -> list[str]:
    """Replace the name of a shipped configuration by its path: `--config large_bf16`.

    A file of the user's own comes first; `configs/large_bf16.yaml` also finds the shipped one where there is no such
    file.

    Raises:
        UsageError: neither a file nor the name of a shipped configuration.
    """
    return _replaced(words, ("--config", "-c"), _find)


def _replaced(words: list[str], options: tuple[str, ...], new: Callable[[str], str]) -> list[str]:
    """The words, with the value of each of these options replaced, as in `--option value` and `--option=value`."""
    replaced = list(words)
    for place, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option in options and equals:
            replaced[place] = f"{option}={new(value)}"
        elif option in options and place + 1 < len(words):
            replaced[place + 1] = new(words[place + 1])
    return replaced


def _find(given: str) -> str:
    if Path(given).exists():
        # Refused here where it is more than a configuration ever is; what it says is the parser's.
        read_yaml(Path(given), f"config {given!r}")
        return given
    # A configuration may also be given as YAML or JSON text.
    if ":" in given:
        parse_yaml(given, "--config")
        return given
    path, shipped = Path(given), shipped_configs()
    is_named = path.parent.name in ("", "configs") and not path.is_absolute() and path.suffix in ("", ".yaml")
    if is_named and path.stem in shipped:
        return str(shipped[path.stem])
    hint = suggest(path.stem, shipped) or f" ({', '.join(shipped)})"
    raise UsageError(f"config {given!r} is no file and no shipped configuration{hint}")
