# ruff: noqa: E501 (tables, one field a line)
"""A run's record, the content of run.json; and what its times may depend on: versions, code, GPU, host, flags, variables."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Struct

from lmbench.records.field import (
    Bytes,
    Count,
    Flag,
    FlopCount,
    FlopsPerSecond,
    Fraction,
    Hertz,
    Index,
    Number,
    PerPhase,
    Seconds,
    Text,
    Watts,
    part,
)
from lmbench.records.measured import (
    DeviceState,
    DtypeRecord,
    Guard,
    HostState,
    KernelSummary,
    Loss,
    Memory,
    MemoryHistoryRecord,
    MemoryPrediction,
    PhaseSummary,
    Probe,
    RankRecord,
    RunError,
    Throughput,
    Warmup,
    Window,
)
from lmbench.records.step import ScalarMeans
from lmbench.records.vocabulary import Mode


class Versions(Struct):
    """Environment: versions of what takes part.

    Attributes:
        python: python. Version of Python.
        torch: torch. Version of PyTorch.
        cuda: cuda. CUDA that PyTorch was built with.
        cudnn: cudnn. cuDNN that PyTorch loaded.
        driver: driver. NVIDIA driver.
        lightning: lightning. Version of Lightning.
        torchmetrics: torchmetrics. Version of torchmetrics.
        wandb: wandb. Version of wandb.
        lmbench: lmbench. Version of lmbench.
    """

    python: Text = None
    torch: Text = None
    cuda: Text = None
    cudnn: Text = None
    driver: Text = None
    lightning: Text = None
    torchmetrics: Text = None
    wandb: Text = None
    lmbench: Text = None


class Revision(Struct):
    """Environment: where a git checkout stands.

    Attributes:
        commit: commit. Git commit of the folder's repository.
        is_dirty: dirty. Tracked files there differ from the commit.
    """

    commit: Text = None
    is_dirty: Flag = None


class Code(Struct):
    """Environment: the code that ran."""

    project: Revision = part(Revision)
    lmbench: Revision = part(Revision)


class Gpu(Struct):
    """Environment: the GPU.

    Attributes:
        name: GPU. Name of the device.
        uuid: UUID. The device's UUID.
        sku: SKU. Board part number.
        pci_bus_id: PCI id. PCI bus id.
        compute_capability: capability. CUDA compute capability.
        memory_total_bytes: memory. Memory of the device.
        power_limit_w: power limit. Power limit in force.
        power_limit_default_w: default limit. Power limit by default.
        max_sm_clock_hz: max SM clock. Highest SM clock.
        is_mig: MIG. The device is split by MIG.
    """

    name: Text = None
    uuid: Text = None
    sku: Text = None
    pci_bus_id: Text = None
    compute_capability: Text = None
    memory_total_bytes: Bytes = None
    power_limit_w: Watts = None
    power_limit_default_w: Watts = None
    max_sm_clock_hz: Hertz = None
    is_mig: Flag = None


class Host(Struct):
    """Environment: the machine.

    Attributes:
        hostname: host. Name of the machine.
        system: system. Operating system and kernel.
        cpu_model: CPU. Model of the processor.
        core_count: cores. Logical cores of the machine.
        affinity: affinity. Cores that the process may use.
        memory_total_bytes: host memory. Memory of the machine.
        python_iteration_s: Python score (lower is better). Host score: one turn of a small pure-Python loop.
        kernel_launch_s: launch score (lower is better). Host score: issuing one tiny kernel (on a CPU: one tiny operator).
    """

    hostname: Text = None
    system: Text = None
    cpu_model: Text = None
    core_count: Count = None
    affinity: list[int] | None = None
    memory_total_bytes: Bytes = None
    python_iteration_s: Seconds = None
    kernel_launch_s: Seconds = None


class GarbageCollection(Struct):
    """Environment: garbage collection outside the window.

    Attributes:
        is_enabled: gc. Automatic garbage collection is on outside the window.
        thresholds: gc thresholds. Thresholds of Python's garbage collector.
        frozen_count: gc frozen. Objects frozen before the window.
    """

    is_enabled: Flag = None
    thresholds: list[int] | None = None
    frozen_count: Count = None


class Flags(Struct):
    """Environment: PyTorch's global switches.

    Attributes:
        float32_matmul_precision: float32 matmuls. `highest` is fp32, `high` is TF32.
        cuda_matmul_allow_tf32: TF32 matmul. TF32 allowed in matmuls.
        cudnn_allow_tf32: TF32 cuDNN. TF32 allowed in cuDNN.
        cudnn_benchmark: cudnn.benchmark. cuDNN tries its algorithms.
        cudnn_deterministic: cudnn.deterministic. cuDNN is kept to deterministic algorithms.
        deterministic_algorithms: deterministic. PyTorch is kept to deterministic algorithms.
        anomaly_mode: anomaly mode. Autograd's anomaly detection is on.
        allocator_backend: allocator. CUDA memory allocator.
        thread_count: threads. PyTorch's threads within an operator.
    """

    float32_matmul_precision: Text = None
    cuda_matmul_allow_tf32: Flag = None
    cudnn_allow_tf32: Flag = None
    cudnn_benchmark: Flag = None
    cudnn_deterministic: Flag = None
    deterministic_algorithms: Flag = None
    anomaly_mode: Flag = None
    allocator_backend: Text = None
    thread_count: Count = None


class Environment(Struct):
    """Environment: everything around a run.

    Attributes:
        variables: variables. Environment variables from an allow-list; never a secret.
    """

    versions: Versions = part(Versions)
    code: Code = part(Code)
    gpu: Gpu = part(Gpu)
    host: Host = part(Host)
    gc: GarbageCollection = part(GarbageCollection)
    flags: Flags = part(Flags)
    variables: dict[str, str] | None = None


#: Version of the layout of run.json and steps.jsonl. A reader refuses any other.
SCHEMA_VERSION = 1


class Profile(Struct):
    """Settings: the profiler.

    Attributes:
        tool: profiled by. `torch` (a trace in the result) or `nsys` (ranges for Nsight Systems).
        steps: profiled steps. Steps in the trace: the first of the window.
        first_step: first profiled step. Number of the first step in the trace.
        trace_file: trace. The trace, in the result folder.
        trace_error: lost trace. Why the trace could not be written.
        trace_bytes: trace size. Size of the trace as it is stored.
    """

    tool: Text = None
    steps: Count = None
    first_step: Count = None
    trace_file: Text = None
    trace_error: Text = None
    trace_bytes: Bytes = None


class Compile(Struct):
    """Settings: torch.compile.

    Attributes:
        is_enabled: compiled. torch.compile was asked for.
        mode: compile mode. torch.compile's mode.
        backend: backend. torch.compile's backend.
        fullgraph: fullgraph. A graph break would have been an error.
        dynamic: dynamic. Shapes may change without a new graph; null leaves it to PyTorch.
        regional: regional. Each block was compiled by itself.
        cache: compile cache. `private` (empty at the start) or `shared` (what is on the disk).
        targets: compiled modules. Names of the modules that were compiled.
        first_step_s: first step (lower is better). Step 0 up to its end on the device, compilation included.
        graph_count: graphs. Graphs compiled by the window's end.
        graph_break_count: graph breaks (lower is better). Graph breaks met by the window's end.
        window_recompile_count: recompiles (lower is better). Graphs compiled inside the window.
        is_attention_fused: attention fused. Inductor recognised attention that is written out, and put PyTorch's fused kernel in its place; null where a cache held the graphs.
    """

    is_enabled: Flag = None
    mode: Text = None
    backend: Text = None
    fullgraph: Flag = None
    dynamic: Flag = None
    regional: Flag = None
    cache: Text = None
    targets: list[str] | None = None
    first_step_s: Seconds = None
    graph_count: Count = None
    graph_break_count: Count = None
    window_recompile_count: Count = None
    is_attention_fused: Flag = None


class AttentionCheck(Struct):
    """Model: what was found of the user's own attention before it was measured.

    Attributes:
        cases: cases checked. Shapes, causal and not, at which output and gradients were held against the formula.
        deviation_fraction: deviation (lower is better). Largest deviation of a row, as a share of its size: the root of the sum of its products' squares.
        tolerance_fraction: tolerance. Largest deviation that is right in the run's dtype: 16 roundings in bfloat16, float16 and TF32, 1024 in float32.
        largest_in: largest in. Where the deviation was largest: output, or gradient of q, k or v, and the shape.
        refused: shapes refused. Shapes other than the run's own at which the function raised.
    """

    cases: Count = None
    deviation_fraction: Fraction = None
    tolerance_fraction: Fraction = None
    largest_in: Text = None
    refused: list[str] = []


class Fp8Layers(Struct):
    """Model: its linear layers, where torchao converted them to fp8.

    Attributes:
        converted: layers in fp8. Names of the converted layers, alike ones counted together.
        left_out: layers not in fp8. Names of the other linear layers, each with the reason.
        converted_count: number in fp8. Number of converted layers.
        parameter_count: parameters in fp8. Weights of the converted layers, each a multiply-add per token and product.
        torchao: torchao. Version of torchao.
    """

    converted: list[str] = []
    left_out: list[str] = []
    converted_count: Count = None
    parameter_count: Count = None
    torchao: Text = None


class Model(Struct):
    """Model: what was measured.

    Attributes:
        name: model. Class of the LightningModule.
        size: size. Name of the size, null for any other shape.
        parameter_count: parameters. Parameters.
        trainable_parameter_count: trainable. Parameters that take a gradient.
        vocab_size: vocab. Rows of the embedding.
        d_model: d_model. Width of the residual stream.
        d_ff: d_ff. Width inside the feed-forward block.
        num_layers: layers. Blocks.
        num_heads: heads. Attention heads.
        head_dim: head_dim. Width of a head, of attention by itself.
        is_causal: causal. Later positions are masked, of attention by itself.
        attention: attention. Attention by name: `naive`, `sdpa`, `flex`, or a function of the user's own.
        attention_backend: back end taken. What PyTorch took for plain `sdpa`, by the name that asks for it alone; of attention by itself.
        checkpoint: checkpoint. Activation checkpointing by name: `none`, `block`, `every_2`, `selective`.
        residual_dtype: residual stream. `bf16` where it is cast to that under autocast; null: as the embedding gives it.
        fused_projections: fused. q, k and v are one product, gate and up another.
        loss: loss by. `whole`, or `chunked`: in chunks of tokens, so that never all logits are in memory.
        optimizer: optimizer. Optimizer with its variant, such as `AdamW fused`.
        is_fresh: fresh. Weights come from initialisation, not from a checkpoint.
        described: more. What else the module says of itself by `describe()`.
    """

    name: Text = None
    size: Text = None
    parameter_count: Count = None
    trainable_parameter_count: Count = None
    vocab_size: Count = None
    d_model: Count = None
    d_ff: Count = None
    num_layers: Count = None
    num_heads: Count = None
    head_dim: Count = None
    is_causal: Flag = None
    attention: Text = None
    attention_backend: Text = None
    attention_check: AttentionCheck | None = None
    checkpoint: Text = None
    fp8: Fp8Layers | None = None
    residual_dtype: Text = None
    fused_projections: Flag = None
    loss: Text = None
    optimizer: Text = None
    is_fresh: Flag = None
    described: dict[str, Any] = {}


class Flops(Struct):
    """FLOPs: counts and the device's peak.

    Attributes:
        per_token_flops: FLOP/token. Model FLOPs per token, attention counted full.
        causal_per_token_flops: causal FLOP/token. Model FLOPs per token, causal attention counted half.
        recomputed_per_token_flops: recomputed FLOP/token (lower is better). What the backward pass computes again under activation checkpointing; null where nobody knows.
        multiplier: multiplier. 1 for a forward pass, 3 with backward; already in both figures.
        source: FLOP source. Where the count comes from.
        reason: no FLOPs because. Why there is no count, where there is none.
        fp8_per_token_flops: fp8 FLOP/token. Those of `per_token_flops` that are products of layers in fp8.
        peak_flops_per_s: peak. Datasheet peak for the precision, null for an unknown device. In fp8 the rate at which all FLOPs would be done, the products of the converted layers at the fp8 peak and all others at that of bf16.
        peak_source: peak source. Datasheet that `peak_flops_per_s` comes from.
    """

    per_token_flops: FlopCount = None
    causal_per_token_flops: FlopCount = None
    recomputed_per_token_flops: FlopCount = None
    multiplier: Annotated[int | None, "1"] = None
    source: Text = None
    reason: Text = None
    fp8_per_token_flops: FlopCount = None
    peak_flops_per_s: FlopsPerSecond = None
    peak_source: Text = None


class Data(Struct):
    """Data: what the model was measured on.

    Attributes:
        name: data. Class of the data module.
        batch_size: batch. Sequences in a micro-batch of one rank, or of the ranks that compute one together.
        context_length: context. Tokens in a sequence.
        source: source. `random` or `text`.
        described: more. What else the data module says of itself by `describe()`.
    """

    name: Text = None
    batch_size: Count = None
    context_length: Count = None
    source: Text = None
    described: dict[str, Any] = {}


class Cost(Struct):
    """Sweep: the time of a run.

    Attributes:
        total_s: total (lower is better). From the start of the cell's process to its end, as the sweep clocked it; `milestones` says where it went.
    """

    total_s: Seconds = None


class SweepPlace(Struct):
    """Sweep: the run's place in its sweep.

    Attributes:
        name: sweep. Name of the sweep.
        study: study. Name of the study whose view shows the sweep; null where it has none.
        cell: cell. The cell's id: its values, and a digest of everything that makes it up.
        axes: axes. The cell's value of every axis.
        repeat: repeat. Which repeat of the cell, from 0.
        attempt: attempt. How often this repeat was begun, up to the run recorded here.
        environment: environment. Name of the environment that it ran in, null for the sweep's own.
        search: search. In a sweep that looks for the largest value that fits: `trial`, or `largest` for the run that found it (`oom` where nothing fits).
        searched_cell: searched cell. The planned cell whose largest value the run helped to find; `cell` is the trial's own id then.
        load_per_core: load (lower is better). The machine's load of the last minute when the process had ended, divided by its cores.
    """

    name: Text = None
    study: Text = None
    cell: Text = None
    axes: dict[str, Any] | None = None
    repeat: Index = None
    attempt: Count = None
    environment: Text = None
    search: Annotated[Literal["trial", "largest"] | None, "text"] = None
    searched_cell: Text = None
    load_per_core: Number = None
    cost: Cost | None = None


class Milestones(Struct):
    """Milestones: when the process reached each part of a run.

    Attributes:
        started_s: started. Python is up. All milestones: seconds since the process began, to 10 ms.
        imported_s: imported. Everything is imported.
        parsed_s: parsed. The command line is understood.
        device_ready_s: device ready. The device has its context.
        built_s: built. Data, model and optimizer are there.
        ready_s: ready. The first batch is about to be fetched.
        first_step_s: first step. Step 0 was issued (compiled: has ended on the device).
        window_opened_s: window opened. The window's begin.
        window_closed_s: window closed. The window's end.
        stepped_s: stepped. The last step, probes included, is over.
        closed_s: closed. The record was complete.
    """

    started_s: Seconds = None
    imported_s: Seconds = None
    parsed_s: Seconds = None
    device_ready_s: Seconds = None
    built_s: Seconds = None
    ready_s: Seconds = None
    first_step_s: Seconds = None
    window_opened_s: Seconds = None
    window_closed_s: Seconds = None
    stepped_s: Seconds = None
    closed_s: Seconds = None


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
    """Run: one process measuring one configuration.

    Attributes:
        schema_version: schema. Version of this layout.
        outcome: outcome. `ok`, `oom`, `timeout`, `error`, `interrupted`, `skipped`, or `running` while it goes on.
        run_id: run. Name of the run's folder.
        exit_code: exit code. Exit code of the process.
        unwritten_step_count: unwritten steps (lower is better). Steps that are in the summary but could not be written to steps.jsonl.
        pid: pid. Process id.
        boot_id: boot id. The kernel's id of this boot: with pid and start, one process for ever.
        process_start_s: process start. When the process started, in seconds since boot.
        started_at: started. UTC time, ISO 8601.
        ended_at: ended. UTC time, ISO 8601; null while running.
        command: command. `fit` or `validate`.
        argv: arguments. The command line as given.
        replay_command: replay. The command that repeats this run.
        config: config. The full resolved configuration.
        rank: rank. Rank of the process that measured.
        world_size: ranks. Number of processes that trained together.
        data_parallel_size: batches at once. Number of ranks, or of groups of ranks that compute a batch together, that each train on batches of their own.
        per_rank: of each rank. Rank, host, GPU, steps, tokens, mean step and phases, peaks and energy of each of several ranks.
        repairs: repairs. What of Lightning was changed for this run, each with its reason.
        wandb: W&B. How W&B files the run (mode, project, entity, group, tags), and whether the result goes along (artifact).
        guards: guards. Checks of the measurement: name, status, value, limit, unit, message, advice.
        mode: mode. `inference`, `forward`, `forward_backward` or `train_step`.
        precision: precision. Compute precision, such as `bf16-mixed`.
        matmul_precision: matmul precision. float32 matmuls: `highest` is fp32, `high` is TF32.
        clock: clock. `events`, `sync` or `host` (a CPU).
        device_type: device type. `cuda` or `cpu`.
        zero_grad: zero_grad. When gradients are zeroed: `after_step`, or `native` (where Lightning or the module does it).
        unseen_phases: unseen phases. Phases that manual optimization hides: null, and their time is in `other`.
        strict: strict. A failed guard makes the exit code 4.
        gc_policy: gc. What garbage collection does in the window.
        is_profiled: profiled. A profiler was on: its step times enter no timing table.
        nonfinite: non-finite. Names and values (`nan`, `inf`, `-inf`) of fields stored as null for that reason.
    """

    schema_version: int
    outcome: str
    run_id: Text = None
    error: RunError | None = None
    exit_code: Count = None
    unwritten_step_count: Count = None
    pid: Index = None
    boot_id: Text = None
    process_start_s: Seconds = None
    started_at: Text = None
    ended_at: Text = None
    command: Text = None
    argv: list[str] | None = None
    replay_command: Text = None
    config: dict[str, Any] | None = None
    rank: Index = None
    world_size: Count = None
    data_parallel_size: Count = None
    per_rank: list[RankRecord] | None = None
    repairs: list[str] | None = None
    wandb: WandbFiling | None = None
    guards: list[Guard] = []
    mode: Annotated[Mode | None, "text"] = None
    precision: Text = None
    matmul_precision: Text = None
    clock: Text = None
    device_type: Text = None
    zero_grad: Text = None
    unseen_phases: list[str] | None = None
    strict: Flag = None
    gc_policy: Text = None
    is_profiled: Flag = None
    nonfinite: dict[str, str] = {}
    environment: Environment | None = None
    model: Model = part(Model)
    data: Data = part(Data)
    flops: Flops = part(Flops)
    compile: Compile = part(Compile)
    profile: Profile | None = None
    sweep: SweepPlace | None = None
    milestones: Milestones = part(Milestones)
    window: Window = part(Window)
    warmup: Warmup = part(Warmup)
    phases: PerPhase[PhaseSummary] = part(PerPhase)
    throughput: Throughput = part(Throughput)
    loss: Loss = part(Loss)
    scalars: ScalarMeans = part(ScalarMeans)
    memory: Memory = part(Memory)
    device_state: DeviceState = part(DeviceState)
    host_state: HostState = part(HostState)
    probe: Probe = part(Probe)
    kernels: KernelSummary | None = None
    memory_history: MemoryHistoryRecord | None = None
    memory_prediction: MemoryPrediction | None = None
    dtypes: DtypeRecord | None = None
