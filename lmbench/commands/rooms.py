"""Commands that call one package each. A command imports its package when it is called, so that help starts fast."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from msgspec import Meta

from lmbench.commands import MEASURING
from lmbench.commands.parser import PositiveFloat, PositiveInt, Result
from lmbench.commands.words import read_budget, read_configuration, read_size, refuse
from lmbench.configs import is_yaml, shipped_configs
from lmbench.errors import UsageError
from lmbench.fit_options import check_options
from lmbench.masking import masked_words
from lmbench.precision import matmul_workspace_bytes
from lmbench.records.store import RESULTS
from lmbench.report.answer import Answer
from lmbench.sweep.file import CONFIG


def kernels(*results: Result, path: bool = False, what_if: list[str] | None = None) -> Answer:
    """Shows where the device's time goes, from a trace.

    The answer comes first: a verdict, why the device was idle, what to do, and what takes the most time. Tables follow
    by name: kernels, their kinds and the parts of the model they work for, by phase; the clocks of device and host;
    times inside attention. A trace of a CPU has no kernels; its operators are shown instead. Needs no GPU and no
    PyTorch.

    It also takes the traces of several ranks: a run, a folder, or several files. It then shows what each rank does,
    which rank the others wait for and why, and what each kind of communication costs.

    Args:
        results: RUN|TRACE|FOLDER: a result recorded with `lmbench fit ... --trainer.profiler kernels`, or any trace of
            torch.profiler on CUDA, ROCm or a CPU (torch 2; .json, .json.gz; at most 1 GiB unpacked).
        path: show the chain of host work, launches, kernels and collectives that sets the step, and what changes it
        what_if: changes to simulate together, such as collectives=0,launches=0 or kind:elementwise=0.5
    """
    if not results:
        raise UsageError("lmbench kernels shows a result, a trace, or the traces of several ranks; give one")
    if path or what_if is not None:
        from lmbench.kernels.path_answer import path_answer

        return path_answer(results, None if what_if is None else ",".join(what_if))
    from lmbench.kernels.ranks import ranks_answer

    return ranks_answer(results)


def memory(
    *sources: Result,
    device: int | None = None,
    gpu: str | None = None,
    gpus: str | None = None,
    fit: str | None = None,
    also: list[str] | None = None,
    run: Path | None = None,
    results_dir: Path = RESULTS,
    settings: list[str],
) -> Answer:
    """Shows what fills the device's memory at its peak: recorded, or predicted without a GPU.

    From a history of PyTorch's allocator it shows bytes by category and by part of the model, the largest allocations
    with their origin, what is saved for the backward, and what is reserved but unused. `--output peak.html` (or .svg)
    adds a timeline. Needs no GPU and no PyTorch. For a run that ran out of memory it shows a plan that fits.

    Without a recorded run it predicts: `lmbench memory [--gpu NAME] [OPTIONS OF lmbench fit]` shows the peak of each
    phase by category, whether it fits on a GPU (`--gpu H200`; by default the one here), and the largest batch and
    context that do. The prediction runs a step on fake tensors, which needs no GPU and no weights:
    `lmbench memory --config large_bf16 --data.batch_size 32 --gpu H200`. For several GPUs (`--trainer.devices 8
    --trainer.strategy fsdp2`) it shows the memory of rank 0, and how many GPUs are enough.

    Of two sources, recordings or configurations, it shows what the second one holds more, by category, line and phase.

    With `--fit 80GiB` (or `--fit RTX4090`) it plans how the same step takes the least time in that memory, and writes
    RESULTS_DIR/plan-CONFIG/planned.yaml for `lmbench fit`. `lmbench tune CONFIG --for memory` measures such plans.

    Args:
        sources: SOURCE|A B: the folder of a run recorded with `lmbench fit ... --memory.history true`, or any snapshot
            of torch.cuda.memory._dump_snapshot, read without running code; or a configuration, as with --config
        device: the device to show, if a snapshot has histories of several
        gpu: name of the GPU to predict for, such as H200; by default the one here
        gpus: several GPUs, parted by commas, or all that lmbench knows: one table of what fits on each
        fit: plan for so much memory, such as 80GiB, or for a GPU of this name
        also: NAME=VALUE[,NAME=VALUE...], with --fit: plan with these settings too, such as trainer.precision=bf16-true
        run: the folder of a `lmbench tune CONFIG --for memory`, for its times of blocks and steps
        results_dir: where the plan's folder goes
        settings: options of `lmbench fit`, to predict
    """
    if len(sources) == 2:
        return _difference(sources, device, gpu, settings)
    if len(sources) > 2:
        raise UsageError(f"memory takes one source, or two to compare; {len(sources)} given")
    source = next(iter(sources), None)
    if source is not None and _is_config(source):
        source, settings = None, [f"--config={source}", *settings]
    if fit is not None:
        if gpus is not None:
            raise UsageError("--fit plans for one GPU; give its name to --fit, and no --gpus")
        return _planned(source, fit, gpu, also or [], run, results_dir, settings)
    refuse({"also": also, "run": run}, "belongs to --fit")
    if source is None and settings:
        return _predicted(settings, device, gpu, gpus)
    if source is None or settings:
        raise UsageError("memory takes a recorded run or snapshot, or options of `lmbench fit`")
    return _recorded(source, device)


def _predicted(settings: list[str], device: int | None, gpu: str | None, gpus: str | None) -> Answer:
    refuse({"device": device}, "chooses a device of a snapshot, and a prediction has one device; leave it out")
    if gpu is not None and gpus is not None:
        raise UsageError("--gpu and --gpus both name GPUs; give one of them")
    check_options(settings)
    from lmbench.memory.answer import forecast_answer
    from lmbench.memory.forecast import Request, ask_forecast, gpus_for

    return forecast_answer(ask_forecast(settings, Request(gpus_for(gpus or gpu), finds_largest=True)))


def _recorded(source: Result, device: int | None) -> Answer:
    """The peak of a recorded history, and the plan for a run that ran out of memory."""
    from lmbench.memory.answer import history_answer, shortage_answer
    from lmbench.memory.blocks import SNAPSHOT_FILE
    from lmbench.memory.findings import examine
    from lmbench.records.load import is_run_folder, load_run

    loaded = load_run(Path(source), with_steps=False) if is_run_folder(Path(source)) else None
    if loaded is None or loaded.outcome != "oom":
        return history_answer(examine(source, device))
    shortage = shortage_answer(loaded.record, loaded.path / "config.yaml")
    if not (loaded.path / SNAPSHOT_FILE).is_file():
        return shortage
    return replace(shortage, sections=[replace(history_answer(examine(source, device)), title="The history")])


def _is_config(source: str) -> bool:
    is_shipped = source in shipped_configs() and not Path(source).exists()
    return is_shipped or is_yaml(source)


def _difference(sources: Sequence[Result], device: int | None, gpu: str | None, settings: list[str]) -> Answer:
    """Two recordings or predictions side by side; `settings` are for both predictions."""
    from lmbench.memory.difference import difference_answer, predicted_peak, recorded_peak
    from lmbench.memory.findings import examine
    from lmbench.memory.forecast import Request, ask_forecast, gpus_for

    if settings and not any(map(_is_config, sources)):
        raise UsageError(f"{settings[0]} is for a prediction; both sources are recordings")
    check_options(settings)
    peaks = [
        predicted_peak(source, ask_forecast([f"--config={source}", *settings], Request(gpus_for(gpu))))
        if _is_config(source)
        else recorded_peak(source, examine(source, device))
        for source in sources
    ]
    return difference_answer(*peaks)


def _planned(
    source: Result | None,
    fit: str,
    gpu: str | None,
    also: Sequence[str],
    run: Path | None,
    results_dir: Path,
    settings: list[str],
) -> Answer:
    """The plan of a configuration for a size or a GPU, which is also written as YAML."""
    from lmbench.campaign.planning import write_plan
    from lmbench.memory.answer import plan_answer
    from lmbench.memory.forecast import TargetGpu, gpu_for

    advice = "a plan is of a configuration, such as `lmbench memory large_bf16 --fit 80GiB`"
    options = read_configuration(source, settings, advice)
    is_size = fit[:1].isdecimal()
    target = gpu_for(gpu if is_size else fit) or TargetGpu("", 0, matmul_workspace_bytes(""))
    if is_size:
        target = TargetGpu(fit, read_size(fit, "fit") or 0, target.workspace_bytes)
    path = results_dir / f"plan-{Path(str(options[CONFIG])).stem}" / "planned.yaml"
    plan, others = write_plan(options, target, run, path, also)
    return plan_answer(plan, ["--config", str(path)], others)


def dtypes(source: Result) -> Answer:
    """Shows the dtypes of a run that was recorded with `lmbench fit ... --dtypes.record true`.

    It shows those of parameters, batch, logits, loss, gradients and optimizer state, and of every module's inputs and
    outputs. Each operator of the forward pass has the reason for its casts: the autocast list that it is in on the
    run's device. Needs no GPU and no PyTorch.

    Args:
        source: the run's folder
    """
    from lmbench.dtypes.answer import dtypes_answer

    return dtypes_answer(source)


def ceiling(
    source: Result | None = None,
    *,
    sustained_s: PositiveFloat = 3.0,
    collectives: bool = False,
    ranks: PositiveInt | None = None,
    budget: str = "60s",
    results_dir: Path = RESULTS,
) -> Answer:
    """Measures the rates of matrix products and copies on this device, and of collectives between ranks.

    Each rate is measured in bursts of 40 ms and sustained for seconds, with the clock and power it ran at. Collectives
    are those of NCCL between this machine's GPUs, or of gloo between processes on its CPU, from 1 MB to 1 GB, alone and
    beside matrix products.

    For a run that was measured before it shows, from these rates, when data, sharded and tensor parallel training of
    its model become bound by communication.

    Args:
        source: the folder of a run, to measure nothing and show what bounds it.
        sustained_s: seconds for which each rate is sustained.
        collectives: measure all-reduce, all-gather, reduce-scatter, all-to-all and broadcast too.
        ranks: the most ranks of a collective; by default one on each GPU, or 2 on a CPU.
        budget: about how long collectives are timed; 90s, 10m.
        results_dir: the result goes to ceiling_NAME.json in this folder, where `lmbench kernels` looks for it.
    """
    if source is not None:
        from lmbench.kernels.bounds import bounds_answer

        return bounds_answer(source)
    from lmbench.kernels.ceiling import ceiling_answer, store_ceiling
    from lmbench.kernels.recording.ceiling import measure_ceiling
    from lmbench.kernels.recording.collectives import measure_collectives

    record = measure_ceiling(sustained_s, measure_collectives(ranks, read_budget(budget)) if collectives else [])
    return ceiling_answer(record, store_ceiling(record, results_dir))


def numerics() -> Answer:
    """Shows how wrong published sums in 16 bit are.

    Runs the loops of published write-ups on a GPU if there is one, else on the CPU.
    """
    from lmbench.numerics import measure_numerics

    return measure_numerics()


def overhead(
    configuration: str | None = None,
    *,
    rounds: Annotated[int, Meta(ge=2)] = 5,
    do_bench: bool = False,
    settings: list[str],
) -> Answer:
    """Measures what the harness costs.

    It trains the same model in Lightning's Trainer with everything off, and in `lmbench fit`, each in turns with a
    plain PyTorch loop: in fresh processes, with the same data and optimizer, and a C library that keeps its memory.
    Takes every option of `lmbench fit`; a first run settles how many steps each window has.

    Args:
        configuration: a YAML file, or a shipped one by its name; or --config
        rounds: pairs of processes of each; an interval takes 2
        do_bench: also time the plain loop as triton.testing.do_bench times a function
        settings: options of `lmbench fit`
    """
    from lmbench.files import ScratchFolder
    from lmbench.overhead import measure_overhead

    if configuration is not None:
        settings = [f"--config={configuration}", *settings]
    check_options(settings)
    words = ["lmbench", "overhead", "--rounds", str(rounds), *(["--do_bench"] if do_bench else []), *settings]
    repeat = shlex.join(masked_words(words))
    with ScratchFolder("overhead") as folder:
        return measure_overhead(settings, rounds, Path(folder), repeat, with_do_bench=do_bench)


def selfcheck(device: str | None = None) -> Answer:
    """Plants known truths and checks that lmbench measures them.

    Exits with 1 when a check fails, and with 11 when the machine is too busy to tell.

    Args:
        device: cpu or cuda; by default cuda, where there is one
    """
    from lmbench.selfcheck import check_truths

    return check_truths(device)


def nsys(*words: str, output: str = "lmbench-%p", settings: Sequence[str] = ()) -> int:
    """Runs `lmbench fit ...` (or validate) under `nsys profile`.

    Nsight captures the profiled steps only (`--trainer.profiler.steps N`, 3 by default) and sees NVTX ranges for steps,
    phases and modules.

    Args:
        words: the command to run, as without nsys
        output: Nsight's report; %p is the process id
        settings: options of the command

    Raises:
        UsageError: there is no command to run, or no nsys on this machine.
    """
    run = [*words, *settings]
    if not words or words[0] not in MEASURING:
        given = repr(run[0]) if run else "nothing"
        raise UsageError(f"nsys was given {given}; it runs {' or '.join(MEASURING)}, such as `lmbench nsys fit smoke`")
    program = shutil.which("nsys")
    if program is None:
        advice = "install Nsight Systems, or use --trainer.profiler kernels, which needs nothing but PyTorch"
        raise UsageError(f"nsys is not on this machine's PATH; {advice}")
    # Nsight starts at the `cudaProfilerStart` that the KernelProfiler calls when the window opens. It records the NVTX
    # ranges without torch.profiler (Nsight Systems user guide, CLI profile options).
    capture = ["--capture-range=cudaProfilerApi", "--capture-range-end=stop", "--trace=cuda,nvtx", "--sample=none"]
    profiler = ["--trainer.profiler", "kernels", "--trainer.profiler.tool", "nsys"]
    # Set the profiler before the user's options: `--trainer.profiler.steps` is valid only after it.
    command = [sys.executable, "-P", "-m", "lmbench", words[0], *profiler, *run[1:]]
    sys.stdout.flush()
    os.execv(program, [program, "profile", *capture, "--output", output, *command])
