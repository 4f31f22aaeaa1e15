"""Are the options of a sweep's cells understood? Asked before anything runs, of as few cells as show it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from lmbench.errors import ExitCode, UsageError
from lmbench.sweep.engine import Engine, Launch, prepare
from lmbench.sweep.environments import check
from lmbench.sweep.grid import Cell
from lmbench.sweep.outcome import last_lines
from lmbench.sweep.plan import Plan
from lmbench.sweep.supervise import Stopped, run_to_end

_TIMEOUT_S = 300.0


def check_cells(plan: Plan, cells: Iterable[Cell], engine: Engine, say: Callable[[str], None]) -> None:
    """Let the command line parse cells (`--print_config`), so that each option is seen with each of its values once.

    Where starting a process is slow, each option once. What a cell's parts refuse when they are built is not found:
    that becomes the cell's own outcome.

    Raises:
        UsageError: a cell's options are not understood, or an environment does not work.
    """
    for name, environment in plan.environments.items():
        check(name, environment)
    with tempfile.TemporaryDirectory(prefix="lmbench-check-") as folder:
        config = Path(folder) / "base.yaml"
        if plan.base_config is not None:
            config.write_text(plan.base_config, encoding="utf-8")
        prepare(engine, say)
        asked = list(covering(cells, with_values=engine.name == "forkserver"))
        say(f"asking the command line whether it takes the options ({len(asked)} of the cells have them all)")
        for cell in asked:
            command, *options = cell.words()
            given = [f"--config={config}"] if plan.base_config is not None else []
            log = Path(folder) / f"{cell.id}.log"
            words = [command, *given, *options, "--print_config"]
            launch = Launch(words, log, plan.environment_of(cell), dict(plan.environment_of(cell).variables))
            try:
                end = run_to_end(engine, launch, _TIMEOUT_S, lambda _: None)
            except Stopped as stopped:
                raise stopped.cause from None
            if end.code != ExitCode.OK:
                line = (last_lines(log) or [f"exit code {end.code}"])[-1].removeprefix("lmbench: ")
                raise UsageError(f"cell {cell.id}: {line}")


def covering(cells: Iterable[Cell], with_values: bool) -> Iterator[Cell]:
    """Cells, as few as come along, in which every command, environment and option (with each value) occurs."""
    seen: set[tuple[str, ...]] = set()
    for cell in cells:
        parts = {("command", cell.command), ("environment", str(cell.environment))}
        for option, value in cell.options.items():
            parts.add((option, json.dumps(value, sort_keys=True, default=str) if with_values else ""))
        if not parts <= seen:
            seen |= parts
            yield cell
