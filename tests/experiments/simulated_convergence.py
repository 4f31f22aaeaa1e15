"""How often `lmbench.convergence` flags a row, by simulation.

`python tests/experiments/simulated_convergence.py [TRIALS]` prints the table of `lmbench/convergence/judgement.py`, of
which a part is in the suite.
"""

from __future__ import annotations

import math
import sys
from collections import Counter

import numpy as np

from lmbench.convergence.judgement import Curve, judge

STEPS = 40


def run_with(loss, log_norm):
    """A run whose tail has this mean loss and this mean logarithm of the gradient norm."""
    return Curve(np.full(STEPS, loss), np.full(STEPS, math.exp(log_norm)), np.zeros(STEPS, dtype=bool))


def rates(seeds, pairs, trials, shift=0.0, shared=0.0, generator=None):
    """Shares of verdicts where figures are normal with deviation 1 between seeds; a row has so much of the variance in
    common with its own seed of the baseline, and its loss is so many deviations higher."""
    generator = generator or np.random.default_rng(0)
    counts = Counter()
    for _ in range(trials):
        baseline = generator.normal(0.0, 1.0, (seeds, 2))
        own = math.sqrt(shared) * baseline[:pairs] + math.sqrt(1 - shared) * generator.normal(0.0, 1.0, (pairs, 2))
        own[:, 0] += shift
        row, seeds_of_baseline = ({s: run_with(*r) for s, r in enumerate(found + 10)} for found in (own, baseline))
        counts[judge(row, seeds_of_baseline).words.partition(":")[0]] += 1
    return {word: counts[word] / trials for word in ("yes", "undecided", "NO")}


def main(trials=10_000):
    generator = np.random.default_rng(0)
    for seeds in (3, 5, 8):
        for name, shares in (
            ("nothing in common", {}),
            ("half in common", {"shared": 0.5}),
            ("nine tenths in common", {"shared": 0.9}),
            ("5 deviations higher, nine tenths", {"shift": 5.0, "shared": 0.9}),
            ("10 deviations higher, nine tenths", {"shift": 10.0, "shared": 0.9}),
        ):
            print(f"{seeds} seeds, {name:36}", rates(seeds, 1, trials, generator=generator, **shares))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
