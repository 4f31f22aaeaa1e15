"""Kernels of compiled graphs: parts by the capture's list of launches, by order within each call, never by guess."""

from __future__ import annotations

from pathlib import Path

import pytest
from paths import TRACES
from trace_events import HandWritten

from lmbench.errors import UsageError
from lmbench.kernels.recorded import GraphNotes
from lmbench.kernels.trace.compiled import parts_of_call, read_graphs
from lmbench.kernels.trace.findings import examine
from lmbench.kernels.trace.kernels import load_trace

NORM, MM = "triton_per_fused_mean_0", "extern_kernels.mm"
FORWARD = GraphNotes(
    [
        (NORM, ["net.blocks.0.attention_norm"]),
        (MM, ["net.blocks.0.attention.q"]),
        (NORM, ["net.blocks.0.ffn_norm", "net.blocks.0.attention_residual"]),
        (MM, ["net.blocks.0.ffn.gate"]),
        ("aten._scaled_dot_product_flash_attention.default", ["net.blocks.0.attention.core"]),
    ]
)


def test_the_kth_launch_of_a_name_has_the_kth_entrys_part() -> None:
    graphs = read_graphs([FORWARD], {})
    library = ["mm", "copy_", "mm", "_scaled_dot_product_flash_attention"]
    triton, others = parts_of_call(graphs, [NORM, NORM], library)
    assert triton == ["norm", "norm+residual"]
    assert others == ["qkv", "", "ffn", "attention"]


def test_a_graph_with_other_kernels_tells_nothing() -> None:
    graphs = read_graphs([FORWARD], {})
    assert parts_of_call(graphs, [NORM], ["mm"]) == ([""], [""])
    assert parts_of_call([], [NORM, NORM], ["mm"]) == (["", ""], [""])


def test_kernels_that_the_graph_does_not_list_have_no_part_and_hide_no_other() -> None:
    graphs = read_graphs([FORWARD, GraphNotes([("triton_poi_fused_other_0", ["net.head"])])], {})
    launched = [NORM, "triton_per_fused_unlisted_7", NORM, "triton_poi_fused_other_0"]
    triton, others = parts_of_call(graphs, launched, ["mm", "mm", "_scaled_dot_product_flash_attention"])
    assert triton == ["norm", "", "norm+residual", ""]
    assert others == ["qkv", "ffn", "attention"]


def test_library_calls_that_do_not_fit_tell_nothing_and_leave_the_rest() -> None:
    assert parts_of_call(read_graphs([FORWARD], {}), [NORM, NORM], ["mm"]) == (["norm", "norm+residual"], [""])


def test_of_graphs_with_the_same_kernels_only_agreement_counts() -> None:
    other = GraphNotes([(NORM, ["net.head"]), *FORWARD.kernels[1:]])
    library = ["mm", "mm", "_scaled_dot_product_flash_attention"]
    assert parts_of_call(read_graphs([FORWARD, FORWARD], {}), [NORM, NORM], library)[0] == ["norm", "norm+residual"]
    assert parts_of_call(read_graphs([FORWARD, other], {}), [NORM, NORM], library) == (["", ""], ["", "", ""])


@pytest.mark.parametrize("stored", [3, [3], [{}], [{"kernels": 3}], [{"kernels": [[NORM, [3, None]]]}]])
def test_a_list_of_another_form_is_said_in_one_line(stored: object, tmp_path: Path) -> None:
    trace = HandWritten()
    trace.op("aten::mm", 0, 10)
    trace.metadata["compiled_graphs"] = stored
    with pytest.raises(UsageError, match=r"is damaged: its notes of lmbench: .*compiled_graphs") as caught:
        load_trace(trace.write(tmp_path / "t.json"))
    assert "\n" not in str(caught.value)


