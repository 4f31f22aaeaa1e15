"""The parts of a run's record that are examined after it: kernels of a trace, the allocator's history, a predicted
peak, dtypes."""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Struct

from lmbench.records.field import (
    Bytes,
    Count,
    Flag,
    Fraction,
    Number,
    PerPhase,
    PhaseBytes,
    Seconds,
    Text,
    about,
    lower,
    part,
    record,
)

#: The what-ifs that a run can make true.
WHAT_IFS: Final = ("collectives=0", "rank=median", "launches=0", "data=0", "optimizer=fused", "attention=fused")


class TopKernel(Struct):
    """One of the longest kernels of its phase, with its share of the phase's kernel time."""

    name: str
    share_fraction: float


@record
class PhaseKernels:
    """Kernels: GPU kernels of one phase, or of the step including kernels outside all phases."""

    kernel_s: Seconds = lower("Sum of the durations of all kernels of <phase>.", "<phase> kernels")
    kernel_count: Annotated[float | None, "count"] = about(
        "Number of kernels, copies and fills in <phase>.", "kernels in <phase>"
    )
    matmul_fraction: Fraction = about(
        "Share of kernel time in matrix products (kind `gemm`); fused attention is not included."
    )
    kinds: dict[str, float] = about("Kernel time by kind of kernel, the largest first: `gemm_s`, ...", factory=dict)
    parts: dict[str, float] = about(
        "Kernel time by part of the model, the largest first: `ffn_s`, ...; `+` joins the parts of a fused kernel.",
        factory=dict,
    )
    top_other: TopKernel | None = about("The longest kernel that is not a matrix product; null if there is none.")
    window_s: Seconds = lower(
        "Time of the device in <phase>: `busy_s` + `queued_gap_s` + `host_wait_s` + `other_idle_s`."
    )
    busy_s: Seconds = lower(
        "Time during which at least one kernel, copy or fill ran. Where kernels of several phases overlap, the time "
        "counts for one."
    )
    queued_gap_s: Seconds = lower("Idle time in gaps of up to 30 us before kernels that were already queued.")
    host_wait_s: Seconds = lower("Idle time until the next kernel was launched: the device waited for the host.")
    other_idle_s: Seconds = lower(
        "All other idle time: waiting for another stream, a copy or another rank, or for an unknown reason."
    )
    comm_s: Seconds = lower("Time during which at least one communication kernel ran.", "<phase> communication")
    comm_exposed_s: Seconds = lower(
        "Time during which a communication kernel ran and nothing computed beside it.", "<phase> exposed communication"
    )
    verdict: Text = about(
        "Verdict of the trace on <phase>: `communication-bound`, `waits for other ranks`, `host-bound`, `stalled` "
        "(idle for another reason), `queued` or `mixed`; null for a phase too short to judge."
    )


@record
class AttentionTimes:
    """Kernels: parts of attention that is written out."""

    scores_s: Seconds = lower(
        "Kernel time of the product of queries and keys in <phase>, where attention is written out."
    )
    mask_s: Seconds = lower("Kernel time of scaling and masking the scores.")
    softmax_s: Seconds = lower("Kernel time of the softmax.")
    values_s: Seconds = lower("Kernel time of the product with the values, including its copies.")
    matmul_s: Seconds = lower("Kernel time of the matrix products within scores and values.", "products")
    softmax_matmul_time_ratio: Number = about("Time of the softmax divided by that of the matrix products.")
    softmax_matmul_flop_ratio: Number = about(
        "FLOPs of the softmax divided by those of the matrix products; null where the model's shape is unknown.",
        "softmax / products, FLOPs",
    )


@record
class KernelSummary:
    """Kernels: GPU kernels of the whole trace."""

    reason: Text = about(
        "Why no kernels are known, such as a run on a CPU or an unreadable trace; null where they are."
    )
    steps: Count = about("Number of steps in the trace. Times and counts of phases are means over them.")
    kernel_s: Seconds = lower("Kernel time of a step, including kernels outside all phases.")
    outside_s: Seconds = lower("Kernel time that was launched outside every phase.")
    unclassified_part_fraction: Fraction = lower("Share of kernel time whose part of the model is unknown.", "no part")
    phases: PerPhase[PhaseKernels] = part(PerPhase)
    attention: PerPhase[AttentionTimes] = part(PerPhase)
    path_s: Seconds = lower(
        "Step by the trace: the length of the chain of host and device that sets it, with the host as fast as in "
        "`profile.host_step_s`, since a profiler slows it."
    )
    path: dict[str, float] = about(
        "Time of the chain that sets the step, by cause, the largest first: `launching_s`, `gemm_s`, ...", factory=dict
    )
    what_if: dict[str, float] = about(
        "How much longer the step would be with a change, in seconds, simulated from the trace: `collectives=0`, ...",
        factory=dict,
    )


@record
class MemoryHistoryRecord:
    """Memory history: contents of the peak of the recorded steps."""

    reason: Text = about("Why there is no history, or why it could not be examined; null where it was.")
    steps: Count = about("Number of steps in the history, from the start of the window.")
    snapshot_file: Text = about("Name of the snapshot in the result folder; `memory_notes.json` lies beside it.")
    peak_allocated_bytes: Bytes = lower(
        "Largest number of bytes allocated in the recorded steps, by replaying the history.",
        over="max",
    )
    peak_phase: Text = about("Phase in which the peak was reached.")
    categories: dict[str, int] = about("Bytes at the peak by category: `parameters_bytes`, ...", factory=dict)
    residual_computed_bytes: Bytes = about(
        "Size of the residual stream by the model's shape: batch x context x d_model, in the precision between the "
        "blocks."
    )


@record
class MemoryPrediction:
    """Memory prediction: peak memory predicted from the configuration, on fake tensors without data."""

    reason: Text = about("Why there is no prediction although one was asked for; null otherwise.")
    method: Text = about("What was run on fake tensors: every block of the model, or only a few.")
    peak_allocated_bytes: Bytes = lower("Predicted peak of allocated memory in a step.", over="max")
    peak_reserved_bytes: Bytes = lower("Predicted memory that the allocator reserves.", over="max")
    phase_peak_allocated_bytes: PhaseBytes = lower(
        "Predicted peak of allocated memory in <phase>.", "predicted peak", over="max"
    )
    error_fraction: Fraction = about(
        "Relative error of the prediction, with its sign: predicted / `memory.steady_peak_allocated_bytes` - 1; null "
        "where nothing was measured."
    )


class NotedTensors(Struct):
    """The dtypes of one kind of tensors (`gradients`): number of tensors by dtype, and the reason for the dtype."""

    name: str
    dtypes: dict[str, int]
    reason: str


@record
class DtypeRecord:
    """Dtypes: dtypes in one probe step."""

    reason: Text = about("Why no dtypes were recorded; null where they were.")
    notes_file: Text = about("Name of the file in the result folder with the dtypes of modules and operators.")
    autocast_dtype: Text = about("Lower precision of autocast; null where autocast was off.")
    was_compiled: Flag = about(
        "Whether the run is compiled. The recorded step was not, since no hook sees into a compiled graph."
    )
    loss_scale: Number = about(
        "Factor by which the loss, and so the gradients until the optimizer's step, were multiplied; null without a "
        "scaler."
    )
    tensors: list[NotedTensors] = about(
        "Dtypes of parameters, buffers, batch, logits, loss, gradients and optimizer state: name, count by dtype, "
        "reason.",
        factory=list,
    )
