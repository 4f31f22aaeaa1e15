"""The commands: a module each, imported when it is called."""

from importlib.resources import files

MEASURING = ("fit", "validate")

#: By name, what it does, as commands.txt has it. `fit` and `validate` are `commands.fit`, every other one is a module
#: of its name, with a typed function of its name, or `run(args: list[str]) -> int`.
COMMANDS = dict(line.split(maxsplit=1) for line in (files(__name__) / "commands.txt").read_text("utf-8").splitlines())
