# ruff: noqa: E501 (tables, one field a line)
# fmt: off
"""What passes besides timing found: kernels in a trace, the allocator's history, a predicted peak, dtypes."""

from __future__ import annotations

from typing import Annotated

from msgspec import Struct, field

from lmbench.records.field import Bytes, Count, Flag, Fraction, Number, PerPhase, Seconds, Text


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

    kernel_s: Annotated[Seconds, "<phase> kernels", "Sum of the kernels of <phase>.", "down"] = None
    kernel_count: Annotated[float | None, "count", "kernels in <phase>", "Kernels, copies and fills."] = None
    matmul_fraction: Annotated[Fraction, "matmul in <phase>", "Share of matrix products (kind `gemm`) in kernel time; fused attention is not counted."] = None
    kinds: Annotated[dict[str, float], "tree", "kinds", "Kernel time by kind, the largest first: `gemm_s`, ..."] = {}
    parts: Annotated[dict[str, float], "tree", "parts", "Kernel time by part of the model, the largest first: `ffn_s`, ...; `+` joins the parts of a fused kernel."] = {}
    top: Annotated[list[TopKernel], "tree", "top kernels", "The longest kernels: name, kind, part, `kernel_s`, `kernel_count`, `share_fraction`."] = []
    top_other: Annotated[TopKernel | None, "tree", "top other kernel", "The longest kernel that is no matrix product; null if there is none."] = None
    window_s: Annotated[Seconds, "<phase> window", "The device's time with <phase>: `busy_s` + `queued_gap_s` + `host_wait_s` + `other_idle_s`.", "down"] = None
    busy_s: Annotated[Seconds, "<phase> busy", "Union of kernels, copies and fills; a moment with kernels of several phases is of one of them.", "down"] = None
    queued_gap_s: Annotated[Seconds, "<phase> gaps", "Gaps of up to 30 us before kernels that lay in the queue.", "down"] = None
    host_wait_s: Annotated[Seconds, "<phase> host wait", "Idle until the next kernel was launched: the device waited for the host.", "down"] = None
    other_idle_s: Annotated[Seconds, "<phase> other idle", "All other idle time: waiting for another stream, a copy or another rank, or unknown.", "down"] = None
    comm_s: Annotated[Seconds, "<phase> communication", "Union of communication kernels.", "down"] = None
    comm_exposed_s: Annotated[Seconds, "<phase> exposed communication", "Communication beside which nothing computes.", "down"] = None
    host_s: Annotated[Seconds, "<phase> on the host", "The host's time in <phase>, slowed by the profiler."] = None
    launch_count: Annotated[float | None, "count", "launches in <phase>", "Calls of the host that start something on the device.", "down"] = None
    median_kernel_s: Annotated[Seconds, "median kernel", "Median duration of the kernels of <phase>."] = None
    verdict: Annotated[Text, "<phase> by the trace", "`host-bound`, `stalled` (idle for something else), `queued` or `mixed`, by the shares of idle time; null for a phase too short to judge."] = None


