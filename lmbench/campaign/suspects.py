"""The rows that `lmbench bisect` searches: commits, versions of a package, or options that two YAML files differ in."""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path

import yaml

from lmbench.configs import find_config, is_yaml, read_config
from lmbench.errors import UsageError
from lmbench.files import cache_folder, names_file, short_digest
from lmbench.masking import leaves, secrets_of
from lmbench.programs import run_program
from lmbench.records.store import write_or_refuse
from lmbench.sweep.environments import commits_between
from lmbench.sweep.file import with_options

_VERSION = re.compile(r"([A-Za-z0-9._-]+)==([A-Za-z0-9.!+]+)")
_INSTALL_TIMEOUT_S = 1800


@dataclass(frozen=True)
class Suspect:
    """One of the row, and what sets it apart: its configuration, its revision, or the version of a package."""

    name: str
    config: str | None = None
    revision: str | None = None
    requirement: str | None = None

    def identity(self) -> tuple[str | None, ...]:
        """What sets it apart, whatever its name and its place in the row."""
        return self.revision, self.requirement, self.config and Path(self.config).read_text(encoding="utf-8")

    def python(self) -> str | None:
        """The Python of an environment with the requirement, made when it is first asked for; None without one.

        Raises:
            UsageError: pip fails, or the environment cannot be written.
        """
        return None if self.requirement is None else _environment(self.requirement)


def find_suspects(good: str, bad: str, folder: Path) -> tuple[str, list[Suspect]]:
    """What is searched (`commit`, `version` or `option`), and the row of suspects from the good end to the bad one.

    Args:
        good: a YAML file, PACKAGE==VERSION, or a revision of the repository here.
        bad: one of the same kind.
        folder: where configurations between two YAML files are written.

    Raises:
        UsageError: the ends are of different kinds, are equal, or nothing lies between them.
    """
    good_version, bad_version = map(_VERSION.fullmatch, (good, bad))
    if (names_file(good) and names_file(bad)) or is_yaml(good) or is_yaml(bad):
        what, row = "option", _between_files(find_config(good), find_config(bad), folder)
    elif good_version and bad_version:
        what, row = "version", _between_versions(good_version, bad_version)
    else:
        what, row = "commit", [Suspect(commit[:12], revision=commit) for commit in commits_between(good, bad)]
    if len(row) < 2:
        raise UsageError(f"{good} and {bad} are the same {what}; give a good end and a bad one")
    return what, row


def _between_files(good: Path, bad: Path, folder: Path) -> list[Suspect]:
    """Configurations that take over one differing setting after the other, in the bad file's order."""
    before, after = (dict(leaves(read_config(str(path))[1])) for path in (good, bad))
    for name, _ in secrets_of([before, after]):
        raise UsageError(
            f"{name} is a secret, and the configurations between these two would hold it; export it instead"
        )
    changed = [name for name in {**after, **before} if before.get(name) != after.get(name) or name not in before]
    settings, row = dict(before), [Suspect("as-given", config=str(good))]
    for number, name in enumerate(changed, start=1):
        settings.pop(name, None)
        if name in after:
            settings[name] = after[name]
        path = folder / f"{number}.yaml"
        write_or_refuse(path, yaml.safe_dump(with_options({}, settings), sort_keys=False), "give another --results_dir")
        row.append(Suspect(f"{name}={after[name]}" if name in after else f"without {name}", config=str(path)))
    return row


def _between_versions(good: re.Match[str], bad: re.Match[str]) -> list[Suspect]:
    """The released versions between two, each in an environment of its own."""
    from packaging.version import InvalidVersion, Version

    package = good[1]
    if package != bad[1]:
        raise UsageError(f"{good[0]} and {bad[0]} are of different packages; give two versions of one")
    listed = _pip(sys.executable, "index", "versions", package).partition("Available versions:")[2].splitlines()
    try:
        first, last = Version(good[2]), Version(bad[2])
        known = {Version(text.strip()) for text in (listed or [""])[0].split(",") if text.strip()}
    except InvalidVersion as error:
        raise UsageError(f"{error}; give two versions such as {package}==2.1") from error
    lowest, highest = min(first, last), max(first, last)
    chosen = sorted({first, last, *(version for version in known if lowest < version < highest)}, reverse=first > last)
    names = [f"{package}=={version}" for version in chosen]
    return [Suspect(name, requirement=name) for name in names]


def _environment(requirement: str) -> str:
    """The Python of an environment that has this requirement, and everything else from the present one; made once.

    pip reads the files that PIP_CONSTRAINT names; an environment belongs to their content.
    """
    present = site.getsitepackages()
    constraints = map(Path, os.environ.get("PIP_CONSTRAINT", "").split())
    try:
        limits = [path.read_bytes() if path.is_file() else path for path in constraints]
        known = short_digest(f"{present} {limits}", 6)
        version = f"py{sys.version_info[0]}.{sys.version_info[1]}"
        folder = cache_folder() / "environments" / f"{requirement}-{version}-{known}"
        python = folder / "bin" / "python"
        if (folder / "made").is_file():
            return str(python)
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        (packages,) = folder.glob("lib/python*/site-packages")
        # Python imports from these folders after the environment's own, and `addsitedir` takes their editable installs.
        lines = [f"import site; site.addsitedir({path!r})\n" for path in present]
        (packages / "present.pth").write_text("".join(lines))
        # What the requirement needs is taken from these folders where they have it.
        _pip(str(python), "install", "--quiet", requirement)
        (folder / "made").touch()
    except (OSError, subprocess.SubprocessError) as error:
        raise UsageError(f"no environment with {requirement} can be made: {error}") from error
    return str(python)


def _pip(python: str, *words: str) -> str:
    process = run_program([python, "-m", "pip", *words, "--disable-pip-version-check"], _INSTALL_TIMEOUT_S)
    if process.returncode:
        last = process.stderr.strip().splitlines()[-1:] or ["pip failed"]
        raise UsageError(f"pip {' '.join(words)}: {last[0]}")
    return process.stdout
