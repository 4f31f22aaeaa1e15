"""`lmbench tune CONFIG`: the fastest configuration of a space that still trains the same."""

from __future__ import annotations

import os
import re
from contextlib import ExitStack
from pathlib import Path

from lmbench.commands.compare_run import WAITING, gives_way, parse_budget
from lmbench.commands.sweep import read_options
from lmbench.errors import UsageError
from lmbench.records.store import check_name, write_whole
from lmbench.report.answer import Answer
from lmbench.standard_output import result_alone
from lmbench.sweep.file import CONFIG, sweep_from
from lmbench.sweep.plan import make_plan

_SIZE = re.compile(r"(\d+\.?\d*)\s*(GiB|MiB)")


def tune(
    configuration: str | None = None,
    /,
    *,
    space: Path | None = None,
    budget: str = "15m",
    for_: str = "tokens_per_s",
    at_most: str | None = None,
    results_dir: Path = Path("results"),
    name: str | None = None,
    settings: list[str] | None = None,
) -> Answer:
    """Finds the fastest configuration of a space that trains the same, at the same tokens a step, and proves it.

    Axis by axis every choice (precision, compile, model options, micro-batch: lmbench/tune/space.yaml) is measured
    on top of the best so far, in a short run of its own. Choices that do not fit by prediction, or that cannot help by
    a profile of the given configuration, are left out. The best are measured again in turn, the last two until the
    verdict stands. The winner has to train like the given configuration by the rule of the convergence study: loss and
    gradient norm within the spread between seeds. Where it does not, the fastest that does is the answer.

    The same command again goes on with what was measured. The answer is RESULTS_DIR/NAME/tuned.yaml.

    Args:
        configuration: a YAML file, or a shipped one by its name; or --config
        space: a YAML file with axes that are added, or taken away by null
        budget: device time for all runs together: 90s, 15m, 1h
        for_: tokens_per_s, joules_per_token or peak
        at_most: no more memory than this, such as 40GiB
        results_dir: where its folder goes
        name: name of the folder, tune-CONFIG by default
        settings: options of `lmbench fit` for every run
    """
    # Imported here because these modules take long to import, and help does not need them.
    from lmbench.commands.tune_stages import Stages
    from lmbench.tune.answer import tune_answer, tuned_config
    from lmbench.tune.search import goal_of
    from lmbench.tune.space import read_space

    options = read_options(settings or [])
    config = options.setdefault(CONFIG, configuration)
    if config is None:
        raise UsageError("tune takes a configuration, such as `lmbench tune large_bf16 --budget 15m`")
    goal, axes, budget_s = goal_of(for_), read_space(space), parse_budget(budget)
    folder = name or f"tune-{Path(str(config)).stem}"
    check_name("--name", folder)
    if gives_way(os.environ):
        os.environ[WAITING] = "passive"
    stages = Stages(results_dir / folder, options, goal, budget_s, bytes_of(at_most))
    with result_alone(), stages.cache, ExitStack() as stack:
        stack.callback(stages.executor.end)
        tuning = stages.search(axes)
        stages.choose(tuning)
        stages.train(tuning)
        stages.measure_alone(tuning)
    tuning.spent_s = sum(stages.costs_s())
    changes = {**options, **tuning.answer.trial.options}
    del changes[CONFIG]
    content = make_plan(folder, sweep_from({"base": options, "include": [{}]})).contents[str(config)]
    write_whole(stages.path / "tuned.yaml", tuned_config(content, changes))
    return tune_answer(tuning, stages.path)


def bytes_of(text: str | None) -> int | None:
    """A size such as `40GiB` in bytes, None for None. Raises UsageError for any other text."""
    if text is None:
        return None
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise UsageError(f"--at_most is {text!r}; give a size such as 40GiB or 900MiB")
    return int(float(match[1]) * {"GiB": 2**30, "MiB": 2**20}[match[2]])
