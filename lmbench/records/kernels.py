# ruff: noqa: E501 (tables, one field a line)
# fmt: off
"""What a profiled run has from its trace: kernel times by phase, kind and part, and clocks."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct, field

from lmbench.records.field import About, PerPhase


class TopKernel(Struct):
    """A kernel among the longest of its phase; times and counts are means per step."""

    name: str
    kind: str
    part: str
    kernel_s: float
    kernel_count: float
    share_fraction: float


class PhaseKernels(Struct):
    """Kernels: of one phase, or of the step with what lies outside of all phases."""

    kernel_s: Annotated[float | None, About("s", "<phase> kernels", "Sum of the kernels of <phase>.", "down")] = None
    kernel_count: Annotated[float | None, About("count", "kernels in <phase>", "Kernels, copies and fills.")] = None
    matmul_fraction: Annotated[float | None, About("fraction", "matmul in <phase>", "Share of matrix products (kind `gemm`) in kernel time; fused attention is not counted.")] = None
    kinds: Annotated[dict[str, float], About("tree", "kinds", "Kernel time by kind, the largest first: `gemm_s`, ...")] = field(default_factory=dict)
    parts: Annotated[dict[str, float], About("tree", "parts", "Kernel time by part of the model, the largest first: `ffn_s`, ...; `+` joins the parts of a fused kernel.")] = field(default_factory=dict)
    top: Annotated[list[TopKernel], About("tree", "top kernels", "The longest kernels: name, kind, part, `kernel_s`, `kernel_count`, `share_fraction`.")] = field(default_factory=list)
    top_other: Annotated[TopKernel | None, About("tree", "top other kernel", "The longest kernel that is no matrix product; null if there is none.")] = None
    window_s: Annotated[float | None, About("s", "<phase> window", "The device's time with <phase>: `busy_s` + `queued_gap_s` + `host_wait_s` + `other_idle_s`.", "down")] = None
    busy_s: Annotated[float | None, About("s", "<phase> busy", "Union of kernels, copies and fills; a moment with kernels of several phases is of one of them.", "down")] = None
    queued_gap_s: Annotated[float | None, About("s", "<phase> gaps", "Gaps of up to 30 us before kernels that lay in the queue.", "down")] = None
    host_wait_s: Annotated[float | None, About("s", "<phase> host wait", "Idle until the next kernel was launched: the device waited for the host.", "down")] = None
    other_idle_s: Annotated[float | None, About("s", "<phase> other idle", "All other idle time: waiting for another stream, a copy or another rank, or unknown.", "down")] = None
    comm_s: Annotated[float | None, About("s", "<phase> communication", "Union of communication kernels.", "down")] = None
    comm_exposed_s: Annotated[float | None, About("s", "<phase> exposed communication", "Communication beside which nothing computes.", "down")] = None
    host_s: Annotated[float | None, About("s", "<phase> on the host", "The host's time in <phase>, slowed by the profiler.")] = None
    launch_count: Annotated[float | None, About("count", "launches in <phase>", "Calls of the host that start something on the device.", "down")] = None
    median_kernel_s: Annotated[float | None, About("s", "median kernel", "Median duration of the kernels of <phase>.")] = None
    verdict: Annotated[str | None, About("text", "<phase> by the trace", "`host-bound`, `stalled` (idle for something else), `queued` or `mixed`, by the shares of idle time; null for a phase too short to judge.")] = None


class AttentionTimes(Struct):
    """Kernels: inside attention written out."""

    scores_s: Annotated[float | None, About("s", "scores", "Kernel time of the score product in <phase>, where attention is written out.", "down")] = None
    mask_s: Annotated[float | None, About("s", "mask", "Scaling the scores and masking them.", "down")] = None
    softmax_s: Annotated[float | None, About("s", "softmax", "Softmax.", "down")] = None
    values_s: Annotated[float | None, About("s", "values", "The value product and its copies.", "down")] = None
    matmul_s: Annotated[float | None, About("s", "products", "Matrix products within scores and values.", "down")] = None
    softmax_matmul_time_ratio: Annotated[float | None, About("1", "softmax / products", "Time of softmax divided by that of the products.")] = None
    softmax_matmul_flop_ratio: Annotated[float | None, About("1", "softmax / products, FLOPs", "The same of FLOPs; null without the model's shape.")] = None


class AnnotationKernels(Struct):
    """The kernels that were launched within one of the user's own ranges; means per step."""

    name: str
    calls: float
    kernel_s: float
    own_s: float
    kernel_count: float


class TopOperator(Struct):
    """An operator among the longest of its phase on the host, without those inside it; means per step."""

    phase: str
    name: str
    self_s: float
    call_count: float
    share_fraction: float


class KernelSummary(Struct):
    """Kernels: of the whole trace."""

    reason: Annotated[str | None, About("text", "no kernels because", "Why nothing is known of the kernels (a CPU, a trace that cannot be read); null where it is.")] = None
    steps: Annotated[int | None, About("count", "steps", "Steps in the trace; times and counts of phases are means over them.")] = None
    clock_steps: Annotated[int | None, About("count", "clocked steps", "Steps that the clocks are over: the first of several begins on an idle device and is left out.")] = None
    phase_source: Annotated[str | None, About("text", "phases by", "Whose ranges tell the phases: `lmbench`, `foreign` or `none`.")] = None
    inferred_phases: Annotated[list[str], About("tree", "inferred phases", "Phases that no range tells, only what autograd runs: where they begin and end is inferred.")] = field(default_factory=list)
    kernel_s: Annotated[float | None, About("s", "kernel time", "Kernel time of a step, what lies outside of all phases included.", "down")] = None
    outside_s: Annotated[float | None, About("s", "outside", "Kernel time launched outside of every phase.", "down")] = None
    unclassified_kind_fraction: Annotated[float | None, About("fraction", "no kind", "Share of kernel time whose kind is unknown.", "down")] = None
    unclassified_part_fraction: Annotated[float | None, About("fraction", "no part", "Share of kernel time whose part of the model is unknown.", "down")] = None
    captured_kernel_count: Annotated[int | None, About("count", "kernels in the trace", "Kernels, copies and fills of the whole trace.")] = None
    captured_launch_count: Annotated[int | None, About("count", "launches in the trace", "Launches of the whole trace.")] = None
    kernel_without_launch_count: Annotated[int | None, About("count", "without launch", "Kernels whose launch is not in the trace.", "down")] = None
    launch_without_kernel_count: Annotated[int | None, About("count", "without kernel", "Launches whose kernel is not in the trace.", "down")] = None
    kernel_before_launch_count: Annotated[int | None, About("count", "before launch", "Kernels that start before their launch.", "down")] = None
    phases: PerPhase[PhaseKernels] = field(default_factory=PerPhase)
    annotations: Annotated[list[AnnotationKernels], About("tree", "annotations", "Kernels by the user's own ranges (`record_function`), the longest first: `name`, `calls`, `kernel_s`, `own_s` (without ranges inside), `kernel_count`.")] = field(default_factory=list)
    attention: PerPhase[AttentionTimes] = field(default_factory=PerPhase)
    operators: Annotated[list[TopOperator], About("tree", "operators", "Of a trace without kernels, each phase's longest operators on the host: `phase`, `name`, `self_s`, `call_count`, `share_fraction`.")] = field(default_factory=list)
