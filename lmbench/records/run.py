"""A run's record, the content of run.json.

Beside the measured parts it has the settings, the model, and the environment that times may depend on.
"""

from __future__ import annotations

from dataclasses import MISSING
from typing import Annotated, Literal

from msgspec import Struct

from lmbench.records.endurance import Collector, Saving
from lmbench.records.examined import DtypeRecord, KernelSummary, MemoryHistoryRecord, MemoryPrediction
from lmbench.records.field import (
    Bytes,
    Count,
    Flag,
    FlopCount,
    FlopsPerSecond,
    Fraction,
    Index,
    Number,
    PerPhase,
    Seconds,
    Text,
    Watts,
    about,
    lower,
    part,
    record,
)
from lmbench.records.host_time import HostTime
from lmbench.records.input_pipeline import InputPipeline
from lmbench.records.measured import (
    Communication,
    DeviceState,
    Guard,
    HostState,
    Loss,
    Memory,
    PhaseSummary,
    Probe,
    RankRecord,
    RunError,
    Throughput,
    Warmup,
    Window,
)
from lmbench.records.vocabulary import Mode, Values


@record
class Versions:
    """Environment: versions of the software."""

    python: Text = about("Version of Python.")
    torch: Text = about("Version of PyTorch.")
    cuda: Text = about("Version of CUDA that PyTorch was built with.")
    cudnn: Text = about("Version of cuDNN that PyTorch loaded.")
    driver: Text = about("Version of the NVIDIA driver.")
    lightning: Text = about("Version of Lightning.")
    lmbench: Text = about("Version of lmbench.")


@record
class Revision:
    """Environment: state of a git checkout."""

    commit: Text = about("Git commit of the folder's repository; null without one.")
    is_dirty: Flag = about("Whether tracked files differ from the commit.")
    changes_digest: Text = about("Digest of the tracked files' differences from the commit; null without any.")


@record
class Code:
    """Environment: revisions of the code that ran.

    `project` is the repository of the measured module's file, else that of the current folder.
    """

    project: Revision = part(Revision)
    lmbench: Revision = part(Revision)


@record
class GpuFacts:
    """Environment: the GPU."""

    name: Text = about("Name of the GPU.", "GPU")
    uuid: Text = about("Unique id of the GPU (UUID).")
    sku: Text = about("Part number of the GPU's board.", "SKU")
    pci_bus_id: Text = about("Address of the GPU on the PCI bus.")
    memory_total_bytes: Bytes = about("Total memory of the GPU.")
    power_limit_w: Watts = about("Power limit in force for the GPU.")
    is_mig: Flag = about("Whether the GPU is split into slices (MIG).", "MIG")
    sensor_reason: Text = about(
        "Why the GPU's sensors were not read: no NVML, or no amdsmi on ROCm; null where they were, and on a CPU."
    )


@record
class HostFacts:
    """Environment: the machine."""

    hostname: Text = about("Name of the machine.", "host")
    cpu_model: Text = about("Model of the processor.", "CPU")
    core_count: Count = about("Number of logical cores of the machine.", "cores")
    affinity: list[int] | None = about("Cores that the process may use.")
    python_iteration_s: Seconds = lower("Speed of the host in Python: time of one turn of a small pure-Python loop.")
    kernel_launch_s: Seconds = lower(
        "Speed of the host in launching: time to issue one tiny kernel (on a CPU: to run one tiny operator)."
    )


@record
class Flags:
    """Environment: PyTorch's global switches."""

    float32_matmul_precision: Text = about(
        "PyTorch's precision of float32 matrix products: `highest` is fp32, `high` is TF32.", "float32 matmuls"
    )
    cuda_matmul_allow_tf32: Flag = about("Whether matrix products may use TF32.", "TF32 matmul")
    cudnn_allow_tf32: Flag = about("Whether cuDNN may use TF32.", "TF32 cuDNN")
    cudnn_benchmark: Flag = about("Whether cuDNN tries several algorithms and keeps the fastest.", "cudnn.benchmark")
    cudnn_deterministic: Flag = about("Whether cuDNN may use only deterministic algorithms.", "cudnn.deterministic")
    deterministic_algorithms: Flag = about("Whether PyTorch may use only deterministic algorithms.", "deterministic")
    anomaly_mode: Flag = about("Whether autograd's anomaly detection is on.")
    allocator_backend: Text = about("Name of the CUDA memory allocator.", "allocator")
    thread_count: Count = about("Number of threads that PyTorch uses within an operator.", "threads")


