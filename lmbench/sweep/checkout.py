"""A revision of a git repository as a folder that Python can import from."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
import tomllib
from pathlib import Path

from lmbench.errors import UsageError

_TIMEOUT_S = 300.0


def cache_dir() -> Path:
    """Where checkouts are kept: `lmbench/checkouts` in the user's cache folder."""
    root = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(root) / "lmbench" / "checkouts"


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
    """A folder with the repository as it was at a commit; made once, and kept.

    It is a clone that borrows the repository's objects: nothing is written into the repository, and lmbench finds the
    commit in the clone as it does in any working tree.

    Raises:
        UsageError: git refuses.
    """
    digest = hashlib.sha256(str(root).encode()).hexdigest()[:8]
    folder = cache_dir() / f"{root.name}-{digest}" / commit[:16]
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
    if not (folder / ".git").is_dir():
        return False
    try:
        # The objects are the repository's: it may have dropped them, or be gone.
        at = _git(folder, "rev-parse", "HEAD", what="")
        return at == commit and not _git(folder, "status", "--porcelain", "--untracked-files=no", what="")
    except UsageError:
        return False


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
        told = " ".join(done.stderr.split())
        raise UsageError(f"{what}{f' ({told})' if told else ''}")
    return done.stdout.strip()
