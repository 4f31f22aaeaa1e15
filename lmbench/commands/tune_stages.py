"""The stages of `lmbench tune`: what applies, the search, the best again, the verdict, the training."""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lmbench.commands.compare_run import measure as compare_sides
from lmbench.commands.sweep import carry_out
from lmbench.compare.comparison import FASTER, UNDECIDED, compare
from lmbench.compare.sides import typical_step_s
from lmbench.configs import MAX_YAML_BYTES, parse_yaml
from lmbench.convergence.judgement import MIN_STEPS, Curve, Judgement, curve_of, judge
from lmbench.errors import UsageError, tell
from lmbench.files import read_file
from lmbench.memory.forecast import Request, ask_forecast, gpu_for
from lmbench.python_process import ProcessFailed
from lmbench.records.load import Run, is_run_folder, load_known
from lmbench.records.store import RUNS_FOLDER, write_whole
from lmbench.records.vocabulary import SIDE
from lmbench.report.units import duration, percent_short, times
from lmbench.sweep.execute import CompileCache, Pace
from lmbench.sweep.file import CONFIG, MOST_ROUNDS, PASS, Options, sweep_from
from lmbench.sweep.local import LastingExecutor
from lmbench.sweep.plan import GridCell, Job, make_plan
from lmbench.sweep.progress import Progress
from lmbench.tune.answer import Tuning
from lmbench.tune.search import (
    LEAST_GAIN_FRACTION,
    Goal,
    Trial,
    Tried,
    finalists,
    peak_of,
    search,
    standing,
)
from lmbench.tune.space import LEAST_SHARE_FRACTION, Axis, applicable, setting, share_of

#: Parts of the budget after which a stage begins no further run: search, finals, the verdict between the last two.
_SEARCH, _FINALS, _VERDICT = 0.55, 0.72, 0.8
#: A run may take so much of the budget.
_MOST_OF_ONE = 0.25
_FINALISTS, _ROUNDS = 4, 3
_SHORT = {"measure.steps": 10, "measure.min_window_s": 1.5, "measure.probe_steps": 0}
_LONG = {"measure.steps": 20, "measure.min_window_s": 3.0, "measure.probe_steps": 0}
_TRAINING = {"measure.min_window_s": 0.0, "measure.probe_steps": 0, "measure.gradient_norm": True}
_PREDICTED = "predicted_bytes.json"
#: Two finalists that differ by less are the same.
_GATE = 0.01
_SEED = "seed_everything"
#: The curves of given configuration and candidate: seeds of each, and steps at most.
_SEEDS, _MOST_STEPS = (0, 1, 2), 200
#: What runs of a training may take longer than expected.
_MARGIN = 1.3


