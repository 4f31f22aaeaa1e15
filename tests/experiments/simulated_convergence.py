"""How often `lmbench.convergence` flags a row, by simulation and by real small trainings.

`python tests/experiments/simulated_convergence.py [TRIALS]` prints both tables of `lmbench/convergence/judgement.py`;
with `--train SEEDS` (24: fifteen minutes on a core) the second one from trainings of a tiny model. A part of the first
one is in the suite.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from itertools import islice

import numpy as np

from lmbench.convergence.judgement import Curve, judge

STEPS = 40


def run_with(loss, log_norm):
    """A run whose tail has this mean loss and this mean logarithm of the gradient norm."""
    return Curve(np.full(STEPS, loss), np.full(STEPS, math.exp(log_norm)), np.zeros(STEPS, dtype=bool))


def verdict(own, baseline):
    """`yes`, `NO` or `undecided` of rows by seed, each a pair of loss and logarithm of the norm."""
    found = judge({s: run_with(*r) for s, r in own.items()}, {s: run_with(*r) for s, r in baseline.items()})
    return found.words.partition(":")[0]


def rates(seeds, pairs, trials, shift=0.0, shared=0.0, generator=None):
    """Shares of verdicts where figures are normal with deviation 1 between seeds; a row has so much of the variance in
    common with its own seed of the baseline, and its loss is so many deviations higher."""
    generator = generator or np.random.default_rng(0)
    counts = Counter()
    for _ in range(trials):
        baseline = generator.normal(0.0, 1.0, (seeds, 2))
        own = math.sqrt(shared) * baseline[:pairs] + math.sqrt(1 - shared) * generator.normal(0.0, 1.0, (pairs, 2))
        own[:, 0] += shift
        counts[verdict(dict(enumerate(own + 10)), dict(enumerate(baseline + 10)))] += 1
    return {word: counts[word] / trials for word in ("yes", "undecided", "NO")}


def trainings(count, steps=300, learning_rate=1e-3):
    """Loss and logarithm of the norm over the tail of a tiny model on text, by kind and seed: fp32, the same from
    weights that differ in their last bit, bf16-mixed and bf16-true."""
    import torch

    from lmbench.data.datamodule import TokenData
    from lmbench.instruments.training import total_norm
    from lmbench.model.transformer import Transformer
    from lmbench.sizes import resolve_shape

    torch.set_num_threads(1)
    data = TokenData(source="text", batch_size=4, context_length=64, vocab_size=512, num_batches=steps)
    batches = list(islice(data.train_dataloader(), steps))
    sizes = dict.fromkeys(("d_model", "d_ff", "num_layers", "num_heads"))
    shape = resolve_shape("tiny", **sizes, vocab_size=512)

    def train(seed, kind):
        torch.manual_seed(seed)
        net = Transformer(shape, 64, "sdpa", "none")
        if kind == "last bit":
            with torch.no_grad():
                for parameter in net.parameters():
                    parameter.mul_(1 + 1.2e-7 * torch.sign(torch.randn_like(parameter)))
        net = net.bfloat16() if kind == "bf16-true" else net
        optimizer = torch.optim.AdamW(net.parameters(), lr=learning_rate, weight_decay=0.1, betas=(0.9, 0.95))
        losses, norms = [], []
        for batch in batches:
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == "bf16-mixed"):
                loss = net(*batch)
            loss.backward()
            norms.append(float(total_norm([parameter.grad for parameter in net.parameters()])))
            losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
        curve = Curve(np.array(losses), np.array(norms), np.zeros(len(losses), dtype=bool))
        return curve.tail_loss, curve.tail_log_norm

    kinds = ("fp32", "last bit", "bf16-mixed", "bf16-true")
    return {kind: [train(seed, kind) for seed in range(count)] for kind in kinds}


def resampled(found, kind, seeds, trials, generator):
    """Shares of verdicts on a row of that kind and one seed, against so many seeds of fp32 drawn from all."""
    counts = Counter()
    for _ in range(trials):
        drawn = generator.choice(len(found["fp32"]), seeds, replace=False)
        counts[verdict({drawn[0]: found[kind][drawn[0]]}, {seed: found["fp32"][seed] for seed in drawn})] += 1
    return {word: counts[word] / trials for word in ("yes", "undecided", "NO")}


def _row(name, found):
    print(f"{name:42}" + "".join(f"{word} {100 * share:5.1f} %   " for word, share in found.items()))


def main(words):
    generator = np.random.default_rng(0)
    if words[:1] == ["--train"]:
        found = trainings(int(words[1]))
        fp32 = np.array(found["fp32"])
        print("between seeds:", fp32.std(0, ddof=1))
        for kind in ("last bit", "bf16-mixed", "bf16-true"):
            off = np.array(found[kind]) - fp32
            print(f"{kind} - fp32:", off.mean(0), "+-", off.std(0, ddof=1))
            for seeds in (3, 5, 8):
                _row(f"{kind}, {seeds} seeds", resampled(found, kind, seeds, 500, generator))
        return
    trials = int(words[0]) if words else 10_000
    for seeds in (3, 5, 8):
        for name, given in (
            ("nothing in common", {}),
            ("half in common", {"shared": 0.5}),
            ("nine tenths in common", {"shared": 0.9}),
            ("5 deviations higher, nine tenths", {"shift": 5.0, "shared": 0.9}),
            ("10 deviations higher, nine tenths", {"shift": 10.0, "shared": 0.9}),
        ):
            _row(f"{seeds} seeds, {name}", rates(seeds, 1, trials, generator=generator, **given))


if __name__ == "__main__":
    main(sys.argv[1:])
