"""How often the search of `lmbench tune` finds the best, and with how many trials, in simulated spaces.

`python tests/experiments/simulated_tuning.py [SPACES]`: six axes of one to three values, which change the cost by
-5 ± 15 % each, and each pair of values by 0 ± 3 % more. There is no noise.
"""

from __future__ import annotations

import math
import sys
from itertools import combinations, product
from random import Random
from unittest.mock import patch

from lmbench.tune.search import Candidate, Trial, search
from lmbench.tune.space import Axis


def searched(seed):
    """Whether the found trial is within 2 % of the best of all, and the number of trials."""
    random = Random(seed)
    axes = [Axis(name, [{name: value} for value in range(random.choice([1, 1, 2, 3]))]) for name in "abcdef"]
    names = [(axis.name, value[axis.name]) for axis in axes for value in axis.values]
    effects = {(name,): random.gauss(-0.05, 0.15) for name in names}
    effects |= {pair: random.gauss(0, 0.03) for pair in combinations(names, 2)}

    def cost(options):
        return math.exp(sum(effect for chosen, effect in effects.items() if {*chosen} <= options.items()))

    with patch.object(Candidate, "cost", lambda candidate, goal: cost(candidate.trial.options)):
        candidates, best = search(axes, Candidate(Trial()), None, lambda axis, trials: None)
        found = best.cost(None)
    choices = product(*[[{}, *axis.values] for axis in axes])
    least = min(cost({name: value for part in parts for name, value in part.items()}) for parts in choices)
    return found < 1.02 * least, len(candidates) - 1


if __name__ == "__main__":
    spaces = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    hits, trials = zip(*map(searched, range(spaces)), strict=True)
    print(f"within 2 % of the best: {sum(hits) / spaces:.0%}; {sum(trials) / spaces:.1f} trials")
