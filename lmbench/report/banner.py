"""What a run measures, in a few lines: its configuration, and the device, machine and versions that it ran on."""

from __future__ import annotations

from lmbench.records.passes import pass_of
from lmbench.records.run import Fp8Layers, RunEnvironment, RunRecord
from lmbench.report.answer import Line, labelled, listed
from lmbench.report.facts import choices_of
from lmbench.report.strategies import strategy_of
from lmbench.report.units import count, plain, whole

#: Whether a graph is for one shape, by torch.compile's option `dynamic`.
_SHAPES = {None: "dynamic once shapes change", True: "dynamic shapes", False: "static shapes"}


def banner(run: RunRecord) -> list[Line]:
    """The configuration in a few labelled lines; none for a run that did not record it."""
    if not run.mode:
        return []
    model, data, window, run_pass = run.model, run.data, run.window, pass_of(run)
    environment, fp8 = run.environment, run.model.fp8 or Fp8Layers()
    trained, shape = model.trainable_parameter_count, "batch as the data gives it"
    if data.batch_size:
        shape = f"batch {data.batch_size} x context {data.context_length or '?'}, {data.source or '?'} tokens"
    accumulation = f"{window.micro_batches} micro-batches a step" if (window.micro_batches or 1) > 1 else ""
    compiled = listed(run.compile.mode, run.compile.regional and "regional", _SHAPES[run.compile.dynamic])
    processor = environment.device_name or "CPU"
    if run.rank_count > 1:
        # Ranks share a CPU.
        processor = f"{run.rank_count} {'ranks on' if run.device_type == 'cpu' else 'x'} {processor}"
    power_w, peak = environment.gpu.power_limit_w, run.flops.peak_flops_per_s
    length = f"{window.requested_steps or window.steps or 'all'} steps"
    length += f" and {window.requested_s:g} s" if window.requested_s else ""
    if not run_pass.has_timing:
        length += f", {run_pass.label}: in no timing table"
    elif window.requested_steps:
        length += " at least"
    return [
        *labelled(
            "model",
            model.size or model.name or "(not built)",
            model.parameter_count and f"{count(model.parameter_count)} parameters",
            trained not in (None, model.parameter_count) and f"{count(trained)} of them trained",
            model.num_heads and model.head_dim and f"heads {model.num_heads}, head_dim {model.head_dim}",
            model.is_causal and "causal",
            model.attention and f"attention {model.attention}",
            model.attention_backend and f"which took {model.attention_backend}",
            model.checkpoint and model.checkpoint != "none" and f"checkpoint {model.checkpoint}",
            choices_of(model),
            model.optimizer,
        ),
        Line("step", listed(run.mode, shape, accumulation)),
        *labelled(
            "precision",
            run.precision,
            model.dtype and f"but parameters in {model.dtype}",
            run.matmul_precision and f"float32 matmul {run.matmul_precision}",
            f"compiled ({compiled})" if run.compile.is_enabled else "eager",
        ),
        *labelled(
            "fp8",
            fp8.converted_count and fp8.torchao and f"{fp8.converted_count} linear layers, by torchao {fp8.torchao}",
            fp8.left_out and f"in bf16: {', '.join(fp8.left_out)}",
            not run.compile.is_enabled and "slower than bf16 unless compiled",
            peak and f"MFU is of {plain(peak * 1e-12)} TFLOP/s, each product at its own peak",
            separator="; ",
        ),
        *labelled(
            "device",
            processor,
            run.rank_count > 1 and strategy_of(run),
            power_w and f"power limit {whole(power_w)} W",
        ),
        *labelled("window", length, window.warmup_steps and f"after {window.warmup_steps} of warm-up"),
    ]


def environment_text(environment: RunEnvironment, device: object, with_code: bool) -> str:
    """The device, machine and versions of a run, and the commits of its code; empty where the device is unknown."""
    power_w, versions = environment.gpu.power_limit_w, environment.versions
    # In lmbench's own repository one commit is that of both, and stands once.
    roles = {}
    for role, revision in (("lmbench commit", environment.code.lmbench), ("code at", environment.code.project)):
        if with_code and revision.commit:
            roles[f"{revision.commit[:9]}{', with changes' if revision.is_dirty else ''}"] = role
    if not device:
        return ""
    return listed(
        device,
        power_w and f"power limit {power_w:.0f} W",
        environment.host.hostname and f"on {environment.host.hostname}",
        *(
            f"{name} {version}"
            for name in ("torch", "cuda", "driver", "lightning", "lmbench")
            if (version := getattr(versions, name))
        ),
        *(f"{role} {commit}" for commit, role in roles.items()),
    )
