# ruff: noqa: E501 (tables, one field a line)
# fmt: off
"""A run's record: the content of run.json."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Struct, field

from lmbench.records.environment import Environment
from lmbench.records.field import Bytes, Count, Flag, Fraction, Number, PerPhase, Seconds, Text
from lmbench.records.guard import Guard
from lmbench.records.instruments import DtypeRecord, KernelSummary, MemoryHistoryRecord, MemoryPrediction
from lmbench.records.measured import (
    DeviceState,
    HostState,
    Loss,
    Memory,
    PhaseSummary,
    Probe,
    RunError,
    Throughput,
    Warmup,
    Window,
)
from lmbench.records.step import ScalarMeans
from lmbench.records.vocabulary import Mode

#: Version of the layout of run.json and steps.jsonl. A reader refuses any other.
SCHEMA_VERSION = 1


class Profile(Struct):
    """Settings: of a profiled run."""

    tool: Annotated[Text, "profiled by", "`torch` (a trace in the result) or `nsys` (ranges for Nsight Systems)."] = None
    steps: Annotated[Count, "profiled steps", "Steps in the trace: the first of the window."] = None
    first_step: Annotated[Count, "first profiled step", "Number of the first step in the trace."] = None
    trace_file: Annotated[Text, "trace", "The trace, in the result folder."] = None
    trace_error: Annotated[Text, "lost trace", "Why the trace could not be written."] = None
    trace_bytes: Annotated[Bytes, "trace size", "Size of the trace as it is stored."] = None


class Compile(Struct):
    """Settings: torch.compile."""

    is_enabled: Annotated[Flag, "compiled", "torch.compile was asked for."] = None
    mode: Annotated[Text, "compile mode", "torch.compile's mode."] = None
    backend: Annotated[Text, "backend", "torch.compile's backend."] = None
    fullgraph: Annotated[Flag, "fullgraph", "A graph break would have been an error."] = None
    dynamic: Annotated[Flag, "dynamic", "Shapes may change without a new graph; null leaves it to PyTorch."] = None
    regional: Annotated[Flag, "regional", "Each block was compiled by itself."] = None
    cache: Annotated[Text, "compile cache", "`private` (empty at the start) or `shared` (what is on the disk)."] = None
    targets: Annotated[list[str] | None, "tree", "compiled modules", "Names of the modules that were compiled."] = None
    first_step_s: Annotated[Seconds, "first step", "Step 0 up to its end on the device, compilation included.", "down"] = None
    graph_count: Annotated[Count, "graphs", "Graphs compiled by the window's end."] = None
    graph_break_count: Annotated[Count, "graph breaks", "Graph breaks met by the window's end.", "down"] = None
    window_recompile_count: Annotated[Count, "recompiles", "Graphs compiled inside the window.", "down"] = None
    is_attention_fused: Annotated[Flag, "attention fused", "Inductor recognised attention that is written out, and put PyTorch's fused kernel in its place; null where a cache held the graphs."] = None


class AttentionCheck(Struct):
    """Model: what was found of the user's own attention before it was measured."""

    cases: Annotated[Count, "cases checked", "Shapes, causal and not, at which output and gradients were held against the formula."] = None
    deviation_fraction: Annotated[Fraction, "deviation", "Largest deviation of a row, as a share of its size: the root of the sum of its products' squares.", "down"] = None
    tolerance_fraction: Annotated[Fraction, "tolerance", "Largest deviation that is right in the run's dtype: 16 roundings in bfloat16, float16 and TF32, 1024 in float32."] = None
    largest_in: Annotated[Text, "largest in", "Where the deviation was largest: output, or gradient of q, k or v, and the shape."] = None
    refused: Annotated[list[str], "tree", "shapes refused", "Shapes other than the run's own at which the function raised."] = []


