"""`lmbench tune CONFIG`: the fastest configuration of a space that still trains the same."""

from __future__ import annotations

from pathlib import Path

from lmbench.commands.words import read_budget, read_configuration, read_size
from lmbench.configs import find_config
from lmbench.fit_options import option_words
from lmbench.records.store import RESULTS, check_name, file_name
from lmbench.report.answer import Answer
from lmbench.sweep.file import CONFIG


def tune(
    configuration: str | None = None,
    *,
    space: Path | None = None,
    budget: str = "15m",
    for_: str = "tokens_per_s",
    at_most: str | None = None,
    results_dir: Path = RESULTS,
    name: str | None = None,
    trust: bool = False,
    settings: list[str],
) -> Answer:
    """Finds the fastest configuration of a space that trains the same, at the same tokens a step, and proves it.

    Axis by axis every choice (precision, compile, model options, micro-batch: lmbench/tune/space.yaml) is measured
    on top of the best so far, in a short run of its own. Choices that do not fit by prediction, or that cannot help by
    a profile of the given configuration, are left out. The best are measured again in turn, the last two until the
    verdict stands. The winner has to train like the given configuration by the rule of the convergence study: loss and
    gradient norm within the spread between seeds. Where it does not, the fastest that does is the answer.

    `--for memory` proves a memory plan instead (`lmbench memory --fit`): what to compute again, and in which
    micro-batches, for the least time in the memory of `--at_most` or of the GPU here. It measures the times of a block,
    then the plan's best point, and plans again by what it took, until the best point is one that was measured.

    The same command again goes on with what was measured. The answer is RESULTS_DIR/NAME/tuned.yaml.

    Args:
        configuration: a YAML file, or a shipped one by its name; or --config
        space: a YAML file with axes that are added, or taken away by null
        budget: device time for all runs together: 90s, 15m, 1h
        for_: tokens_per_s, joules_per_token, peak or memory
        at_most: no more memory than this, such as 40GiB
        results_dir: where its folder goes
        name: name of the folder, tune-CONFIG by default
        trust: go on with a folder that you did not begin here
        settings: options of `lmbench fit` for every run
    """
    # Imported here because these modules take long to import, and help does not need them.
    from lmbench.campaign.planning import prove
    from lmbench.campaign.stages import Stages
    from lmbench.campaign.tuning import Tuner
    from lmbench.tune.answer import tune_answer
    from lmbench.tune.proof import proof_answer
    from lmbench.tune.search import goal_of
    from lmbench.tune.space import read_space

    advice = "tune takes a configuration, such as `lmbench tune large_bf16 --budget 15m`"
    options = read_configuration(configuration, settings, advice)
    # Before a folder is made for it.
    find_config(str(options[CONFIG]))
    axes, budget_s, most_bytes = read_space(space), read_budget(budget), read_size(at_most)
    folder = name or file_name(f"tune-{Path(str(options[CONFIG])).stem}")
    check_name("--name", folder)
    given = {"space": space, "budget": budget, "for": for_, "at_most": at_most}
    words = option_words({name: str(value) for name, value in given.items() if value is not None})
    command = ["lmbench", "tune", *filter(None, [configuration]), *settings, *words]
    path = results_dir / folder
    if for_ == "memory":
        return proof_answer(*prove(Stages(path, options, budget_s, most_bytes, command), trust), path)
    return tune_answer(Tuner(path, options, budget_s, most_bytes, command, goal=goal_of(for_)).tune(axes, trust), path)