@record
class RunEnvironment:
    """Environment: environment variables."""

    versions: Versions = part(Versions)
    code: Code = part(Code)
    gpu: GpuFacts = part(GpuFacts)
    host: HostFacts = part(HostFacts)
    flags: Flags = part(Flags)
    variables: dict[str, str] | None = about("Environment variables from an allow-list; never a secret.")

    @property
    def device_name(self) -> str | None:
        """The name of the GPU, or else of the processor."""
        return self.gpu.name or self.host.cpu_model


#: Version of the layout of run.json and steps.jsonl. Reading refuses any other version.
SCHEMA_VERSION = 1


@record
class Profile:
    """Settings: the profiler."""

    tool: Text = about(
        "Name of the profiler: `torch` (leaves a trace in the result folder) or `nsys` (sets ranges for Nsight "
        "Systems)."
    )
    steps: Count = about("Number of steps in the trace, from the start of the window.")
    first_step: Count = about("Index of the first step in the trace.")
    trace_file: Text = about("Name of the trace in the result folder.")
    trace_error: Text = about("Why the trace could not be written.")
    trace_bytes: Bytes = about("Size of the trace's file, compressed.")
    host_step_s: Seconds = about(
        "Least time that the host took for a step of the warm-up, without the profiler, the loader and waits for the "
        "device: behind every block and phase it let the device catch up, so that few launches wait for room."
    )


@record
class Compile:
    """Settings: torch.compile."""

    is_enabled: Flag = about("Whether torch.compile was asked for.", "compiled")
    mode: Text = about("Option `mode` of torch.compile.", "compile mode")
    backend: Text = about("Option `backend` of torch.compile.")
    fullgraph: Flag = about("Whether a graph break is an error.")
    dynamic: Flag = about("Whether shapes may change without a new graph; null leaves the choice to PyTorch.")
    regional: Flag = about("Whether each block was compiled separately.")
    split_at_buckets: Flag = about(
        "Whether graphs are split at DDP's buckets; null splits a network that is compiled as a whole."
    )
    cache: Text = about("Compile cache: `private` (empty at the start) or `shared` (the one on the disk).")
    targets: list[str] | None = about("Names of the modules that were compiled.")
    first_step_s: Seconds = lower("Time of step 0 up to its end on the device, including compilation.")
    graph_count: Count = about("Number of graphs compiled by the end of the window.", "graphs", over="max")
    graph_break_count: Count = lower("Number of graph breaks by the end of the window.", "graph breaks", over="max")
    window_recompile_count: Count = lower("Number of graphs compiled inside the window.")
    is_attention_fused: Flag = about(
        "Whether Inductor replaced attention that is written out by PyTorch's fused kernel; null where the graphs came "
        "from a cache."
    )


@record
class AttentionCheck:
    """Model: check of the user's own attention function before it was measured."""

    cases: Count = about(
        "Number of cases (shapes, causal or not) in which output and gradients were compared with the formula."
    )
    deviation_fraction: Fraction = lower(
        "Largest deviation of a row from the formula, relative to the row's expected size: the root of the sum of its "
        "squared products."
    )
    tolerance_fraction: Fraction = about(
        "Largest deviation allowed in the run's dtype: 16 roundings in bfloat16, float16 and TF32, 1024 in float32."
    )
    refused: list[str] = about("Shapes at which the function raised an error, apart from the run's own.", factory=list)


@record
class Fp8Layers:
    """Model: linear layers that torchao converted to fp8."""

    converted: list[str] = about("Names of the layers in fp8; equal layers are counted together.", factory=list)
    left_out: list[str] = about("Names of the linear layers that are not in fp8, each with the reason.", factory=list)
    converted_count: Count = about("Number of layers in fp8.")
    parameter_count: Count = about(
        "Number of weights in fp8 layers. A matrix product takes one multiply-add per weight and token."
    )
    torchao: Text = about("Version of torchao.")


