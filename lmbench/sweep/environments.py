"""Environments that cells run in: which Python, which code and which variables a process gets on this machine.

A git revision is checked out into a folder of the user's cache, from which Python then imports.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lmbench.errors import UsageError
from lmbench.files import cache_folder, short_digest
from lmbench.masking import MASK, to_fill_in
from lmbench.programs import git
from lmbench.sweep.file import EnvironmentSpec


class ServerLost(Exception):
    """The fork server of an environment did not start, or ended early. The message is one line."""


@dataclass(frozen=True)
class Environment:
    """Where a process runs.

    Attributes:
        name: None for the environment of the sweep itself.
        python: path of the interpreter.
        spec: describes the environment on any machine; its revision is a commit.
        folder: working directory in the checkout of the revision; None keeps the sweep's working directory.
    """

    name: str | None
    python: str
    spec: EnvironmentSpec
    folder: Path | None = None

    @property
    def import_paths(self) -> list[Path]:
        """Folders of the checkout that Python imports from: the folder itself, and `src` in it if it exists."""
        return [] if self.folder is None else [path for path in (self.folder / "src", self.folder) if path.is_dir()]

    def process_variables(self) -> dict[str, str]:
        """All environment variables of a process in this environment."""
        variables = {**os.environ, **self.spec.variables}
        if self.folder is not None:
            paths = [*map(str, self.import_paths), variables.get("PYTHONPATH", "")]
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return variables

    def check_origin(self, lmbench: Path) -> None:
        """Raises ServerLost where the checkout has an lmbench, but the folder of the imported one is not in it."""
        paths = self.import_paths
        has_lmbench = any((path / "lmbench/__init__.py").is_file() for path in paths)
        if has_lmbench and not any(lmbench.resolve().is_relative_to(path.resolve()) for path in paths):
            raise ServerLost(f"lmbench comes from {lmbench}, not from {self.folder}")


#: The environment of the sweep itself.
HERE = Environment(None, sys.executable, EnvironmentSpec())


def resolve(specs: Mapping[str, EnvironmentSpec]) -> dict[str, Environment]:
    """The environments by name, each with its Python found and its revision checked out.

    Raises:
        UsageError: there is no such Python or revision, or a secret variable is missing.
    """
    environments = {}
    for name, spec in specs.items():
        python = sys.executable if spec.python is None else shutil.which(Path(spec.python).expanduser())
        if python is None:
            raise UsageError(f"environment {name}: python {spec.python!r} is no program; name an interpreter")
        commit = folder = None
        if spec.revision is not None:
            try:
                root, commit = resolve_revision(spec.revision)
                here = Path.cwd().relative_to(root)
                folder = check_out(root, commit) / here
                if not folder.is_dir():
                    raise UsageError(f"its revision has no folder {str(here)!r}; start from one that it has")
            except UsageError as error:
                raise UsageError(f"environment {name}: {error}") from error
        # A sweep's folder holds a mask in the place of a secret. Its value has to be exported again.
        variables = {key: os.environ.get(key, MASK) if text == MASK else text for key, text in spec.variables.items()}
        for variable in to_fill_in(variables):
            problem = f"{variable} is not stored in a sweep's folder"
            raise UsageError(f"environment {name}: {problem}; export it, or go on with the sweep's file")
        # Links are kept: Python knows a virtual environment by the path that it is started from.
        python = str(Path(python).absolute())
        environments[name] = Environment(name, python, EnvironmentSpec(spec.python, commit, variables), folder)
    return environments


def resolve_revision(revision: str) -> tuple[Path, str]:
    """The git repository of the working directory, and the commit that `revision` names there.

    Raises:
        UsageError: the working directory is in no repository, or the revision does not exist.
    """
    here = Path.cwd()
    root = Path(git(here, "rev-parse", "--show-toplevel", problem=f"{str(here)!r} is in no git repository"))
    names = ["rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"]
    problem = f"{revision!r} is no revision of {root}; `git log --all` lists them"
    return root, git(root, *names, problem=problem)


def commits_between(good: str, bad: str) -> list[str]:
    """The commits from `good` to `bad`, both included, along first parents.

    Raises:
        UsageError: one of them does not exist, or `good` is no ancestor of `bad`.
    """
    (root, first), (_, last) = resolve_revision(good), resolve_revision(bad)
    problem = f"{good} is no ancestor of {bad}; give the good one first"
    git(root, "merge-base", "--is-ancestor", first, last, problem=problem)
    return [first, *git(root, "rev-list", "--reverse", "--first-parent", f"{first}..{last}", problem=problem).split()]


def check_out(root: Path, commit: str) -> Path:
    """A folder with the repository as it was at a commit, made once and kept in the user's cache.

    The folder is a clone that shares the repository's objects. So nothing is written into the repository, and lmbench
    finds the commit in the clone as in any working tree. A clone that was changed, or whose objects the repository has
    deleted, is made anew.

    Raises:
        UsageError: git fails, or the folder cannot be written.
    """
    folder = cache_folder() / "checkouts" / f"{root.name}-{short_digest(str(root))}" / commit[:16]
    try:
        git(folder, "diff", "--quiet", commit, problem="")
        return folder
    except UsageError:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as scratch:
            clone = Path(scratch) / "clone"
            words = ["clone", "--quiet", "--shared", "--no-checkout", "--", str(root), str(clone)]
            git(root, *words, problem=f"{root} cannot be cloned")
            git(clone, "checkout", "--quiet", "--detach", commit, problem=f"commit {commit} cannot be checked out")
            # One move, so that another sweep never sees a part of the clone.
            clone.rename(folder)
    except OSError as error:
        # Another sweep may have made the folder meanwhile.
        if error.errno != errno.ENOTEMPTY:
            raise UsageError(f"{folder} cannot be written: {error.strerror}") from error
    return folder
