"""Facts in the words in which people say them: a strategy, and a precision with and without its float32 matmul."""

from __future__ import annotations

import pytest

from lmbench.records.run import RunRecord
from lmbench.report.facts import read_facts

DDP = "lightning.pytorch.strategies.DDPStrategy"
USUAL = {"timeout": "0:30:00", "start_method": "popen", "process_group_backend": None}
FSDP2 = {
    "tensor_parallel_size": 1, "reshard_after_forward": True, "blocks_per_group": 4, "reduce_dtype": "float32",
    "reduce_each_micro_batch": True, "prefetch": 0,
}  # fmt: skip


@pytest.mark.parametrize(("strategy", "words"), [
    ("fsdp2", "fsdp2"),
    ({"class_path": DDP, "init_args": USUAL}, "ddp"),
    ({"class_path": DDP, "init_args": {**USUAL, "find_unused_parameters": True}}, "ddp (find_unused_parameters true)"),
    ({"class_path": "lmbench.ModelParallel", "init_args": FSDP2}, "fsdp2"),
    ({"class_path": "lmbench.ModelParallel", "init_args": {**FSDP2, "prefetch": 2}}, "fsdp2 (prefetch 2)"),
    ({"class_path": "lmbench.ModelParallel", "init_args": {"tensor_parallel_size": "auto"}},
     "fsdp2 (tensor_parallel_size auto)"),
    ({"class_path": "mine.RingStrategy", "init_args": None}, "Ring"),
])  # fmt: skip
def test_a_strategy_is_its_name_and_the_options_that_somebody_set(strategy, words):
    run = RunRecord(1, "ok", world_size=2, config={"trainer": {"strategy": strategy}})
    assert read_facts(run)["strategy"] == words
