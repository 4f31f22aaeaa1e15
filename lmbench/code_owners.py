"""Whose code a file is: the user's, lmbench's, Lightning's, PyTorch's, Python's or another library's.

Errors, allocator snapshots and hidden synchronizes name a line, and this module chooses whose. The name of a folder
that a project lies in decides nothing: a user's project may lie in `lmbench`, `callbacks`, `torch` or `lib`.
"""

from __future__ import annotations

import re
import sys
import sysconfig
from collections.abc import Iterable, Mapping, Sequence
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

#: Libraries that a user brings. A line in them may be to blame, but a function in them is not the user's own.
_BROUGHT = """transformers datasets huggingface_hub safetensors deepspeed torchvision torchaudio sklearn PIL cv2
    matplotlib tensorboard hydra omegaconf pyarrow"""
_LIBRARIES = {*_OWNERS, *_BROUGHT.split()}

#: Folders of installed packages.
INSTALLED = frozenset({"site-packages", "dist-packages"})

#: Generated code by owner, unlike a notebook's cell, `<string>` or `<stdin>`. Inductor names a file by a long hash, and
#: its folder by two letters of the hash.
_GENERATED = re.compile(
    r"(?P<python>^<frozen )|(?P<library>^<(?:__array_function__|attrs |lambdifygenerated))"
    r"|(?P<pytorch>^<eval_with_key>|[/\\](?:torchinductor_|torch_compile_debug[/\\])|[/\\](\w\w)[/\\]\w\4\w{40,}\.py$)"
)

#: A function of a file with its line, in a trace.
_FUNCTION = re.compile(r"(.*?)\.py(?=\([1-9]\d*\): )")

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
#: Parts of a checkout.
_PARTS = ("lmbench", "callbacks", "configs")
#: Folders of lmbench that other projects have too, so that a file in them does not tell a checkout.
_USUAL_FOLDERS = {"callbacks", "configs", "data", "model"}


def code_owner(file: str, folders: Mapping[str, Owner] | None = None) -> Owner:
    """The owner of a file: that of the innermost known folder around it.

    Args:
        file: name of the file, as frames have it.
        folders: known folders and single files by path, such as `recorded_folders`; by default those of this process.
    """
    if (generated := _GENERATED.search(file)) is not None:
        return cast(Owner, generated.lastgroup)
    known = _folders() if folders is None else folders
    path = PurePath(file.replace("\\", "/"))
    for folder in (path, *path.parents):
        if folder.name in INSTALLED:
            break
        if (owner := known.get(str(folder))) is not None:
            return owner
    return "user"


def _folders() -> dict[str, Owner]:
    """Folders, or files of a single module, of Python and of the packages that this process has imported."""
    folders = dict[str, Owner]()
    for name, owner in _OWNERS.items():
        if (file := getattr(sys.modules.get(name), "__file__", None)) is not None:
            folders[file.removesuffix("/__init__.py")] = owner
    return folders | _lasting_folders()


@cache
def _lasting_folders() -> dict[str, Owner]:
    """The folders of Python and of lmbench; finding them takes 0.5 ms, and a stack has dozens of files."""
    return {sysconfig.get_path("stdlib"): "python", **dict.fromkeys(map(str, own_folders()), "lmbench")}


def is_own_object(subject: object) -> bool:
    """Whether the class of an object is one of lmbench's."""
    return type(subject).__module__.startswith("lmbench.")


def own_folders() -> list[Path]:
    """The folders of lmbench's code. In a checkout, whose root is on the package's path, there are three."""
    return [Path(__file__).parent, *(Path(root, part) for root in lmbench.__path__[1:] for part in _PARTS)]


def is_users_function(name: str) -> bool:
    """Whether a Python function of a trace, such as `my_data.py(27): tokenize`, is in the user's own file.

    The profiler leaves out the folders that Python imports from, so that the file's path may begin with a package.
    """
    if (function := _FUNCTION.match(name)) is None:
        return False
    file, (package, *rest) = function[0], function[1].split("/")
    is_library = (
        package in sys.stdlib_module_names or (package in _LIBRARIES and rest) or not INSTALLED.isdisjoint(rest)
    )
    return not (is_library or _FOREIGN_PYTHON.match(file) or _GENERATED.search(file))


def recorded_folders(files: Iterable[str]) -> dict[str, Owner]:
    """Folders of packages, and files of single modules, as the paths of one recording of any machine tell them.

    A checkout of lmbench is recognized by one of its files, and without such a file its callbacks count as the user's.
    """
    folders = {}
    for path in {file.replace("\\", "/") for file in files}:
        if (package := _FOREIGN_PACKAGE.match(path)) and (owner := _OWNERS.get(package[1] or package[2])):
            folders[package[0]] = owner
        if python := _FOREIGN_PYTHON.match(path):
            folders[python[0]] = "python"
        root, _, file = path.rpartition("/lmbench/")
        if file in _telling_files():
            folders |= {f"{root}/{part}": "lmbench" for part in _PARTS}
    return folders


@cache
def _telling_files() -> set[str]:
    """lmbench's own files that tell a checkout, as folder and name: `instruments/clock.py`."""
    files = Path(__file__).parent.glob("*/*.py")
    return {f"{file.parent.name}/{file.name}" for file in files if file.parent.name not in _USUAL_FOLDERS}


def location_of(file: str, line: int | None) -> str:
    """A line of code in short: `model.py:31`."""
    return f"{Path(file).name}:{line}"


#: The frames that `responsible_frame` prefers; any other owner's come last.
_RANKS: Mapping[Owner, int] = {"user": 3, "lightning": 2, "lmbench": 2, "pytorch": 1}


def responsible_frame(frames: Sequence[FrameSummary]) -> FrameSummary:
    """The frame to name for what happened in a Trainer.

    It is the innermost frame of the user; without one, of Lightning or lmbench; without one, of PyTorch. Frames around
    the Trainer do not count: a script that calls `fit` did not ask for all that happens inside.

    Args:
        frames: a stack, the outermost frame first.
    """
    owners = [code_owner(frame.filename) for frame in frames]
    trainers = (
        index
        for index, frame in enumerate(frames)
        if owners[index] == "lightning" and frame.filename.endswith("/trainer/trainer.py")
    )
    inside = range(next(trainers, 0), len(frames))
    return frames[max(inside, key=lambda index: (_RANKS.get(owners[index], 0), index))]
