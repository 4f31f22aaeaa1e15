"""A judgement of a change: is B faster than A, does it train the same, and can its figures be believed?

First comes a round of both sides, whose records show a change that does other work or a measurement that cannot be
true. Then both sides train from the same seeds. What is left of the budget decides the speed, in rounds. A change that
fails early is not measured further.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from msgspec import Struct

from lmbench.campaign.rounds import Rounds
from lmbench.campaign.sweep import Sweep
from lmbench.compare.comparison import EXIT_CODES, INVALID, SAME, UNDECIDED, Comparison
from lmbench.compare.sides import TIME_WORDS, by_round, read_side, typical_step_s
from lmbench.convergence.judgement import MIN_STEPS, Curve, curves_of, judge
from lmbench.errors import UsageError
from lmbench.records.load import StoredRun
from lmbench.records.store import RUNS_FOLDER
from lmbench.records.vocabulary import SIDE, Values
from lmbench.report.units import change_percent, duration, percent_short
from lmbench.standard_output import result_alone
from lmbench.sweep.execute import CompileCache, Pace
from lmbench.sweep.file import SweepFile
from lmbench.sweep.plan import make_plan

YES, NO = "yes", "NO"
#: The seeds of the trainings, the most steps of one, and the share of the budget that they may take.
_SEEDS, _MOST_STEPS, _TRAINING_SHARE = 3, 200, 0.4
_TRAINING: Values = {"measure.min_window_s": 0.0, "measure.probe_steps": 0, "measure.gradient_norm": True}
#: Relative differences of the first loss and the first gradient norm of one seed: float32 in another order, and less
#: precision. One of bfloat16's 8 bits is 0.4 %.
_SAME, _ROUNDED = (1e-5, 1e-4), (0.005, 0.05)
#: Guards on what a step does. B may not be worse at one of them than A.
_WORK_GUARDS = ("inputs", "gradients", "trained", "repeated_losses")
#: Work that may differ by this fraction, such as a vocabulary that is padded.
_WORK_FRACTION = 0.01
#: The peak that decides whether a run fits: the allocator's, or without one the process's.
_PEAKS = ("run_peak_reserved_bytes", "host_peak_rss_bytes")


class Part(Struct):
    """One part of a judgement: its word, and one sentence of reason."""

    word: str
    reason: str


class ChangeJudgement(Struct):
    """The judgement on a change. `verdict` is a word of `compare`; `speed` has the ratio B / A of step times."""

    verdict: str
    parts: dict[str, Part]
    runs: str
    spent_s: float
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    rounds: int = 0
    schema_version: int = 1

    @property
    def exit_code(self) -> int:
        return EXIT_CODES[self.verdict]


@dataclass
class Judge:
    """Judges the two sides of a sweep.

    Attributes:
        path: the folder of the rounds; the trainings lie beside it.
        file: the sweep of both sides.
        tolerance: changes of the step time up to this fraction count as none.
        budget_s: time for all stages together.
        about: dotted names of what is compared.
    """

    path: Path
    file: SweepFile
    tolerance: float
    budget_s: float
    about: Sequence[str] = ()
    parts: dict[str, Part] = field(default_factory=dict)

    def judge(self) -> ChangeJudgement:
        """Measure and judge.

        Raises:
            UsageError: a side does not run, or an option of the trainings belongs to one side.
        """
        began_s, cache = time.monotonic(), CompileCache()

        def left_s() -> float:
            return max(0.0, self.budget_s - (time.monotonic() - began_s))

        with cache, result_alone():
            # A budget of nothing is over after the first round.
            comparison = self._measure(0.0, cache)
            a, b = self._sides(self.path)
            self.parts["plausible"] = self._plausible(a, b)
            if comparison.verdict != INVALID and self.parts["plausible"].word == YES:
                curves = self._train(a[0], b[0], left_s() * _TRAINING_SHARE, cache)
                self._judge_training(*curves)
                if self.parts["trains the same"].word != NO:
                    comparison = self._measure(left_s(), cache)
        return self._conclude(comparison, time.monotonic() - began_s)

    def _measure(self, budget_s: float, cache: CompileCache) -> Comparison:
        limits = Pace(cache=cache)
        return Rounds(self.path, self.file, self.tolerance, budget_s, self.about, limits=limits).measure()

    @staticmethod
    def _sides(path: Path) -> tuple[list[StoredRun], list[StoredRun]]:
        """The runs of both sides that ended, in the order of their rounds. Raises UsageError where a side has none."""
        sides = []
        for side in "AB":
            runs = [*by_round(read_side(f"{path}@{SIDE}={side}").runs).values()]
            ended = [run for run in runs if run.outcome == "ok"]
            if not ended:
                error = runs[0].record.error
                raise UsageError(f"{side} does not run: {runs[0].outcome}: {error and error.message}")
            sides.append(ended)
        return sides[0], sides[1]

    def _plausible(self, a: Sequence[StoredRun], b: Sequence[StoredRun]) -> Part:
        reasons = [*_failures(a, b), *_other_work(a[0], b[0])]
        good = "clocks are the original ones, batches differ, weights move, and both sides do the same work"
        return Part(NO if reasons else YES, "; ".join(reasons) or good)

    def _train(
        self, a: StoredRun, b: StoredRun, budget_s: float, cache: CompileCache
    ) -> tuple[dict[int, Curve], dict[int, Curve]]:
        """Train both sides from the same seeds, which are the rounds' numbers; returns their curves by seed."""
        per_step_s = overhead_s = 0.0
        for record in (a.record, b.record):
            cost = record.sweep and record.sweep.cost
            per_step_s += typical_step_s(record) or 0.0
            overhead_s += ((cost and cost.total_s) or 0.0) - (record.window.wall_s or 0.0)
        steps = int((budget_s / _SEEDS - overhead_s) / per_step_s) if per_step_s else 0
        steps = min(_MOST_STEPS, max(MIN_STEPS, steps))
        options = {**_TRAINING, "measure.steps": steps}
        if a.record.data.source == "random" and str(a.record.data.name).startswith("lmbench."):
            # Random tokens teach nothing, and neither do a few batches over and over.
            options |= {"data.source": "text", "data.num_batches": steps + 20}
        path = self.path.with_name(f"{self.path.name}-training")
        plan = make_plan(path.name, self.file.changed(options, _SEEDS))
        pace = Pace(window_options=lambda seed: [f"--seed_everything={seed}"], cache=cache)
        Sweep(plan, path, "judge", pace=pace).carry_out()
        runs = self._sides(path)
        seeds_a, seeds_b = ({run.record.sweep.repeat: run for run in side if run.record.sweep} for side in runs)
        return curves_of(seeds_a), curves_of(seeds_b)

    def _judge_training(self, a: Mapping[int, Curve], b: Mapping[int, Curve]) -> None:
        judgement = judge(b, a)
        steps = min(map(len, [*a.values(), *b.values()]), default=0)
        same = f"{len(b)} pairs of seeds, {steps} steps: loss and gradient norm are those of A within the spread of seeds"
        word = {True: YES, False: NO, None: UNDECIDED}[judgement.follows]
        self.parts["trains the same"] = Part(word, judgement.why or same)
        distances = np.array(
            [np.abs([y.losses[0] / x.losses[0], y.norms[0] / x.norms[0]]) for x, y in ((a[s], b[s]) for s in a if s in b)]
        )
        loss, norm = np.abs(distances - 1).max(axis=0) if len(distances) else (np.nan, np.nan)
        words = [word for word, limits in (("same", _SAME), ("rounded", _ROUNDED)) if loss <= limits[0] and norm <= limits[1]]
        apart = f"first losses of a seed differ by {percent_short(loss)}, first gradient norms by {percent_short(norm)}"
        self.parts["numerics"] = Part([*words, "other"][0], apart)

    def _conclude(self, comparison: Comparison, spent_s: float) -> ChangeJudgement:
        (cell,) = comparison.cells or [None]
        metrics = {figure.name: figure for figure in cell.metrics} if cell else {}
        reasons = cell.reasons if cell else ["no run counts"]
        speed = Part(comparison.verdict, "; ".join(reasons))
        words = {part.word for part in self.parts.values()}
        verdict = comparison.verdict
        if NO in words:
            verdict = INVALID
            if comparison.verdict == UNDECIDED:
                speed = Part(UNDECIDED, "not measured further, since the change is refused for another reason")
        elif UNDECIDED in words and verdict in (SAME, TIME_WORDS[1]):
            verdict = UNDECIDED
        step = next(iter(metrics.values()), None)
        if step and verdict == UNDECIDED == comparison.verdict:
            more = step.ratio.rounds_until(max(abs(step.ratio.change), self.tolerance)) - step.ratio.n_a
            speed.reason += f"; near a tie: about {max(1, more)} more rounds"
        peak = next((metrics[name] for name in _PEAKS if name in metrics), None)
        memory = Part(peak.finding, f"{peak.title}: {peak.reason or 'not compared'}") if peak else Part(UNDECIDED, "unknown")
        parts = {"speed": speed, **self.parts, "memory": memory}
        ratio = (step.ratio.point, step.ratio.low, step.ratio.high, step.ratio.n_a) if step else ()
        return ChangeJudgement(verdict, parts, str(self.path), spent_s, *ratio)


