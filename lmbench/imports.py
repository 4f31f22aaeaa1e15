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
        name = getattr(error, "name", None) if isinstance(error, ModuleNotFoundError) else None
        if name and f"{module_name}.".startswith(f"{name}."):
            why = f"there is no module {name}, neither in this folder nor installed"
        elif name:
            why = f"{module_name} imports {name}, which is not installed"
        else:
            last = traceback.extract_tb(error.__traceback__)[-1]
            place = f"{last.filename}:{last.lineno}"
            if isinstance(error, SyntaxError):
                place = f"{error.filename}:{error.lineno}"
            reason = " ".join(str(error).split())
            why = f"importing {module_name} failed at {place}: {type(error).__name__}: {reason}"
        raise UsageError(f"{what}: {why}") from error
