# ruff: noqa: E501 (tables, one row a line)
"""Fields of run.json that were measured: window, phases, rates, memory, device state, probe steps."""

from __future__ import annotations

from lmbench.records.old_field import group

_RUN = group(
    "Run",
    "run",
    (
        ("schema_version", "count", "schema", "Version of this layout."),
        ("run_id", "text", "run", "Name of the run's folder."),
        ("outcome", "text", "outcome", "`ok`, `oom`, `timeout`, `error`, `interrupted`, `skipped`, or `running` while it goes on."),
        ("error.kind", "text", "error", "Type of the exception that ended the run."),
        ("error.message", "text", "error message", "Its message, in one line."),
        ("error.phase", "text", "error phase", "Phase it happened in; `setup` before the first step, `recording` or `summary` for lmbench's own work."),
        ("error.requested_bytes", "bytes", "asked", "Bytes asked for when memory ran out, where the message says."),
        ("error.where", "text", "where", "`device` or `host`: whose memory ran out."),
        ("exit_code", "count", "exit code", "Exit code of the process."),
        ("unwritten_step_count", "count", "unwritten steps", "Steps that are in the summary but could not be written to steps.jsonl.", "down"),
        ("pid", "index", "pid", "Process id."),
        ("boot_id", "text", "boot id", "The kernel's id of this boot: with pid and start, one process for ever."),
        ("process_start_s", "s", "process start", "When the process started, in seconds since boot."),
        ("started_at", "text", "started", "UTC time, ISO 8601."),
        ("ended_at", "text", "ended", "UTC time, ISO 8601; null while running."),
        ("command", "text", "command", "`fit` or `validate`."),
        ("argv", "tree", "arguments", "The command line as given."),
        ("replay_command", "text", "replay", "The command that repeats this run."),
        ("config", "tree", "config", "The full resolved configuration."),
        ("world_size", "count", "ranks", "Number of processes that trained together."),
        ("repairs", "tree", "repairs", "What of Lightning was changed for this run, each with its reason."),
        ("wandb", "tree", "W&B", "Where W&B files the run, and whether it is uploaded when closed; null without a WandbLogger."),
        ("guards", "tree", "guards", "Checks of the measurement: name, status, value, limit, unit, message, advice."),
    ),
)  # fmt: skip

_SETTINGS = group(
    "Settings",
    "run",
    (
        ("mode", "text", "mode", "`inference`, `forward`, `forward_backward` or `train_step`."),
        ("precision", "text", "precision", "Compute precision, such as `bf16-mixed`."),
        ("matmul_precision", "text", "matmul precision", "float32 matmuls: `highest` is fp32, `high` is TF32."),
        ("clock", "text", "clock", "`events`, `sync` or `host` (a CPU)."),
        ("device_type", "text", "device type", "`cuda` or `cpu`."),
        ("zero_grad", "text", "zero_grad", "When gradients are zeroed: `after_step`, or `native` (where Lightning or the module does it)."),
        ("unseen_phases", "tree", "unseen phases", "Phases that manual optimization hides: null, and their time is in `other`."),
        ("strict", "flag", "strict", "A failed guard makes the exit code 4."),
        ("gc_policy", "text", "gc", "What garbage collection does in the window."),
        ("is_profiled", "flag", "profiled", "A profiler was on: its step times enter no timing table."),
        ("profile.tool", "text", "profiled by", "`torch` (a trace in the result) or `nsys` (ranges for Nsight Systems)."),
        ("profile.steps", "count", "profiled steps", "Steps in the trace: the first of the window."),
        ("profile.first_step", "count", "first profiled step", "Number of the first step in the trace."),
        ("profile.trace_file", "text", "trace", "The trace, in the result folder."),
        ("profile.trace_error", "text", "lost trace", "Why the trace could not be written."),
        ("profile.trace_bytes", "bytes", "trace size", "Size of the trace as it is stored."),
        ("compile.is_enabled", "flag", "compiled", "torch.compile was asked for."),
        ("compile.mode", "text", "compile mode", "torch.compile's mode."),
        ("compile.backend", "text", "backend", "torch.compile's backend."),
        ("compile.fullgraph", "flag", "fullgraph", "A graph break would have been an error."),
        ("compile.dynamic", "flag", "dynamic", "Shapes may change without a new graph; null leaves it to PyTorch."),
        ("compile.regional", "flag", "regional", "Each block was compiled by itself."),
        ("compile.cache", "text", "compile cache", "`private` (empty at the start) or `shared` (what is on the disk)."),
        ("compile.targets", "tree", "compiled modules", "Names of the modules that were compiled."),
        ("compile.first_step_s", "s", "first step", "Step 0 up to its end on the device, compilation included.", "down"),
        ("compile.graph_count", "count", "graphs", "Graphs compiled by the window's end."),
        ("compile.graph_break_count", "count", "graph breaks", "Graph breaks met by the window's end.", "down"),
        ("compile.window_recompile_count", "count", "recompiles", "Graphs compiled inside the window.", "down"),
    ),
)  # fmt: skip

