"""Configurations and studies that ship with lmbench: `fit --config NAME` and `sweep NAME` find them by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmbench.errors import UsageError


def shipped_configs() -> dict[str, Path]:
    """The files of single runs, by name."""
    return _shipped("*.yaml")


def shipped_studies() -> dict[str, Path]:
    """The sweep files, by name."""
    return _shipped("sweeps/*.yaml")


def read_yaml(path: Path, what: str) -> tuple[str, Any]:
    """The text of a YAML file of a user's, and its content; `what` is how an error calls the file.

    Raises:
        UsageError: it cannot be read, or is no YAML.
    """
    import yaml

    try:
        text = path.read_text(encoding="utf-8")
        return text, yaml.safe_load(text)
    except (OSError, UnicodeError) as error:
        raise UsageError(f"{what} cannot be read: {error}") from error
    except yaml.YAMLError as error:
        raise UsageError(f"{what} is no YAML: {' '.join(str(error).split())}") from error


def _shipped(pattern: str) -> dict[str, Path]:
    return {path.stem: path for path in sorted(Path(__file__).parent.glob(pattern))}
