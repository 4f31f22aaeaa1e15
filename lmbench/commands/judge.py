"""`lmbench judge A B`: is B faster, does it train the same, and can it be believed?"""

from __future__ import annotations

import msgspec

from lmbench.campaign.sides import SideOptions, find_sides
from lmbench.commands.words import read_budget_of_rounds, read_gate, read_options
from lmbench.errors import UsageError
from lmbench.report.answer import Answer, Line
from lmbench.report.render import Output, give
from lmbench.standard_output import write_result
from lmbench.sweep.file import ENVIRONMENT


def judge(
    *sides: str, gate: str | None = None, about: list[str] | None = None, options: SideOptions, settings: list[str]
) -> int:
    """Judges a change: is B faster than A, does it train the same, and can its figures be believed?

    A and B are the sides of `compare --run`: configurations with options (small_bf16@model.attention=naive), or one
    configuration with two revisions, Pythons or values of a variable. The parts are speed (in rounds), trains the same
    (by pairs of seeds), numerics, memory and plausible (clocks, inputs, weights, work). The last line of standard
    output is the judgement as JSON. `lmbench guide agents` explains it.

    exit codes: 0 same or faster and nothing speaks against it, 10 slower, 11 undecided, 12 refused: implausible, other
    training or incomparable, 2 usage

    Args:
        sides: before and after, A and B
        gate: changes of the step time up to this count as none (1%)
        about: dotted name of what is compared: nothing else may differ
        settings: options of `lmbench fit` for both sides
    """
    if options.on is not None:
        raise UsageError("--on: a judgement is measured on this machine; leave it out")
    # Imported here because these modules take long to import, and help does not need them.
    from lmbench.campaign.judging import Judge
    from lmbench.compare.comparison import EXIT_CODES

    path, file = find_sides(sides, read_options(settings), options, is_elsewhere=False)
    if len(sides) == 1:
        # One configuration stands for both, whose environments may have two names for the same one.
        named = ((side, file.environments.get(str(side.get(ENVIRONMENT)))) for side in file.sides.values())
        a, b = ({**side, ENVIRONMENT: environment} for side, environment in named)
        if a == b:
            raise UsageError(f"A and B are both {sides[0]}; give {sides[0]}@NAME=VALUE for B, or --revision REVISION .")
    judgement = Judge(path, file, read_gate(gate), read_budget_of_rounds(options.budget), about or [])
    verdict, comparison = judgement.judge()
    code = EXIT_CODES[verdict]
    lines = [Line("verdict", verdict.upper()), *(Line(name, ": ".join(part)) for name, part in judgement.parts.items())]
    give(Answer(lines), Output())
    figures = {
        "schema_version": 1, "verdict": verdict, "exit_code": code, "runs": str(path),
        "parts": {name: part._asdict() for name, part in judgement.parts.items()},
        "step": comparison.step,
    }  # fmt: skip
    write_result(f"{msgspec.json.encode(figures).decode()}\n")
    return code
