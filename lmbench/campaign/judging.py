"""A judgement of a change: is B faster than A, does it train the same, and can its figures be believed?

First comes a round of both sides, whose records show other work, and measurements that cannot be true. Then both sides
train from the same seeds. What is left of the budget decides the speed, in rounds. A change that is refused is not
measured further.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path

import numpy as np

from lmbench.campaign.rounds import Rounds
from lmbench.campaign.sweep import Sweep
from lmbench.campaign.trainings import affordable_steps, training_options
from lmbench.compare.comparability import differences_within
from lmbench.compare.comparison import EXIT_CODES, INVALID, UNDECIDED, Comparison, Decision
from lmbench.compare.rounds import rounds_until
from lmbench.compare.sides import by_round, read_side
from lmbench.convergence.judgement import MAX_STEPS, MIN_STEPS, Curves, curves_of, judge
from lmbench.errors import ExitCode, UsageError
from lmbench.python_process import SWEEP
from lmbench.records.load import StoredRun, first_steps
from lmbench.records.store import SWEEP_FILE
from lmbench.records.vocabulary import SIDE
from lmbench.report.units import change_percent, percent_short
from lmbench.standard_output import result_alone
from lmbench.sweep.execute import Pace
from lmbench.sweep.file import SweepFile
from lmbench.sweep.folder import read_sweep_folder
from lmbench.sweep.local import LocalExecutor
from lmbench.sweep.plan import make_plan
from lmbench.tune.search import SEEDS

YES, NO = "yes", "NO"
#: The word on whether B trains like A.
_TRAINS = {True: YES, False: NO, None: UNDECIDED}
#: Begins the lines on progress.
_TITLE = "judge"
#: The share of the budget that trainings may take.
_TRAINING_SHARE = 0.4
#: Relative differences of the first loss and the first gradient norm of a seed: of float32 in another order, and of
#: less precision. The last of bfloat16's 8 bits is 0.4 %.
_SAME, _ROUNDED = (1e-5, 1e-4), (0.005, 0.05)
#: Guards on what a step does. They may not fail, and B may not be worse at one of them than A.
_WORK_GUARDS = (
    "clocks", "mfu", "finite_loss", "inputs", "outputs", "tokens", "gradients", "trained", "repeated_losses",
)  # fmt: skip
#: Work may differ by this fraction, as with a padded vocabulary.
_WORK_FRACTION = 0.01


@dataclass
class Judge:
    """Judges the two sides of a sweep.

    Attributes:
        path: the folder of the rounds; the trainings lie beside it, in PATH-training.
        file: the sweep of both sides.
        tolerance: changes of the step time up to this fraction count as none.
        budget_s: time for all stages together; infinite: as long as the gate needs.
        about: dotted names of what is compared.
        parts: the parts that are judged so far, by name.
    """

    path: Path
    file: SweepFile
    tolerance: float
    budget_s: float
    about: Sequence[str] = ()
    parts: dict[str, Decision] = field(default_factory=dict)

    def judge(self) -> tuple[str, Comparison]:
        """Measure and fill in `parts`; returns the verdict, in a word of `compare`, and the comparison of the speed.

        Raises:
            UsageError: a side does not run, or an option of the trainings belongs to one side.
        """
        # Imports take longer than most rounds, so servers that one stage started serve the next one too.
        self._executor = LocalExecutor({SWEEP: str(self.path.resolve())})
        self._limits = Pace(executor=self._executor)
        with result_alone(), closing(self._executor):
            comparison = self._carry_out(time.monotonic() + self.budget_s)
        return self._conclude(comparison), comparison

    def _carry_out(self, end_s: float) -> Comparison:
        """All stages, until a moment of `time.monotonic`; returns the comparison of the speed."""
        # A budget of nothing is over after the first round.
        comparison = self._measure(0.0)
        # A later round may have failed by accident, and is then left out.
        (a,), (b,) = self._sides(self.path, 1)
        doubts = "; ".join([*worse_guards(a, b), *other_work(a, b)])
        good = "clocks are the original ones, batches differ, weights move, and both sides do the same work"
        self.parts["plausible"] = Decision(NO, doubts) if doubts else Decision(YES, good)
        if doubts or not comparison.cells or comparison.verdict == INVALID:
            return comparison
        rest_s = end_s - time.monotonic()
        if rest_s <= 0:
            self.parts["trains the same"] = Decision(UNDECIDED, "the budget ended before the trainings")
            return comparison
        trainings = self._train(a, b, rest_s)
        curves_a, curves_b = (curves_of(dict(enumerate(runs))) for runs in trainings)
        edits = list[str]()
        for side, run, runs in zip("AB", (a, b), trainings, strict=True):
            edits += [f"{side}: {edit}" for edit in differences_within([run, *runs], ())]
        if edits:
            training = Decision(NO, f"trainings and rounds ran other code: {'; '.join(edits)}")
        else:
            judgement = judge(curves_b, curves_a)
            alike = f"by {len(curves_b)} pairs of seeds, loss and gradient norm are A's within the spread of seeds"
            training = Decision(_TRAINS[judgement.follows], judgement.why or alike)
        self.parts |= {"trains the same": training, "numerics": _numerics(curves_a, curves_b)}
        if training.word == NO:
            return comparison
        return self._measure(max(0.0, end_s - time.monotonic()))

    def _measure(self, budget_s: float) -> Comparison:
        rounds = Rounds(self.path, self.file, self.tolerance, budget_s, self.about, limits=self._limits, title=_TITLE)
        return rounds.measure()

    @staticmethod
    def _sides(path: Path, rounds: int | None = None) -> list[list[StoredRun]]:
        """The runs of both sides in the first rounds, in their order. Raises UsageError where one did not end well."""
        sides = [[*by_round(read_side(f"{path}@{SIDE}={side}").runs).values()][:rounds] for side in "AB"]
        for run in chain(*sides):
            if run.outcome != "ok":
                raise UsageError(f"{run.path} ended with {run.record.failure.ending(run.outcome)}")
        return sides

    def _train(self, a: StoredRun, b: StoredRun, budget_s: float) -> list[list[StoredRun]]:
        """Train both sides from the same seeds, which are the numbers of the rounds; returns the sides' trainings."""
        steps = affordable_steps((a.record, b.record), _TRAINING_SHARE * budget_s)
        options = training_options(a.record, max(MIN_STEPS, steps))
        path = self.path.with_name(f"{self.path.name}-training")
        # Trainings that were begun go on with as many steps.
        file = read_sweep_folder(path) if (path / SWEEP_FILE).is_file() else self.file.changed(options, len(SEEDS))
        pace = replace(self._limits, window_options=lambda seed: [f"--seed_everything={seed}"])
        # Losses do not depend on the server, and rounds that time the steps need those that start meanwhile.
        self._executor.is_lasting = True
        Sweep(make_plan(path.name, file), path, _TITLE, pace=pace).carry_out()
        self._executor.is_lasting = False
        return self._sides(path)

    def _conclude(self, comparison: Comparison) -> str:
        """Add the parts of speed and memory; returns the verdict."""
        words, speed = [part.word for part in self.parts.values()], comparison.verdict
        if not comparison.cells:
            self.parts["speed"] = Decision(speed, "; ".join(cell["reason"] for cell in comparison.neither))
            return INVALID if NO in words else speed
        cell = comparison.cells[0]
        reason = "; ".join(cell.reasons)
        if NO in words:
            reason = f"not measured further, since the change is refused ({reason})"
        elif cell.metrics and speed == UNDECIDED:
            ratio = cell.metrics[0].ratio
            needed = rounds_until(max(abs(ratio.change), self.tolerance), cell.round_std)
            reason += f"; about {max(1, needed - ratio.n_a)} more rounds if it stays so"
        self.parts["speed"] = Decision(speed, reason)
        peaks = {figure.name: figure for figure in cell.metrics}
        if peak := peaks.get("run_peak_reserved_bytes") or peaks.get("host_peak_rss_bytes"):
            self.parts["memory"] = Decision(peak.finding, f"{peak.title}: {peak.reason or cell.reasons[0]}")
        if NO in words:
            return INVALID
        is_open = UNDECIDED in words and EXIT_CODES[speed] == ExitCode.OK
        return UNDECIDED if is_open else speed


