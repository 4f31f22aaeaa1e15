"""Environments that cells run in: Python, code and variables as they really are on this machine.

A revision of a git repository is checked out into a folder of the user's cache that Python can import from.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from msgspec import Struct, field

from lmbench.errors import UsageError
from lmbench.sweep.file import EnvironmentSpec

_TIMEOUT_S = 300.0


class ServerLost(Exception):
    """The server of an environment did not start, or ended before its time; one line says why."""


class EnvironmentFacts(Struct, frozen=True):
    """What makes up an environment, on whichever machine: `python` as it was given, the commit, variables."""

    python: str | None = None
    commit: str | None = None
    variables: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Environment:
    """Where a process runs; `name` is None for the sweep's own. Without `folder` (in a checkout) it stays in the
    sweep's working directory."""

    name: str | None
    python: str
    facts: EnvironmentFacts
    folder: Path | None = None

    def process_variables(self) -> dict[str, str]:
        """All environment variables of a process in it."""
        variables = {**os.environ, **self.facts.variables}
        if self.folder is not None:
            paths = [*map(str, import_paths(self.folder)), variables.get("PYTHONPATH", "")]
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return variables

    def check_origin(self, lmbench: Path) -> None:
        """Make sure that the lmbench found there is the checkout's, where the checkout has one. Raises ServerLost."""
        folder = self.folder
        if folder is None or not any((path / "lmbench" / "__init__.py").is_file() for path in import_paths(folder)):
            return
        if not lmbench.resolve().is_relative_to(folder.resolve()):
            raise ServerLost(f"lmbench comes from {lmbench}, not from {folder}")


#: Where the sweep itself runs.
HERE = Environment(None, sys.executable, EnvironmentFacts())


def resolve(specs: Mapping[str, EnvironmentSpec], makes_checkouts: bool = True) -> dict[str, Environment]:
    """Find or make every environment; without `makes_checkouts` revisions are only looked up.

    Raises:
        UsageError: there is no such Python, tree or revision.
    """
    environments = {}
    for name, spec in specs.items():
        try:
            environments[name] = _resolve(name, spec, makes_checkouts)
        except UsageError as error:
            raise UsageError(f"environment {name}: {error}") from error
    return environments


def _resolve(name: str, spec: EnvironmentSpec, makes_checkouts: bool) -> Environment:
    python = sys.executable if spec.python is None else shutil.which(Path(spec.python).expanduser())
    if python is None:
        raise UsageError(f"python {spec.python!r} is no program; name an interpreter, such as /path/.venv/bin/python")
    commit = folder = None
    if spec.revision is not None:
        tree = Path(spec.tree or ".").expanduser().resolve()
        root, commit = resolve_revision(tree, spec.revision)
        folder = check_out(root, commit) / tree.relative_to(root) if makes_checkouts else None
    # Not the interpreter's target: what makes a virtual environment one is the path.
    return Environment(
        name, str(Path(python).absolute()), EnvironmentFacts(spec.python, commit, spec.variables), folder
    )


# revisions


def resolve_revision(tree: Path, revision: str) -> tuple[Path, str]:
    """The repository that `tree` lies in, and the commit that `revision` names there.

    Raises:
        UsageError: no repository, or no such revision.
    """
    if not tree.is_dir():
        raise UsageError(f"tree {str(tree)!r} is no folder; name one within a git repository")
    root = Path(_git(tree, "rev-parse", "--show-toplevel", what=f"{str(tree)!r} is in no git repository"))
    commit = _git(
        root, "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}",
        what=f"{revision!r} is no revision of {root}",
    )  # fmt: skip
    return root, commit


def check_out(root: Path, commit: str) -> Path:
    """A folder with the repository as it was at a commit; made once, and kept in the user's cache.

    It is a clone that borrows the repository's objects: nothing is written into the repository, and lmbench finds the
    commit in the clone as it does in any working tree.

    Raises:
        UsageError: git refuses.
    """
    digest = hashlib.sha256(str(root).encode()).hexdigest()[:8]
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lmbench" / "checkouts"
    folder = cache / f"{root.name}-{digest}" / commit[:16]
    if _is_intact(folder, commit):
        return folder
    shutil.rmtree(folder, ignore_errors=True)
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".new-"))
    try:
        clone = scratch / "clone"
        failed = f"{root} cannot be cloned"
        _git(root, "clone", "--quiet", "--shared", "--no-checkout", "--", str(root), str(clone), what=failed)
        _git(clone, "checkout", "--quiet", "--detach", commit, what=f"commit {commit} cannot be checked out")
        _link_packages(clone)
        # In one move: another sweep sees all of it or nothing.
        clone.rename(folder)
    except OSError as error:
        if not _is_intact(folder, commit):
            raise UsageError(f"{folder} cannot be written: {error.strerror}") from error
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return folder


def import_paths(folder: Path) -> list[Path]:
    """What has to be on Python's path so that the folder's packages are found: itself, and `src` where there is one."""
    return [path for path in (folder / "src", folder) if path.is_dir()]


def _is_intact(folder: Path, commit: str) -> bool:
    """Whether a checkout is there as it was made. Its objects are the repository's, which may have dropped them."""
    try:
        _git(folder, "diff", "--quiet", commit, what="")
    except UsageError:
        return False
    return True


def _link_packages(folder: Path) -> None:
    """Put packages that lie elsewhere than their names say (setuptools' `package-dir`) where an import looks for them.

    Otherwise such a package would come from another, installed copy of the same project.
    """
    try:
        project = tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return
    places = project.get("tool", {}).get("setuptools", {}).get("package-dir", {})
    for package, place in places.items():
        link = folder.joinpath(*package.split("."))
        if package and link.parent.is_dir() and not link.exists():
            link.symlink_to(os.path.relpath(folder / place, link.parent), target_is_directory=True)


def _git(folder: Path, *words: str, what: str) -> str:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *words],
            capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"{what}: git: {error}") from error
    if done.returncode:
        complaint = " ".join(done.stderr.split())
        raise UsageError(f"{what} ({complaint})" if complaint else what)
    return done.stdout.strip()
