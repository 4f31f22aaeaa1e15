"""Whose code a file is: the user's, lmbench's, Lightning's, PyTorch's, Python's or another library's.

Errors, allocator snapshots and hidden synchronizes name a line, and this module chooses whose. The name of a folder
that a project lies in decides nothing: a user's project may lie in `lmbench`, `callbacks`, `torch` or `lib`.
"""

from __future__ import annotations

import os
import re
import sys
import sysconfig
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path, PurePath
from traceback import FrameSummary
from typing import Literal, cast

import lmbench

Owner = Literal["user", "lmbench", "lightning", "pytorch", "python", "library"]

#: Packages and console scripts by owner. The user brought every other package, even an installed one. A library is used
#: by lmbench, Lightning or PyTorch, or wraps a user's functions.
_NAMES: Mapping[Owner, str] = {
    "lmbench": "lmbench",
    # Lightning's command line is jsonargparse's.
    "lightning": "lightning lightning_fabric lightning_utilities pytorch_lightning jsonargparse",
    "pytorch": "torch functorch torchrun triton",
    "library": """torchmetrics numpy scipy msgspec rich yaml wandb tokenizers jinja2 pandas pynvml fsspec tqdm
        typeshed_client docstring_parser sympy accelerate einops jaxtyping beartype IPython ipykernel""",
}
_OWNERS = {name: owner for owner, names in _NAMES.items() for name in names.split()}

#: Folders of installed packages.
INSTALLED = frozenset({"site-packages", "dist-packages"})

#: Generated code by owner, unlike a notebook's cell, `<string>` or `<stdin>`. Inductor names a file by a long hash, and
#: its folder by two letters of the hash.
_GENERATED = re.compile(
    r"(?P<python>^<frozen )|(?P<library>^<(?:__array_function__|attrs |lambdifygenerated))"
    r"|(?P<pytorch>^<eval_with_key>|[/\\](?:torchinductor_|torch_compile_debug[/\\])|[/\\](\w\w)[/\\]\w\4\w{40,}\.py$)"
)

#: A package or a console script in the path of a file on another machine. A `link-tree` is a PAR file's, and PyTorch's
#: own repository is called `pytorch`.
_FOREIGN_PACKAGE = re.compile(
    r".*/(?:(?:site|dist)-packages|[^/]*link-tree|pytorch(?=/(?:torch|functorch)/))/(\w+)(?:(?=/)|\.py$)"
    r"|.*/(?:bin|Scripts)/(\w+)(?:$|(?=\.exe/))"
)
#: Python's own folder, or on Windows its own module, in the path of a file on another machine.
_FOREIGN_PYTHON = re.compile(
    r".*/lib(?:64)?/python[\d.]+(?=/)"
    rf"|\w:(?i:.*(?:python|conda|mamba|forge).*/lib/(?:{'|'.join(sorted(sys.stdlib_module_names))}))(?:(?=/)|\.py$)"
)
#: Folders of lmbench that other projects have too, so that they do not tell a checkout of lmbench.
_USUAL_FOLDERS = {"callbacks", "configs", "data", "model"}


def code_owners(files: Collection[str], are_foreign: bool = False) -> dict[str, Owner]:
    """The owner of each file.

    In this process the owner is told by the folders of the imported packages; any other package can have no frame.

    Args:
        files: names of files, as frames have them.
        are_foreign: the files are those of one recording, which another machine may have made. Their paths alone then
            tell the owner: `site-packages/torch/`, say. A checkout of lmbench is recognized by one of its files, and
            without such a file its callbacks count as the user's.
    """
    if are_foreign:
        paths = {file: file.replace("\\", "/") for file in files}
        folders = _foreign_folders(paths.values())
    else:
        paths, folders = {file: file for file in files}, dict(_folders())
    return {file: _owner(path, folders) for file, path in paths.items()}


def _owner(file: str, folders: Mapping[str, Owner]) -> Owner:
    """The owner of the innermost known folder around a file, or of the file itself."""
    if (generated := _GENERATED.search(file)) is not None:
        return cast(Owner, generated.lastgroup)
    path = PurePath(file)
    for folder in (path, *path.parents):
        if folder.name in INSTALLED:
            return "user"
        if (owner := folders.get(str(folder))) is not None:
            return owner
    return "user"


def _folders() -> Iterator[tuple[str, Owner]]:
    """Folders, or files of a single module, of Python and of this process's packages."""
    for name in ("stdlib", "platstdlib"):
        yield sysconfig.get_path(name), "python"
    for name, owner in _OWNERS.items():
        if (file := getattr(sys.modules.get(name), "__file__", None)) is not None:
            yield file.removesuffix(f"{os.sep}__init__.py"), owner
    # In a checkout two parts of lmbench lie beside its package.
    for root in lmbench.__path__[1:]:
        for name in ("callbacks", "configs"):
            yield str(Path(root, name)), "lmbench"


def _foreign_folders(paths: Collection[str]) -> dict[str, Owner]:
    """Folders of packages and files of single modules, as far as the paths of a recording tell them."""
    folders: dict[str, Owner] = {}
    for path in paths:
        if (package := _FOREIGN_PACKAGE.match(path)) and (owner := _OWNERS.get(package[1] or package[2])):
            folders[package[0]] = owner
        if python := _FOREIGN_PYTHON.match(path):
            folders[python[0]] = "python"
        root, _, file = path.rpartition("/lmbench/")
        folder = file.rpartition("/")[0]
        if folder and folder not in _USUAL_FOLDERS and file in _own_files():
            folders[f"{root}/lmbench"] = "lmbench"
            callbacks = (file for file in _own_files() if file.startswith("callbacks/"))
            folders |= {f"{root}/{file}": "lmbench" for file in callbacks}
    return folders


@cache
def _own_files() -> frozenset[str]:
    """lmbench's own files, relative to its package: `instruments/clock.py`, `callbacks/session.py`."""
    return frozenset(
        file.relative_to(root).as_posix()
        for root in map(Path, lmbench.__path__)
        for file in root.glob("**/*.py" if root == Path(lmbench.__path__[0]) else "callbacks/*.py")
    )


def responsible_frame(frames: Sequence[FrameSummary]) -> FrameSummary:
    """The frame to name for what happened in a Trainer.

    It is the innermost frame of the user; without one, of Lightning or lmbench; without one, of PyTorch. Frames around
    the Trainer do not count: a script that calls `fit` did not ask for all that happens inside.

    Args:
        frames: a stack, the outermost frame first.
    """
    owners = code_owners({frame.filename for frame in frames})
    entries = (
        index
        for index, frame in enumerate(frames)
        if owners[frame.filename] == "lightning" and Path(frame.filename).parts[-2:] == ("trainer", "trainer.py")
    )
    inside = frames[next(entries, 0) :]
    for responsible in ({"user"}, {"lightning", "lmbench"}, {"pytorch"}):
        for frame in reversed(inside):
            if owners[frame.filename] in responsible:
                return frame
    return frames[-1]