def _failures(a: Sequence[StoredRun], b: Sequence[StoredRun]) -> Iterator[str]:
    """The guards that failed in most runs of a side that have their fact, and those that B passes worse than A."""
    for side, runs in (("A", a), ("B", b)):
        guards = [guard for run in runs for guard in run.record.guards if guard.status != "n/a"]
        for name in dict.fromkeys(guard.name for guard in guards if guard.status == "fail"):
            same = [guard for guard in guards if guard.name == name]
            failed = [guard for guard in same if guard.status == "fail"]
            if 2 * len(failed) > len(same):
                yield f"{side}: {failed[0].message}"
    before = {guard.name: guard for guard in a[0].record.guards}
    for guard in b[0].record.guards:
        if guard.name not in _WORK_GUARDS or guard.status == "fail":
            continue
        is_new = guard.status == "warn" and before[guard.name].status == "pass"
        if is_new or (guard.value or 0) > (before[guard.name].value or 0):
            yield f"B: {guard.message}"


def _other_work(a: StoredRun, b: StoredRun) -> Iterator[str]:
    """The differences of what a step works on: tokens, trained parameters, and FLOPs by the same count."""
    figures = {
        "tokens a step": [run.record.window.step_tokens for run in (a, b)],
        "trained parameters": [run.record.model.trainable_parameter_count for run in (a, b)],
    }
    if a.record.flops.source == b.record.flops.source:
        figures["FLOPs a token"] = [run.record.flops.per_token_flops for run in (a, b)]
    for name, (before, after) in figures.items():
        if before and after and abs(after / before - 1) > _WORK_FRACTION:
            yield f"B has {change_percent(after / before - 1)} {name}"