@record
class Model:
    """Model: what was measured."""

    name: Text = about("Class of the LightningModule.")
    size: Text = about("Name of the model size; null for any other shape.")
    parameter_count: Count = about("Number of parameters.", "parameters")
    trainable_parameter_count: Count = about("Number of parameters that get a gradient.", "trainable parameters")
    dtype: Text = about(
        "Dtypes of the parameters, that of most first; null where all have that of the precision.",
        "parameters in",
    )
    vocab_size: Count = about("Size of the vocabulary: rows of the embedding.", "vocab")
    d_model: Count = about("Width of the residual stream.", "d_model")
    d_ff: Count = about("Width inside the feed-forward block.", "d_ff")
    num_layers: Count = about("Number of blocks.", "layers")
    num_heads: Count = about("Number of attention heads.", "heads")
    head_dim: Count = about("Width of one attention head; known only where attention is measured alone.", "head_dim")
    is_causal: Flag = about("Whether attention masks later positions; known only where attention is measured alone.")
    attention: Text = about("Attention implementation: `naive`, `sdpa`, `flex`, or a function of the user's.")
    attention_backend: Text = about(
        "Kernel that PyTorch chose for plain `sdpa`, by lmbench's name for it; known only where attention is measured "
        "alone."
    )
    attention_check: AttentionCheck | None = None
    checkpoint: Text = about(
        "What the backward pass computes again (activation checkpointing), such as `all blocks, keep matmuls`; `none`, "
        "or null for a module that may do so by itself."
    )
    fp8: Fp8Layers | None = None
    residual_dtype: Text = about(
        "Dtype of the residual stream: `bf16` where it is cast to that under autocast; null where it has the "
        "embedding's dtype.",
        "residual stream",
    )
    fused_projections: bool | str | None = about(
        "Whether q, k and v are one matrix product, and gate and up another; `qkv` for the first alone.", "fused"
    )
    loss: Text = about(
        "How the loss is computed: `whole`, or `chunked` over tokens, so that all logits are never in memory at once.",
        "loss by",
    )
    optimizer: Text = about("Optimizer with its variant, such as `AdamW fused`.")
    is_fresh: Flag = about("Whether the weights come from initialization rather than from a checkpoint.")
    described: Values = about("Further facts that the module reports by its method `describe()`.", factory=dict)


@record
class Flops:
    """FLOPs: counts and the device's peak."""

    per_token_flops: FlopCount = about("Model FLOPs per token, with attention counted in full.")
    causal_per_token_flops: FlopCount = about("Model FLOPs per token, with causal attention counted half.")
    recomputed_per_token_flops: FlopCount = lower(
        "FLOPs per token that the backward pass computes again under activation checkpointing; null where unknown."
    )
    multiplier: Annotated[int | None, "1"] = about(
        "FLOPs of the mode in forward passes: 1 for a forward pass, 3 with backward. `per_token_flops` and "
        "`causal_per_token_flops` include it."
    )
    source: Text = about("How the FLOPs were counted.")
    reason: Text = about("Why there is no count; null where there is one.")
    fp8_per_token_flops: FlopCount = about("Part of `per_token_flops` that layers in fp8 multiply.")
    peak_flops_per_s: FlopsPerSecond = about(
        "Peak of the device for the precision, from its datasheet; null for an unknown device. In fp8 the mean rate if "
        "converted layers run at the fp8 peak and all other products at the bf16 peak."
    )
    peak_source: Text = about("Datasheet that `peak_flops_per_s` comes from.")


@record
class Data:
    """Data: batches that the model was measured on."""

    name: Text = about("Class of the data module.")
    batch_size: Count = about(
        "Sequences in a micro-batch of one rank, or of one group of ranks that compute a batch together.", "batch"
    )
    context_length: Count = about("Tokens in a sequence.", "context")
    source: Text = about("Source of the tokens: `random` or `text`.")
    padding_fraction: Fraction = lower(
        "Share of padding in the warm-up's tokens that count: outside of `attention_mask`, or else labels of -100."
    )
    described: Values = about("Further facts that the data module reports by its method `describe()`.", factory=dict)


