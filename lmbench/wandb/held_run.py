"""Stands in for W&B's run while a measurement goes on, so that nothing of W&B happens in it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from lmbench.records.encoding import encode
from lmbench.records.vocabulary import Record

#: What a module logged itself, in the result folder: its settings on the first line, then a line a call.
LOGGED_FILE = "logged.jsonl"


class HeldRun:
    """Takes what a module sends to its WandbLogger, or to `logger.experiment`, and keeps it until the run is over.

    Numbers, text and flags are kept (tensors of one value as they are, without waiting for the device); of anything
    else, such as images or `watch`, only the name, in `unkept`.
    """

    def __init__(self, run_id: str) -> None:
        self.id = run_id
        self.name = run_id
        self.config: Any = _Settings()
        self.summary: Any = _Settings()
        self.rows: list[Record] = []
        self.unkept: set[str] = set()

    def log(self, data: Mapping[str, Any], step: int | None = None, *_: Any, **__: Any) -> None:
        """As `wandb.Run.log`."""
        row: Record = {} if step is None else {"_step": step}
        for name, value in data.items():
            if _is_plain(value):
                row[str(name)] = _detached(value)
            else:
                self.unkept.add(str(name))
        if row:
            self.rows.append(row)

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("_"):
            raise AttributeError(name)
        self.unkept.add(name)
        return _ignore

    def write(self, folder: Path) -> None:
        """Leave what was kept in the result folder; nothing where nothing was logged.

        Raises OSError if it cannot be written.
        """
        settings = {**self.config, **{f"summary.{name}": value for name, value in self.summary.items()}}
        if not settings and not self.rows:
            return
        lines = [encode({"config": settings}), *(encode(row) for row in self.rows)]
        (folder / LOGGED_FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")


class _Settings(dict[str, Any]):
    """W&B's config or summary: items, attributes, and `update` with W&B's own options."""

    def update(self, data: Any = (), allow_val_change: bool | None = None, **more: Any) -> None:  # type: ignore[override]
        super().update(data, **more)

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def _is_plain(value: Any) -> bool:
    return isinstance(value, int | float | str) or (hasattr(value, "item") and getattr(value, "ndim", None) == 0)


def _detached(value: Any) -> Any:
    """A tensor's value as it is now: the module may go on computing in place."""
    return value.detach().clone() if hasattr(value, "detach") else value


def _ignore(*_: Any, **__: Any) -> None:
    """What stands in for a method of W&B's run."""
