# ruff: noqa: E501 (tables, one field a line)
"""A run's record, the content of run.json.

Beside the measured parts it has the settings, the model, and the environment that times may depend on.
"""

from __future__ import annotations

from typing import Annotated, Literal

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
    Communication,
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
from lmbench.records.vocabulary import Mode, Values


class Versions(Struct):
    """Environment: versions of the software.

    Attributes:
        python: python. Version of Python.
        torch: torch. Version of PyTorch.
        cuda: cuda. Version of CUDA that PyTorch was built with.
        cudnn: cudnn. Version of cuDNN that PyTorch loaded.
        driver: driver. Version of the NVIDIA driver.
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
    """Environment: state of a git checkout.

    Attributes:
        commit: commit. Git commit of the folder's repository; null without one.
        is_dirty: dirty. Whether tracked files differ from the commit.
    """

    commit: Text = None
    is_dirty: Flag = None


class Code(Struct):
    """Environment: revisions of the code that ran."""

    project: Revision = part(Revision)
    lmbench: Revision = part(Revision)


class Gpu(Struct):
    """Environment: the GPU.

    Attributes:
        name: GPU. Name of the GPU.
        uuid: UUID. Unique id of the GPU (UUID).
        sku: SKU. Part number of the GPU's board.
        pci_bus_id: PCI id. Address of the GPU on the PCI bus.
        compute_capability: capability. CUDA compute capability of the GPU.
        memory_total_bytes: memory. Total memory of the GPU.
        power_limit_w: power limit. Power limit in force for the GPU.
        power_limit_default_w: default limit. Default power limit of the GPU.
        max_sm_clock_hz: max SM clock. Highest clock rate of the GPU's multiprocessors (SM).
        is_mig: MIG. Whether the GPU is split into slices (MIG).
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
        core_count: cores. Number of logical cores of the machine.
        affinity: affinity. Cores that the process may use.
        memory_total_bytes: host memory. Total memory of the machine.
        python_iteration_s: Python score (lower is better). Speed of the host in Python: time of one turn of a small pure-Python loop.
        kernel_launch_s: launch score (lower is better). Speed of the host in launching: time to issue one tiny kernel (on a CPU: to run one tiny operator).
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
    """Environment: Python's garbage collection outside the window.

    Attributes:
        is_enabled: gc. Whether automatic garbage collection is on outside the window.
        thresholds: gc thresholds. Thresholds of Python's garbage collector.
        frozen_count: gc frozen. Number of objects that were frozen before the window.
    """

    is_enabled: Flag = None
    thresholds: list[int] | None = None
    frozen_count: Count = None


class Flags(Struct):
    """Environment: PyTorch's global switches.

    Attributes:
        float32_matmul_precision: float32 matmuls. PyTorch's precision of float32 matrix products: `highest` is fp32, `high` is TF32.
        cuda_matmul_allow_tf32: TF32 matmul. Whether matrix products may use TF32.
        cudnn_allow_tf32: TF32 cuDNN. Whether cuDNN may use TF32.
        cudnn_benchmark: cudnn.benchmark. Whether cuDNN tries several algorithms and keeps the fastest.
        cudnn_deterministic: cudnn.deterministic. Whether cuDNN may use only deterministic algorithms.
        deterministic_algorithms: deterministic. Whether PyTorch may use only deterministic algorithms.
        anomaly_mode: anomaly mode. Whether autograd's anomaly detection is on.
        allocator_backend: allocator. Name of the CUDA memory allocator.
        thread_count: threads. Number of threads that PyTorch uses within an operator.
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
    """Environment: environment variables.

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


#: Version of the layout of run.json and steps.jsonl. Reading refuses any other version.
SCHEMA_VERSION = 1