def compiled(path: Path, graphs: list[object]) -> list[str]:
    trace = HandWritten()
    trace.metadata["compiled_graphs"] = graphs
    trace.phase("forward", 0, 200)
    trace.module("net", 1, 190)
    trace.op("Torch-Compiled Region: 0/0", 2, 180)
    trace.op("## Call CompiledFxGraph fabc ##", 5, 170)
    for number, name in enumerate((NORM, MM, NORM, MM), start=1):
        at = 10 + 20 * number
        if name == MM:
            trace.op("aten::mm", at, 15)
            # Split over the inner dimension: two kernels of one call.
            trace.launch(10 + number, at + 8, 2)
            trace.kernel(10 + number, "void cublasLt::splitKreduce_kernel<32, 16, int>(int)", at + 505, 1)
        trace.launch(number, at + 1, 2)
        trace.kernel(number, NORM if name == NORM else "nvjet_sm90_tst_64x96_64x8_4x2_h_bz_NTT", at + 500, 5)
    return load_trace(trace.write(path / "t.json")).kernels.parts


def test_kernels_in_a_call_of_a_compiled_graph_have_its_parts(tmp_path: Path) -> None:
    graph = {"kernels": FORWARD.kernels[:4]}
    assert compiled(tmp_path, [graph]) == ["norm", "qkv", "qkv", "norm+residual", "ffn", "ffn"]


def test_a_sum_directly_in_a_call_has_the_part_of_the_kernel_before_it(tmp_path: Path) -> None:
    trace = HandWritten()
    trace.metadata["compiled_graphs"] = [{"kernels": [[NORM, ["net.blocks.0.attention_norm"]]]}]
    trace.phase("backward", 0, 200)
    trace.op("## Call CompiledFxGraph fabc ##", 5, 170)
    trace.launch(1, 10, 2)
    trace.op("aten::sum", 20, 15)
    trace.launch(2, 25, 2)
    trace.kernel(1, NORM, 500, 5)
    trace.kernel(2, "void at::native::reduce_kernel<512, 1>(int)", 510, 5)
    assert load_trace(trace.write(tmp_path / "t.json")).kernels.parts == ["norm", "norm"]


def test_without_the_list_they_are_unclassified_and_a_guard_warns(tmp_path: Path) -> None:
    assert compiled(tmp_path, []) == ["unclassified"] * 6
    guards = {guard.name: guard for guard in examine(tmp_path / "t.json").guards}
    assert guards["unclassified_part"].status == "warn"
    assert guards["unclassified_part"].value == 1.0
    assert guards["unclassified_kind"].status == "pass"


def test_a_replayed_graph_has_the_parts_of_the_same_one_launched() -> None:
    # Two runs of one model on one H200: the second with CUDA graphs, whose kernels no operator launches.
    launched, replayed = examine(TRACES / "small_bf16_compiled"), examine(TRACES / "small_bf16_replayed")
    assert replayed.step.parts_s["unclassified"] < 0.002 * replayed.step.kernel_s
    for before, after in zip(launched.phases[:2], replayed.phases[:2], strict=True):
        assert (before.phase, after.phase) in {("forward", "forward"), ("backward", "backward")}
        for part, seconds in before.parts_s.items():
            if seconds / launched.steps > 100e-6:
                assert after.parts_s[part] / replayed.steps == pytest.approx(seconds / launched.steps, rel=0.05), part


def test_a_real_compiled_step_has_all_parts_with_nothing_left() -> None:
    found = examine(TRACES / "small_bf16_compiled")
    assert found.step.parts_s["unclassified"] < 0.001 * found.step.kernel_s
    named = {part for joined in found.step.parts_s for part in joined.split("+")}
    assert named >= {
        "embedding",
        "norm",
        "qkv",
        "rope",
        "scores",
        "softmax",
        "values",
        "output",
        "ffn",
        "residual",
        "head",
    }
    # 12 layers: of forward's products 3 are qkv, 3 ffn, 1 output, 1 scores and 1 values; 1 head.
    rows = [row for row in found.phases[0].rows if row.kind == "gemm"]
    assert sum(row.instances for row in rows) == 2 * (12 * 9 + 1)
    assert {part for row in rows for part in row.parts_s} == {"qkv", "scores", "values", "output", "ffn", "head"}