class AttentionTimes(Struct):
    """Kernels: inside attention written out."""

    scores_s: Annotated[Seconds, "scores", "Kernel time of the score product in <phase>, where attention is written out.", "down"] = None
    mask_s: Annotated[Seconds, "mask", "Scaling the scores and masking them.", "down"] = None
    softmax_s: Annotated[Seconds, "softmax", "Softmax.", "down"] = None
    values_s: Annotated[Seconds, "values", "The value product and its copies.", "down"] = None
    matmul_s: Annotated[Seconds, "products", "Matrix products within scores and values.", "down"] = None
    softmax_matmul_time_ratio: Annotated[Number, "softmax / products", "Time of softmax divided by that of the products."] = None
    softmax_matmul_flop_ratio: Annotated[Number, "softmax / products, FLOPs", "The same of FLOPs; null without the model's shape."] = None


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

    reason: Annotated[Text, "no kernels because", "Why nothing is known of the kernels (a CPU, a trace that cannot be read); null where it is."] = None
    steps: Annotated[Count, "steps", "Steps in the trace; times and counts of phases are means over them."] = None
    clock_steps: Annotated[Count, "clocked steps", "Steps that the clocks are over: the first of several begins on an idle device and is left out."] = None
    phase_source: Annotated[Text, "phases by", "Whose ranges tell the phases: `lmbench`, `foreign` or `none`."] = None
    inferred_phases: Annotated[list[str], "tree", "inferred phases", "Phases that no range tells, only what autograd runs: where they begin and end is inferred."] = []
    kernel_s: Annotated[Seconds, "kernel time", "Kernel time of a step, what lies outside of all phases included.", "down"] = None
    outside_s: Annotated[Seconds, "outside", "Kernel time launched outside of every phase.", "down"] = None
    unclassified_kind_fraction: Annotated[Fraction, "no kind", "Share of kernel time whose kind is unknown.", "down"] = None
    unclassified_part_fraction: Annotated[Fraction, "no part", "Share of kernel time whose part of the model is unknown.", "down"] = None
    captured_kernel_count: Annotated[Count, "kernels in the trace", "Kernels, copies and fills of the whole trace."] = None
    captured_launch_count: Annotated[Count, "launches in the trace", "Launches of the whole trace."] = None
    kernel_without_launch_count: Annotated[Count, "without launch", "Kernels whose launch is not in the trace.", "down"] = None
    launch_without_kernel_count: Annotated[Count, "without kernel", "Launches whose kernel is not in the trace.", "down"] = None
    kernel_before_launch_count: Annotated[Count, "before launch", "Kernels that start before their launch.", "down"] = None
    phases: PerPhase[PhaseKernels] = field(default_factory=PerPhase)
    annotations: Annotated[list[AnnotationKernels], "tree", "annotations", "Kernels by the user's own ranges (`record_function`), the longest first: `name`, `calls`, `kernel_s`, `own_s` (without ranges inside), `kernel_count`."] = []
    attention: PerPhase[AttentionTimes] = field(default_factory=PerPhase)
    operators: Annotated[list[TopOperator], "tree", "operators", "Of a trace without kernels, each phase's longest operators on the host: `phase`, `name`, `self_s`, `call_count`, `share_fraction`."] = []


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
    """Memory history: what the peak of the recorded steps is made of."""

    reason: Annotated[Text, "no history because", "Why there is no history, or why it could not be examined; null where it is."] = None
    steps: Annotated[Count, "recorded steps", "Steps in the history: the first of the window."] = None
    max_entries: Annotated[Count, "most entries", "Entries that the history may hold; older ones are lost."] = None
    snapshot_file: Annotated[Text, "snapshot", "The snapshot, in the result folder; `memory_notes.json` lies beside it."] = None
    snapshot_bytes: Annotated[Bytes, "snapshot size", "Size of the snapshot."] = None
    entry_count: Annotated[Count, "entries", "Entries of the history."] = None
    is_complete: Annotated[Flag, "complete history", "No entry of the recorded steps is missing."] = None
    peak_allocated_bytes: Annotated[Bytes, "history's peak", "Most that was allocated in the recorded steps, as replayed.", "down"] = None
    peak_requested_bytes: Annotated[Bytes, "asked for at the peak", "What was asked for of it, before rounding.", "down"] = None
    peak_reserved_bytes: Annotated[Bytes, "reserved at the peak", "Reserved at that moment.", "down"] = None
    peak_phase: Annotated[Text, "phase of the peak", "Phase in which the peak is."] = None
    unknown_fraction: Annotated[Fraction, "unknown", "Share of the peak without a category.", "down"] = None
    categories: Annotated[dict[str, int], "tree", "peak by category", "Bytes at the peak by category: `parameters_bytes`, ..."] = {}
    parts: Annotated[dict[str, int], "tree", "peak by part", "Bytes at the peak by the module that made them, the largest first; `*` is any block."] = {}
    saved_bytes: Annotated[Bytes, "saved for backward", "What the forward of the peak's step saved for the backward, parameters left out.", "down"] = None
    saved: Annotated[list[SavedPerBlock], "tree", "saved by block", "The same by block of the model: first, last, count, `each_bytes`."] = []
    residual_computed_bytes: Annotated[Bytes, "residual stream", "Batch x context x d_model by the shape, in the precision between the blocks."] = None
    residual_seen_bytes: Annotated[Bytes, "residual stream seen", "Size of most blocks' outputs in the history."] = None
    top: Annotated[list[TopAllocation], "tree", "largest", "The largest at the peak: size, count, category, part, phase, where from."] = []


class MemoryPrediction(Struct):
    """Memory prediction: by the configuration alone, on fake tensors."""

    reason: Annotated[Text, "no prediction because", "Why there is no prediction, where it was asked for and there is none."] = None
    method: Annotated[Text, "predicted from", "What was run on fake tensors: every block, or a few of them."] = None
    peak_allocated_bytes: Annotated[Bytes, "predicted peak", "Peak that was predicted for a step.", "down"] = None
    peak_reserved_bytes: Annotated[Bytes, "predicted reserved", "What the allocator was predicted to hold for it.", "down"] = None
    phase_peak_allocated_bytes: Annotated[PerPhase[int] | None, "bytes", "predicted peak in <phase>", "Peak that was predicted for <phase>.", "down"] = None
    error_fraction: Annotated[Fraction, "prediction error", "Signed: predicted / `memory.steady_peak_allocated_bytes` - 1; null where nothing was measured."] = None


class NotedTensors(Struct):
    """Tensors of one kind: how many there are of each dtype (`float32`), and why they have it."""

    name: str
    dtypes: dict[str, int]
    reason: str


class DtypeRecord(Struct):
    """Dtypes: what a probe step showed."""

    reason: Annotated[Text, "no dtypes because", "Why no dtypes were noted; null where they were."] = None
    notes_file: Annotated[Text, "dtypes", "Modules and operators with their dtypes, in the result folder."] = None
    autocast_dtype: Annotated[Text, "autocast", "Autocast's lower precision, null where it was off."] = None
    was_compiled: Annotated[Flag, "noted eagerly", "The run is compiled, and the step whose dtypes were noted was not: no hook sees into a compiled graph."] = None
    loss_scale: Annotated[Number, "loss scale", "What the loss, and so the gradients until the optimizer's step, were multiplied by; null without a scaler."] = None
    tensors: Annotated[list[NotedTensors], "tree", "dtypes of tensors", "Parameters, buffers, batch, logits, loss, gradients, optimizer state: name, count by dtype, reason."] = []
    unused_modules: Annotated[list[str], "tree", "unused modules", "Paths of modules that the step never called, but for those whose parameters another module uses."] = []