class Model(Struct):
    """Model: what was measured."""

    name: Annotated[Text, "model", "Class of the LightningModule."] = None
    size: Annotated[Text, "size", "Name of the size, null for any other shape."] = None
    parameter_count: Annotated[Count, "parameters", "Parameters."] = None
    trainable_parameter_count: Annotated[Count, "trainable", "Parameters that take a gradient."] = None
    vocab_size: Annotated[Count, "vocab", "Rows of the embedding."] = None
    d_model: Annotated[Count, "d_model", "Width of the residual stream."] = None
    d_ff: Annotated[Count, "d_ff", "Width inside the feed-forward block."] = None
    num_layers: Annotated[Count, "layers", "Blocks."] = None
    num_heads: Annotated[Count, "heads", "Attention heads."] = None
    head_dim: Annotated[Count, "head_dim", "Width of a head, of attention by itself."] = None
    is_causal: Annotated[Flag, "causal", "Later positions are masked, of attention by itself."] = None
    attention: Annotated[Text, "attention", "Attention by name: `naive`, `sdpa`, `flex`, or a function of the user's own."] = None
    attention_backend: Annotated[Text, "back end taken", "What PyTorch took for plain `sdpa`, by the name that asks for it alone; of attention by itself."] = None
    attention_check: AttentionCheck | None = None
    checkpoint: Annotated[Text, "checkpoint", "Activation checkpointing by name: `none`, `block`, `every_2`, `selective`."] = None
    optimizer: Annotated[Text, "optimizer", "Optimizer with its variant, such as `AdamW fused`."] = None
    is_fresh: Annotated[Flag, "fresh", "Weights come from initialisation, not from a checkpoint."] = None
    described: Annotated[dict[str, Any], "tree", "more", "What else the module says of itself by `describe()`."] = {}


class Flops(Struct):
    """FLOPs: counts and the device's peak."""

    per_token_flops: Annotated[int | None, "FLOP", "FLOP/token", "Model FLOPs per token, attention counted full."] = None
    causal_per_token_flops: Annotated[int | None, "FLOP", "causal FLOP/token", "The same with attention halved."] = None
    recomputed_per_token_flops: Annotated[int | None, "FLOP", "recomputed FLOP/token", "What the backward pass computes again under activation checkpointing; null where nobody knows.", "down"] = None
    multiplier: Annotated[int | None, "1", "multiplier", "1 for a forward pass, 3 with backward; already in both figures."] = None
    source: Annotated[Text, "FLOP source", "Where the count comes from."] = None
    reason: Annotated[Text, "no FLOPs because", "Why there is no count, where there is none."] = None
    peak_flops_per_s: Annotated[float | None, "FLOP/s", "peak", "Datasheet peak for the precision, null for an unknown device."] = None
    peak_source: Annotated[Text, "peak source", "Where the peak comes from."] = None


class Data(Struct):
    """Data: what it was measured on."""

    name: Annotated[Text, "data", "Class of the data module."] = None
    batch_size: Annotated[Count, "batch", "Sequences in a micro-batch of one rank."] = None
    context_length: Annotated[Count, "context", "Tokens in a sequence."] = None
    source: Annotated[Text, "source", "`random` or `text`."] = None
    described: Annotated[dict[str, Any], "tree", "more", "What else the data module says of itself by `describe()`."] = {}


class Cost(Struct):
    """Sweep: where the time of a run went."""

    total_s: Annotated[Seconds, "total", "From the start of the cell's process to its end, as the sweep clocked it.", "down"] = None
    overhead_s: Annotated[Seconds, "overhead", "`total_s` without warm-up and window, but with the compilation in the first step.", "down"] = None
    start_s: Annotated[Seconds, "start", "The process and its interpreter.", "down"] = None
    import_s: Annotated[Seconds, "import", "Importing PyTorch, Lightning and lmbench.", "down"] = None
    parse_s: Annotated[Seconds, "parse", "Understanding the command line.", "down"] = None
    device_s: Annotated[Seconds, "device", "Making the device's context.", "down"] = None
    build_s: Annotated[Seconds, "build", "Data, model and optimizer.", "down"] = None
    capture_s: Annotated[Seconds, "capture", "Recording the environment, and compiling's own preparation.", "down"] = None
    first_step_s: Annotated[Seconds, "first step", "Step 0, with what it compiles or loads.", "down"] = None
    compile_s: Annotated[Seconds, "compile", "`first_step_s` without a step of the window, where torch.compile is on.", "down"] = None
    warmup_s: Annotated[Seconds, "warm-up", "The other steps before the window.", "down"] = None
    window_s: Annotated[Seconds, "window", "The window, its pauses included.", "down"] = None
    probe_s: Annotated[Seconds, "probe", "Probe steps.", "down"] = None
    close_s: Annotated[Seconds, "close", "Summary, guards, writing.", "down"] = None
    exit_s: Annotated[Seconds, "exit", "From the last writing to the process's end.", "down"] = None


