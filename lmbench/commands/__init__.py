"""The commands: functions of a few modules, each imported when one of its commands is called."""

from importlib.resources import files

MEASURING = ("fit", "validate")

_LINES = (files(__name__) / "commands.txt").read_text("utf-8").splitlines()
#: By name its module and what it does, as commands.txt has it. The module has a typed function of the command's name,
#: or `run(args: list[str]) -> int`.
COMMANDS = {name: words for name, *words in (line.split(maxsplit=2) for line in _LINES)}
