"""Configurations that ship with lmbench; `--config NAME` finds them by name."""

from __future__ import annotations

from pathlib import Path


def shipped_configs() -> dict[str, Path]:
    """The configurations of single runs, by name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}
