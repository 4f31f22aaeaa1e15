"""Whose code failed: the lines of a traceback that are the user's own, as against Python's, lmbench's, and those of the
libraries that lmbench stands on."""

from __future__ import annotations

import os
import re
import sys
import sysconfig
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

#: Packages whose frames say nothing of the user's code. Another one, even an installed one, was brought by the user.
_LIBRARIES = (
    "torch", "lightning", "lightning_utilities", "lightning_fabric", "pytorch_lightning", "torchmetrics", "triton",
    "jsonargparse", "numpy", "scipy", "msgspec", "rich", "yaml", "wandb", "tokenizers", "jinja2", "pandas",
    "pynvml", "fsspec", "tqdm", "typeshed_client", "docstring_parser", "sympy",
)  # fmt: skip
_OWN = ("lmbench", "lmbench.callbacks", "lmbench.configs")

# Code without a file: Python's and PyTorch's own, as against a notebook's cell, `<string>` or `<stdin>`.
_GENERATED = re.compile(r"<(?:frozen |eval_with_key|__array_function__|attrs |lambdifygenerated)|.*[/\\]torchinductor_")

#: A frame as the message of an exception tells it that came from another process (a loader's worker).
_TOLD = re.compile(r'^ *File "(.+)", line (\d+), in (.+)(?:\n +(.+))?', re.MULTILINE)


@dataclass(frozen=True)
class Line:
    """A line of the user's own code: file, number, function, and the text if the file can be read."""

    file: str
    number: int
    function: str
    text: str = ""

    def __str__(self) -> str:
        """`my_module.py:31 in training_step`."""
        return f"{Path(self.file).name}:{self.number} in {self.function}"

    def lines(self) -> str:
        """As Python writes it in a traceback."""
        return f'  File "{self.file}", line {self.number}, in {self.function}\n' + (
            f"    {self.text}\n" if self.text else ""
        )


def own_lines(exception: BaseException) -> list[Line]:
    """The user's lines that an exception came through, the one that failed last.

    Lines of the user's own files; where there are none, those of packages that only the user's code can have brought.
    """
    if "Original Traceback (most recent call last):" in str(exception):
        lines = [Line(file, int(number), *rest) for file, number, *rest in _TOLD.findall(str(exception))]
    else:
        frames = traceback.extract_tb(exception.__traceback__)
        lines = [Line(frame.filename, frame.lineno or 0, frame.name, frame.line or "") for frame in frames]
    brought = [line for line in lines if not _is_library(line.file)]
    return [line for line in brought if not _is_installed(line.file)] or brought


def own_traceback(exception: BaseException) -> TracebackType | None:
    """The exception's traceback without the frames of Lightning and its like; None where the user has none in it."""
    links, link = list[TracebackType](), exception.__traceback__
    while link is not None:
        links.append(link)
        link = link.tb_next
    kept: TracebackType | None = None
    for link in reversed(links):
        if not _is_library(link.tb_frame.f_code.co_filename):
            kept = TracebackType(kept, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return kept


def is_lmbenchs_own(exception: BaseException) -> bool:
    """Whether lmbench's own code failed, in what Lightning called of it or beside that: of the frames that are neither
    PyTorch's nor Python's, the last one is lmbench's."""
    owners = {**dict.fromkeys(_folders(_OWN), True), **dict.fromkeys(_folders(("lightning", "jsonargparse")), False)}
    for frame in reversed(traceback.extract_tb(exception.__traceback__)):
        for folder, is_own in owners.items():
            if _is_in(frame.filename, [folder]):
                return is_own
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
    return is_python or _is_in(file, _folders((*_OWN, *_LIBRARIES)))


def _is_installed(file: str) -> bool:
    return bool({"site-packages", "dist-packages"} & set(Path(file).parts))


def _folders(names: tuple[str, ...]) -> list[str]:
    """Where packages lie (of a single file, that file), of those that are imported: only they can have a frame."""
    modules = [sys.modules.get(name) for name in names]
    # A package is where its own file is: lmbench's path names a checkout's root too.
    return [
        str(Path(module.__file__).parent) if hasattr(module, "__path__") else module.__file__
        for module in modules
        if module is not None and module.__file__
    ]


def _is_in(file: str, folders: list[str]) -> bool:
    return any(file == folder or file.startswith(folder + os.sep) for folder in folders)
