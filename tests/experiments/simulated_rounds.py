"""The error rates and rounds of `compare --run`, by simulated comparisons of two sides on several kinds of machines.

`python tests/experiments/simulated_rounds.py` prints the table of `lmbench/compare/rounds.py` in half a minute. The
test suite runs a part of it with a fixed seed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import numpy as np
import pandas as pd

from lmbench.compare.rounds import LEAST_ROUNDS, log_evidence, running_medians

GATE, ROUNDS = 0.01, 60
EFFECTS = (0.02, 0.05, 0.10, 0.30)


@dataclass(frozen=True)
class Machine:
    """What happens to the logarithms of step times of successive processes, as fractions.

    `spread` is the standard deviation between processes, of Student's t with 3 degrees of freedom if `heavy`, and with
    this autocorrelation from process to process (`persistence`). `drift` is the rise per round, `second` that of the
    second process of a round. A fraction `slow_share` of the processes takes `slow` longer. `clock` is how much slower
    the second of two clocks is, drawn for each process. Bursts last 12 processes, of which each takes up to `burst`
    longer; one in 40 processes begins one.
    """

    spread: float
    heavy: bool = False
    persistence: float = 0.0
    drift: float = 0.0
    second: float = 0.0
    slow: float = 0.0
    clock: float = 0.0
    burst: float = 0.0


MACHINES = {
    "independent 0.3 %": Machine(0.003),
    "independent 0.5 %": Machine(0.005),
    "independent 1 %": Machine(0.01),
    "independent 3 %": Machine(0.03),
    "independent 10 %": Machine(0.1),
    "autocorrelation 0.9, 3 %": Machine(0.03, persistence=0.9),
    "t with 3 degrees, 1 %": Machine(0.01, heavy=True),
    "1 %, one in five slow by 30 %": Machine(0.01, slow=0.3),
    "3 %, bursts to +100 %": Machine(0.03, burst=1.0),
    "0.5 %, drift 1 % a round": Machine(0.005, drift=0.01),
    "0.5 %, second slow by 1 %": Machine(0.005, second=0.01),
    "0.3 %, two clocks, 5 %": Machine(0.003, clock=0.05),
}


def simulated(machine, trials, effect, rounds, generator):
    """The differences of rounds, log(B / A), of shape (trials, rounds)."""
    shape = (trials, 2 * rounds)
    draw = partial(generator.standard_t, 3) if machine.heavy else generator.standard_normal
    values = draw(size=shape) * machine.spread / (math.sqrt(3) if machine.heavy else 1)
    for index in range(1, 2 * rounds) if machine.persistence else ():
        kept = machine.persistence * values[:, index - 1]
        values[:, index] = kept + math.sqrt(1 - machine.persistence**2) * values[:, index]
    values += machine.drift / 2 * np.arange(2 * rounds) + machine.second * (np.arange(2 * rounds) % 2)
    values += math.log1p(machine.slow) * (generator.random(shape) < 0.2)
    values += math.log1p(machine.clock) * (generator.random(shape) < 0.5)
    begins = generator.random(shape) < 1 / 40
    is_burst = np.stack([begins[:, max(0, end - 11) : end + 1].any(axis=-1) for end in range(2 * rounds)], axis=-1)
    values += np.log1p(machine.burst * generator.random(shape)) * is_burst
    is_b_first = generator.random((trials, rounds)) < 0.5
    difference = values[:, 1::2] - values[:, ::2]
    return np.where(is_b_first, -difference, difference) + math.log1p(effect)


def verdicts(rounds):
    """The first verdict of each trial (0 undecided, 1 same, 2 changed), and the rounds until then; 1 more for none."""
    limit, count = math.log1p(GATE), rounds.shape[-1]
    is_same = np.minimum(*(log_evidence(rounds - end) for end in (-limit, limit))) > math.log(10)
    is_same &= np.abs(running_medians(rounds)) < limit
    words = np.where(is_same, 1, 2 * (log_evidence(rounds) > math.log(20)))
    words[:, : LEAST_ROUNDS - 1] = 0
    found = words.any(axis=-1)
    ends = words.astype(bool).argmax(axis=-1)
    return words[np.arange(len(words)), ends] * found, np.where(found, ends, count) + 1


def simulate(machine, trials, effect=0.0, rounds=ROUNDS, seed=0):
    """The shares of `same` and of `changed`, and the median rounds until a change."""
    words, ends = verdicts(simulated(machine, trials, effect, rounds, np.random.default_rng(seed)))
    same, changed = (float((words == word).mean()) for word in (1, 2))
    needed = np.where(words == (2 if effect > GATE else 1), ends, rounds + 1)
    return same, changed, int(np.median(needed))


def main():
    rows = {}
    for name, machine in MACHINES.items():
        same, false, rounds = simulate(machine, 2000)
        false_same, _, _ = simulate(machine, 2000, GATE * 1.01)
        found = [simulate(machine, 500, effect)[2] for effect in EFFECTS]
        rows[name] = [f"{false:.1%}", f"{false_same:.1%}", f"{same:.0%}", rounds, *found]
    heads = ["false", "false same", "A/A same", "rounds", *(f"+{effect * 100:.0f} %" for effect in EFFECTS)]
    print(pd.DataFrame(rows.values(), [*rows], heads).to_string())


if __name__ == "__main__":
    main()
