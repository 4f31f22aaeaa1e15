"""A tuning as an answer: what to set, what each choice bought, whether it trains; and the configuration itself."""

from __future__ import annotations

import copy
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lmbench.convergence.judgement import Judgement
from lmbench.masking import masked_whole
from lmbench.records.statistics import geometric_mean
from lmbench.report.answer import Answer, Cell, Column, Line, Table, Value
from lmbench.report.units import GIB, MISSING, TIMES, UNITS, Unit, duration, gib, percent_short, times, whole
from lmbench.sweep.file import Options
from lmbench.tune.search import Change, Goal, Spread, Tried, peak_of, spread_of

#: How a goal's cost is shown: by the goal's name its title, its unit, and whether the unit is that of the inverse.
_SHOWN = {
    "tokens_per_s": ("tokens/s", Unit("", 1.0, whole), True),
    "joules_per_token": ("energy per token (mJ)", UNITS["mJ"], False),
    "peak": ("peak", GIB, False),
}


@dataclass
class Tuning:
    """What a tuning found.

    `answer` is the trial to take, `given` the configuration as it was. `left_out` says of axes why they were not tried,
    `judged` how trials train against the given one; `untrained` is the fastest where there was no time to see that.
    `verdict` is that between the best of the finals. `alone` has the runs of the answer's choices by themselves, by the
    choice's words.
    """

    config: str
    goal: Goal
    given: Tried
    answer: Tried
    tried: list[Tried]
    left_out: list[str] = field(default_factory=list)
    finalists: list[Tried] = field(default_factory=list)
    judged: list[tuple[Tried, Judgement]] = field(default_factory=list)
    untrained: Tried | None = None
    verdict: str = ""
    alone: Mapping[str, Tried] = field(default_factory=dict)
    budget_s: float = 0.0
    spent_s: float = 0.0
    training_steps: int = 0

    @property
    def title(self) -> str:
        """What the goal is called."""
        record = self.given.record
        is_counted = record is None or record.window.tokens is not None
        return _SHOWN[self.goal.name][0] if is_counted else _SHOWN[self.goal.name][0].replace("token", "step")


def tuned_config(content: Mapping[str, Any], options: Options) -> str:
    """The text of a configuration with options set, by their dotted names."""
    tree: dict[str, Any] = copy.deepcopy(masked_whole(dict(content)))
    for name, value in options.items():
        *groups, last = name.split(".")
        node = tree
        for group in groups:
            inner = node.get(group)
            # A class's name alone stands for the class without arguments.
            node[group] = {"class_path": inner} if isinstance(inner, str) else inner if isinstance(inner, dict) else {}
            node = node[group]
            node = node.setdefault("init_args", {}) if "class_path" in node and last != "class_path" else node
        node[last] = value
    return yaml.safe_dump(tree, sort_keys=False)


