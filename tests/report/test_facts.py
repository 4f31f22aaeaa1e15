"""Facts in the words in which people say them: a strategy, and a baseline."""

from __future__ import annotations

from tables import cases

from lmbench.report.facts import strategy_text
from lmbench.report.frame import Frame, MeasuredCell, parse_baseline


# The words for a strategy, its class, and its options.
@cases("""
- [words, class_path, options]
- [ddp, lightning.pytorch.strategies.DDPStrategy,
   &usual {timeout: "0:30:00", start_method: popen, process_group_backend: null}]
- [ddp (find_unused_parameters true), lightning.pytorch.strategies.DDPStrategy,
   {<<: *usual, find_unused_parameters: true}]
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


def test_a_baseline_is_the_value_itself_before_longer_ones_that_begin_with_it():
    ways = ["default regional", "default fullgraph", "default static", "default", "default dynamic", "eager"]
    frame = Frame([MeasuredCell([], {"compile": way, "matmul": "highest (fp32)"}) for way in ways])
    assert parse_baseline("compile=default,matmul=highest", frame) == {"compile": "default", "matmul": "highest (fp32)"}
