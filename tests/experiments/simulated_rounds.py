"""The error rates of `compare --run`, by simulated comparisons of two sides under several kinds of noise.

`python tests/experiments/simulated_rounds.py [TRIALS]` prints the table of `lmbench/compare/rounds.py`; 10 000 trials
take two minutes. The test suite runs a part of it with a fixed seed.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np
import pandas as pd

from lmbench.compare.rounds import FIRST_LOOK, is_same, log_evidence, weights_of_noises

GATE = 0.01
EFFECT = 0.02
ROUNDS = 60


@dataclass(frozen=True)
class Noise:
    """The sources of differences between step times of processes, as fractions.

    `spread` is the standard deviation between processes. `drift` is the change from round to round, half of it from one
    process to the next. A fraction `slow_share` of the processes takes `slow` longer. `clock` is how much slower the
    second of two clocks is; each process, or with `by_round` each round, gets one at random. `persistence` is the
    autocorrelation of the spread from round to round, on `sides` 2 (both) or 1 (B only).
    """

    spread: float
    drift: float = 0.0
    slow: float = 0.0
    slow_share: float = 0.2
    clock: float = 0.0
    by_round: bool = False
    persistence: float = 0.0
    sides: int = 2


CONDITIONS = {
    "spread 0.3 %": Noise(0.003),
    "spread 0.5 %": Noise(0.005),
    "spread 1 %": Noise(0.01),
    "spread 2 %": Noise(0.02),
    "spread 3 %": Noise(0.03),
    "0.5 %, drift 1 % a round": Noise(0.005, drift=0.01),
    "0.3 %, two clocks, 2 %": Noise(0.003, clock=0.02),
    "0.3 %, two clocks, 5 %": Noise(0.003, clock=0.05),
    "0.3 %, clock by round, 5 %": Noise(0.003, clock=0.05, by_round=True),
    "0.5 %, 1 in 5 slow by 5 %": Noise(0.005, slow=0.05),
    "0.5 %, 1 in 5 slow by 10 %": Noise(0.005, slow=0.10),
    "1 %, 1 in 5 slow by 30 %": Noise(0.01, slow=0.30),
    "1 %, 0.3 persists": Noise(0.01, persistence=0.3),
    "1 %, 0.6 persists": Noise(0.01, persistence=0.6),
    "1 %, 0.9 persists": Noise(0.01, persistence=0.9),
    "4 %, 0.9 persists": Noise(0.04, persistence=0.9),
    "1 %, B's 0.6 persists": Noise(0.01, persistence=0.6, sides=1),
    "1 %, B's 0.9 persists": Noise(0.01, persistence=0.9, sides=1),
}


@dataclass(frozen=True)
class Rates:
    """Fractions of comparisons by verdict, and the median number of rounds until the verdict."""

    same: float
    slower: float
    faster: float
    median_rounds: float


def logarithms(noise, trials, rounds, effect, generator):
    """Logarithms of step times, of shape (trials, sides, rounds). B is measured first in every other round."""
    values = generator.normal(0.0, noise.spread, (trials, rounds, 2))
    kept, fresh = noise.persistence, math.sqrt(1 - noise.persistence**2)
    for at in range(1, rounds):
        values[:, at, -noise.sides :] *= fresh
        values[:, at, -noise.sides :] += kept * values[:, at - 1, -noise.sides :]
    order = np.arange(2.0 * rounds).reshape(rounds, 2)
    order[1::2] = order[1::2, ::-1].copy()
    values += noise.drift / 2 * order
    values += math.log1p(noise.slow) * (generator.random((trials, rounds, 2)) < noise.slow_share)
    states = generator.random((trials, rounds, 1 if noise.by_round else 2)) < 0.5
    values += math.log1p(noise.clock) * states
    values[..., 1] += math.log1p(effect)
    return np.moveaxis(values, -1, -2)


def simulate(noise, trials, effect=0.0, rounds=ROUNDS):
    """Rates of the first verdict of each trial."""
    logs = logarithms(noise, trials, rounds, effect, np.random.default_rng(0))
    words, ends = np.full(trials, "undecided"), np.full(trials, rounds)
    for look in range(FIRST_LOOK, rounds + 1):
        undecided = np.flatnonzero(words == "undecided")
        sides = logs[undecided, :, :look]
        differences, weights = sides[:, 1] - sides[:, 0], weights_of_noises(sides)
        changed = np.where(np.median(differences, axis=-1) > 0, "slower", "faster")
        is_changed = np.exp(-log_evidence(differences, weights)) < 0.1
        verdicts = [is_same(differences, weights, GATE), is_changed]
        words[undecided] = np.select(verdicts, ["same", changed], "undecided")
        ends[undecided] = look
    shares = [float((words == word).mean()) for word in ("same", "slower", "faster")]
    return Rates(*shares, float(np.median(ends)))


def main(trials=10_000):
    rows = {}
    for name, noise in CONDITIONS.items():
        same_20, same, changed_20, changed = (
            simulate(noise, trials, effect, rounds) for effect in (0.0, EFFECT) for rounds in (20, ROUNDS)
        )
        rows[name] = [same.slower + same.faster, same_20.same, same.same, int(same.median_rounds)]
        rows[name] += [changed_20.slower, changed.slower, int(changed.median_rounds)]
    heads = ["A/A: false", "same in 20", f"in {ROUNDS}", "rounds", "+2 %: found in 20", f"in {ROUNDS}", "rounds"]
    table = pd.DataFrame(rows.values(), [*rows], heads)
    print(table.to_string(float_format="{:.1%}".format))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