_MODEL = group(
    "Model",
    "run",
    (
        ("name", "text", "model", "Class of the LightningModule."),
        ("size", "text", "size", "Name of the size, null for any other shape."),
        ("parameter_count", "count", "parameters", "Parameters."),
        ("trainable_parameter_count", "count", "trainable", "Parameters that take a gradient."),
        ("vocab_size", "count", "vocab", "Rows of the embedding."),
        ("d_model", "count", "d_model", "Width of the residual stream."),
        ("d_ff", "count", "d_ff", "Width inside the feed-forward block."),
        ("num_layers", "count", "layers", "Blocks."),
        ("num_heads", "count", "heads", "Attention heads."),
        ("attention", "text", "attention", "Attention by name: `naive` or `sdpa`."),
        ("optimizer", "text", "optimizer", "Optimizer with its variant, such as `AdamW fused`."),
        ("is_fresh", "flag", "fresh", "Weights come from initialisation, not from a checkpoint."),
    ),
    prefix="model.",
)

_FLOPS = group(
    "FLOPs",
    "run",
    (
        ("per_token_flops", "FLOP", "FLOP/token", "Model FLOPs per token, attention counted full."),
        ("causal_per_token_flops", "FLOP", "causal FLOP/token", "The same with attention halved."),
        ("multiplier", "1", "multiplier", "1 for a forward pass, 3 with backward; already in both figures."),
        ("source", "text", "FLOP source", "Where the count comes from."),
        ("reason", "text", "no FLOPs because", "Why there is no count, where there is none."),
        (
            "peak_flops_per_s",
            "FLOP/s",
            "peak",
            "Datasheet peak for the precision, null for an unknown device.",
        ),
        ("peak_source", "text", "peak source", "Where the peak comes from."),
    ),
    prefix="flops.",
)

_DATA = group(
    "Data",
    "run",
    (
        ("batch_size", "count", "batch", "Sequences in a micro-batch of one rank."),
        ("context_length", "count", "context", "Tokens in a sequence."),
        ("source", "text", "source", "`random` or `text`."),
    ),
    prefix="data.",
)

_DATA_TREE = group("Data", "run", (("data", "tree", "data", "What the data module says of itself."),))

_SWEEP = group(
    "Sweep",
    "run",
    (
        ("name", "text", "sweep", "Name of the sweep."),
        ("cell", "text", "cell", "The cell's id: its values, and a digest of everything that makes it up."),
        ("axes", "tree", "axes", "The cell's value of every axis."),
        ("repeat", "index", "repeat", "Which repeat of the cell, from 0."),
        ("attempt", "count", "attempt", "How often this repeat was begun, up to the run recorded here."),
        ("environment", "text", "environment", "Name of the environment that it ran in, null for the sweep's own."),
    ),
    prefix="sweep.",
)  # fmt: skip

_COST = group(
    "Sweep",
    "run",
    (
        ("total_s", "s", "total", "From the start of the cell's process to its end, as the sweep clocked it.", "down"),
        ("overhead_s", "s", "overhead", "`total_s` without warm-up and window, but with the compilation in the first step.", "down"),
        ("start_s", "s", "start", "The process and its interpreter.", "down"),
        ("import_s", "s", "import", "Importing PyTorch, Lightning and lmbench.", "down"),
        ("parse_s", "s", "parse", "Understanding the command line.", "down"),
        ("device_s", "s", "device", "Making the device's context.", "down"),
        ("build_s", "s", "build", "Data, model and optimizer.", "down"),
        ("capture_s", "s", "capture", "Recording the environment, and compiling's own preparation.", "down"),
        ("first_step_s", "s", "first step", "Step 0, with what it compiles or loads.", "down"),
        ("compile_s", "s", "compile", "`first_step_s` without a step of the window, where torch.compile is on.", "down"),
        ("warmup_s", "s", "warm-up", "The other steps before the window.", "down"),
        ("window_s", "s", "window", "The window, its pauses included.", "down"),
        ("probe_s", "s", "probe", "Probe steps.", "down"),
        ("close_s", "s", "close", "Summary, guards, writing.", "down"),
        ("exit_s", "s", "exit", "From the last writing to the process's end.", "down"),
    ),
    prefix="sweep.cost.",
)  # fmt: skip

_MILESTONES = group(
    "Milestones",
    "run",
    (
        ("started_s", "s", "started", "Python is up. All milestones: seconds since the process began, to 10 ms."),
        ("imported_s", "s", "imported", "Everything is imported."),
        ("parsed_s", "s", "parsed", "The command line is understood."),
        ("device_ready_s", "s", "device ready", "The device has its context."),
        ("built_s", "s", "built", "Data, model and optimizer are there."),
        ("ready_s", "s", "ready", "The first batch is about to be fetched."),
        ("first_step_s", "s", "first step", "Step 0 was issued (compiled: has ended on the device)."),
        ("window_opened_s", "s", "window opened", "The window's begin."),
        ("window_closed_s", "s", "window closed", "The window's end."),
        ("stepped_s", "s", "stepped", "The last step, probes included, is over."),
        ("closed_s", "s", "closed", "The record was complete."),
    ),
    prefix="milestones.",
)

RUN_FACT_FIELDS = (*_RUN, *_SETTINGS, *_MODEL, *_FLOPS, *_DATA, *_DATA_TREE, *_SWEEP, *_COST, *_MILESTONES)
