"""Whose code failed: the lines of a traceback that are the user's own, as against Python's, lmbench's, and those of the
libraries that lmbench stands on."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from pathlib import Path
from traceback import FrameSummary
from types import TracebackType

#: Packages whose frames say nothing of the user's code. Another one, even an installed one, was brought by the user.
_LIBRARIES = """torch lightning lightning_utilities lightning_fabric pytorch_lightning torchmetrics triton jsonargparse
    numpy scipy msgspec rich yaml wandb tokenizers jinja2 pandas pynvml fsspec tqdm typeshed_client docstring_parser
    sympy"""
_OWN = "lmbench lmbench.callbacks lmbench.configs"

# Code without a file: Python's and PyTorch's own, as against a notebook's cell, `<string>` or `<stdin>`.
_GENERATED = re.compile(r"<(?:frozen |eval_with_key|__array_function__|attrs |lambdifygenerated)|.*[/\\]torchinductor_")

#: A frame as the message of an exception tells it that came from another process (a loader's worker).
_TOLD = re.compile(r'^ *File "(.+)", line (\d+), in (.+)(?:\n +(.+))?', re.MULTILINE)


def place(frame: FrameSummary) -> str:
    """`my_module.py:31 in training_step`."""
    return f"{Path(frame.filename).name}:{frame.lineno} in {frame.name}"


def own_lines(exception: BaseException) -> list[FrameSummary]:
    """The user's lines that an exception came through, the one that failed last.

    Lines of the user's own files; where there are none, those of packages that only the user's code can have brought.
    """
    if "Original Traceback (most recent call last):" in str(exception):
        told = [(file, int(number), name, text) for file, number, name, text in _TOLD.findall(str(exception))]
    else:
        told = [(f.filename, f.lineno or 0, f.name, f.line) for f in traceback.extract_tb(exception.__traceback__)]
    # Without columns, which Python would underline.
    lines = [FrameSummary(file, number, name, line=text) for file, number, name, text in told]
    brought = [line for line in lines if not _is_library(line.filename)]
    return [line for line in brought if not _is_installed(line.filename)] or brought


def own_traceback(exception: BaseException) -> TracebackType | None:
    """The exception's traceback without the frames of Lightning and its like; None where the user has none in it."""
    kept: TracebackType | None = None
    for frame, line in reversed(list(traceback.walk_tb(exception.__traceback__))):
        if not _is_library(frame.f_code.co_filename):
            kept = TracebackType(kept, frame, frame.f_lasti, line)
    return kept


def is_lmbenchs_own(exception: BaseException) -> bool:
    """Whether lmbench's own code failed, in what Lightning called of it or beside that: of the frames that are neither
    PyTorch's nor Python's, the last one is lmbench's."""
    for frame in reversed(traceback.extract_tb(exception.__traceback__)):
        if _is_in(frame.filename, _folders(_OWN)):
            return True
        if _is_in(frame.filename, _folders("lightning jsonargparse")):
            return False
    return True


def _is_library(file: str) -> bool:
    """Whether a file is Python's, lmbench's, or of the libraries below it."""
    cache = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    if _GENERATED.match(file) or (cache and file.startswith(cache)):
        return True
    if file.startswith("<"):
        return False
    paths = sysconfig.get_paths()
    is_python = _is_in(file, [paths["stdlib"], paths["platstdlib"]]) and not _is_installed(file)
    return is_python or _is_in(file, _folders(f"{_OWN} {_LIBRARIES}"))


def _is_installed(file: str) -> bool:
    return bool({"site-packages", "dist-packages"} & set(Path(file).parts))


def _folders(names: str) -> list[str]:
    """Where packages lie (of a single file, that file), of those that are imported: only they can have a frame."""
    files = {name: getattr(sys.modules.get(name), "__file__", None) for name in names.split()}
    # A package is where its own file is: lmbench's path names a checkout's root too.
    return [file.removesuffix(f"{os.sep}__init__.py") for file in files.values() if file]


def _is_in(file: str, folders: list[str]) -> bool:
    return any(file == folder or file.startswith(folder + os.sep) for folder in folders)
