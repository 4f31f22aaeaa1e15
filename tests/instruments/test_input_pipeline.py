"""The prediction of a step from the times of batches and the model, against small cases that can be counted by hand."""

from __future__ import annotations

import pytest
from tables import cases
from torch.utils.data import DataLoader

from lmbench.instruments.input_pipeline import (
    ModelAlone,
    Production,
    best_settings,
    predicted_batch_s,
    simulated_step_s,
)


@cases("""
- [batches, model, workers, prefetched, epoch, step]
- [[40], 20, 0, 2, null, 60]
- [[40], 20, 1, 2, null, 40]
- [[40], 20, 2, 2, null, 20]
- [[10], 20, 1, 2, null, 20]
# Two workers start together, so that an epoch of two batches takes 40 + 20 + 20.
- [[40], 20, 2, 2, 2, 40]
# One slow batch in ten: two batches ahead hide 40 of its 100, eight all of it. On the average a batch takes 19.
- [&bursts [10, 10, 10, 10, 10, 10, 10, 10, 10, 100], 20, 1, 2, null, 26]
- [*bursts, 20, 1, 8, null, 20]
- [*bursts, 20, 4, 2, null, 20]
""")
def test_a_step_is_simulated(batches, model, workers, prefetched, epoch, step):
    assert simulated_step_s(batches, model, workers, prefetched, epoch) == pytest.approx(step, rel=0.05)


@cases("""
- [workers, batch_s, cpu_s, epoch, fix, step_s]
- [0, 0.09, 0, null, {num_workers: 5, persistent_workers: false}, 0.02]
- [0, 0.03, 0, 6, {num_workers: 2, persistent_workers: true}, 0.025]
- [3, 0.03, 0, null, {num_workers: 3, persistent_workers: false}, 0.02]
- [0, 0.09, 0.08, null, {num_workers: 2, persistent_workers: false}, 0.05]
- [0, 0.0001, 0, null, {num_workers: 0, prefetch_factor: null}, 0.0201]
""")
def test_the_fewest_workers_that_are_as_good_as_any_are_chosen(workers, batch_s, cpu_s, epoch, fix, step_s):
    made, model = Production([batch_s], cpu_s, epoch), ModelAlone(0.02, 0.02, free_cores=2, cores=2)
    chosen = best_settings(DataLoader([1], num_workers=workers), made, model)
    assert {name: chosen[name] for name in fix} == fix
    predicted_s = predicted_batch_s(made, model, chosen["num_workers"], chosen["prefetch_factor"] or 0)
    assert predicted_s == pytest.approx((step_s, step_s), rel=0.1)


def test_a_prediction_on_a_busy_machine_says_what_other_processes_may_take():
    made, model = Production([0.03], 0.03, None), ModelAlone(0.02, 0.02, free_cores=1, cores=2)
    assert predicted_batch_s(made, model, 2, 2) == pytest.approx((0.025, 0.05))