def _numerics(a: Curves, b: Curves) -> Decision:
    """How far the first losses and gradient norms of the same seeds are apart, before any update."""
    if a.keys() != b.keys() or not a:
        return Decision("unknown", "no losses were recorded")
    first_a, first_b = (np.array([(side[seed].losses[0], side[seed].norms[0]) for seed in a]) for side in (a, b))
    # Equal losses may be 0, and a module that optimizes by hand may have no norms.
    is_equal = (first_a == first_b) | (np.isnan(first_a) & np.isnan(first_b))
    with np.errstate(all="ignore"):
        distance = np.where(is_equal, 0.0, np.abs(first_b / first_a - 1)).max(axis=0)
    words = [word for word, limits in (("same", _SAME), ("rounded", _ROUNDED)) if (distance <= limits).all()]
    loss, norm = map(percent_short, distance)
    return Decision([*words, "other"][0], f"first losses of a seed differ by {loss}, first gradient norms by {norm}")


def worse_guards(a: StoredRun, b: StoredRun) -> Iterator[str]:
    """The guards on a step's work that fail on a side, or that B passes worse than A."""
    ranks = {guard.name: (guard.status != "pass", guard.value or 0.0) for guard in a.record.guards}
    for side, run in (("A", a), ("B", b)):
        for guard in run.record.guards:
            rank = guard.status != "pass", guard.value or 0.0
            is_worse = guard.status == "fail" or (rank[0] and rank > ranks.get(guard.name, rank))
            if is_worse and guard.name in _WORK_GUARDS:
                yield f"{side}: {guard.message or f'guard {guard.name} is {guard.status}, which passes on A'}"


def other_work(a: StoredRun, b: StoredRun) -> Iterator[str]:
    """The differences of what a step works on: tokens, trained parameters, and FLOPs by the same count.

    Sequences may differ in length, and windows in their number of steps: only steps that both sides took are compared.
    """
    tokens_a, tokens_b = ({step.step: step.tokens or 0 for step in first_steps(run.path, MAX_STEPS)} for run in (a, b))
    shared = tokens_a.keys() & tokens_b.keys()
    figures = {
        "tokens a step": (sum(tokens_a[step] for step in shared), sum(tokens_b[step] for step in shared)),
        "trained parameters": (a.record.model.trainable_parameter_count, b.record.model.trainable_parameter_count),
    }
    if a.record.flops.source == b.record.flops.source:
        figures["FLOPs a token"] = (a.record.flops.per_token_flops, b.record.flops.per_token_flops)
    for name, (before, after) in figures.items():
        if before and after and abs(after / before - 1) > _WORK_FRACTION:
            yield f"B has {change_percent(after / before - 1)} {name}"
