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
        raise UsageError(f"{what}: {_why_no_import(module_name, error)}") from error


def _why_no_import(module_name: str, error: BaseException) -> str:
    if isinstance(error, ModuleNotFoundError) and error.name:
        if f"{module_name}.".startswith(f"{error.name}."):
            return f"there is no module {error.name}, neither in this folder nor installed"
        return f"{module_name} imports {error.name}, which is not installed"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{error.filename}:{error.lineno}" if isinstance(error, SyntaxError) else f"{frame.filename}:{frame.lineno}"
    return f"importing {module_name} failed at {place}: {type(error).__name__}: {' '.join(str(error).split())}"