@record
class Cost:
    """Sweep: time of a run."""

    total_s: Seconds = lower(
        "Time from the start of the cell's process to its end, on the sweep's clock; half of it where two processes "
        "took turns. `milestones` shows where the time went."
    )


@record
class SweepPlace:
    """Sweep: the run's place in its sweep."""

    name: Text = about("Name of the sweep.")
    study: Text = about("Name of the study whose view shows the sweep; null without one.")
    cell: Text = about("Id of the cell: its values and a digest of everything that defines it.")
    axes: Values | None = about("Value of each axis in this cell.")
    repeat: Index = about("Index of this repeat of the cell, from 0.")
    position: Index = about(
        "Place of the run's side in its round, drawn by coin: 0 begins. Null where no two sides are compared."
    )
    server_pid: Index = about(
        "Process id of the server that forked the run: runs of one server share a hash seed and an address layout."
    )
    environment: Text = about(
        "Name of the environment (interpreter, variables, code) that the run used; null for the sweep's own."
    )
    search: Annotated[Literal["trial", "largest"] | None, "text"] = about(
        "Role in a search for the largest value that fits: `trial`, or `largest` for the run that found it (`oom` "
        "where nothing fits)."
    )
    cost: Cost | None = None


@record
class Milestones:
    """Milestones: time at which the process reached each part of a run."""

    started_s: Seconds = about(
        "Time at which Python was running. All milestones are in seconds since the process began, to 10 ms."
    )
    imported_s: Seconds = about("Time at which all modules were imported.")
    first_step_s: Seconds = about(
        "Time at which step 0 was issued; with torch.compile, at which it ended on the device."
    )
    window_opened_s: Seconds = about("Time of the window's start.")
    stepped_s: Seconds = about("Time at which the last step ended, probe steps included.")
    closed_s: Seconds = about("Time at which the record was complete.")


WandbMode = Literal["offline", "online", "disabled"]


class WandbFiling(Struct):
    """W&B: how a run is filed there, and whether its result is uploaded when the run is closed."""

    mode: WandbMode | None = None
    project: str | None = None
    entity: str | None = None
    group: str | None = None
    tags: list[str] | None = None
    artifact: bool = False