class Profile(Struct):
    """Settings: the profiler.

    Attributes:
        tool: profiled by. Name of the profiler: `torch` (leaves a trace in the result folder) or `nsys` (sets ranges for Nsight Systems).
        steps: profiled steps. Number of steps in the trace, from the start of the window.
        first_step: first profiled step. Index of the first step in the trace.
        trace_file: trace. Name of the trace in the result folder.
        trace_error: lost trace. Why the trace could not be written.
        trace_bytes: trace size. Size of the trace's file, compressed.
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
        is_enabled: compiled. Whether torch.compile was asked for.
        mode: compile mode. Option `mode` of torch.compile.
        backend: backend. Option `backend` of torch.compile.
        fullgraph: fullgraph. Whether a graph break is an error.
        dynamic: dynamic. Whether shapes may change without a new graph; null leaves the choice to PyTorch.
        regional: regional. Whether each block was compiled separately.
        split_at_buckets: split at buckets. Whether graphs are split at DDP's buckets; null splits a network that is compiled as a whole.
        cache: compile cache. Compile cache: `private` (empty at the start) or `shared` (the one on the disk).
        targets: compiled modules. Names of the modules that were compiled.
        first_step_s: first step (lower is better). Time of step 0 up to its end on the device, including compilation.
        graph_count: graphs. Number of graphs compiled by the end of the window.
        graph_break_count: graph breaks (lower is better). Number of graph breaks by the end of the window.
        window_recompile_count: recompiles (lower is better). Number of graphs compiled inside the window.
        is_attention_fused: attention fused. Whether Inductor replaced attention that is written out by PyTorch's fused kernel; null where the graphs came from a cache.
    """

    is_enabled: Flag = None
    mode: Text = None
    backend: Text = None
    fullgraph: Flag = None
    dynamic: Flag = None
    regional: Flag = None
    split_at_buckets: Flag = None
    cache: Text = None
    targets: list[str] | None = None
    first_step_s: Seconds = None
    graph_count: Count = None
    graph_break_count: Count = None
    window_recompile_count: Count = None
    is_attention_fused: Flag = None


class AttentionCheck(Struct):
    """Model: check of the user's own attention function before it was measured.

    Attributes:
        cases: cases checked. Number of cases (shapes, causal or not) in which output and gradients were compared with the formula.
        deviation_fraction: deviation (lower is better). Largest deviation of a row from the formula, relative to the row's expected size: the root of the sum of its squared products.
        tolerance_fraction: tolerance. Largest deviation allowed in the run's dtype: 16 roundings in bfloat16, float16 and TF32, 1024 in float32.
        largest_in: largest in. Result with the largest deviation (output, or gradient of q, k or v) and its shape.
        refused: shapes refused. Shapes at which the function raised an error, apart from the run's own.
    """

    cases: Count = None
    deviation_fraction: Fraction = None
    tolerance_fraction: Fraction = None
    largest_in: Text = None
    refused: list[str] = []


