"""Why W&B did not get a result."""

from __future__ import annotations


class BoardProblem(Exception):
    """A result was not written for W&B, or not uploaded; the message is one line.

    Args:
        message: what is wrong and, where it can be said, what to do.
        is_usage: the user can put it right (no key, a wrong one).
        is_general: it would be the same for any other result, so that trying on is of no use.
    """

    def __init__(self, message: str, *, is_usage: bool = False, is_general: bool = False) -> None:
        super().__init__(message)
        self.is_usage = is_usage
        self.is_general = is_general


class IncompleteFile(BoardProblem):
    """wandb ended without an error and yet its file lacks steps, or its end."""
