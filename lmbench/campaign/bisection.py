"""The search of `lmbench bisect`: rounds of suspects against the good end, until one is certainly the first bad one.

Everything that was measured lies in the folder, a comparison for each suspect, and the search is worked out from it
again after every round. So the same command goes on after any end.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from lmbench.campaign.rounds import Rounds
from lmbench.campaign.sides import SideOptions, two_sides
from lmbench.campaign.suspects import Suspect
from lmbench.compare.answer import comparison_answer
from lmbench.compare.bisection import next_suspect, probabilities_of
from lmbench.compare.comparison import INVALID, SAME, UNDECIDED, Comparison, interval
from lmbench.errors import ExitCode, UsageError, tell
from lmbench.programs import git_output
from lmbench.records.store import SWEEP_FILE
from lmbench.records.vocabulary import Values
from lmbench.report.answer import Answer, Line, labelled
from lmbench.report.units import change_percent, percent_short
from lmbench.sweep.file import CONFIG, Options
from lmbench.sweep.folder import FolderTaken, read_sweep_folder
from lmbench.sweep.plan import digest

#: Rounds without a result after which a suspect counts as one that does not run.
_MOST_FAILURES = 2


@dataclass
class Bisection:
    """A search for the first bad suspect.

    Attributes:
        path: the folder of its comparisons.
        what: commit, version or option.
        row: the suspects, from the good end to the bad one.
        options: options of `lmbench fit` of all of them, the configuration among them where they are not YAML files.
        tolerance: a change between the ends has to be above it.
        budget_s: the time after which no further round begins.
    """

    path: Path
    what: str
    row: Sequence[Suspect]
    options: Options
    tolerance: float
    budget_s: float

    def __post_init__(self) -> None:
        self._ends_s = time.monotonic() + self.budget_s
        #: log(suspect / good) of the rounds of each suspect that runs, as far as is known.
        self._differences: dict[Suspect, list[float]] = {}

    def search(self) -> Answer:
        """Judge the ends, search, and compare the first bad suspect with the one before it."""
        good, bad = self.row[0], self.row[-1]
        ends = self._rounds(good, bad, "ends").measure()
        step = ends.step
        if step is None or ends.verdict in (SAME, UNDECIDED, INVALID) or not step.ratio.lies_beyond(self.tolerance):
            return self._without_search(ends)
        apart = f"the bad end is {_shown(ends)} than the good one"
        tell(f"bisect: {apart}")
        self._differences = {suspect: self._read(suspect) for suspect in self.row}
        self._differences[bad] = list(step.ratio.differences)
        change = math.log(step.ratio.point)
        while True:
            probabilities = probabilities_of([*self._differences.values()], change)
            measured, first = list(self._differences), int(probabilities.argmax())
            index = next_suspect(probabilities)
            if index is None or time.monotonic() > self._ends_s:
                break
            self._measure(measured[index])
        rounds = sum(map(len, self._differences.values())) - len(step.ratio.differences)
        share = percent_short(float(probabilities[first]))
        lines = [Line("certainty", f"{share} after {rounds} rounds"), Line("ends", apart)]
        figures = {"first": measured[first].name, "probability_fraction": float(probabilities[first]), "rounds": rounds}
        if index is not None:
            headline = Line("not certain", f"most likely {measured[first].name}; the same command goes on")
            return Answer([headline, *lines], figures=figures, exit_code=ExitCode.UNDECIDED)
        return self._found(measured[first - 1], measured[first], lines, figures)

    def _found(self, before: Suspect, found: Suspect, lines: list[Line], figures: Values) -> Answer:
        """The answer with what the first bad suspect changed: its comparison with the one before it."""
        between = [suspect.name for suspect in self.row[self.row.index(before) + 1 : self.row.index(found)]]
        comparison = self._rounds(before, found, f"found-{self.row.index(found)}").measure()
        lines += labelled("or", between and f"one of those that do not run: {', '.join(between)}")
        lines.append(Line("its change", f"{_shown(comparison)} than {before.name}, the one before it"))
        own = comparison_answer(comparison)
        subject = found.revision and git_output(Path.cwd(), "show", "-s", "--format=%s (%an, %as)", found.revision)
        figures |= {"subject": subject, "before": before.name, "or": between, "comparison": own.figures}
        headline = [Line(f"first {self.what}", found.name), *labelled("subject", subject), *lines]
        return replace(own, headline=headline, figures=figures, exit_code=ExitCode.OK)

    def _without_search(self, ends: Comparison) -> Answer:
        """The answer where the ends do not differ for certain: no suspect is measured."""
        if ends.verdict == SAME:
            why, code = "nothing to find: the ends are the same", ExitCode.OK
        elif ends.verdict == INVALID or ends.step is None:
            why, code = "nothing to search: the ends cannot be compared", ExitCode.INVALID
        elif ends.verdict == UNDECIDED:
            why, code = "the ends do not differ for certain; give a longer --budget", ExitCode.UNDECIDED
        else:
            limit = percent_short(self.tolerance)
            why, code = f"no change above ±{limit} is shown; give a lower --gate", ExitCode.UNDECIDED
        headline = [Line("answer", why), Line("ends", f"{ends.verdict}: {ends.reason}")]
        return Answer(headline, figures={"first": None, "why": why}, exit_code=code)

    def _folder(self, a: Suspect, b: Suspect, name: str = "") -> Path:
        """The folder of the rounds of two suspects. Its name has their digest: a new commit shifts the row."""
        return self.path / f"{name or f'suspect-{self.row.index(b)}'}-{digest(a.identity(), b.identity())}"

    def _rounds(self, a: Suspect, b: Suspect, name: str = "", more: int | None = None) -> Rounds:
        """The rounds of two suspects, which go on if they were begun before."""
        path = self._folder(a, b, name)
        pythons = a.python(), b.python()
        if (path / SWEEP_FILE).is_file():
            file = read_sweep_folder(path)
        else:
            sides = SideOptions(
                revision=(a.name, b.name) if a.revision and b.revision else None,
                python=(pythons[0], pythons[1]) if pythons[0] and pythons[1] else None,
            )
            others = dict(self.options)
            config = str(others.pop(CONFIG, ""))
            file = two_sides([suspect.config or config for suspect in (a, b)], others, sides)
        budget_s = max(1.0, self._ends_s - time.monotonic())
        return Rounds(path, file, self.tolerance, budget_s, more=more, title="bisect")

    def _read(self, suspect: Suspect) -> list[float]:
        """The differences of the rounds that were measured earlier."""
        if not (self._folder(self.row[0], suspect) / SWEEP_FILE).is_file():
            return []
        try:
            return _differences(self._rounds(self.row[0], suspect).compare())
        except UsageError:
            # No run of a side ended before an earlier start did.
            return []

    def _measure(self, suspect: Suspect) -> None:
        """Measure one more round of a suspect, or leave it out if it, or its environment, cannot be made to run."""
        try:
            rounds = self._rounds(self.row[0], suspect, more=1)
            differences = _differences(rounds.measure())
        except FolderTaken:
            raise
        except UsageError as error:
            # The ends ran with the same options, so that the fault is the suspect's own.
            del self._differences[suspect]
            tell(f"bisect: {suspect.name} is left out: {error}")
            return
        if len(differences) > len(self._differences[suspect]):
            self._differences[suspect] = differences
            tell(f"bisect: {suspect.name}: {change_percent(math.exp(differences[-1]) - 1)}")
        elif rounds.kept_rounds + 1 - len(differences) >= _MOST_FAILURES:
            del self._differences[suspect]
            tell(f"bisect: {suspect.name} does not run, and is left out")


def _differences(comparison: Comparison) -> list[float]:
    step = comparison.step
    return [] if step is None else list(step.ratio.differences)


def _shown(comparison: Comparison) -> str:
    step = comparison.step
    if step is None:
        return comparison.verdict
    return f"{comparison.verdict} {change_percent(step.ratio.change)} ({interval(step.ratio.low, step.ratio.high)})"