@dataclass
class Stages:
    """The sweeps of a tuning, each in a folder of its own below `path`; what they have measured is not measured again.

    Device time is the time of all their processes, from start to end.
    """

    path: Path
    base: Options
    goal: Goal
    budget_s: float
    most_bytes: int | None
    cache: CompileCache = field(default_factory=CompileCache)
    executor: LastingExecutor = field(default_factory=lambda: LastingExecutor(cores=1))
    #: All settings of the configuration as it was given, and the tokens of its steps.
    settings: Any = None
    step_tokens: float | None = None

    def costs_s(self, *stages: str) -> list[float]:
        """The time of every run."""
        files = (file for stage in stages or "*" for file in self.path.glob(f"{stage}/{RUNS_FOLDER}/*/run.json"))
        places = (load_known(file.parent).record.sweep for file in files)
        return [place.cost.total_s for place in places if place and place.cost and place.cost.total_s]

    def folder(self, stage: str, cells: Iterable[str]) -> Path:
        """The folder of a stage over these cells: with another budget or space it may have others."""
        return self.path / f"{stage}-{hashlib.sha256(' '.join(cells).encode()).hexdigest()[:6]}"

    def measure(
        self, stage: str, base: Options, points: Mapping[str, Options], until: float, repeats: int = 1
    ) -> list[list[Run]]:
        """The runs of every point by its name, whose options come to the base's; none is begun that would end after
        this part of the budget."""
        plan = make_plan(stage, sweep_from({"base": base, "include": list(points.values()), "repeats": repeats}))
        names = {cell.id: name for cell, name in zip(plan.cells, points, strict=True)}

        def left_s() -> float:
            rest_s, usual_s = self.budget_s - sum(self.costs_s()), statistics.fmean(self.costs_s(path.name) or [0.0])
            is_late = rest_s - usual_s < (1 - until) * self.budget_s
            return 0.0 if is_late else min(rest_s, _MOST_OF_ONE * self.budget_s)

        path = self.folder(stage, (cell.id for cell in plan.cells))
        if not left_s() and not path.is_dir():
            return [[] for _ in plan.cells]
        # Repeats have servers of their own: they are to differ in what forks of one share.
        pace = Pace(left_s=left_s, cache=self.cache, executor=self.executor if repeats == 1 else None)
        carry_out(plan, path, Progress(plan, f"tune: {stage}", names), pace)
        folders = [[path / RUNS_FOLDER / Job(cell, repeat).name for repeat in range(repeats)] for cell in plan.cells]
        return [[load_known(run) for run in each if is_run_folder(run)] for each in folders]

    def search(self, axes: Sequence[Axis]) -> Tuning:
        """Try what applies and can help, one axis after the other.

        Raises:
            UsageError: the configuration as given does not run.
        """
        base, given = {**_SHORT, **self.base}, Tried(Trial())
        given.runs, profiled = self.measure("given", base, {"as given": {}, "its kernels": {PASS: "kernels"}}, _SEARCH)
        self.check(given)
        ended = next((run for run in (*given.runs, *profiled) if run.outcome == "ok"), None)
        if ended is None:
            errors = [str(run.record.error.message) for run in given.runs if run.record.error]
            raise UsageError(f"the configuration as given does not run: {'; '.join(errors) or 'no time for it'}")
        self.step_tokens = ended.record.window.step_tokens
        self.settings = parse_yaml(read_file(ended.path / "config.yaml", MAX_YAML_BYTES).decode(), str(ended.path))
        left_out, useful = list[str](), list[Axis]()
        for axis in applicable(axes, self.settings):
            share = share_of(axis, profiled[0].record if profiled else None)
            if share is None or share >= LEAST_SHARE_FRACTION:
                useful.append(axis)
            else:
                left_out.append(f"{axis.name}: it can shorten {percent_short(share)} of the step at most")
        count, usual_s = sum(len(axis.values) for axis in useful), statistics.fmean(self.costs_s())
        names = ", ".join(axis.name.rpartition(".")[2] for axis in useful)
        tell(f"tune: {count} trials on {len(useful)} axes ({names}), {duration(usual_s)} each if nothing is compiled")
        for line in left_out:
            tell(f"tune: left out: {line}")
        tell(f"tune: runs go to {self.path}; after an interruption the same command goes on")

        seen = [given]

        def run(axis: Axis, trials: list[Tried]) -> None:
            self.predict(trials)
            fitting = [each for each in trials if not each.problem]
            self.run(f"search-{axis.name.rpartition('.')[2]}", base, fitting, _SEARCH)
            seen.extend(trials)
            best = min(seen, key=lambda each: each.cost(self.goal))
            gain = given.cost(self.goal) / best.cost(self.goal)
            spent = f"{duration(sum(self.costs_s()))} of {duration(self.budget_s)}"
            tell(f"tune: {spent}: best so far {times(gain)}: {best.trial}")

        tried, best = search(useful, given, self.goal, run)
        return Tuning(str(self.base[CONFIG]), self.goal, given, best, tried, left_out, budget_s=self.budget_s)

    def run(self, stage: str, base: Options, trials: Sequence[Tried], until: float, repeats: int = 1) -> None:
        """Measure trials; from now on these runs are theirs. What cannot be the answer for them has that as its
        problem."""
        points = {str(each.trial): each.trial.options for each in trials}
        for each, runs in zip(trials, self.measure(stage, base, points, until, repeats) if points else [], strict=True):
            each.runs = runs or each.runs
            self.check(each)

    def check(self, tried: Tried) -> None:
        """Note why it cannot be the answer."""
        peak_bytes = None if tried.record is None else peak_of(tried.record)
        if not tried.runs:
            tried.problem = "no time left"
        elif peak_bytes is not None and not self.is_allowed(peak_bytes):
            tried.problem = "too much memory"
        elif self.step_tokens and tried.record is not None and tried.record.window.step_tokens != self.step_tokens:
            tried.problem = "other tokens a step: another training"

    def predict(self, trials: Sequence[Tried]) -> None:
        """Predict the memory of trials on the GPU that is here; one that does not fit has that as its problem."""
        gpu, kept = gpu_for(None), self.path / _PREDICTED
        known: dict[str, int | None] = json.loads(kept.read_text()) if kept.is_file() else {}
        new = [each for each in trials if str(each.trial) not in known]

        def ask(cell: GridCell) -> int | None:
            words = cell.words(cell.config)[1:]
            try:
                return ask_forecast(words, Request(gpu, finds_largest=False), heard=lambda text: None).reserved_bytes
            except (UsageError, ProcessFailed):
                return None

        if gpu is not None and new:
            file = sweep_from({"base": self.base, "include": [each.trial.options for each in new]})
            with ThreadPoolExecutor(len(new)) as pool:
                predicted = pool.map(ask, make_plan("", file).cells)
                known |= {str(each.trial): value for each, value in zip(new, predicted, strict=True)}
            write_whole(kept, json.dumps(known))
        for each in trials:
            each.predicted_bytes = peak = known.get(str(each.trial))
            if peak and not (self.is_allowed(peak) and (gpu is None or gpu.fits(peak))):
                each.problem = "predicted too large"

    def is_allowed(self, peak_bytes: int) -> bool:
        return self.most_bytes is None or peak_bytes <= self.most_bytes

    def choose(self, tuning: Tuning) -> None:
        """The best by the finals, of those that are the same the plainest; where they leave open whether another one is
        slower, the verdict of `compare --run` decides."""
        tuning.finalists = finalists(tuning.tried, self.goal, _FINALISTS)
        tuning.finalists += [] if tuning.given in tuning.finalists else [tuning.given]
        tuning.answer = tuning.given
        if tuning.finalists == [tuning.given]:
            return
        self.run("finals", {**_LONG, **self.base}, tuning.finalists, _FINALS, _ROUNDS)
        alike, unclear = standing(tuning.finalists, self.goal, _GATE)
        tuning.answer, *others = sorted(alike, key=lambda each: len(each.trial.choices))
        if others:
            tuning.verdict = (
                f"{tuning.answer.trial} is the same as {' and as '.join(str(each.trial) for each in others)}"
            )
        if not unclear or self.goal.name != "tokens_per_s":
            return
        a, b = sorted((tuning.answer, unclear[0]), key=lambda each: len(each.trial.choices))
        sides: dict[str, Options] = {
            name: {CONFIG: self.base[CONFIG], **each.trial.options} for name, each in (("A", a), ("B", b))
        }
        file = sweep_from({"base": self.base, "sides": sides, "repeats": MOST_ROUNDS})
        path = self.folder("verdict", (str(a.trial), str(b.trial)))
        rest_s = _VERDICT * self.budget_s - sum(self.costs_s())
        try:
            if rest_s > 0:
                comparison = compare_sides(path, file, _GATE, [], f"{rest_s:g}s")
            else:
                comparison = compare(f"{path}@{SIDE}=A", f"{path}@{SIDE}=B", _GATE)
        except UsageError as nothing:
            # An earlier start ended before both sides had a run, or there was no time for one.
            tuning.left_out.append(f"a verdict between the last two: {nothing}")
            return
        reasons = [reason for cell in comparison.cells for reason in cell.reasons]
        tuning.verdict = f"{b.trial} is {comparison.verdict}, against {a.trial}: {'; '.join(reasons)}"
        # Of two that are alike the plainer one.
        tuning.answer = {FASTER: b, UNDECIDED: tuning.answer}.get(comparison.verdict, a)

    def train(self, tuning: Tuning) -> None:
        """Whether the answer trains like the given configuration; where it does not, the answer is the best that does,
        with fewer of its choices."""
        tuning.training_steps = steps = self.training_steps(tuning)
        best, tuning.answer, seeds = tuning.answer, tuning.given, {f"seed {seed}": {_SEED: seed} for seed in _SEEDS}
        base = {**self.base, **_TRAINING, "measure.steps": steps}
        with suppress(KeyError):
            if setting(self.settings, "data.source") == "random":
                # Nothing is learned from noise, and nothing much from a few batches.
                base |= {"data.source": "text", "data.num_batches": steps + 10}
        fallbacks = [trial for trial in (best.trial, *best.trial.fallbacks()) if trial.choices]
        given = self.trained("training-given", base, seeds) if fallbacks and steps >= MIN_STEPS else {}
        for number, trial in enumerate(fallbacks, start=1):
            tried = next((each for each in tuning.tried if each.trial.key == trial.key), Tried(trial, Trial()))
            if tried not in tuning.finalists:
                self.run(f"fallback-{number}", {**_LONG, **self.base}, [tried], 1.0, _ROUNDS)
                tuning.tried += [] if tried in tuning.tried else [tried]
            if tried.cost(self.goal) > tuning.given.cost(self.goal) * (1 - LEAST_GAIN_FRACTION):
                continue
            points = {f"{trial}; {name}": {**trial.options, **seed} for name, seed in seeds.items()}
            own = self.trained(f"training-{number}", base, points) if len(given) == len(seeds) else {}
            if len(own) < len(seeds):
                tuning.untrained = tried
                return
            ended = [run.outcome for run in own.values() if run.outcome != "ok"]
            judgement = judge(_curves(own), _curves(given))
            if ended:
                judgement = Judgement(False, "NO", f"its training ended with {ended[0]}")
            tuning.judged.append((tried, judgement))
            if judgement.follows:
                tuning.answer = tried
                return

    def trained(self, stage: str, base: Options, points: Mapping[str, Options]) -> dict[int, Run]:
        """The trainings that there was time for, by their seeds."""
        runs = zip(_SEEDS, self.measure(stage, base, points, 1.0), strict=True)
        return {seed: each[0] for seed, each in runs if each}

    def training_steps(self, tuning: Tuning) -> int:
        """Steps for which the rest of the budget has time, in a training of each seed on both sides; those of the given
        configuration's trainings where there are some."""
        begun = (load_known(file.parent) for file in self.path.glob(f"training-given-*/{RUNS_FOLDER}/*/run.json"))
        if kept := max((run.record.window.steps or 0 for run in begun if run.outcome == "ok"), default=0):
            return kept
        per_step_s = around_s = 0.0
        for record in filter(None, (tuning.given.record, tuning.answer.record)):
            cost = record.sweep.cost if record.sweep else None
            per_step_s += typical_step_s(record) or 0.0
            around_s += (cost.total_s if cost and cost.total_s else 0.0) - (record.window.wall_s or 0.0)
        rest_s = self.budget_s - sum(self.costs_s("given-*", "search-*", "finals-*", "verdict-*"))
        steps = (rest_s / _MARGIN / len(_SEEDS) - around_s) / per_step_s if per_step_s else 0.0
        return min(_MOST_STEPS, max(0, int(steps)))

    def measure_alone(self, tuning: Tuning) -> None:
        """What each choice of the answer buys by itself, as far as there is time."""
        choices = tuning.answer.trial.choices
        tuning.alone = {str(each.trial): each for each in tuning.tried if len(each.trial.choices) == 1}
        missing = [Tried(Trial((choice,))) for choice in choices if str(choice) not in tuning.alone]
        self.run("alone", {**_SHORT, **self.base}, missing, 1.0)
        tuning.alone |= {str(each.trial): each for each in missing}


def _curves(runs: Mapping[int, Run]) -> dict[int, Curve]:
    curves = {seed: curve_of(run) for seed, run in runs.items() if run.outcome == "ok"}
    return {seed: curve for seed, curve in curves.items() if curve is not None}