def tune_answer(tuning: Tuning, path: Path) -> Answer:
    """The headline says what to set and what it buys; tables have every trial, and how trials train."""
    goal, given, answer = tuning.goal, tuning.given, tuning.answer
    spread = spread_of([each.costs(goal) for each in (*tuning.tried, *tuning.alone.values())])
    change = spread.change(answer.costs(goal), given.costs(goal))
    is_given = not answer.trial.choices
    as_given = f"as given: {given.problem or 'no choice is measured to be better'}"
    lines = [Line("tuned", f"{tuning.config}: {as_given if is_given else answer.trial}")]
    if tuning.untrained is not None:
        lines = [Line("tuned", f"{tuning.config} as given: nothing faster is shown to train the same")]
        faster = spread.change(tuning.untrained.costs(goal), given.costs(goal))
        why = "a larger --budget has time to see how it trains"
        lines.append(Line("untrained", f"{tuning.untrained.trial}, {faster}: {why}"))
    if change is not None and not is_given:
        lines.append(Line(tuning.title, f"{_cost(goal, given).text} -> {_cost(goal, answer).text}, {change}"))
    peaks = [f"{gib(peak_of(each.record))}" for each in (given, answer) if each.record is not None]
    predicted = answer.predicted_bytes
    lines.append(
        Line("peak", " -> ".join(dict.fromkeys(peaks)) + (f", predicted {gib(predicted)}" if predicted else ""))
    )
    for each, judgement in tuning.judged:
        speed = spread.change(each.costs(goal), given.costs(goal))
        gain = f" ({times(speed.ratio)})" if speed else ""
        if each.trial == answer.trial:
            seeds = f"{tuning.training_steps} steps from each of 3 seeds"
            known = [each for each in judgement.differences.values() if each.limit is not None]
            figures = ", ".join(f"{each.name} {each.value:+.2g} (limit {each.limit:.2g})" for each in known)
            lines.append(Line("trains", f"like {tuning.config}, over {seeds}: {figures}"))
        else:
            lines.append(Line("refused", f"{each.trial}{gain}: {judgement.words}; {judgement.why}"))
    if tuning.verdict:
        lines.append(Line("verdict", tuning.verdict))
    lines += [Line("left out", line) for line in tuning.left_out]
    part = f"{duration(tuning.spent_s)} of {duration(tuning.budget_s)}"
    lines += [
        Line("took", f"{part} of device time, {len(tuning.tried)} trials"),
        Line("use", shlex.join(["lmbench", "fit", "--config", str(path / "tuned.yaml")]), is_whole=True),
    ]
    note = (
        f"95 % intervals by the spread between processes, {percent_short(spread.std)} over {spread.freedom} degrees of "
        "freedom" if spread.freedom else "no interval: no trial was run twice"
    )  # fmt: skip
    return Answer(
        headline=lines,
        tables=[_choices(tuning, spread)],
        notes=[Line("gain", f"how many times better a choice is than the trial that it was added to; {note}")],
        figures={
            "config": tuning.config,
            "goal": goal.name,
            "options": answer.trial.options,
            "gain": change and change.ratio,
            "gain_low": change and change.low,
            "gain_high": change and change.high,
            "refused": [str(each.trial) for each, _ in tuning.judged if each.trial != answer.trial],
            "spent_s": tuning.spent_s,
            "budget_s": tuning.budget_s,
        },
    )


def _choices(tuning: Tuning, spread: Spread) -> Table:
    """What each choice bought on top of those before, and those of the answer by themselves."""
    goal, by_trial = tuning.goal, {each.trial.key: each for each in tuning.tried}
    names = {each.trial.key: f"#{number}" for number, each in enumerate(tuning.tried)}
    rows = list[list[Value | Cell]]()
    for each in tuning.tried:
        costs, choice = each.costs(goal), each.trial.choices[-1:]
        before = by_trial[each.before.key].costs(goal) if each.before is not None else []
        gain, alone = spread.change(costs, before), None
        if choice and (by_itself := tuning.alone.get(str(choice[0]))) is not None:
            alone = spread.change(by_itself.costs(goal), tuning.given.costs(goal))
        outcome = each.problem or (each.runs[-1].outcome if each.runs else "not tried")
        is_taken = bool(choice) and choice[0] in tuning.answer.trial.choices
        rows.append(
            [
                names[each.trial.key],
                str(choice[0] if each.adds_one else each.trial),
                "" if each.before is None else names[each.before.key],
                _cost(goal, each),
                _gain(gain),
                _gain(alone),
                None if each.record is None else peak_of(each.record),
                each.predicted_bytes,
                "taken" if is_taken else "" if outcome == "ok" else outcome,
            ]
        )
    cost = Column(tuning.title, _SHOWN[goal.name][1], name=goal.name)
    columns = [
        Column("trial"), Column("choice"), Column("added to"), cost,
        Column("gain", TIMES), Column("by itself", TIMES, name="gain_by_itself"),
        Column("peak", GIB, name="peak_bytes"), Column("predicted", GIB, name="predicted_peak_bytes", is_extra=True),
        Column("", name="outcome"),
    ]  # fmt: skip
    caption = "in the order in which they were tried; a gain of 1.27 is 27 % better"
    return Table("choices", "What each choice bought", columns, rows, caption).without_empty_columns()


def _cost(goal: Goal, tried: Tried) -> Cell:
    _, unit, is_inverse = _SHOWN[goal.name]
    if not (costs := tried.costs(goal)):
        return Cell(None, text=MISSING)
    value = geometric_mean(costs) ** (-1 if is_inverse else 1)
    return Cell(value, text=unit.text(value))


def _gain(change: Change | None) -> Cell | None:
    return None if change is None else Cell(change.ratio, low=change.low, high=change.high, text=str(change))
