"""Configurations and studies that ship with lmbench: `fit --config NAME` and `sweep NAME` find them by name."""

from __future__ import annotations

from pathlib import Path


def shipped_configs() -> dict[str, Path]:
    """The files of single runs, by name."""
    return _shipped("*.yaml")


def shipped_studies() -> dict[str, Path]:
    """The sweep files, by name."""
    return _shipped("sweeps/*.yaml")


def _shipped(pattern: str) -> dict[str, Path]:
    return {path.stem: path for path in sorted(Path(__file__).parent.glob(pattern))}
