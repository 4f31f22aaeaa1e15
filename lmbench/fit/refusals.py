"""Settings that every parser lets through and nothing can be measured with: refused before anything is built."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lmbench.errors import UsageError

_SEED_LIMIT = 2**32


def refuse(config: Any) -> None:
    """Look through the parsed configuration of a command, a namespace with `get`.

    Raises:
        UsageError: a group that is null, a seed that NumPy cannot take, a checkpoint that is not there, a limit that
            would keep training from ending, or no name for the results folder.
    """
    for group in ("trainer", "measure", "timer", "wandb"):
        if group in config and config[group] is None:
            raise UsageError(f"{group} is null; leave it out, or give its settings")
    for name in ("min_steps", "min_epochs"):
        if config.trainer.get(name) is not None:
            raise UsageError(
                f"trainer.{name} is {config.trainer.get(name)}; lmbench ends training itself, after the window: "
                "ask for more with --measure.steps or --measure.min_window_s"
            )
    seed = config.get("seed_everything")
    if seed is not None and not 0 <= seed < _SEED_LIMIT:
        raise UsageError(f"seed_everything is {seed}; it must be from 0 to {_SEED_LIMIT - 1}")
    if not config.measure.results_dir.strip():
        raise UsageError("measure.results_dir is empty; give a folder, such as results")
    _refuse_checkpoint(config.get("ckpt_path"))


def _refuse_checkpoint(path: str | None) -> None:
    # An address is the file system's business; `best` and `last` are of earlier runs of the same Trainer, and there
    # are none.
    if path is not None and "://" not in path and not Path(path).is_file():
        raise UsageError(f"ckpt_path {path!r} is no file; give a checkpoint's")


def about_checkpoint(path: str, error: Exception) -> UsageError:
    """What to say of a checkpoint that cannot be read."""
    # PyTorch goes on with advice for programmers after its first sentence.
    why = (str(error) or type(error).__name__).splitlines()[0].split(". ")[0]
    return UsageError(f"ckpt_path {path!r} cannot be read: {why}")
