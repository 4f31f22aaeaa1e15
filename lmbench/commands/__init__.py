"""The commands: functions of a few modules, each module imported when one of its commands runs."""

from importlib.resources import files

MEASURING = ("fit", "validate")

_LINES = (files(__name__) / "commands.txt").read_text("utf-8").splitlines()
#: Each command's module and summary, from commands.txt. The module has a typed function of the command's name, or
#: `run(args: list[str]) -> int`.
COMMANDS = {name: words for name, *words in (line.split(maxsplit=2) for line in _LINES)}
