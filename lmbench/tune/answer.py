"""The answer of `lmbench tune`: what to set, what each choice gains, whether the result trains; and its YAML file."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from lmbench.configs import read_config
from lmbench.convergence.judgement import Judgement
from lmbench.errors import ExitCode
from lmbench.masking import masked_whole
from lmbench.records.statistics import geometric_mean
from lmbench.report.answer import Answer, Cell, Column, Line, Table, Value
from lmbench.report.units import GIB, MISSING, TIMES, duration, gib, percent_short, times
from lmbench.sweep.file import CONFIG, Options, with_options
from lmbench.tune.search import SEEDS, Candidate, Change, Goal, Spread, peak_of, spread_of


@dataclass
class Tuning:
    """The result of a tuning.

    `baseline` is the configuration as it was given, `answer` the candidate to use, `candidates` are all that were
    tried. `left_out` has a line for each axis that was not tried. `judged` has candidates with the judgement whether
    they train like the baseline; `untrained` is the fastest candidate if there was no time to judge it. `verdict` is
    about the best of the finals. `alone` has the runs of single choices of the answer, by the choice's words.
    """

    config: str
    goal: Goal
    baseline: Candidate
    answer: Candidate
    candidates: list[Candidate]
    left_out: list[str] = field(default_factory=list)
    finalists: list[Candidate] = field(default_factory=list)
    judged: list[tuple[Candidate, Judgement]] = field(default_factory=list)
    untrained: Candidate | None = None
    verdict: str = ""
    alone: Mapping[str, Candidate] = field(default_factory=dict)
    budget_s: float = 0.0
    spent_s: float = 0.0
    training_steps: int = 0

    @property
    def title(self) -> str:
        """The title of the goal's figure, which is per step where the module's tokens are not counted."""
        record = self.baseline.record
        is_counted = record is None or record.window.tokens is not None
        return self.goal.title if is_counted else self.goal.title.replace("token", "step")


def tuned_config(options: Options) -> str:
    """The YAML text of a configuration, which the options name, with the other options set by their dotted names.

    Secrets are masked, from wherever they come.

    Raises:
        UsageError: there is no such configuration.
    """
    changes = dict(options)
    settings = with_options(read_config(str(changes.pop(CONFIG)))[1], changes)
    return yaml.safe_dump(masked_whole(settings), sort_keys=False)


def use_line(path: Path) -> Line:
    """The command that runs the answer of a tuning in a folder."""
    return Line("use", shlex.join(["lmbench", "fit", "--config", str(path / "tuned.yaml")]), is_whole=True)


def tune_answer(tuning: Tuning, path: Path) -> Answer:
    """What to set and what it gains, and the table of all candidates.

    `path` is the folder of the tuning, which holds tuned.yaml.
    """
    # By trial, because a candidate with a single choice is in both collections.
    by_trial = {candidate.trial.key: candidate for candidate in (*tuning.candidates, *tuning.alone.values())}
    spread = spread_of([candidate.costs(tuning.goal) for candidate in by_trial.values()])
    change = spread.change(tuning.answer.costs(tuning.goal), tuning.baseline.costs(tuning.goal))
    spent = f"{duration(tuning.spent_s)} of {duration(tuning.budget_s)} of device time"
    measured = sum(bool(candidate.runs) for candidate in tuning.candidates)
    note = "no interval: no trial was run twice"
    if spread.freedom:
        note = (
            f"95 % intervals by the spread between processes, {percent_short(spread.std)} over {spread.freedom} "
            "degrees of freedom"
        )
    return Answer(
        headline=[
            *_findings(tuning, spread, change),
            Line("took", f"{spent}, {measured} of {len(tuning.candidates)} trials measured"),
            *([] if tuning.answer.problem else [use_line(path)]),
        ],
        tables=[_choices(tuning, spread)],
        notes=[Line("gain", f"how many times better a choice is than the trial that it was added to; {note}")],
        figures={
            "config": tuning.config,
            "goal": tuning.goal.name,
            "options": tuning.answer.trial.options,
            "gain": change and change.ratio,
            "gain_low": change and change.low,
            "gain_high": change and change.high,
            "refused": [
                str(candidate.trial) for candidate, _ in tuning.judged if candidate.trial != tuning.answer.trial
            ],
            "spent_s": tuning.spent_s,
            "budget_s": tuning.budget_s,
        },
        # The answer is then the given configuration, for want of another.
        exit_code=ExitCode.OUT_OF_MEMORY if tuning.answer.problem else ExitCode.OK,
    )


def _findings(tuning: Tuning, spread: Spread, change: Change | None) -> list[Line]:
    """The lines on the answer, its gain (`change`) and its memory, and on whether it trains like the baseline."""
    goal, baseline, answer = tuning.goal, tuning.baseline, tuning.answer
    is_baseline = not answer.trial.choices
    as_given = f"as given: {baseline.problem or 'no choice is shown to be better'}"
    lines = [Line("tuned", f"{tuning.config}: {as_given if is_baseline else answer.trial}")]
    if tuning.untrained is not None:
        lines = [Line("tuned", f"{tuning.config} as given: nothing faster is shown to train the same")]
        faster = spread.change(tuning.untrained.costs(goal), baseline.costs(goal))
        why = "a larger --budget has time to see how it trains"
        lines.append(Line("untrained", f"{tuning.untrained.trial}, {faster}: {why}"))
    if change is not None and not is_baseline:
        lines.append(Line(tuning.title, f"{_cost(goal, baseline).text} -> {_cost(goal, answer).text}, {change}"))
    peaks = [gib(peak_of(candidate.record)) for candidate in (baseline, answer) if candidate.record is not None]
    prediction = f", predicted {gib(answer.predicted_bytes)}" if answer.predicted_bytes else ""
    lines.append(Line("peak", " -> ".join(dict.fromkeys(peaks)) + prediction))
    for candidate, judgement in tuning.judged:
        if candidate.trial == answer.trial:
            limited = [difference for difference in judgement.differences.values() if difference.limit is not None]
            figures = ", ".join(f"{figure.name} {figure.value:+.2g} (limit {figure.limit:.2g})" for figure in limited)
            seeds = f"{tuning.training_steps} steps from each of {len(SEEDS)} seeds"
            lines.append(Line("trains", f"like {tuning.config}, over {seeds}: {figures}; {judgement.why}"))
        else:
            speed = spread.change(candidate.costs(goal), baseline.costs(goal))
            gain = f" ({times(speed.ratio)})" if speed else ""
            lines.append(Line("refused", f"{candidate.trial}{gain}: {judgement.words}; {judgement.why}"))
    if tuning.verdict:
        lines.append(Line("verdict", tuning.verdict))
    return [*lines, *(Line("left out", line) for line in tuning.left_out)]


def _choices(tuning: Tuning, spread: Spread) -> Table:
    """A row for each candidate: the gain of its choice on top of those before, and of that choice by itself."""
    goal, answer, rows = tuning.goal, tuning.answer.trial, list[list[Value | Cell]]()
    for number, candidate in enumerate(tuning.candidates):
        choices, before = candidate.trial.choices, candidate.before
        earlier = before.trial.choices if before else ()
        added = [choice for choice in choices if choice not in earlier]
        removed = [choice for choice in earlier if choice.axis not in {kept.axis for kept in choices}]
        gain, gain_alone, is_taken = None, None, False
        if before is not None:
            gain = spread.change(candidate.costs(goal), before.costs(goal))
            adds_of_answer = not removed and all(choice in answer.choices for choice in added)
            is_taken = adds_of_answer or candidate.trial.key == answer.key
        name = "; ".join([*map(str, added), *(f"without {choice}" for choice in removed)])
        if (alone := tuning.alone.get(name)) is not None:
            gain_alone = spread.change(alone.costs(goal), tuning.baseline.costs(goal))
        outcome = candidate.problem or (candidate.runs[-1].outcome if candidate.runs else "not tried")
        if is_taken:
            outcome = "taken"
        elif outcome == "ok":
            outcome = ""
        rows.append(
            [
                f"#{number}",
                name or "as given",
                "" if before is None else f"#{tuning.candidates.index(before)}",
                _cost(goal, candidate),
                _gain(gain),
                _gain(gain_alone),
                None if candidate.record is None else peak_of(candidate.record),
                candidate.predicted_bytes,
                outcome,
            ]
        )
    columns = [
        Column("trial"), Column("choice"), Column("added to"),
        Column(tuning.title, goal.unit, name=goal.name),
        Column("gain", TIMES), Column("by itself", TIMES, name="gain_by_itself"),
        Column("peak", GIB, name="peak_bytes"), Column("predicted", GIB, name="predicted_peak_bytes", is_extra=True),
        Column("", name="outcome"),
    ]  # fmt: skip
    caption = "in the order in which they were tried; a gain of 1.27 is 27 % better"
    return Table("choices", "What each choice bought", columns, rows, caption).without_empty_columns()


def _cost(goal: Goal, candidate: Candidate) -> Cell:
    """The figure of a goal for a candidate, from the geometric mean of its costs."""
    costs = candidate.costs(goal)
    if not costs:
        return Cell(None, text=MISSING)
    value = geometric_mean(costs) ** (-1 if goal.is_inverse else 1)
    return Cell(value, text=goal.unit.text(value))


def _gain(change: Change | None) -> Cell | None:
    return None if change is None else Cell(change.ratio, low=change.low, high=change.high, text=str(change))
