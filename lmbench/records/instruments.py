# ruff: noqa: E501 (tables, one field a line)
"""What passes besides timing found: kernels in a trace, the allocator's history, a predicted peak, dtypes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct

from lmbench.records.field import Bytes, Count, Flag, Fraction, Number, PerPhase, PhaseBytes, Seconds, Text, part


class TopKernel(Struct):
    """A kernel among the longest of its phase; times and counts are means per step."""

    name: str
    kind: str
    part: str
    kernel_s: float
    kernel_count: float
    share_fraction: float


class PhaseKernels(Struct):
    """Kernels: kernels of one phase, or of the step with what lies outside of all phases.

    Attributes:
        kernel_s: <phase> kernels (lower is better). Sum of the kernels of <phase>.
        kernel_count: kernels in <phase>. Kernels, copies and fills.
        matmul_fraction: matmul in <phase>. Share of matrix products (kind `gemm`) in kernel time; fused attention is not counted.
        kinds: kinds. Kernel time by kind, the largest first: `gemm_s`, ...
        parts: parts. Kernel time by part of the model, the largest first: `ffn_s`, ...; `+` joins the parts of a fused kernel.
        top: top kernels. The longest kernels: name, kind, part, `kernel_s`, `kernel_count`, `share_fraction`.
        top_other: top other kernel. The longest kernel that is no matrix product; null if there is none.
        window_s: <phase> window (lower is better). The device's time with <phase>: `busy_s` + `queued_gap_s` + `host_wait_s` + `other_idle_s`.
        busy_s: <phase> busy (lower is better). Union of kernels, copies and fills; a moment with kernels of several phases is of one of them.
        queued_gap_s: <phase> gaps (lower is better). Gaps of up to 30 us before kernels that lay in the queue.
        host_wait_s: <phase> host wait (lower is better). Idle until the next kernel was launched: the device waited for the host.
        other_idle_s: <phase> other idle (lower is better). All other idle time: waiting for another stream, a copy or another rank, or unknown.
        comm_s: <phase> communication (lower is better). Union of communication kernels.
        comm_exposed_s: <phase> exposed communication (lower is better). Communication beside which nothing computes.
        host_s: <phase> on the host. The host's time in <phase>, slowed by the profiler.
        launch_count: launches in <phase> (lower is better). Calls of the host that start something on the device.
        median_kernel_s: median kernel. Median duration of the kernels of <phase>.
        verdict: <phase> by the trace. `communication-bound`, `host-bound`, `stalled` (idle for something else), `queued` or `mixed`, by the shares of its time; null for a phase too short to judge.
    """

    kernel_s: Seconds = None
    kernel_count: Annotated[float | None, "count"] = None
    matmul_fraction: Fraction = None
    kinds: dict[str, float] = {}
    parts: dict[str, float] = {}
    top: list[TopKernel] = []
    top_other: TopKernel | None = None
    window_s: Seconds = None
    busy_s: Seconds = None
    queued_gap_s: Seconds = None
    host_wait_s: Seconds = None
    other_idle_s: Seconds = None
    comm_s: Seconds = None
    comm_exposed_s: Seconds = None
    host_s: Seconds = None
    launch_count: Annotated[float | None, "count"] = None
    median_kernel_s: Seconds = None
    verdict: Text = None


class AttentionTimes(Struct):
    """Kernels: parts of attention that is written out.

    Attributes:
        scores_s: scores (lower is better). Kernel time of the score product in <phase>, where attention is written out.
        mask_s: mask (lower is better). Scaling the scores and masking them.
        softmax_s: softmax (lower is better). Softmax.
        values_s: values (lower is better). The value product and its copies.
        matmul_s: products (lower is better). Matrix products within scores and values.
        softmax_matmul_time_ratio: softmax / products. Time of softmax divided by that of the products.
        softmax_matmul_flop_ratio: softmax / products, FLOPs. FLOPs of softmax divided by those of the products; null without the model's shape.
    """

    scores_s: Seconds = None
    mask_s: Seconds = None
    softmax_s: Seconds = None
    values_s: Seconds = None
    matmul_s: Seconds = None
    softmax_matmul_time_ratio: Number = None
    softmax_matmul_flop_ratio: Number = None


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
    """Kernels: kernels of the whole trace.

    Attributes:
        reason: no kernels because. Why nothing is known of the kernels (a CPU, a trace that cannot be read); null where it is.
        steps: steps. Steps in the trace; times and counts of phases are means over them.
        clock_steps: clocked steps. Steps that the clocks are over: the first of several begins on an idle device and is left out.
        phase_source: phases by. Whose ranges tell the phases: `lmbench`, `foreign` or `none`.
        inferred_phases: inferred phases. Phases that no range tells, only what autograd runs: where they begin and end is inferred.
        kernel_s: kernel time (lower is better). Kernel time of a step, what lies outside of all phases included.
        outside_s: outside (lower is better). Kernel time launched outside of every phase.
        unclassified_kind_fraction: no kind (lower is better). Share of kernel time whose kind is unknown.
        unclassified_part_fraction: no part (lower is better). Share of kernel time whose part of the model is unknown.
        captured_kernel_count: kernels in the trace. Kernels, copies and fills of the whole trace.
        captured_launch_count: launches in the trace. Launches of the whole trace.
        kernel_without_launch_count: without launch (lower is better). Kernels whose launch is not in the trace.
        launch_without_kernel_count: without kernel (lower is better). Launches whose kernel is not in the trace.
        kernel_before_launch_count: before launch (lower is better). Kernels that start before their launch.
        annotations: annotations. Kernels by the user's own ranges (`record_function`), the longest first: `name`, `calls`, `kernel_s`, `own_s` (without ranges inside), `kernel_count`.
        operators: operators. Of a trace without kernels, each phase's longest operators on the host: `phase`, `name`, `self_s`, `call_count`, `share_fraction`.
    """

    reason: Text = None
    steps: Count = None
    clock_steps: Count = None
    phase_source: Text = None
    inferred_phases: list[str] = []
    kernel_s: Seconds = None
    outside_s: Seconds = None
    unclassified_kind_fraction: Fraction = None
    unclassified_part_fraction: Fraction = None
    captured_kernel_count: Count = None
    captured_launch_count: Count = None
    kernel_without_launch_count: Count = None
    launch_without_kernel_count: Count = None
    kernel_before_launch_count: Count = None
    phases: PerPhase[PhaseKernels] = part(PerPhase)
    annotations: list[AnnotationKernels] = []
    attention: PerPhase[AttentionTimes] = part(PerPhase)
    operators: list[TopOperator] = []


class SavedPerBlock(Struct):
    """Blocks of the model that save alike for the backward, the first and the last by path; bytes of each."""

    first: str
    last: str
    count: int
    each_bytes: int


class TopAllocation(Struct):
    """Blocks of one kind among the largest at the peak."""

    size_bytes: int
    count: int
    category: str
    part: str
    phase: str
    where: str


class MemoryHistoryRecord(Struct):
    """Memory history: what the peak of the recorded steps is made of.

    Attributes:
        reason: no history because. Why there is no history, or why it could not be examined; null where it is.
        steps: recorded steps. Steps in the history: the first of the window.
        max_entries: most entries. Entries that the history may hold; older ones are lost.
        snapshot_file: snapshot. The snapshot, in the result folder; `memory_notes.json` lies beside it.
        snapshot_bytes: snapshot size. Size of the snapshot.
        entry_count: entries. Entries of the history.
        is_complete: complete history. No entry of the recorded steps is missing.
        peak_allocated_bytes: history's peak (lower is better). Most that was allocated in the recorded steps, as replayed.
        peak_requested_bytes: asked for at the peak (lower is better). Most that was allocated in the recorded steps, as asked for before rounding.
        peak_reserved_bytes: reserved at the peak (lower is better). Reserved by the allocator at the peak.
        peak_phase: phase of the peak. Phase in which the peak is.
        unknown_fraction: unknown (lower is better). Share of the peak without a category.
        categories: peak by category. Bytes at the peak by category: `parameters_bytes`, ...
        parts: peak by part. Bytes at the peak by the module that made them, the largest first; `*` is any block.
        saved_bytes: saved for backward (lower is better). What the forward of the peak's step saved for the backward, parameters left out.
        saved: saved by block. What the forward saved for the backward, by block of the model: first, last, count, `each_bytes`.
        residual_computed_bytes: residual stream. Batch x context x d_model by the shape, in the precision between the blocks.
        residual_seen_bytes: residual stream seen. Size of most blocks' outputs in the history.
        top: largest. The largest allocations at the peak: size, count, category, part, phase, where from.
    """

    reason: Text = None
    steps: Count = None
    max_entries: Count = None
    snapshot_file: Text = None
    snapshot_bytes: Bytes = None
    entry_count: Count = None
    is_complete: Flag = None
    peak_allocated_bytes: Bytes = None
    peak_requested_bytes: Bytes = None
    peak_reserved_bytes: Bytes = None
    peak_phase: Text = None
    unknown_fraction: Fraction = None
    categories: dict[str, int] = {}
    parts: dict[str, int] = {}
    saved_bytes: Bytes = None
    saved: list[SavedPerBlock] = []
    residual_computed_bytes: Bytes = None
    residual_seen_bytes: Bytes = None
    top: list[TopAllocation] = []


class MemoryPrediction(Struct):
    """Memory prediction: a peak worked out by the configuration alone, on fake tensors.

    Attributes:
        reason: no prediction because. Why there is no prediction, where it was asked for and there is none.
        method: predicted from. What was run on fake tensors: every block, or a few of them.
        peak_allocated_bytes: predicted peak (lower is better). Peak that was predicted for a step.
        peak_reserved_bytes: predicted reserved (lower is better). What the allocator was predicted to hold for it.
        phase_peak_allocated_bytes: predicted peak in <phase> (lower is better). Peak that was predicted for <phase>.
        error_fraction: prediction error. Signed: predicted / `memory.steady_peak_allocated_bytes` - 1; null where nothing was measured.
    """

    reason: Text = None
    method: Text = None
    peak_allocated_bytes: Bytes = None
    peak_reserved_bytes: Bytes = None
    phase_peak_allocated_bytes: PhaseBytes = None
    error_fraction: Fraction = None


class NotedTensors(Struct):
    """Tensors of one kind: how many there are of each dtype (`float32`), and why they have it."""

    name: str
    dtypes: dict[str, int]
    reason: str


class DtypeRecord(Struct):
    """Dtypes: dtypes that a probe step had.

    Attributes:
        reason: no dtypes because. Why no dtypes were noted; null where they were.
        notes_file: dtypes. Modules and operators with their dtypes, in the result folder.
        autocast_dtype: autocast. Autocast's lower precision, null where it was off.
        was_compiled: noted eagerly. The run is compiled, and the step whose dtypes were noted was not: no hook sees into a compiled graph.
        loss_scale: loss scale. What the loss, and so the gradients until the optimizer's step, were multiplied by; null without a scaler.
        tensors: dtypes of tensors. Parameters, buffers, batch, logits, loss, gradients, optimizer state: name, count by dtype, reason.
        unused_modules: unused modules. Paths of modules that the step never called, but for those whose parameters another module uses.
    """

    reason: Text = None
    notes_file: Text = None
    autocast_dtype: Text = None
    was_compiled: Flag = None
    loss_scale: Number = None
    tensors: list[NotedTensors] = []
    unused_modules: list[str] = []
