"""What `compare --run` promises, by simulation: comparisons of two sides under several kinds of noise.

`python tests/experiments/simulated_rounds.py [TRIALS]` prints the table of `lmbench/compare/rounds.py` (10 000 trials
take two minutes); a part of it, with a fixed seed, is in the suite.
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
    """What makes the step times of processes differ, as fractions.

    `spread` is between processes; `drift` is from round to round, half of it from one process to the next; so many of
    `slow_share` processes take `slow` longer; `clock` is how much slower the second of two clocks is, which each
    process meets by chance (`by_round`: each round). `persistence` is the autocorrelation of a side's spread from round
    to round, on so many `sides` (1: B's only).
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
    """Shares of comparisons by verdict after so many rounds, and the median number of rounds that they took."""

    same: float
    slower: float
    faster: float
    median_rounds: float


def logarithms(noise, trials, rounds, effect, generator):
    """Logarithms of the step times of A and of B by round, B's first in every other round."""
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
    """Verdicts at the first look that has one."""
    drawn = logarithms(noise, trials, rounds, effect, np.random.default_rng(0))
    words, ends = np.full(trials, "undecided"), np.full(trials, rounds)
    for look in range(FIRST_LOOK, rounds + 1):
        open_ones = np.flatnonzero(words == "undecided")
        sides = drawn[open_ones, :, :look]
        seen, weights = sides[:, 1] - sides[:, 0], weights_of_noises(sides)
        changed = np.where(np.median(seen, axis=-1) > 0, "slower", "faster")
        words[open_ones] = np.select(
            [is_same(seen, weights, GATE), np.exp(-log_evidence(seen, weights)) < 0.1], ["same", changed], "undecided"
        )
        ends[open_ones] = look
    shares = [float((words == word).mean()) for word in ("same", "slower", "faster")]
    return Rates(*shares, float(np.median(ends)))


def main(trials=10_000):
    rows = {}
    for name, noise in CONDITIONS.items():
        short, same, soon, found = (
            simulate(noise, trials, effect, rounds) for effect in (0.0, EFFECT) for rounds in (20, ROUNDS)
        )
        rows[name] = [same.slower + same.faster, short.same, same.same, int(same.median_rounds)]
        rows[name] += [soon.slower, found.slower, int(found.median_rounds)]
    heads = ["A/A: false", "same in 20", f"in {ROUNDS}", "rounds", "+2 %: found in 20", f"in {ROUNDS}", "rounds"]
    table = pd.DataFrame(rows.values(), [*rows], heads)
    print(table.to_string(float_format="{:.1%}".format))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