class SweepPlace(Struct):
    """Sweep: the run's place in it."""

    name: Annotated[Text, "sweep", "Name of the sweep."] = None
    study: Annotated[Text, "study", "Name of the study whose view shows the sweep; null where it has none."] = None
    cell: Annotated[Text, "cell", "The cell's id: its values, and a digest of everything that makes it up."] = None
    axes: Annotated[dict[str, Any] | None, "tree", "axes", "The cell's value of every axis."] = None
    repeat: Annotated[int | None, "index", "repeat", "Which repeat of the cell, from 0."] = None
    attempt: Annotated[Count, "attempt", "How often this repeat was begun, up to the run recorded here."] = None
    environment: Annotated[Text, "environment", "Name of the environment that it ran in, null for the sweep's own."] = None
    search: Annotated[Literal["trial", "largest"] | None, "text", "search", "In a sweep that looks for the largest value that fits: `trial`, or `largest` for the run that found it (`oom` where nothing fits)."] = None
    searched_cell: Annotated[Text, "searched cell", "The planned cell whose largest value the run helped to find; `cell` is the trial's own id then."] = None
    load_per_core: Annotated[Number, "load", "The machine's load of the last minute when the process had ended, divided by its cores.", "down"] = None
    cost: Cost | None = None


class Milestones(Struct):
    """Milestones: when the process reached what."""

    started_s: Annotated[Seconds, "started", "Python is up. All milestones: seconds since the process began, to 10 ms."] = None
    imported_s: Annotated[Seconds, "imported", "Everything is imported."] = None
    parsed_s: Annotated[Seconds, "parsed", "The command line is understood."] = None
    device_ready_s: Annotated[Seconds, "device ready", "The device has its context."] = None
    built_s: Annotated[Seconds, "built", "Data, model and optimizer are there."] = None
    ready_s: Annotated[Seconds, "ready", "The first batch is about to be fetched."] = None
    first_step_s: Annotated[Seconds, "first step", "Step 0 was issued (compiled: has ended on the device)."] = None
    window_opened_s: Annotated[Seconds, "window opened", "The window's begin."] = None
    window_closed_s: Annotated[Seconds, "window closed", "The window's end."] = None
    stepped_s: Annotated[Seconds, "stepped", "The last step, probes included, is over."] = None
    closed_s: Annotated[Seconds, "closed", "The record was complete."] = None


WandbMode = Literal["offline", "online", "disabled"]


class WandbFiling(Struct):
    """W&B: how it files a run, and what it was to get when the run was closed."""

    mode: WandbMode | None = None
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    tags: list[str] | None = None
    artifact: bool = False