@record
class RunRecord:
    """Run: one process measuring one configuration."""

    schema_version: int = about("Version of the layout of run.json.", default=MISSING)
    outcome: str = about(
        "How the run ended: `ok`, `oom` (out of memory), `timeout`, `error`, `interrupted` or `skipped`; `running` "
        "until it ends.",
        default=MISSING,
    )
    run_id: Text = about("Name of the run's folder.")
    error: RunError | None = None
    exit_code: Count = about("Exit code of the process.")
    unwritten_step_count: Count = lower("Steps that are in the summary but could not be written to steps.jsonl.")
    pid: Index = about("Id of the process.")
    boot_id: Text = about(
        "The kernel's random id of this boot. Together with `pid` and `process_start_s` it identifies the process for "
        "ever."
    )
    process_start_s: Seconds = about("Start of the process, in seconds since boot.")
    started_at: Text = about("Start of the run: UTC time, ISO 8601.")
    ended_at: Text = about("End of the run: UTC time, ISO 8601; null while it is running.")
    command: Text = about("Command that measured: `fit` or `validate`.")
    argv: list[str] | None = about("Command line as it was given, with secrets masked.")
    replay_command: Text = about("Command that repeats this run.")
    config: Values | None = about("Full configuration, with all defaults.")
    rank: Index = about("Rank of the process that measured.")
    world_size: Count = about("Number of processes that trained together.", "ranks")
    data_parallel_size: Count = about(
        "Number of ranks that train on different batches. A group of ranks that compute one batch together counts as "
        "one."
    )
    per_rank: list[RankRecord] | None = about(
        "Figures of each of several ranks: host, GPU, steps, tokens, mean step and phase times, memory peaks, energy, "
        "guards that warn or fail."
    )
    repairs: list[str] | None = about("Changes made to Lightning for this run, each with its reason.")
    wandb: WandbFiling | None = about(
        "How the run is filed at W&B (mode, project, entity, group, tags), and whether the result is uploaded "
        "(artifact)."
    )
    guards: list[Guard] = about(
        "Checks of the measurement: name, status, value, limit, unit, message, advice.", factory=list
    )
    mode: Annotated[Mode | None, "text"] = about(
        "Parts of training that ran: `inference`, `forward`, `forward_backward` or `train_step`."
    )
    precision: Text = about("Compute precision by Lightning's name, such as `bf16-mixed`.")
    matmul_precision: Text = about("PyTorch's precision of float32 matrix products: `highest` is fp32, `high` is TF32.")
    clock: Text = about(
        "Clock that timed the phases: `events` (the GPU's own), `sync` (synchronizes at each phase), `host` (on a CPU)."
    )
    device_type: Text = about("Type of the device as PyTorch names it: `cuda` or `cpu`.")
    zero_grad: Text = about(
        "When gradients are zeroed: `after_step`, or `native` (where Lightning or the module does it).", "zero_grad"
    )
    unseen_phases: list[str] | None = about(
        "Phases that manual optimization hides: they are null, and `other` contains their time."
    )
    strict: Flag = about("Whether a failed guard makes the exit code 4.")
    gc_policy: Text = about("What Python's garbage collector does in the window.", "gc")
    is_profiled: Flag = about("Whether a profiler was on. Tables of timings leave out the step times of such a run.")
    scalars: dict[str, Number] = about(
        "Means over the window's steps of all logged scalars, by name. As a column: `scalars.NAME`.", factory=dict
    )
    rooms: dict[str, Values] = about("What rooms of installed packages recorded, by the room's name.", factory=dict)
    scalar_units: dict[str, str] = about("Units of the scalars that were logged with one, by name.", factory=dict)
    nonfinite: dict[str, str] = about(
        "Names and values (`nan`, `inf`, `-inf`) of fields that are null because JSON has no such numbers.",
        factory=dict,
    )
    environment: RunEnvironment = part(RunEnvironment)
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
    memory: Memory = part(Memory)
    device_state: DeviceState = part(DeviceState)
    host_state: HostState = part(HostState)
    host_time: HostTime = part(HostTime)
    input_pipeline: InputPipeline | None = None
    saving: Saving = part(Saving)
    collector: Collector = part(Collector)
    probe: Probe = part(Probe)
    communication: Communication = part(Communication)
    kernels: KernelSummary | None = None
    memory_history: MemoryHistoryRecord | None = None
    memory_prediction: MemoryPrediction | None = None
    dtypes: DtypeRecord | None = None

    @property
    def step(self) -> PhaseSummary:
        """The statistics of the step, empty where no step was measured."""
        return self.phases.step or PhaseSummary()

    @property
    def failure(self) -> RunError:
        """The exception that ended the run, empty without one."""
        return self.error or RunError()

    @property
    def place(self) -> SweepPlace:
        """The run's place in its sweep, empty outside a sweep."""
        return self.sweep or SweepPlace()

    @property
    def axes(self) -> Values:
        """The values on the axes of the run's sweep, empty outside a sweep."""
        return self.place.axes or {}

    @property
    def cost_s(self) -> float:
        """The time of a sweep's run from the start of its process to its end, 0 where it was not noted."""
        cost = self.place.cost
        return (cost.total_s if cost else None) or 0.0

    @property
    def rank_count(self) -> int:
        """The number of ranks, 1 where it is not recorded."""
        return self.world_size or 1

    @property
    def is_set_up(self) -> bool:
        """Whether the run came to the end of its setup, where it records its environment."""
        return self.environment.versions.python is not None

    @property
    def is_on_gpu(self) -> bool:
        """Whether the run's device works beside the host; false also where the device is not recorded."""
        return self.device_type not in (None, "cpu")
