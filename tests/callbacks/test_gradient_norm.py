"""The gradient norm of every step, against the norm that a module computes itself."""

from __future__ import annotations

import math

import pytest
import torch
from lightning.pytorch.plugins import MixedPrecision
from tables import cases
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from lmbench.callbacks import GradientNorm
from lmbench.instruments.training import total_norm
from lmbench.instruments.window import Schedule

from conftest import measure


def measured(module, **flags):
    return measure(module, GradientNorm(), schedule=Schedule(0, 5), **flags)[0]


@cases("flags", {}, {"accumulate_grad_batches": 3, "gradient_clip_val": 1e-3})
def test_each_step_has_the_norm_that_the_module_sees_before_it_is_clipped(sleeper, seen_norms, flags):
    records = measured(sleeper, **flags)
    assert [record.gradient_norm for record in records] == pytest.approx(seen_norms, rel=1e-6)
    assert len(set(seen_norms)) > 3
    assert all(record.clip_s > 0 for record in records)


@cases("fused", False, True)
def test_the_loss_scale_is_not_in_the_norm_and_a_skipped_step_has_no_finite_one(sleeper, fused):
    """A fused optimizer removes the scale inside its step; for all others Lightning removes it before."""

    def first_step(scale=None):
        torch.manual_seed(0)
        module = type(sleeper)()
        module.forward_s = module.backward_s = module.optimizer_s = 0.0
        module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=0.1, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0)
        return measured(module, **({"plugins": MixedPrecision("16-mixed", "cpu", scaler)} if scale else {}))[0]

    scaled, skipped = first_step(2.0**10), first_step(2.0**100)
    assert (scaled.is_skipped, skipped.is_skipped) == (False, True)
    assert scaled.gradient_norm == pytest.approx(first_step().gradient_norm, rel=0.02)
    assert not math.isfinite(skipped.gradient_norm)


def test_sharded_gradients_and_others_have_one_norm_in_bf16():
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        # The fake group would not fill what it sends.
        ones = torch.ones(9, dtype=torch.bfloat16)
        sharded = distribute_tensor(ones, init_device_mesh("cpu", (1,)), [Shard(0)], src_data_rank=None)
        assert float(total_norm([sharded, torch.ones(16)])) == 5.0
    finally:
        distributed.destroy_process_group()


def test_norms_are_worked_out_in_float32_whatever_the_gradients_are():
    values = torch.full((4096,), 1.001)
    embedding = nn.Embedding(5, 2, sparse=True)
    embedding(torch.tensor([1, 1])).sum().backward()
    # In half precision the squares would be infinite.
    for gradients, norm in (
        ([values.bfloat16(), values], math.hypot(64.0, 64.064)),
        ([torch.ones(9, dtype=torch.float64)], 3.0),
        ([embedding.weight.grad], math.sqrt(8.0)),
    ):
        assert float(total_norm(gradients)) == pytest.approx(norm, rel=1e-5)
