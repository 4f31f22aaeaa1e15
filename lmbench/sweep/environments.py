"""Environments that cells run in: Python, code and variables as they really are on this machine."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmbench.errors import UsageError
from lmbench.sweep.checkout import check_out, import_paths, resolve_revision
from lmbench.sweep.sweep_file import EnvironmentSpec

_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Environment:
    """Where a process runs. Without `folder` (in a checkout) it stays in the sweep's working directory.

    `facts` is what makes it up, on whichever machine: `python` as it was given, `commit`, `variables`.
    """

    python: str
    variables: Mapping[str, str]
    facts: Mapping[str, Any]
    folder: Path | None = None

    def process_variables(self) -> dict[str, str]:
        """All environment variables of a process in it."""
        variables = {**os.environ, **self.variables}
        if self.folder is not None:
            paths = [*map(str, import_paths(self.folder)), variables.get("PYTHONPATH", "")]
            variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        return variables


#: This Python, with the code as it is.
HERE = Environment(sys.executable, {}, {})


def resolve(specs: Mapping[str, EnvironmentSpec], makes_checkouts: bool = True) -> dict[str, Environment]:
    """Find or make every environment; without `makes_checkouts` revisions are only looked up.

    Raises:
        UsageError: there is no such Python, tree or revision.
    """
    found = {}
    for name, spec in specs.items():
        try:
            found[name] = _resolve(spec, makes_checkouts)
        except UsageError as error:
            raise UsageError(f"environment {name}: {error}") from error
    return found


def _resolve(spec: EnvironmentSpec, makes_checkouts: bool) -> Environment:
    python = sys.executable if spec.python is None else shutil.which(Path(spec.python).expanduser())
    if python is None:
        raise UsageError(f"python {spec.python!r} is no program; name an interpreter, such as /path/.venv/bin/python")
    # Not its target: what makes a virtual environment one is the path.
    python = str(Path(python).absolute())
    facts: dict[str, Any] = {"python": spec.python, "commit": None, "variables": dict(spec.variables)}
    if spec.revision is None:
        return Environment(python, spec.variables, facts)
    tree = Path(spec.tree or ".").expanduser().resolve()
    root, facts["commit"] = resolve_revision(tree, spec.revision)
    folder = check_out(root, facts["commit"]) / tree.relative_to(root) if makes_checkouts else None
    return Environment(python, spec.variables, facts, folder)


def check(name: str, environment: Environment) -> None:
    """Make sure that lmbench starts there, and is the checkout's where the checkout has one.

    Raises:
        UsageError: it does not.
    """
    code = "import lmbench; print(lmbench.__file__)"
    try:
        done = subprocess.run(
            [environment.python, "-P", "-c", code],
            capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S, check=False,
            env=environment.process_variables(), cwd=environment.folder,
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UsageError(f"environment {name}: {environment.python} does not run: {error}") from error
    if done.returncode:
        why = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise UsageError(f"environment {name}: {environment.python} finds no lmbench: {why}; install it there")
    folder = environment.folder
    if folder is not None and any((path / "lmbench" / "__init__.py").is_file() for path in import_paths(folder)):
        found = Path(done.stdout.strip()).resolve()
        if not found.is_relative_to(folder.resolve()):
            raise UsageError(f"environment {name}: lmbench comes from {found.parent}, not from {folder}")
