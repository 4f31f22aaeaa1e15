"""Parts of compiled kernels, by the recorded launches of each graph and the order of kernels in each call."""

from __future__ import annotations

import pytest
from trace_events import examined

from lmbench.kernels.compiled import parts_of_call, read_graphs
from lmbench.kernels.names import kind_of
from lmbench.kernels.trace_notes import GraphNotes

NORM, SILU, MM = "triton_per_fused_mean_0", "triton_poi_fused_silu_1", "extern_kernels.mm"
UNLISTED = "triton_per_fused_unlisted_7"
GEMM, SPLIT_SUM = "nvjet_sm90_tst_64x96_64x8_4x2_h_bz_NTT", "void cublasLt::splitKreduce_kernel<32, 16, int>(int)"
ADDED = "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::sum_functor<float>>>(int)"
FILL = "Memset (Device)"
FLASH, COMBINE = "flash::flash_fwd_splitkv_kernel<int>(int)", "flash::flash_fwd_splitkv_combine_kernel<int>(int)"
FLASH_CALL = "aten._scaled_dot_product_flash_attention.default"


def graph_of(*launches):
    """A graph from pairs of a kernel's name and paths of modules, with `+` between several paths."""
    kernels = [(name, [f"net.blocks.0.{path}" for path in paths.split("+")]) for name, paths in launches]
    return read_graphs([GraphNotes(kernels)], {})


TWO_MODULES = graph_of(
    (NORM, "attention_norm"), (MM, "attention.output"), (MM, "ffn.up"), (SILU, "ffn"), (MM, "ffn.down")
)
FUSED = graph_of((NORM, "attention_norm"), (FLASH_CALL, "attention.core"), (MM, "ffn.up"))
SORTED = graph_of((NORM, "attention_norm"), ("aten.sort.default", "loss"), (MM, "ffn.up"))
# One name is listed twice, and once with the parts of two modules.
REPEATED = graph_of((NORM, "attention_norm"), (MM, "attention.q"), (NORM, "ffn_norm+attention_residual"), (MM, "ffn"))
SAME, TWIN = (graph_of((NORM, "ffn_norm"), (MM, "ffn.up"), (MM, path), (SILU, "ffn")) for path in ("ffn.gate", "head"))
OTHER = graph_of(("triton_poi_fused_other_0", "head"))


@pytest.mark.parametrize(
    ("graphs", "names", "expected"),
    [
        # Each product between two Triton kernels is the next call.
        (TWO_MODULES, [NORM, GEMM, GEMM, SILU, GEMM], "norm output ffn ffn ffn"),
        (REPEATED, [NORM, GEMM, NORM, GEMM], "norm qkv norm+residual ffn"),
        # A fill belongs to the product after it, a split sum to the product before it.
        (TWO_MODULES, [NORM, FILL, GEMM, SPLIT_SUM, FILL, GEMM, SILU, FILL, GEMM, SPLIT_SUM],
         "norm output output output ffn ffn ffn ffn ffn ffn"),
        # Calls of one part need no matching.
        (TWO_MODULES, [NORM, GEMM, GEMM, SILU, "what_is_this", GEMM, GEMM], "norm output ffn ffn ffn ffn ffn"),
        # Kernels that do not fit the calls have no part; the parts of others stand.
        (TWO_MODULES, [NORM, GEMM, SILU, GEMM], "norm - ffn ffn"),
        (SORTED, [NORM, GEMM, GEMM], "norm - -"),
        # Attention may run several kernels in a row.
        (FUSED, [NORM, FLASH, COMBINE, GEMM], "norm attention attention ffn"),
        # A sum has the part of the Triton kernel or the product before it.
        (TWO_MODULES, [NORM, ADDED, ADDED, GEMM, GEMM, SILU, GEMM, ADDED], "norm norm norm output ffn ffn ffn ffn"),
        # A Triton kernel that the graph does not list has no part, and does not keep the graph from fitting.
        (TWO_MODULES + OTHER, [NORM, GEMM, UNLISTED, GEMM, SILU, GEMM], "norm output - ffn ffn ffn"),
        # Another order of Triton kernels is another graph.
        (TWO_MODULES, [SILU, GEMM, GEMM, NORM, GEMM], "- - - - -"),
        (TWO_MODULES, [GEMM, GEMM], "- -"),
        # Graphs with the same kernels have to agree.
        (SAME + TWIN, [NORM, GEMM, GEMM, SILU], "- - - -"),
    ],
)  # fmt: skip
def test_parts_of_a_call_follow_from_its_triton_kernels(graphs, names, expected):
    ran = [(name, kind_of(name, "gpu_memset" if name == FILL else "kernel")) for name in names]
    assert [part or "-" for part in parts_of_call(graphs, ran)] == expected.split()


def test_a_replayed_graph_has_the_parts_of_the_launched_one():
    # Two runs of one model on one H200: the second with CUDA graphs, whose kernels no operator launches.
    launched, replayed = examined("small_bf16_compiled"), examined("small_bf16_replayed")
    assert replayed.work.fraction("part", "unclassified") < 0.002
    for phase in ("forward", "backward"):
        before, after = (findings.work.seconds("part", phase) for findings in (launched, replayed))
        long = {part: pytest.approx(seconds, rel=0.05) for part, seconds in before.items() if seconds > 100e-6}
        assert {part: after[part] for part in long} == long
