"""Environments that cells run in: Python, code and variables as they really are on this machine.

A revision of a git repository is checked out into a folder of the user's cache that Python can import from.
"""

from __future__ import annotations

import errno
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from lmbench.errors import UsageError
from lmbench.masking import MASK, to_fill_in
from lmbench.sweep.file import EnvironmentSpec

_TIMEOUT_S = 300.0


class ServerLost(Exception):
    """The server of an environment did not start, or ended before its time; one line says why."""


@dataclass(frozen=True)
class Environment:
    """Where a process runs; `name` is None for the sweep's own. `spec` is what makes it up on whichever machine, its
    revision a commit. Without `folder` (in a checkout) it stays in the sweep's working directory."""

    name: str | None
    python: str
    spec: EnvironmentSpec
    folder: Path | None = None

    @property
    def import_paths(self) -> list[Path]:
        """What must be on Python's path to import from the checkout: itself, and `src` where there is one."""
        return [] if self.folder is None else [path for path in (self.folder / "src", self.folder) if path.is_dir()]

    def process_variables(self) -> dict[str, str]:
        """All environment variables of a process in it."""
        variables = {**os.environ, **self.spec.variables}
        if self.folder is not None:
            paths = [*map(str, self.import_paths), variables.get("PYTHONPATH", "")]
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return variables

    def check_origin(self, lmbench: Path) -> None:
        """Make sure that the imported lmbench is the checkout's, where the checkout has one. Raises ServerLost."""
        paths = self.import_paths
        is_there = any((path / "lmbench/__init__.py").is_file() for path in paths)
        if is_there and not any(lmbench.resolve().is_relative_to(path.resolve()) for path in paths):
            raise ServerLost(f"lmbench comes from {lmbench}, not from {self.folder}")


#: Where the sweep itself runs.
HERE = Environment(None, sys.executable, EnvironmentSpec())


def resolve(specs: Mapping[str, EnvironmentSpec]) -> dict[str, Environment]:
    """Find or make every environment.

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
                folder = check_out(root, commit) / Path.cwd().relative_to(root)
            except UsageError as error:
                raise UsageError(f"environment {name}: {error}") from error
        # A sweep's folder keeps no secrets.
        variables = {key: os.environ.get(key, MASK) if text == MASK else text for key, text in spec.variables.items()}
        for variable in to_fill_in(variables):
            lost = f"{variable} is not stored in a sweep's folder"
            raise UsageError(f"environment {name}: {lost}; export it, or go on with the sweep's file")
        # Not the interpreter's target: what makes a virtual environment is the path.
        known = EnvironmentSpec(spec.python, commit, variables=variables)
        environments[name] = Environment(name, str(Path(python).absolute()), known, folder)
    return environments


def resolve_revision(revision: str) -> tuple[Path, str]:
    """The repository that the working directory lies in, and the commit that `revision` names there.

    Raises:
        UsageError: no repository, or no such revision.
    """
    here = Path.cwd()
    root = Path(_git(here, "rev-parse", "--show-toplevel", problem=f"{str(here)!r} is in no git repository"))
    names = ["rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"]
    return root, _git(root, *names, problem=f"{revision!r} is no revision of {root}")


def check_out(root: Path, commit: str) -> Path:
    """A folder with the repository as it was at a commit; made once, and kept in the user's cache.

    It is a clone that borrows the repository's objects: nothing is written into the repository, and lmbench finds the
    commit in the clone as it does in any working tree. A clone that was changed, or whose objects the repository has
    dropped, is made anew.

    Raises:
        UsageError: git refuses.
    """
    digest = hashlib.sha256(str(root).encode()).hexdigest()[:8]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = cache / "lmbench" / "checkouts" / f"{root.name}-{digest}" / commit[:16]
    try:
        _git(folder, "diff", "--quiet", commit, problem="")
        return folder
    except UsageError:
        shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".new-") as scratch:
            clone = Path(scratch) / "clone"
            words = ["clone", "--quiet", "--shared", "--no-checkout", "--", str(root), str(clone)]
            _git(root, *words, problem=f"{root} cannot be cloned")
            _git(clone, "checkout", "--quiet", "--detach", commit, problem=f"commit {commit} cannot be checked out")
            # In one move: another sweep sees all of it or nothing.
            clone.rename(folder)
    except OSError as error:
        # Another sweep may have made it meanwhile.
        if error.errno != errno.ENOTEMPTY:
            raise UsageError(f"{folder} cannot be written: {error.strerror}") from error
    return folder


def _git(folder: Path, *words: str, problem: str) -> str:
    """What git prints in a folder. Raises UsageError with the problem, and with what git says of it."""
    command = ["git", "-C", str(folder), *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{problem}: git: {error}") from error
    if done.returncode:
        raise UsageError(f"{problem} ({' '.join(done.stderr.split())})")
    return done.stdout.strip()
