"""How several ranks share the work, in words: `ddp`, or `fsdp2 (reshard_after_forward false)`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lmbench.records.run import RunRecord
from lmbench.records.schema import value_at
from lmbench.records.settings import as_text
from lmbench.records.vocabulary import Values

#: Values that options of a strategy have unless somebody sets them, some of them by its class.
_USUAL_OPTIONS = {
    "timeout": "0:30:00", "start_method": "popen", "data_parallel_size": "auto", "tensor_parallel_size": "auto",
    "save_distributed_checkpoint": True, "sharding_strategy": "FULL_SHARD", "state_dict_type": "full", "dim": 0,
    "init_sync": True, "broadcast_buffers": True, "find_unused_parameters": False, "check_reduction": False,
    "gradient_as_bucket_view": False, "static_graph": False, "skip_all_reduce_unused_params": False,
    "batched_grad_copy": False, "bucket_cap_mb": 25.0, "reduce_dtype": "float32",
}  # fmt: skip
_USUAL_OF_DDP = {**_USUAL_OPTIONS, "gradient_as_bucket_view": True}
_USUAL_OF_FSDP2 = {
    "tensor_parallel_size": 1, "reshard_after_forward": True, "blocks_per_group": 4, "reduce_dtype": "float32",
    "reduce_each_micro_batch": True, "prefetch": 0,
}  # fmt: skip
#: The names of strategies and the usual values of their options, by their classes.
_STRATEGIES = {
    "DataParallel": ("ddp", _USUAL_OF_DDP), "ShardedOptimizer": ("ddp_zero1", _USUAL_OF_DDP),
    "ModelParallel": ("fsdp2", _USUAL_OF_FSDP2), "FSDPStrategy": ("fsdp", _USUAL_OPTIONS),
    # lmbench's `ddp` is another one.
    "DDPStrategy": ("DDPStrategy", _USUAL_OPTIONS),
}  # fmt: skip


def strategy_of(run: RunRecord) -> str | None:
    """How several ranks share the work; `none` for one rank."""
    if run.world_size == 1:
        return "none"
    strategy: Values | str | None = value_at(run, "config.trainer.strategy")
    if strategy == "auto" and run.world_size is not None:
        # Lightning takes this one for several devices.
        return "ddp"
    return strategy_text(strategy) if isinstance(strategy, Mapping) else strategy


def strategy_text(strategy: Mapping[str, Any]) -> str:
    """The class of a strategy by its name, with the options that somebody set."""
    class_name = strategy["class_path"].rpartition(".")[2]
    name, usual = _STRATEGIES.get(class_name, (class_name.removesuffix("Strategy"), _USUAL_OPTIONS))
    options = ", ".join(
        f"{option} {as_text(value)}"
        for option, value in (strategy.get("init_args") or {}).items()
        if value is not None and value != usual.get(option)
    )
    return f"{name} ({options})" if options else name