class Fp8Layers(Struct):
    """Model: linear layers that torchao converted to fp8.

    Attributes:
        converted: layers in fp8. Names of the layers in fp8; equal layers are counted together.
        left_out: layers not in fp8. Names of the linear layers that are not in fp8, each with the reason.
        converted_count: number in fp8. Number of layers in fp8.
        parameter_count: parameters in fp8. Number of weights in fp8 layers. A matrix product takes one multiply-add per weight and token.
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
        size: size. Name of the model size; null for any other shape.
        parameter_count: parameters. Number of parameters.
        trainable_parameter_count: trainable. Number of parameters that get a gradient.
        vocab_size: vocab. Size of the vocabulary: rows of the embedding.
        d_model: d_model. Width of the residual stream.
        d_ff: d_ff. Width inside the feed-forward block.
        num_layers: layers. Number of blocks.
        num_heads: heads. Number of attention heads.
        head_dim: head_dim. Width of one attention head; known only where attention is measured alone.
        is_causal: causal. Whether attention masks later positions; known only where attention is measured alone.
        attention: attention. Attention implementation: `naive`, `sdpa`, `flex`, or a function of the user's.
        attention_backend: back end taken. Kernel that PyTorch chose for plain `sdpa`, by lmbench's name for it; known only where attention is measured alone.
        checkpoint: checkpoint. Activation checkpointing: `none`, `block`, `every_2` or `selective`.
        residual_dtype: residual stream. Dtype of the residual stream: `bf16` where it is cast to that under autocast; null where it has the embedding's dtype.
        fused_projections: fused. Whether q, k and v are one matrix product, and gate and up another.
        loss: loss by. How the loss is computed: `whole`, or `chunked` over tokens, so that all logits are never in memory at once.
        optimizer: optimizer. Optimizer with its variant, such as `AdamW fused`.
        is_fresh: fresh. Whether the weights come from initialization rather than from a checkpoint.
        described: more. Further facts that the module reports by its method `describe()`.
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
    described: Values = {}


class Flops(Struct):
    """FLOPs: counts and the device's peak.

    Attributes:
        per_token_flops: FLOP/token. Model FLOPs per token, with attention counted in full.
        causal_per_token_flops: causal FLOP/token. Model FLOPs per token, with causal attention counted half.
        recomputed_per_token_flops: recomputed FLOP/token (lower is better). FLOPs per token that the backward pass computes again under activation checkpointing; null where unknown.
        multiplier: multiplier. FLOPs of the mode in forward passes: 1 for a forward pass, 3 with backward. `per_token_flops` and `causal_per_token_flops` include it.
        source: FLOP source. How the FLOPs were counted.
        reason: no FLOPs because. Why there is no count; null where there is one.
        fp8_per_token_flops: fp8 FLOP/token. Part of `per_token_flops` that layers in fp8 multiply.
        peak_flops_per_s: peak. Peak of the device for the precision, from its datasheet; null for an unknown device. In fp8 the mean rate if converted layers run at the fp8 peak and all other products at the bf16 peak.
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
    """Data: batches that the model was measured on.

    Attributes:
        name: data. Class of the data module.
        batch_size: batch. Sequences in a micro-batch of one rank, or of one group of ranks that compute a batch together.
        context_length: context. Tokens in a sequence.
        source: source. Source of the tokens: `random` or `text`.
        described: more. Further facts that the data module reports by its method `describe()`.
    """

    name: Text = None
    batch_size: Count = None
    context_length: Count = None
    source: Text = None
    described: Values = {}


class Cost(Struct):
    """Sweep: time of a run.

    Attributes:
        total_s: total (lower is better). Time from the start of the cell's process to its end, on the sweep's clock. `milestones` shows where the time went.
    """

    total_s: Seconds = None


class SweepPlace(Struct):
    """Sweep: the run's place in its sweep.

    Attributes:
        name: sweep. Name of the sweep.
        study: study. Name of the study whose view shows the sweep; null without one.
        cell: cell. Id of the cell: its values and a digest of everything that defines it.
        axes: axes. Value of each axis in this cell.
        repeat: repeat. Index of this repeat of the cell, from 0.
        attempt: attempt. Number of times that this repeat was started, up to this run.
        environment: environment. Name of the environment (interpreter, variables, code) that the run used; null for the sweep's own.
        search: search. Role in a search for the largest value that fits: `trial`, or `largest` for the run that found it (`oom` where nothing fits).
        searched_cell: searched cell. Planned cell whose largest value the run helped to find; `cell` is then the trial's own id.
        load_per_core: load (lower is better). Load average of the last minute after the run's process had ended, divided by the machine's cores.
    """

    name: Text = None
    study: Text = None
    cell: Text = None
    axes: Values | None = None
    repeat: Index = None
    attempt: Count = None
    environment: Text = None
    search: Annotated[Literal["trial", "largest"] | None, "text"] = None
    searched_cell: Text = None
    load_per_core: Number = None
    cost: Cost | None = None


