"""Configurations and studies that ship with lmbench: `fit --config NAME` and `sweep NAME` find them by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmbench.errors import UsageError
from lmbench.files import Unreadable, read_file


def shipped_configs() -> dict[str, Path]:
    """The files of single runs, by name."""
    return _shipped("*.yaml")


def shipped_studies() -> dict[str, Path]:
    """The sweep files, by name."""
    return _shipped("sweeps/*.yaml")


#: The largest study that ships has 2 kB; a list of a thousand included cells some 100 kB.
MAX_YAML_BYTES = 2**20
#: Values of a file once its aliases are written out, mappings and lists included, and how deep they nest.
MAX_YAML_VALUES = 200_000
MAX_YAML_DEPTH = 50


def read_yaml(path: Path, what: str) -> tuple[str, Any]:
    """The text of a YAML file of a user's, and its content; `what` is how an error calls the file.

    Raises:
        UsageError: it cannot be read, is no YAML, or is more than is ever meant: too large, nested too deeply, with
            aliases that multiply or contain themselves.
    """
    try:
        # Without the mark that some editors put before UTF-8.
        text = read_file(path, MAX_YAML_BYTES, follows_links=True).decode("utf-8-sig")
    except (Unreadable, UnicodeError) as error:
        raise UsageError(f"{what} cannot be read: {error}") from error
    return text, parse_yaml(text, what)


def parse_yaml(text: str, what: str) -> Any:
    """The content of a YAML text; raises UsageError as `read_yaml` does."""
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)(text)
    try:
        _refuse_depth(yaml, text)
        node = loader.get_single_node()
        if node is None:
            return None
        _extent(yaml, node, {}, MAX_YAML_DEPTH)
        content = loader.construct_document(node)
        # A number of more than 4 300 digits (0xfff...) could not be written any more.
        repr(content)
        return content
    except _TooMuch as error:
        raise UsageError(f"{what} is not read: {error}") from None
    # ValueError: a date or a number of no value, such as 2026-99-99.
    except (yaml.YAMLError, ValueError) as error:
        raise UsageError(f"{what} is no YAML: {' '.join(str(error).split())}") from error
    finally:
        loader.dispose()


class _TooMuch(Exception):
    """YAML that holds more than is ever meant."""


def _refuse_depth(yaml: Any, text: str) -> None:
    """Before anything is built of it, which would take a frame of the stack for every level."""
    depth = 0
    for event in yaml.parse(text, getattr(yaml, "CSafeLoader", yaml.SafeLoader)):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_YAML_DEPTH:
            raise _TooMuch(f"it is nested more than {MAX_YAML_DEPTH} levels deep")


def _extent(yaml: Any, node: Any, known: dict[int, tuple[int, int]], levels: int) -> tuple[int, int]:
    """How many values a node is and how many levels deep, its aliases written out; `known` tells it of nodes by their
    ids, `levels` is how many more are allowed."""
    if levels < 0 or (id(node) in known and known[id(node)][1] > levels):
        raise _TooMuch(f"it contains itself, or is nested more than {MAX_YAML_DEPTH} levels deep")
    if id(node) not in known:
        count, height = 1, 0
        if isinstance(node, yaml.CollectionNode):
            pairs = isinstance(node, yaml.MappingNode)
            for child in (part for pair in node.value for part in pair) if pairs else node.value:
                of_child = _extent(yaml, child, known, levels - 1)
                count, height = count + of_child[0], max(height, of_child[1] + 1)
                if count > MAX_YAML_VALUES:
                    raise _TooMuch(f"with its aliases written out it has more than {MAX_YAML_VALUES:,} values")
        known[id(node)] = count, height
    return known[id(node)]


def _shipped(pattern: str) -> dict[str, Path]:
    return {path.stem: path for path in sorted(Path(__file__).parent.glob(pattern))}
