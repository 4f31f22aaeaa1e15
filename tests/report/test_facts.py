"""Facts in the words in which people say them: a strategy, and a baseline."""

from __future__ import annotations

from tables import cases

from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.report.facts import read_facts
from lmbench.report.frame import Frame, MeasuredCell, parse_baseline
from lmbench.report.strategies import strategy_text


# The words for a strategy, its class, and its options.
@cases("""
- [words, class_path, options]
- [DDPStrategy, lightning.pytorch.strategies.DDPStrategy,
   &usual {timeout: "0:30:00", start_method: popen, process_group_backend: null, dim: 0, init_sync: true,
           find_unused_parameters: false, gradient_as_bucket_view: false, static_graph: false}]
- [DDPStrategy (find_unused_parameters true), lightning.pytorch.strategies.DDPStrategy,
   {<<: *usual, find_unused_parameters: true}]
- [ddp, lmbench.DataParallel,
   &ddp {gradient_as_bucket_view: true, static_graph: false, bucket_cap_mb: 25.0, find_unused_parameters: false,
         broadcast_buffers: true, reduce_dtype: float32}]
- [ddp (gradient_as_bucket_view false), lmbench.DataParallel, {<<: *ddp, gradient_as_bucket_view: false}]
- [ddp_zero1 (bucket_cap_mb 50.0), lmbench.ShardedOptimizer, {<<: *ddp, bucket_cap_mb: 50.0}]
- [fsdp2, lmbench.ModelParallel,
   &fsdp2 {tensor_parallel_size: 1, reshard_after_forward: true, blocks_per_group: 4, reduce_dtype: float32,
           reduce_each_micro_batch: true, prefetch: 0}]
- [fsdp2 (prefetch 2), lmbench.ModelParallel, {<<: *fsdp2, prefetch: 2}]
- [fsdp2 (tensor_parallel_size auto), lmbench.ModelParallel, {tensor_parallel_size: auto}]
- [Ring, mine.RingStrategy, null]
""")
def test_a_strategy_is_its_name_and_the_options_that_somebody_set(words, class_path, options):
    strategy = {"class_path": class_path, "init_args": options}
    assert strategy_text(strategy) == words


def test_several_devices_without_a_strategy_are_the_ddp_that_lightning_takes():
    def strategy_of(world_size):
        run = RunRecord(SCHEMA_VERSION, "ok", config={"trainer": {"strategy": "auto"}}, world_size=world_size)
        return read_facts(run)["strategy"]

    assert (strategy_of(2), strategy_of(1)) == ("ddp", "none")


def test_a_baseline_is_the_value_itself_before_longer_ones_that_begin_with_it():
    ways = ["default regional", "default fullgraph", "default static", "default", "default dynamic", "eager"]
    frame = Frame([MeasuredCell([], {"compile": way, "matmul": "highest (fp32)"}) for way in ways])
    assert parse_baseline("compile=default,matmul=highest", frame) == {"compile": "default", "matmul": "highest (fp32)"}