class RunRecord(Struct):
    """Run: one process measuring one configuration."""

    schema_version: Annotated[int, "count", "schema", "Version of this layout."]
    outcome: Annotated[str, "text", "outcome", "`ok`, `oom`, `timeout`, `error`, `interrupted`, `skipped`, or `running` while it goes on."]
    run_id: Annotated[Text, "run", "Name of the run's folder."] = None
    error: RunError | None = None
    exit_code: Annotated[Count, "exit code", "Exit code of the process."] = None
    unwritten_step_count: Annotated[Count, "unwritten steps", "Steps that are in the summary but could not be written to steps.jsonl.", "down"] = None
    pid: Annotated[int | None, "index", "pid", "Process id."] = None
    boot_id: Annotated[Text, "boot id", "The kernel's id of this boot: with pid and start, one process for ever."] = None
    process_start_s: Annotated[Seconds, "process start", "When the process started, in seconds since boot."] = None
    started_at: Annotated[Text, "started", "UTC time, ISO 8601."] = None
    ended_at: Annotated[Text, "ended", "UTC time, ISO 8601; null while running."] = None
    command: Annotated[Text, "command", "`fit` or `validate`."] = None
    argv: Annotated[list[str] | None, "tree", "arguments", "The command line as given."] = None
    replay_command: Annotated[Text, "replay", "The command that repeats this run."] = None
    config: Annotated[dict[str, Any] | None, "tree", "config", "The full resolved configuration."] = None
    rank: Annotated[int | None, "index", "rank", "Rank of the process that measured."] = None
    world_size: Annotated[Count, "ranks", "Number of processes that trained together."] = None
    repairs: Annotated[list[str] | None, "tree", "repairs", "What of Lightning was changed for this run, each with its reason."] = None
    wandb: Annotated[WandbFiling | None, "tree", "W&B", "How W&B files the run (mode, project, entity, group, tags), and whether the result goes along (artifact)."] = None
    guards: Annotated[list[Guard], "tree", "guards", "Checks of the measurement: name, status, value, limit, unit, message, advice."] = []
    mode: Annotated[Mode | None, "text", "mode", "`inference`, `forward`, `forward_backward` or `train_step`."] = None
    precision: Annotated[Text, "precision", "Compute precision, such as `bf16-mixed`."] = None
    matmul_precision: Annotated[Text, "matmul precision", "float32 matmuls: `highest` is fp32, `high` is TF32."] = None
    clock: Annotated[Text, "clock", "`events`, `sync` or `host` (a CPU)."] = None
    device_type: Annotated[Text, "device type", "`cuda` or `cpu`."] = None
    zero_grad: Annotated[Text, "zero_grad", "When gradients are zeroed: `after_step`, or `native` (where Lightning or the module does it)."] = None
    unseen_phases: Annotated[list[str] | None, "tree", "unseen phases", "Phases that manual optimization hides: null, and their time is in `other`."] = None
    strict: Annotated[Flag, "strict", "A failed guard makes the exit code 4."] = None
    gc_policy: Annotated[Text, "gc", "What garbage collection does in the window."] = None
    is_profiled: Annotated[Flag, "profiled", "A profiler was on: its step times enter no timing table."] = None
    nonfinite: Annotated[dict[str, str], "tree", "non-finite", "Names and values (`nan`, `inf`, `-inf`) of fields stored as null for that reason."] = {}
    environment: Environment | None = None
    model: Model = field(default_factory=Model)
    data: Data = field(default_factory=Data)
    flops: Flops = field(default_factory=Flops)
    compile: Compile = field(default_factory=Compile)
    profile: Profile | None = None
    sweep: SweepPlace | None = None
    milestones: Milestones = field(default_factory=Milestones)
    window: Window = field(default_factory=Window)
    warmup: Warmup = field(default_factory=Warmup)
    phases: PerPhase[PhaseSummary] = field(default_factory=PerPhase)
    throughput: Throughput = field(default_factory=Throughput)
    loss: Loss = field(default_factory=Loss)
    scalars: ScalarMeans = field(default_factory=ScalarMeans)
    memory: Memory = field(default_factory=Memory)
    device_state: DeviceState = field(default_factory=DeviceState)
    host_state: HostState = field(default_factory=HostState)
    probe: Probe = field(default_factory=Probe)
    kernels: KernelSummary | None = None
    memory_history: MemoryHistoryRecord | None = None
    memory_prediction: MemoryPrediction | None = None
    dtypes: DtypeRecord | None = None