class Milestones(Struct):
    """Milestones: time at which the process reached each part of a run.

    Attributes:
        started_s: started. Time at which Python was running. All milestones are in seconds since the process began, to 10 ms.
        imported_s: imported. Time at which all modules were imported.
        parsed_s: parsed. Time at which the command line was parsed.
        device_ready_s: device ready. Time at which the device had its context.
        built_s: built. Time at which data, model and optimizer were built.
        ready_s: ready. Time just before the first batch was fetched.
        first_step_s: first step. Time at which step 0 was issued; with torch.compile, at which it ended on the device.
        window_opened_s: window opened. Time of the window's start.
        window_closed_s: window closed. Time of the window's end.
        stepped_s: stepped. Time at which the last step ended, probe steps included.
        closed_s: closed. Time at which the record was complete.
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
    """W&B: how a run is filed there, and whether its result is uploaded when the run is closed."""

    mode: WandbMode | None = None
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    tags: list[str] | None = None
    artifact: bool = False


class RunRecord(Struct):
    """Run: one process measuring one configuration.

    Attributes:
        schema_version: schema. Version of the layout of run.json.
        outcome: outcome. How the run ended: `ok`, `oom` (out of memory), `timeout`, `error`, `interrupted` or `skipped`; `running` until it ends.
        run_id: run. Name of the run's folder.
        exit_code: exit code. Exit code of the process.
        unwritten_step_count: unwritten steps (lower is better). Steps that are in the summary but could not be written to steps.jsonl.
        pid: pid. Id of the process.
        boot_id: boot id. The kernel's random id of this boot. Together with `pid` and `process_start_s` it identifies the process for ever.
        process_start_s: process start. Start of the process, in seconds since boot.
        started_at: started. Start of the run: UTC time, ISO 8601.
        ended_at: ended. End of the run: UTC time, ISO 8601; null while it is running.
        command: command. Command that measured: `fit` or `validate`.
        argv: arguments. Command line as it was given, with secrets masked.
        replay_command: replay. Command that repeats this run.
        config: config. Full configuration, with all defaults.
        rank: rank. Rank of the process that measured.
        world_size: ranks. Number of processes that trained together.
        data_parallel_size: batches at once. Number of ranks that train on different batches. A group of ranks that compute one batch together counts as one.
        per_rank: of each rank. Figures of each of several ranks: host, GPU, steps, tokens, mean step and phase times, memory peaks, energy.
        repairs: repairs. Changes made to Lightning for this run, each with its reason.
        wandb: W&B. How the run is filed at W&B (mode, project, entity, group, tags), and whether the result is uploaded (artifact).
        guards: guards. Checks of the measurement: name, status, value, limit, unit, message, advice.
        mode: mode. Parts of training that ran: `inference`, `forward`, `forward_backward` or `train_step`.
        precision: precision. Compute precision by Lightning's name, such as `bf16-mixed`.
        matmul_precision: matmul precision. PyTorch's precision of float32 matrix products: `highest` is fp32, `high` is TF32.
        clock: clock. Clock that timed the phases: `events` (CUDA events), `sync` (synchronizes at each phase) or `host` (on a CPU).
        device_type: device type. Type of the device: `cuda` or `cpu`.
        zero_grad: zero_grad. When gradients are zeroed: `after_step`, or `native` (where Lightning or the module does it).
        unseen_phases: unseen phases. Phases that manual optimization hides: they are null, and `other` contains their time.
        strict: strict. Whether a failed guard makes the exit code 4.
        gc_policy: gc. What Python's garbage collector does in the window.
        is_profiled: profiled. Whether a profiler was on. Tables of timings leave out the step times of such a run.
        nonfinite: non-finite. Names and values (`nan`, `inf`, `-inf`) of fields that are null because JSON has no such numbers.
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
    config: Values | None = None
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
    communication: Communication = part(Communication)
    kernels: KernelSummary | None = None
    memory_history: MemoryHistoryRecord | None = None
    memory_prediction: MemoryPrediction | None = None
    dtypes: DtypeRecord | None = None
