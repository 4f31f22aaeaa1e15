"""Turn jsonargparse's complaints into one line: what was given, what is allowed, what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable
from difflib import get_close_matches

_KEY = re.compile(r'Parser key "([^"]+)":')
_GIVEN = re.compile(r"(?:Given value|Got value): (.*)")
_NESTED = re.compile(r"NestedArg\(key='(\w+)'")
_EXPECTED = re.compile(r"Expected an? (<class '[^']+'>|typing\.Literal\[[^\]]*\]|[^.\n]+)")
_IN_CLASS = re.compile(
    r'Parser key "([^"]+)":.*Problem with given class_path \'([^\']+)\':\n(.*?)\n    - Expected', re.DOTALL
)
_REQUIRED = re.compile(r"the following arguments are required: (.+)")
_REFUSED = re.compile(r"(?:Option '|unrecognized arguments: --)([\w.]+)")
# What a key is taken for when nothing says which class it is.
_BASES = ("lightning.LightningModule", "lightning.LightningDataModule")
_UNKNOWN = re.compile(r"(?:unrecognized arguments: |does not accept option ')(?:--)?([\w.+-]+)(.*)", re.DOTALL)


def translate(text: str, options: Iterable[str]) -> str:
    """One line for a message of jsonargparse; `options` are the names a misspelt one may have been meant for."""
    in_class = _IN_CLASS.search(text)
    if in_class:
        key, class_path, detail = in_class.groups()
        return _about_class(key, class_path, detail, list(options))
    unknown = _UNKNOWN.search(text)
    if unknown:
        return _misspelt(unknown.group(1), list(options))
    setting, given = _KEY.search(text), _GIVEN.search(text)
    if setting and given and (nested := _NESTED.search(given.group(1))):
        option = f"--{setting.group(1)}.{nested.group(1)}"
        return f"{option} is an option of a class; name the class before it: --{setting.group(1)} CLASS {option} ..."
    if setting and given:
        return f"{setting.group(1)} is {given.group(1).strip()!r}; {_allowed(text)}"
    if text.startswith("Unexpected config"):
        return (
            f"a configuration is YAML with a setting a line (`key: value`); given: {text.partition(':')[2].strip()!r}"
        )
    return " ".join(text.split())


def _about_class(key: str, class_path: str, detail: str, options: list[str]) -> str:
    """What is wrong with the arguments of a class that was named (`--model my_file.MyModule`)."""
    required, refused = _REQUIRED.search(detail), _REFUSED.search(detail)
    if required:
        names = [f"--{key}.{name.strip()}" for name in required.group(1).split(",")]
        return f"{class_path} needs {' and '.join(names)}"
    if refused and class_path in _BASES:
        return f"{key} is given both as a class and by arguments of lmbench's own; keep one (a class has its init_args)"
    if refused:
        near = get_close_matches(refused.group(1), [o[len(key) + 1 :] for o in options if o.startswith(f"{key}.")], 1)
        hint = f"; did you mean --{key}.{near[0]}?" if near else ""
        return f"{class_path} takes no {refused.group(1)}{hint}"
    argument, given = _KEY.search(detail), _GIVEN.search(detail)
    if argument and given:
        return f"{key}.{argument.group(1)} is {given.group(1).strip()!r}; {_allowed(detail)}"
    return f"{key} {class_path}: {' '.join(detail.split())}"


def _misspelt(name: str, options: list[str]) -> str:
    if name not in options and not any(option.startswith(name + ".") for option in options):
        near = get_close_matches(name, options, 1, 0.6)
        hint = f"; did you mean --{near[0]}?" if near else ""
        return f"unknown option --{name}{hint} (`lmbench fit --help` lists them all)"
    return f"--{name} was not understood here; options are --name value, after the command"


def _allowed(text: str) -> str:
    """The choices or types that would have done, in the reader's words."""
    choices: list[str] = []
    for expected in _EXPECTED.findall(text):
        if expected.startswith("typing.Literal"):
            choices += [word.strip().strip("'\"") for word in expected[len("typing.Literal[") : -1].split(",")]
        elif expected != "<class 'NoneType'>" and not expected.startswith("path but"):
            choices.append(_TYPES.get(expected, expected.removeprefix("<class '").removesuffix("'>")))
    unique = list(dict.fromkeys(choices))
    if "typing.Literal" in text:
        unique = [choice for choice in unique if choice not in _TYPES.values()]
    return f"allowed: {', '.join(unique)}" if unique else "that is not of the right form"


_TYPES = {
    "<class 'int'>": "a whole number",
    "<class 'float'>": "a number",
    "<class 'str'>": "a text",
    "<class 'bool'>": "true or false",
    "<class 'list'>": "a list, such as '[a, b]'",
    "<class 'tuple'>": "a list of two, such as '[0.9, 0.95]'",
}
