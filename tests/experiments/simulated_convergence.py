"""How often `lmbench.convergence` flags a row, by simulation.

`python tests/experiments/simulated_convergence.py [TRIALS]` prints the table of `lmbench/convergence/judgement.py`. The
test suite runs a part of it.
"""

from __future__ import annotations

import math
import sys
from collections import Counter

import numpy as np

from lmbench.convergence.judgement import Curve, judge

STEPS = 40


def run_with(loss, log_norm):
    """A curve whose tail has this mean loss and this mean logarithm of the gradient norm."""
    return Curve(np.full(STEPS, loss), np.full(STEPS, math.exp(log_norm)), np.zeros(STEPS, dtype=bool))


def rates(seeds, pairs, trials, shift=0.0, shared=0.0, generator=None):
    """Rates of verdicts, for figures that are normal with standard deviation 1 between seeds.

    A row shares the fraction `shared` of the variance with its own seed of the baseline; its loss is `shift` standard
    deviations higher.
    """
    generator = generator or np.random.default_rng(0)
    counts = Counter()
    for _ in range(trials):
        baseline = generator.normal(0.0, 1.0, (seeds, 2))
        row = math.sqrt(shared) * baseline[:pairs] + math.sqrt(1 - shared) * generator.normal(0.0, 1.0, (pairs, 2))
        row[:, 0] += shift
        curves, baseline_curves = (dict(enumerate(run_with(*run) for run in runs + 10)) for runs in (row, baseline))
        counts[judge(curves, baseline_curves).words.partition(":")[0]] += 1
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
