"""Parts in a replayed CUDA graph: by the Triton kernels around, a main kernel for each library call, or not at all."""

from __future__ import annotations

import pytest

from lmbench.kernels.recorded import GraphNotes
from lmbench.kernels.trace.compiled import CompiledGraph, parts_of_replay, read_graphs
from lmbench.kernels.trace.kinds import kind_of

NORM, SILU = "triton_per_fused_mean_0", "triton_poi_fused_silu_1"
GEMM, SUM = "nvjet_sm90_tst_64x96_64x8_4x2_h_bz_NTT", "void cublasLt::splitKreduce_kernel<32, 16, int>(int)"
FILL = "Memset (Device)"
FLASH, COMBINE = "flash::flash_fwd_splitkv_kernel<int>(int)", "flash::flash_fwd_splitkv_combine_kernel<int>(int)"


def graph_of(*launches: tuple[str, str]) -> list[CompiledGraph]:
    return read_graphs([GraphNotes([(name, [f"blocks.0.{path}"]) for name, path in launches])], {})


TWO_MODULES = graph_of(
    (NORM, "attention_norm"),
    ("extern_kernels.mm", "attention.output"),
    ("extern_kernels.mm", "ffn.up"),
    (SILU, "ffn"),
    ("extern_kernels.mm", "ffn.down"),
)


def parts(graphs: list[CompiledGraph], *names: str) -> list[str]:
    kinds = [kind_of(name, "gpu_memset" if name == FILL else "kernel") for name in names]
    return parts_of_replay(graphs, names, kinds)


def test_each_product_between_two_triton_kernels_is_the_next_call() -> None:
    assert parts(TWO_MODULES, NORM, GEMM, GEMM, SILU, GEMM) == ["norm", "output", "ffn", "ffn", "ffn"]


def test_a_fill_goes_with_the_product_after_it_and_a_split_sum_with_the_one_before() -> None:
    found = parts(TWO_MODULES, NORM, FILL, GEMM, SUM, FILL, GEMM, SILU, FILL, GEMM, SUM)
    assert found == ["norm", "output", "output", "output", "ffn", "ffn", "ffn", "ffn", "ffn", "ffn"]


def test_calls_of_one_part_need_no_counting() -> None:
    assert parts(TWO_MODULES, NORM, GEMM, GEMM, SILU, "what_is_this", GEMM, GEMM)[4:] == ["ffn"] * 3


@pytest.mark.parametrize("between", [[GEMM], [GEMM, GEMM, GEMM], [], [FLASH, GEMM]])
def test_kernels_that_do_not_fit_the_calls_tell_nothing_and_leave_the_rest(between: list[str]) -> None:
    assert parts(TWO_MODULES, NORM, *between, SILU, GEMM) == ["norm", *[""] * len(between), "ffn", "ffn"]


def test_kernels_of_one_attention_call_stand_in_a_row() -> None:
    attention = "torch.ops.aten._scaled_dot_product_flash_attention.default"
    graphs = graph_of((NORM, "attention_norm"), (attention, "attention.core"), ("extern_kernels.mm", "ffn.up"))
    assert parts(graphs, NORM, FLASH, COMBINE, GEMM) == ["norm", "attention", "attention", "ffn"]


def test_a_sum_behind_a_triton_kernel_has_its_part() -> None:
    added = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::sum_functor<float>>>(int)"
    assert parts(TWO_MODULES, NORM, added, added, GEMM, GEMM, SILU, GEMM)[:4] == ["norm", "norm", "norm", "output"]
    assert parts(TWO_MODULES, NORM, GEMM, GEMM, SILU, GEMM, added)[4:] == ["ffn", "ffn"]


def test_a_triton_kernel_that_the_graph_does_not_list_has_no_part() -> None:
    unlisted = "triton_per_fused_unlisted_7"
    assert parts(TWO_MODULES, NORM, GEMM, unlisted, GEMM, SILU, GEMM) == ["norm", "output", "", "ffn", "ffn", "ffn"]
    assert parts(TWO_MODULES, NORM, GEMM, GEMM, SILU, GEMM, unlisted)[4:] == ["ffn", ""]


def test_calls_of_any_number_of_kernels_tell_nothing_beside_others() -> None:
    graphs = graph_of((NORM, "attention_norm"), ("aten.sort.default", "loss"), ("extern_kernels.mm", "ffn.up"))
    assert parts(graphs, NORM, GEMM, GEMM) == ["norm", "", ""]


def test_another_order_of_triton_kernels_is_another_graph() -> None:
    assert parts(TWO_MODULES, SILU, GEMM, GEMM, NORM, GEMM) == [""] * 5
    assert parts([], NORM, GEMM) == ["", ""]
    assert parts(TWO_MODULES, GEMM, GEMM) == ["", ""]


def test_of_graphs_with_the_same_kernels_only_agreement_counts() -> None:
    other = graph_of(
        (NORM, "ffn_norm"), ("extern_kernels.mm", "ffn.up"), ("extern_kernels.mm", "ffn.gate"), (SILU, "ffn")
    )
    twin = graph_of((NORM, "ffn_norm"), ("extern_kernels.mm", "ffn.up"), ("extern_kernels.mm", "head"), (SILU, "ffn"))
    assert parts([*other, *other], NORM, GEMM, GEMM, SILU) == ["norm", "ffn", "ffn", "ffn"]
    assert parts([*other, *twin], NORM, GEMM, GEMM, SILU) == [""] * 4
