"""Importing what a user names, and saying in one line why that failed."""

from __future__ import annotations

import importlib
import traceback
from types import ModuleType

from lmbench.errors import UsageError


def import_named(what: str, module_name: str) -> ModuleType:
    """Import a module of the user's; `what` says where it was named.

    Raises:
        UsageError: there is no such module, or its own code failed, with the line.
    """
    try:
        return importlib.import_module(module_name)
    except (Exception, SystemExit) as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{frame.filename}:{frame.lineno}"
        if isinstance(error, SyntaxError):
            place = f"{error.filename}:{error.lineno}"
        reason = f"importing {module_name} failed at {place}: {type(error).__name__}: {' '.join(str(error).split())}"
        if isinstance(error, ModuleNotFoundError) and error.name:
            reason = f"{module_name} imports {error.name}, which is not installed"
            if f"{module_name}.".startswith(f"{error.name}."):
                reason = f"there is no module {error.name}, neither in this folder nor installed"
        raise UsageError(f"{what}: {reason}") from error
