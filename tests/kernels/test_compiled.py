"""Parts of compiled kernels, by the recorded launches of each graph and the order of kernels in each call."""

from __future__ import annotations

import pytest
from tables import cases, rows
from trace_events import examined

from lmbench.kernels.compiled import parts_of_call, read_graphs
from lmbench.kernels.names import kind_of
from lmbench.kernels.trace_notes import GraphNotes

KERNELS = dict(
    rows("""
norm | triton_per_fused_mean_0
silu | triton_poi_fused_silu_1
other | triton_poi_fused_other_0
unlisted | triton_per_fused_unlisted_7
mm | extern_kernels.mm
sort | aten.sort.default
attention | aten._scaled_dot_product_flash_attention.default
gemm | nvjet_sm90_tst_64x96_64x8_4x2_h_bz_NTT
split_sum | void cublasLt::splitKreduce_kernel<32, 16, int>(int)
sum | void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::sum_functor<float>>>(int)
fill | Memset (Device)
flash | flash::flash_fwd_splitkv_kernel<int>(int)
combine | flash::flash_fwd_splitkv_combine_kernel<int>(int)
unheard_of | what_is_this
""")
)
#: The launches of each graph: a kernel, and the modules of a block that it computes.
GRAPHS = dict(
    rows("""
two_modules | norm attention_norm, mm attention.output, mm ffn.up, silu ffn, mm ffn.down
fused | norm attention_norm, attention attention.core, mm ffn.up
sorted | norm attention_norm, sort loss, mm ffn.up
repeated | norm attention_norm, mm attention.q, norm ffn_norm attention_residual, mm ffn
same | norm ffn_norm, mm ffn.up, mm ffn.gate, silu ffn
twin | norm ffn_norm, mm ffn.up, mm head, silu ffn
other | other head
""")
)


def graph_of(name):
    launches = [launch.split() for launch in GRAPHS[name].split(", ")]
    notes = [(KERNELS[kernel], [f"net.blocks.0.{path}" for path in paths]) for kernel, *paths in launches]
    return read_graphs([GraphNotes(notes)], {})


@cases("""
graphs | kernels | parts
# Each product between two Triton kernels is the next call.
two_modules | norm gemm gemm silu gemm | norm output ffn ffn ffn
repeated | norm gemm norm gemm | norm qkv norm+residual ffn
# A fill belongs to the product after it, a split sum to the product before it.
two_modules | norm fill gemm split_sum fill gemm silu fill gemm | norm output output output ffn ffn ffn ffn ffn
# Calls of one part need no matching.
two_modules | norm gemm gemm silu unheard_of gemm gemm | norm output ffn ffn ffn ffn ffn
# Kernels that do not fit the calls have no part; the parts of others stand.
two_modules | norm gemm silu gemm | norm - ffn ffn
sorted | norm gemm gemm | norm - -
# Attention may run several kernels in a row.
fused | norm flash combine gemm | norm attention attention ffn
# A sum has the part of the Triton kernel or the product before it.
two_modules | norm sum sum gemm gemm silu gemm sum | norm norm norm output ffn ffn ffn ffn
# A Triton kernel that the graph does not list has no part, and does not keep the graph from fitting.
two_modules other | norm gemm unlisted gemm silu gemm | norm output - ffn ffn ffn
# Another order of Triton kernels is another graph.
two_modules | silu gemm gemm norm gemm | - - - - -
two_modules | gemm gemm | - -
# Graphs with the same kernels have to agree.
same twin | norm gemm gemm silu | - - - -
""")
def test_parts_of_a_call_follow_from_its_triton_kernels(graphs, kernels, parts):
    known = [each for name in graphs.split() for each in graph_of(name)]
    names = [KERNELS[kernel] for kernel in kernels.split()]
    ran = [(name, kind_of(name, "gpu_memset" if "Memset" in name else "kernel")) for name in names]
    assert [part or "-" for part in parts_of_call(known, ran)] == parts.split()


def test_a_replayed_graph_has_the_parts_of_the_launched_one():
    # Two runs of one model on one H200: the second with CUDA graphs, whose kernels no operator launches.
    launched, replayed = examined("small_bf16_compiled"), examined("small_bf16_replayed")
    assert replayed.work.fraction("part", "unclassified") < 0.002
    for phase in ("forward", "backward"):
        before, after = (findings.work.seconds("part", phase) for findings in (launched, replayed))
        long = {part: pytest.approx(seconds, rel=0.05) for part, seconds in before.items() if seconds > 100e-6}
        assert {part: after[part] for part in long} == long
