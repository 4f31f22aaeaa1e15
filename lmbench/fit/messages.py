"""Turn the libraries' complaints into one line: what was given, what is allowed, what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable

from lmbench.errors import UsageError, suggest
from lmbench.fit.choice import BASES, OWN, OWN_PATHS, class_options, import_class, untaken
from lmbench.masking import MASK, is_secret

_KEY = re.compile(r'Parser key "([^"]+)":')
_GIVEN = re.compile(r"(?:Given value|Got value): (.*)")
_NESTED = re.compile(r"NestedArg\(key='(\w+)'")
_EXPECTED = re.compile(r"Expected an? (<class '[^']+'>|typing\.Literal\[[^\]]*\]|[^.\n]+)")
_IN_CLASS = re.compile(r'Parser key "([^"]+)":.*?Problem with given class_path \'([^\']+)\':\n(.*)', re.DOTALL)
# The class that `--model` or `--data` names, as it stands in a complaint about it.
_NAMED = re.compile(
    r'Parser key "(model|data)":.*?(?:Expected a path but |class_path(?:\': | )\')([\w.]+)(?:\'| either)', re.DOTALL
)
_REQUIRED = re.compile(r"the following arguments are required: (.+)")
_REFUSED = re.compile(r"(?:Option '|unrecognized arguments: --)([\w.]+)")
_EXTRA = re.compile(r"unrecognized arguments: ([^-\s]\S*)")
_UNKNOWN = re.compile(r"(?:unrecognized arguments: |does not accept option ')(?:--)?([\w.+-]+)(.*)", re.DOTALL)


def translate(text: str, options: Iterable[str]) -> str:
    """One line for a message of jsonargparse; `options` are the names a misspelt one may have been meant for."""
    options = [*options, *(option for key, own in OWN.items() for option in class_options(key, own))]
    named = _NAMED.search(text)
    if named:
        try:
            import_class(named.group(1), named.group(2))
        except UsageError as error:
            return str(error)
    if in_class := _IN_CLASS.search(text):
        return _about_class(in_class.group(1), in_class.group(2), in_class.group(3), options)
    if extra := _EXTRA.search(text):
        return f"{extra.group(1)!r} is one word too many; a configuration comes first, options are --name value"
    if unknown := _UNKNOWN.search(text):
        return _misspelt(unknown.group(1), options)
    if text.startswith("Unexpected config"):
        return (
            f"a configuration is YAML with a setting a line (`key: value`); given: {text.partition(':')[2].strip()!r}"
        )
    return _about_value(text)


def _about_value(text: str) -> str:
    """What is wrong with a setting's value, and which would do."""
    setting, given = _KEY.search(text), _GIVEN.search(text)
    if setting and given and (nested := _NESTED.search(given.group(1))):
        option = f"--{setting.group(1)}.{nested.group(1)}"
        return f"{option} is an option of a class; name the class before it: --{setting.group(1)} CLASS {option} ..."
    if setting and given:
        return f"{setting.group(1)} is {_quoted(setting.group(1), given.group(1))}; {_allowed(text)}"
    return " ".join(text.split())


def _quoted(option: str, value: str) -> str:
    """A value that was refused, unless it may be a secret."""
    return MASK if is_secret(option) else repr(value.strip())


def about_checkpoint(path: str, error: Exception) -> UsageError:
    """What to say of a checkpoint that cannot be read."""
    # PyTorch goes on with advice for programmers after its first sentence.
    why = (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]
    return UsageError(f"ckpt_path {path!r} cannot be read: {why}")


def _about_class(key: str, class_path: str, detail: str, options: list[str]) -> str:
    """What is wrong with the arguments of a class: of one that was named (`--model my_file.MyModule`), or lmbench's."""
    required, refused = _REQUIRED.search(detail), _REFUSED.search(detail)
    if required:
        names = [f"--{key}.{name.strip()}" for name in required.group(1).split(",")]
        return f"{class_path} needs {' and '.join(names)}"
    if refused and OWN_PATHS.get(key) == class_path:
        if refused.group(1) in ("class_path", "init_args"):
            both = f"{key} is given both as a class and by arguments of lmbench's own"
            return f"{both}; keep one (a class has its init_args)"
        return _misspelt(f"{key}.{refused.group(1)}", options)
    if refused:
        taken = class_options(key, import_class(key, class_path)) if key in BASES else ()
        return untaken(key, class_path, refused.group(1), taken)
    argument, given = _KEY.search(detail), _GIVEN.search(detail)
    if argument and given:
        option = f"{key}.{argument.group(1)}"
        return f"{option} is {_quoted(option, given.group(1))}; {_allowed(detail)}"
    return f"{key} {class_path}: {detail.strip().splitlines()[0]}"


def _misspelt(name: str, options: list[str]) -> str:
    if name not in options and not any(option.startswith(name + ".") for option in options):
        return f"unknown option --{name}{suggest(name, options, '--{}')} (`lmbench fit --help` lists them all)"
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
