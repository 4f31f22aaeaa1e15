"""A tuning: the search over axes, the finals of the best, the verdict on the last two, the training of the answer."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from lmbench.campaign.rounds import Rounds
from lmbench.campaign.stages import GIVEN, MOST_OF_ONE, Stages
from lmbench.campaign.trainings import affordable_steps, training_options
from lmbench.compare.comparison import FASTER, SAME, SLOWER
from lmbench.compare.rounds import LEAST_ROUNDS
from lmbench.convergence.judgement import MIN_STEPS, Judgement, curves_of, judge
from lmbench.errors import UsageError, tell
from lmbench.fit_options import option_words
from lmbench.memory.forecast import Forecast, Request, ask, gpu_for
from lmbench.python_process import ProcessFailed
from lmbench.records.codec import find_packed, indented_json
from lmbench.records.field import Bytes
from lmbench.records.load import StoredRun
from lmbench.records.run import RunRecord
from lmbench.records.vocabulary import GATE_FRACTION
from lmbench.report.units import duration, percent_short, times
from lmbench.sweep.file import CONFIG, MOST_ROUNDS, PASS, Options, sweep_from
from lmbench.tune.answer import Tuning, tuned_config
from lmbench.tune.search import (
    LEAST_GAIN_FRACTION,
    SEEDS,
    Candidate,
    Goal,
    Trial,
    finalists,
    peak_of,
    search,
    spread_of,
    standing,
)
from lmbench.tune.space import LEAST_SHARE_FRACTION, MICRO_BATCH, Axis, applicable, settings_of, share_of

#: Fractions of the budget after which a stage starts no further run: search, finals, verdict on the last two.
_SEARCH, _FINALS, _VERDICT = 0.55, 0.72, 0.8
_FINALISTS, _ROUNDS = 4, 3
#: Noise between processes for each further run of a trial: one run at 1 %, two at 2 %.
_NOISE_PER_RUN = 0.015
#: A prediction takes as long as a run: none is asked where the given configuration takes less of the memory than this.
_ROOMY_FRACTION = 0.5
#: Compiled code is kept, which spares later runs of the same at least this share of a first step that compiles (on an
#: H200: lmbench/reference/h200_compile.csv has cold and warm ones).
_CACHED_FRACTION = 0.75
#: Compiling the whole network takes at most this many times the first step of alike blocks that share their code (on an
#: H200, 36 blocks: 5.4 times in bf16, 9.3 in fp8).
_WHOLE_FACTOR = 10
#: Trials whose steps differ in tokens by less than this train alike.
_TOKENS_FRACTION = 0.1
_PREDICTED = "predicted_bytes.json"
_SEED = "seed_everything"
#: The problem of a candidate for which the budget has no time.
_NO_TIME = "no time left"


@dataclass
class Tuner(Stages):
    """The stages of a tuning for a goal."""

    goal: Goal = field(kw_only=True)
    #: A run of the given configuration; set once it has run.
    given: RunRecord = field(init=False)

    def tune(self, axes: Sequence[Axis], trusts: bool) -> Tuning:
        """Carry out all stages, and write the answer's configuration to tuned.yaml.

        Args:
            trusts: go on with a folder that this user did not begin.

        Raises:
            UsageError: the given configuration does not run, the folder is another user's, or a file in it is damaged.
        """
        with self.begun(trusts):
            tuning = self.search(axes)
            self.choose(tuning)
            self.train(tuning)
            self.measure_alone(tuning)
            self.use_rest(tuning)
        tuning.spent_s = sum(self.costs_s())
        self.write("tuned.yaml", tuned_config({**self.base, **tuning.answer.trial.options}))
        return tuning

    def search(self, axes: Sequence[Axis]) -> Tuning:
        """Try the axes that apply and can help, one after the other.

        Raises:
            UsageError: the given configuration does not run, or has no figure of the goal.
        """
        baseline = Candidate(Trial())
        points = {"as given": {}, "its kernels": {PASS: "kernels"}}
        baseline.runs, profiled = self.measure(GIVEN, self.short, points, _SEARCH, _ROUNDS)
        record = next((run.record for run in (*baseline.runs, *profiled) if run.outcome == "ok"), None)
        if record is None:
            errors = [str(run.record.error.message) for run in baseline.runs if run.record.error]
            raise UsageError(f"the configuration as given does not run: {'; '.join(errors) or 'no time for it'}")
        if self.goal.cost(record) is None:
            raise UsageError(f"--for {self.goal.name}: this device does not tell it; give another goal")
        self.given = record
        self.check(baseline)
        useful, left_out = self.useful(axes, profiled[0].record if profiled else None)
        # Runs of later stages, which an earlier start left, would change the plan that goes on.
        count, usual_s = sum(len(axis.values) for axis in useful), statistics.fmean(self.costs_s(f"{GIVEN}-*"))
        names = ", ".join(axis.name.rpartition(".")[2] for axis in useful)
        by_noise = 1 + int(spread_of([baseline.costs(self.goal)]).std / _NOISE_PER_RUN)
        repeats = max(1, min(_ROUNDS, by_noise, int(_SEARCH * self.budget_s / (usual_s * max(1, count)))))
        tell(
            f"tune: {count} trials on {len(useful)} axes ({names}), then again on top of the best; {repeats} runs "
            f"each, {duration(usual_s)} a run if nothing is compiled"
        )
        for line in left_out:
            tell(f"tune: left out: {line}")
        tell(f"tune: runs go to {self.path}; after an interruption the same command goes on")
        measured = [baseline]

        def measure_axis(axis: Axis, candidates: list[Candidate]) -> None:
            self.predict(candidates, peak_of(record))
            fitting = [candidate for candidate in candidates if not candidate.problem]
            left_out.extend(self.try_axis(axis, fitting, measured, repeats))
            measured.extend(candidates)
            if not any(candidate.runs for candidate in candidates):
                return
            best = min(measured, key=lambda candidate: candidate.cost(self.goal))
            spent = f"{duration(sum(self.costs_s()))} of {duration(self.budget_s)}"
            tell(f"tune: {spent}: best so far {times(baseline.cost(self.goal) / best.cost(self.goal))}: {best.trial}")

        candidates, best = search(useful, baseline, self.goal, measure_axis)
        return Tuning(str(self.base[CONFIG]), self.goal, baseline, best, candidates, left_out, budget_s=self.budget_s)

    def useful(self, axes: Sequence[Axis], profiled: RunRecord | None) -> tuple[list[Axis], list[str]]:
        """The axes that apply and can help, and a line for each other one that a user may expect."""
        left_out, useful, settings = list[str](), list[Axis](), settings_of(self.given)
        narrowed = applicable(axes, settings, self.given.is_on_gpu)
        if narrowed != applicable(axes, settings):
            left_out.append("fp8 and CUDA graphs: they are for a GPU")
        for axis in narrowed:
            share = share_of(axis, profiled)
            if axis.name == MICRO_BATCH and self.given.unseen_phases:
                left_out.append("micro-batches: the module optimizes by hand, and Lightning accumulates nothing for it")
            elif share is not None and share < LEAST_SHARE_FRACTION:
                left_out.append(f"{axis.name}: it can shorten {percent_short(share)} of the step at most")
            else:
                useful.append(axis)
        taken = {axis.name for axis in narrowed}
        return useful, left_out + [
            f"{axis.name}: this configuration has no such option, or the value already"
            for axis in axes
            if axis.is_users and axis.name not in taken
        ]

    def try_axis(
        self, axis: Axis, candidates: Sequence[Candidate], measured: Sequence[Candidate], repeats: int
    ) -> Iterator[str]:
        """Measure the candidates of an axis; yields a line for what the budget has no time for.

        What compiles the whole network is not begun where that may take the time of the proof.
        """
        compile_s = self.whole_compile_s(measured) if axis.compiles_whole else 0.0
        until = _SEARCH - compile_s / self.budget_s
        self.run(f"search-{axis.name.rpartition('.')[2]}", self.short, candidates, until, repeats)
        if axis.compiles_whole and candidates and not any(candidate.runs for candidate in candidates):
            yield f"{axis.name}: compiling it may take {duration(compile_s)}; a larger --budget has time for it"
        yield from self.refuse_unprovable(candidates, measured)

    def whole_compile_s(self, measured: Sequence[Candidate]) -> float:
        """The time that compiling the whole network may take, from the first steps of what is compiled so far."""
        records = filter(None, (candidate.record for candidate in measured))
        first_steps_s = [record.compile.first_step_s for record in records if record.compile.first_step_s]
        return min(_WHOLE_FACTOR * max(first_steps_s, default=math.inf), MOST_OF_ONE * self.budget_s)

    def refuse_unprovable(self, candidates: Sequence[Candidate], measured: Sequence[Candidate]) -> Iterator[str]:
        """Set the problem of candidates whose proof does not fit the time after the search; yields a line for each."""
        # Runs of later stages, which an earlier start left, would refuse what they prove.
        costs_s = [run.record.cost_s for candidate in (*measured, *candidates) for run in candidate.runs]
        rest_s = min((1 - _SEARCH) * self.budget_s, self.budget_s - sum(costs_s))
        for candidate in candidates:
            if candidate.record is None or candidate.problem:
                continue
            kept_s = _CACHED_FRACTION * (candidate.record.compile.first_step_s or 0.0)
            # Finals, and trainings from as many seeds.
            proof_s = 2 * _ROUNDS * (candidate.record.cost_s - kept_s)
            if proof_s > rest_s:
                candidate.problem = f"too slow to start: a proof takes {duration(proof_s)}"
                yield f"{candidate.trial}: {candidate.problem}; a larger --budget has time for it"

    def run(self, stage: str, base: Options, candidates: Sequence[Candidate], until: float, repeats: int = 1) -> None:
        """Measure candidates and check them. New runs replace a candidate's earlier ones."""
        points = {str(candidate.trial): candidate.trial.options for candidate in candidates}
        measured = self.measure(stage, base, points, until, repeats) if points else []
        for candidate, runs in zip(candidates, measured, strict=True):
            candidate.runs = runs or candidate.runs
            self.check(candidate)

    def check(self, candidate: Candidate) -> None:
        """Set the problem of a candidate whose runs show that it cannot be the answer."""
        if not candidate.runs:
            candidate.problem = _NO_TIME
        if candidate.record is None:
            return
        peak_bytes = peak_of(candidate.record)
        if peak_bytes is not None and not self.is_allowed(peak_bytes):
            candidate.problem = "too much memory"
        elif given_tokens := self.given.window.step_tokens:
            # Where sequences differ in length, windows of other steps differ a little. A loader of the user's own,
            # which keeps its batches, makes at least twice as many tokens a step, or half.
            ratio = (candidate.record.window.step_tokens or 0.0) / given_tokens
            if abs(ratio - 1) >= _TOKENS_FRACTION:
                candidate.problem = "other tokens a step: another training"

    def predict(self, candidates: Sequence[Candidate], given_bytes: int | None) -> None:
        """Predict the memory of candidates on this machine's GPU, and set the problem of those that do not fit.

        Args:
            candidates: the candidates.
            given_bytes: the peak of the given configuration.
        """
        gpu = gpu_for(None)
        if gpu is None:
            return
        room_bytes = min(gpu.room_bytes, self.most_bytes or gpu.room_bytes)
        if given_bytes is not None and given_bytes < _ROOMY_FRACTION * room_bytes:
            return
        predicted = find_packed(self.path / _PREDICTED, dict[str, Bytes]) or {}
        new = [candidate.trial for candidate in candidates if str(candidate.trial) not in predicted]
        predicted |= dict.fromkeys(map(str, new))
        reasons = set[str]()

        def forecast(trial: Trial) -> None:
            words = option_words({**self.base, **trial.options})
            try:
                predicted[str(trial)] = ask(words, Request([gpu]), Forecast).reserved_bytes
            except (UsageError, ProcessFailed) as error:
                reasons.add(str(error))

        if new:
            with ThreadPoolExecutor(len(new)) as pool:
                list(pool.map(forecast, new))
            for reason in sorted(reasons):
                tell(f"tune: left out: a prediction of the memory: {reason}")
            self.write(_PREDICTED, indented_json(predicted))
        for candidate in candidates:
            candidate.predicted_bytes = peak = predicted.get(str(candidate.trial))
            if peak and not (self.is_allowed(peak) and gpu.fits(peak)):
                candidate.problem = "predicted too large"

    def choose(self, tuning: Tuning) -> None:
        """Choose the answer by the finals: of the best and those that are the same, the one with the fewest choices.

        Where the finals leave open whether another finalist is slower, the verdict of `compare --run` decides. Where
        they leave that open for the baseline, the baseline is the answer unless the verdict calls the best faster.
        """
        tuning.finalists = finalists(tuning.candidates, self.goal, _FINALISTS)
        if tuning.baseline not in tuning.finalists:
            tuning.finalists.append(tuning.baseline)
        tuning.answer = tuning.baseline
        if tuning.finalists == [tuning.baseline]:
            return
        self.run("finals", self.long, tuning.finalists, _FINALS, _ROUNDS)
        ended, planned = len(self.runs("finals-*")), _ROUNDS * len(tuning.finalists)
        if ended < planned:
            tuning.left_out.append(
                f"{planned - ended} of {planned} runs of the finals: they end at {_FINALS:.0%} of the budget"
            )
        alike, unclear = standing(tuning.finalists, self.goal, GATE_FRACTION)
        best, *others = sorted(alike, key=lambda candidate: len(candidate.trial.choices))
        tuning.answer = best
        if others:
            names = " and as ".join(str(candidate.trial) for candidate in others)
            tuning.verdict = f"{tuning.answer.trial} is the same as {names}"
        if tuning.baseline in unclear:
            unclear, tuning.answer = [tuning.baseline], tuning.baseline
        if not unclear or self.goal.name != "tokens_per_s":
            return
        self.decide(tuning, *sorted((best, unclear[0]), key=lambda candidate: len(candidate.trial.choices)))

    def decide(self, tuning: Tuning, a: Candidate, b: Candidate) -> None:
        """Choose between two finalists by the verdict of `compare --run`; `a` has fewer choices."""
        sides = {
            name: {CONFIG: self.base[CONFIG], **candidate.trial.options}
            for name, candidate in zip("AB", (a, b), strict=True)
        }
        file = sweep_from({"base": {"measure.probe_steps": 0, **self.base}, "sides": sides, "repeats": MOST_ROUNDS})
        path = self.folder("verdict", (str(a.trial), str(b.trial)))
        rest_s = _VERDICT * self.budget_s - sum(self.costs_s())
        least_s = 2 * LEAST_ROUNDS * statistics.fmean(self.costs_s("finals-*") or [0.0])
        if rest_s <= least_s and not path.is_dir():
            tuning.left_out.append(
                f"a verdict between {a.trial} and {b.trial}: no time for its {LEAST_ROUNDS} rounds, "
                f"{duration(least_s)} together; trainings take the last {1 - _VERDICT:.0%} of the budget"
            )
            return
        rounds = Rounds(path, file, GATE_FRACTION, rest_s, limits=self.pace(path, _VERDICT), title="tune")
        try:
            comparison = rounds.measure() if rest_s > least_s else rounds.compare()
        except UsageError as error:
            # A side may have no run, if an earlier start was interrupted too soon.
            tuning.left_out.append(f"a verdict between {a.trial} and {b.trial}: {error}")
            return
        reasons = [reason for cell in comparison.cells for reason in cell.reasons]
        tuning.verdict = f"{b.trial} is {comparison.verdict}, against {a.trial}: {'; '.join(reasons)}"
        if comparison.verdict == FASTER:
            tuning.answer = b
        elif comparison.verdict in (SAME, SLOWER):
            # A has fewer choices.
            tuning.answer = a

    def train(self, tuning: Tuning) -> None:
        """Train the answer and the baseline from the same seeds, and judge whether both train alike.

        If not, the answer becomes the first trial with fewer choices that trains alike and is still faster. Where no
        time is left to judge a candidate, it is `tuning.untrained`, and the answer is the baseline.
        """
        tuning.training_steps = steps = self.training_steps(tuning)
        best, tuning.answer = tuning.answer, tuning.baseline
        base = {**self.base, **training_options(self.given, steps)}
        trials = [trial for trial in (best.trial, *best.trial.fallbacks()) if trial.choices]
        is_long = trials and steps >= MIN_STEPS
        baseline_runs = self.trained("training-given", base, tuning.baseline.trial) if is_long else {}
        for number, trial in enumerate(trials, start=1):
            matching = (candidate for candidate in tuning.candidates if candidate.trial.key == trial.key)
            candidate = next(matching, Candidate(trial, tuning.baseline))
            if candidate not in tuning.finalists:
                self.run(f"fallback-{number}", self.long, [candidate], 1.0, _ROUNDS)
                if candidate.problem == _NO_TIME:
                    tuning.untrained = candidate
                    return
                if candidate not in tuning.candidates:
                    tuning.candidates.append(candidate)
            if candidate.cost(self.goal) > tuning.baseline.cost(self.goal) * (1 - LEAST_GAIN_FRACTION):
                continue
            has_baseline = len(baseline_runs) == len(SEEDS)
            runs = self.trained(f"training-{number}", base, trial) if has_baseline else {}
            if len(runs) < len(SEEDS):
                tuning.untrained = candidate
                return
            if failed := [run.outcome for run in runs.values() if run.outcome != "ok"]:
                judgement = Judgement(False, "NO", f"its training ended with {failed[0]}")
            else:
                ended = {seed: run for seed, run in baseline_runs.items() if run.outcome == "ok"}
                judgement = judge(curves_of(runs), curves_of(ended))
            tuning.judged.append((candidate, judgement))
            if judgement.follows:
                tuning.answer = candidate
                return

    def trained(self, stage: str, base: Options, trial: Trial) -> dict[int, StoredRun]:
        """Train a trial from each seed; returns the runs that there was time for, by seed."""
        points = {f"{trial}; seed {seed}": {**trial.options, _SEED: seed} for seed in SEEDS}
        measured = zip(SEEDS, self.measure(stage, base, points, 1.0), strict=True)
        return {seed: runs[0] for seed, runs in measured if runs}

    def training_steps(self, tuning: Tuning) -> int:
        """The number of steps for which the rest of the budget can train baseline and answer from every seed; the steps
        of the baseline's trainings where some are there already."""
        earlier = [run.record.window.steps or 0 for run in self.runs("training-given-*") if run.outcome == "ok"]
        if any(earlier):
            return max(earlier)
        rest_s = self.budget_s - sum(self.costs_s("given-*", "search-*", "finals-*", "verdict-*"))
        return affordable_steps(filter(None, (tuning.baseline.record, tuning.answer.record)), rest_s)

    def measure_alone(self, tuning: Tuning) -> None:
        """Measure each choice of the answer by itself, as far as the budget allows."""
        single = (candidate for candidate in tuning.candidates if len(candidate.trial.choices) == 1)
        alone = {str(candidate.trial): candidate for candidate in single}
        missing = [Candidate(Trial((choice,))) for choice in tuning.answer.trial.choices if str(choice) not in alone]
        self.run("alone", self.short, missing, 1.0)
        tuning.alone = alone | {str(candidate.trial): candidate for candidate in missing}

    def use_rest(self, tuning: Tuning) -> None:
        """Measure the answer and the baseline further with the rest of the budget, for a narrower interval."""
        sides, costs_s = [tuning.answer, tuning.baseline], self.costs_s("finals-*")
        if tuning.answer is tuning.baseline or not costs_s:
            return
        rest_s = max(0.0, self.budget_s - sum(self.costs_s()))
        # After an interruption the rounds that are there count.
        rounds = len(self.costs_s("rest-*")) // 2 + int(rest_s / (2 * statistics.fmean(costs_s)))
        earlier = [candidate.runs for candidate in sides]
        if rounds:
            self.run("rest", self.long, sides, 1.0, min(rounds, _ROUNDS))
            for candidate, runs in zip(sides, earlier, strict=True):
                candidate.runs = [*runs, *candidate.runs]
