"""When data, sharded and tensor parallel training become bound by communication, from what this machine attains.

Compute and communication overlap at best, so the longer one bounds a phase. A rank of n has T tokens in a step. f are
the FLOPs of a forward per token, C the sustained rate of products, W the bus bandwidth of a collective. P and G are the
bytes of gathered parameters and of gradients; L layers have the width d, and a number of activations takes a bytes.

- A forward computes T f / C, a backward twice that; under tensor parallel a rank computes the n-th part of it.
- `ddp`: the backward all-reduces gradients: G 2 (n - 1) / n / W.
- `fsdp2`: the forward gathers parameters: P (n - 1) / n / W. The backward does so again, and reduces and scatters
  gradients: G (n - 1) / n / W.
- `tensor_parallel`: forward and backward each all-reduce activations twice a layer: 2 L T d a 2 (n - 1) / n / W
  (Shoeybi et al., Megatron-LM, 2019, section 3).

With one batch for all ranks, the ratio of communication to compute grows with n - 1, which gives the most ranks. With T
tokens a rank, that of `ddp` and `fsdp2` falls with T, which gives the least tokens.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd

from lmbench.errors import UsageError
from lmbench.kernels.ceiling import CeilingRecord, find_ceiling
from lmbench.kernels.communication import bus_factor_of
from lmbench.precision import find_precision
from lmbench.records.load import load_run
from lmbench.records.run import RunRecord
from lmbench.report.answer import Answer, Line
from lmbench.report.described import table
from lmbench.report.facts import FACT


def bounds_answer(source: str) -> Answer:
    """Compute and communication of a run's model under each kind of parallel training, and how far each scales.

    Raises:
        UsageError: the run or its machine's collectives are not known, or the record lacks a figure that is needed.
    """
    loaded = load_run(Path(source), with_steps=False)
    if loaded.damage is not None:
        raise UsageError(f"{source!r}: {loaded.damage}")
    run = loaded.record
    found = find_ceiling(loaded.path, run.environment)
    if found is None or not found[1].collectives:
        raise UsageError(
            f"no collectives of this run's machine lie beside {source!r}; `lmbench ceiling --collectives` measures them"
        )
    path, ceiling = found
    ranks = run.rank_count
    if ranks == 1:
        ranks = max(rate.ranks for rate in ceiling.collectives)
    rows = _rows(run, ceiling, ranks)
    return Answer(
        [Line("run", f"{loaded.path.name}, strategy {_strategy(run)}, ranks {run.rank_count}")],
        [table("kernels/bounds", rows, ranks=ranks, tokens=f"{_tokens(run):,.0f}")],
        [Line("ceiling", str(path), is_whole=True)],
    )


def _strategy(run: RunRecord) -> str:
    return str(FACT["strategy"].of(run, ({}, None)))


def _tokens(run: RunRecord) -> float:
    """Tokens of a rank in a step."""
    return (run.window.step_tokens or 0.0) / (run.data_parallel_size or run.rank_count)


def _rows(run: RunRecord, ceiling: CeilingRecord, ranks: int) -> pd.DataFrame:
    """A row for each strategy and pass, with the columns of the table."""
    model, flops, precision = run.model, run.flops, find_precision(str(run.precision))
    name = precision.peak if precision is not None else None
    # In cuBLAS `medium` acts like `high` (see `precision.peak_flops`).
    if name == "fp32" and run.matmul_precision in ("high", "medium"):
        name = "tf32"
    rate = next((rate for rate in ceiling.rates if rate.name == name), None)
    tokens, count, width = _tokens(run), model.trainable_parameter_count, model.d_model
    per_token, layers = flops.per_token_flops, model.num_layers
    if not (precision and rate and tokens and count and width and layers and per_token and flops.multiplier):
        raise UsageError("the run's record lacks tokens, FLOPs, layers or the rate of its precision's products")
    forward_s = tokens * per_token / flops.multiplier / rate.sustained_per_s
    gathered, gradients = float(count * precision.compute_bytes), float(count * precision.weight_bytes)
    activations = 2 * layers * tokens * width * precision.compute_bytes

    def seconds(kind: str, total_bytes: float, messages: int) -> float:
        """Seconds of messages that nothing slows down, at the bus bandwidth of their size."""
        bus = ceiling.bus_bytes_per_s(kind, ranks, total_bytes / messages)
        assert bus is not None
        return total_bytes * bus_factor_of(kind, ranks) / bus

    gather_s = seconds("all-gather", gathered, layers)
    exchange_s = seconds("all-reduce", activations, 2 * layers)
    strategies = (
        ("ddp", "backward", seconds("all-reduce", gradients, layers)),
        ("fsdp2", "forward", gather_s),
        ("fsdp2", "backward", gather_s + seconds("reduce-scatter", gradients, layers)),
        ("tensor_parallel", "forward", exchange_s),
        ("tensor_parallel", "backward", exchange_s),
    )
    rows = pd.DataFrame(strategies, columns=["strategy", "phase", "communication_s"])
    is_split = rows.strategy == "tensor_parallel"
    compute_s = forward_s * np.where(rows.phase == "backward", 2, 1) / np.where(is_split, ranks, 1)
    ratio = rows.communication_s / compute_s
    own = _strategy(run)
    is_own = run.world_size == ranks and "tensor_parallel_size" not in own
    measured_s = rows.phase.map({phase: figures.mean_s for phase, figures in run.phases.items()})
    return rows.assign(
        compute_s=compute_s,
        ratio=ratio,
        bound=np.where(ratio > 1, "communication", "compute"),
        least_tokens=(tokens * ratio).mask(is_split),
        most_ranks=np.floor(1 + (ranks - 1) / ratio),
        measured_s=measured_s.where([is_own and own.startswith(strategy) for strategy in rows.strategy]),
    )
