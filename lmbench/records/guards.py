"""All guards of a run (design section 6): each reads a run's record and its steps; what they lack makes `n/a`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from lmbench.precision import find_precision
from lmbench.records.environment import Flags
from lmbench.records.guard import BUSY_MACHINE, Guard, at_most, not_applicable
from lmbench.records.measured import PhaseSummary, TrainingFacts
from lmbench.records.run import RunRecord
from lmbench.records.statistics import mean_error_fraction, noise_fraction
from lmbench.records.step import StepRecord, select_window
from lmbench.records.vocabulary import BACKWARD_MODES

# training itself (design section 7)

#: Distance of a fresh model's first loss from ln(vocab): logits of unit variance add half a nat.
FIRST_LOSS_LIMIT_NAT = 0.5


def finite_loss(run: RunRecord, steps: Sequence[StepRecord]) -> Guard:
    """Fails if a step, warm-up included, or the summary has a loss that is nan or infinite."""
    name = "finite_loss"
    losses = [step.loss for step in steps if step.loss is not None]
    summary = [value for value in (run.loss.first, run.loss.last, run.loss.mean) if value is not None]
    if not losses and not summary:
        return not_applicable(name, "no loss was recorded")
    bad = sum(not math.isfinite(loss) for loss in losses) or sum(not math.isfinite(value) for value in summary)
    message = "every loss is finite" if not bad else f"{bad} losses are nan or infinite"
    if bad and losses:
        first = next((step.step for step in steps if step.loss is not None and not math.isfinite(step.loss)), None)
        message += f", the first at step {first}" if first is not None else ", in the summary"
    advice = (
        "Lower the learning rate, clip gradients or use a wider precision; the speed of a diverged run is no result."
    )
    return at_most(name, bad, 0, "count", message, advice=advice, otherwise="fail")


def gradients(run: RunRecord, steps: Sequence[StepRecord]) -> Guard:
    """Fails if no trainable tensor has a non-zero gradient, or one is not finite; warns if some have none."""
    name = "gradients"
    training = _checked(run)
    if isinstance(training, str):
        return not_applicable(name, training)
    checked, bad = training.parameters or 0, training.nonfinite_gradients
    if bad and training.is_skipped is not True:
        advice = "Lower the learning rate or the loss scale; find the operation with torch.autograd.detect_anomaly."
        message = f"{len(bad)} of {checked} gradients are not finite: {_listed(bad)}"
        return Guard(name, "fail", len(bad), 0, "count", message, advice)
    without = training.missing_gradients + training.zero_gradients
    if len(without) >= checked:
        advice = "Check that the loss depends on the parameters and that they require gradients; nothing was trained."
        message = f"none of {checked} parameters has a non-zero gradient"
        return Guard(name, "fail", len(without), 0, "count", message, advice)
    message = f"{len(without)} of {checked} parameters have no or zero gradients"
    if without:
        message += f": {_listed(without)}"
    advice = "Freeze these parameters if they are meant to stay; else their work is missing from this step."
    return at_most(name, len(without), 0, "count", message, advice=advice)


def trained(run: RunRecord, steps: Sequence[StepRecord]) -> Guard:
    """Fails if the optimizer moved nothing; warns if it left some parameters as they were."""
    name = "trained"
    training = _checked(run)
    if isinstance(training, str):
        return not_applicable(name, training)
    if run.mode != "train_step":
        return not_applicable(name, f"mode {run.mode} has no optimizer step")
    if training.is_skipped is True:
        return not_applicable(name, "the fp16 scaler skipped the checked step")
    if training.unmoved_parameters is None:
        return not_applicable(name, "the weights were not compared")
    checked, unmoved = training.parameters or 0, training.unmoved_parameters
    if len(unmoved) >= checked:
        advice = (
            "Check the learning rate (a warm-up from 0 moves nothing) and which parameters the optimizer was given."
        )
        return Guard(name, "fail", len(unmoved), 0, "count", f"the step moved none of {checked} parameters", advice)
    message = f"{len(unmoved)} of {checked} parameters did not move"
    if unmoved:
        message += f": {_listed(unmoved)}"
    advice = "Check that the optimizer holds these parameters and that the update is not below their precision."
    return at_most(name, len(unmoved), 0, "count", message, advice=advice)


def first_loss(run: RunRecord, steps: Sequence[StepRecord]) -> Guard:
    """Warns if a fresh model's first loss is far from ln(vocab), the loss of an even guess."""
    name = "first_loss"
    if run.model.is_fresh is not True:
        return not_applicable(name, "the model is not known to be fresh from initialisation")
    loss, vocab = run.loss.first, run.model.vocab_size
    if loss is None or vocab is None:
        return not_applicable(name, "the first loss or the vocabulary is not known")
    if not math.isfinite(loss):
        return not_applicable(name, "the first loss is not finite")
    message = f"first loss {loss:.2f}, ln(vocab) {math.log(vocab):.2f}"
    advice = "Check the initialisation, the labels' shift and the loss's mean: an untrained model guesses evenly."
    return at_most(name, abs(loss - math.log(vocab)), FIRST_LOSS_LIMIT_NAT, "nat", message, advice=advice)


def skipped_steps(run: RunRecord, steps: Sequence[StepRecord]) -> Guard:
    """Warns if the fp16 scaler skipped updates in the window, which are left out of every statistic; fails if it did so
    with all."""
    name = "skipped_steps"
    precision = find_precision(str(run.precision))
    if precision is None or not precision.has_scaler:
        return not_applicable(name, "no gradient scaler at this precision")
    window = select_window(steps)
    count = window.skipped_count
    total = count + len(window.used) + window.short_count
    if count == total > 0:
        before = [step for step in steps if step.stage == "warmup" and _is_own(run, step)]
        since = ", from the first step on: nothing was trained" if all(step.is_skipped for step in before) else ""
        message = f"fp16 gradients overflowed in all {total} steps of the window{since}, and there is no step time"
        advice = (
            f"Use bf16-mixed, or a smaller loss; or warm up for longer, if the loss scale has only to settle (it was "
            f"halved {count + sum(bool(step.is_skipped) for step in before)} times so far)."
        )
        return Guard(name, "fail", count, 0, "count", message, advice)
    message = f"the scaler skipped {count} of {total} steps of the window"
    advice = "Warm up for longer, so that the loss scale settles before the window."
    return at_most(name, count, 0, "count", message, advice=advice)


def _checked(run: RunRecord) -> TrainingFacts | str:
    """What a probe step saw of the parameters, or why none were checked."""
    if run.mode not in BACKWARD_MODES:
        return f"mode {run.mode} computes no gradients"
    training = run.probe.training
    if training is None or training.parameters is None:
        return "no probe step looked at the gradients"
    return training


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


# step times

IDENTITY_LIMIT_FRACTION = {"cuda": 0.001, "cpu": 0.005}
#: What synchronizing at both ends of a window may take besides, however short that is: 20 to 107 us in 496 windows of
#: 7 ms to 15 s (H200, torch 2.11).
IDENTITY_ENDS_S = {"cuda": 150e-6}
TREND_LIMIT_FRACTION = 0.01
#: A drift that noise makes this often is not called a trend.
TREND_P = 0.05
SPREAD_LIMIT_FRACTION = 0.10
#: Noise from step to step that a quiet CPU does not have: half the spread that warns.
NOISE_LIMIT_FRACTION = 0.05
#: What other processes may take of a CPU's cores, and what may be lost of a window without a core.
OTHER_CPU_LIMIT_FRACTION, WAITED_LIMIT_FRACTION = 0.10, 0.02
OTHER_LIMIT_FRACTION = 0.02
MFU_LIMIT_FRACTION = 1.0


def window_identity(run: RunRecord, steps: Sequence[StepRecord]) -> Guard:
    """Fails if the window's steps do not add up to its wall time, which was clocked apart from them.

    The sum is taken from the records where all of the window's are there, else from run.json.
    """
    name = "window_identity"
    wall = run.window.wall_s
    if not wall or not run.window.steps:
        return not_applicable(name, "no window was closed")
    spans = [step.step_s for step in steps if step.stage == "window" and _is_own(run, step)]
    known = [span for span in spans if span is not None]
    complete = len(known) == run.window.steps
    total = math.fsum(known) if complete else run.window.steps_sum_s
    if total is None:
        return not_applicable(name, "the window's steps were not all recorded")
    error = abs(total - wall) / wall
    device = str(run.device_type)
    limit = IDENTITY_LIMIT_FRACTION.get(device, IDENTITY_LIMIT_FRACTION["cuda"])
    limit = max(limit, IDENTITY_ENDS_S.get(device, 0.0) / wall)
    message = f"steps sum to {total:.4f} s, the window took {wall:.4f} s ({error:.3%} apart)"
    advice = (
        "Time passed outside every step, or was counted twice: look for callbacks that work between batches; "
        "if there are none, please report it."
    )
    return at_most(name, error, limit, "fraction", message, advice=advice, otherwise="fail")


def window_complete(run: RunRecord, steps: Sequence[StepRecord]) -> Guard:
    """Warns if the window has fewer steps, or is shorter, than was asked for; fails if it has none."""
    name = "window_complete"
    if run.outcome not in (None, "ok"):
        return not_applicable(name, f"the run's outcome is {run.outcome}")
    asked, asked_s = run.window.requested_steps, run.window.requested_s or 0.0
    count, wall_s = run.window.steps, run.window.wall_s
    lasted_s = None if wall_s is None else wall_s + (run.window.excluded_s or 0.0)
    if count is None:
        return not_applicable(name, "no window was recorded")
    advice = "The run ended first: lift what ends training (max_steps, max_epochs, max_time, limits), or ask for less."
    message = f"{count:.0f} steps in the window"
    if asked is not None:
        message += f", {asked:.0f} asked for"
    if not count:
        return Guard(name, "fail", count, 1, "count", message, advice)
    if asked is None or (lasted_s is not None and count >= asked and lasted_s >= asked_s):
        return Guard(name, "pass", count, asked, "count", message)
    if count >= asked:
        message += f"; shorter than the {asked_s:g} s asked for"
    return Guard(name, "warn", count, asked, "count", message, advice)


def probe_steps(run: RunRecord, steps: Sequence[StepRecord]) -> Guard:
    """Warns if the steps after the window, which look inside it, ended too soon."""
    name = "probe_steps"
    if run.outcome not in (None, "ok"):
        return not_applicable(name, f"the run's outcome is {run.outcome}")
    is_complete, error = run.probe.is_complete, run.probe.error
    if is_complete is None:
        return not_applicable(name, "no probe steps were taken")
    if is_complete:
        return Guard(name, "pass", None, None, "", "every kind of probe step was taken")
    if error is None:
        message = "the run ended before its probe steps did: some verdicts or checks are missing"
        return Guard(name, "warn", None, None, "", message, "Lift what ends training, or ask for fewer steps.")
    message = f"out of memory in the probe steps, in {error.phase}, after a complete window"
    advice = "Probes take memory of their own; --measure.probe_steps 0 leaves them out, a smaller batch makes room."
    return Guard(name, "warn", None, None, "", message, advice)


def _is_own(run: RunRecord, step: StepRecord) -> bool:
    return int(step.rank or 0) == int(run.rank or 0)


def trend(run: RunRecord, steps: Sequence[StepRecord]) -> Guard:
    """Warns if step times drift by over 1 % across the window, and noise alone would rarely order them so."""
    name = "trend"
    step = run.phases.step or PhaseSummary()
    drift, chance = step.trend_fraction, step.trend_p
    if drift is None or chance is None:
        return not_applicable(name, "fewer than 6 steps")
    if _noisy_times(run, steps):
        return not_applicable(name, "this machine is busy: a drift of the step is not told from one of its load")
    message = f"step time drifts by {drift:+.1%} over the window (p = {chance:.2g})"
    if abs(drift) > TREND_LIMIT_FRACTION and chance >= TREND_P:
        return Guard(name, "pass", abs(drift), TREND_LIMIT_FRACTION, "fraction", f"{message}: not told from noise")
    advice = (
        "Steps get slower: see power, temperature and clock, or memory that grows; measure a longer window."
        if drift > 0
        else "Steps get faster: warm up for longer."
    )
    return at_most(name, abs(drift), TREND_LIMIT_FRACTION, "fraction", message, advice=advice)


def spread(run: RunRecord, steps: Sequence[StepRecord]) -> Guard:
    """Warns if the standard deviation of step times is over 10 % of their mean."""
    name = "spread"
    step = run.phases.step or PhaseSummary()
    value = step.cv_fraction
    if value is None:
        return not_applicable(name, "fewer than 2 steps")
    if _noisy_times(run, steps):
        return not_applicable(name, "this machine is busy: its steps spread with its load")
    outliers = step.outlier_count or 0
    message = f"standard deviation is {value:.1%} of the mean step, {outliers:.0f} outlier{'s' * (outliers != 1)}"
    advice = (
        "Single steps stand out: see their phases in steps.jsonl (loader, other work on the machine), and "
        "quote the median."
        if outliers
        else "Steps vary throughout: keep the machine free of other work, or measure more steps."
    )
    return at_most(name, value, SPREAD_LIMIT_FRACTION, "fraction", message, advice=advice)


def busy_machine(run: RunRecord, steps: Sequence[StepRecord]) -> Guard:
    """Warns if other work took turns on this machine: on a CPU if it took over 10 % of the cores, anywhere if the
    training thread waited for a core, or the hypervisor took them away, for over 2 % of the window.

    On a CPU whose steps spread from each to the next it says what that makes of the figures: the 95 % interval of the
    mean step within this window. What the load is in another one, no window can tell.
    """
    name, state = BUSY_MACHINE, run.host_state
    signs = [(share, limit, text) for share, limit, text in _signs(run) if share is not None]
    noisy = _noisy_times(run, steps)
    if not signs and not noisy:
        return not_applicable(name, "the system does not tell of other processes")
    told = [text.format(f"{100 * share:.0f} %") for share, limit, text in signs if share > limit]
    value, limit, _ = max(signs, key=lambda sign: sign[0] / sign[1], default=(None, None, ""))
    if not told and not noisy:
        return Guard(name, "pass", value, limit, "fraction", "other processes left it its cores")
    if noisy:
        error = float(f"{mean_error_fraction(noisy):.1g}")
        told.insert(0, f"figures are good to about \N{PLUS-MINUS SIGN}{100 * error:g} %")
    if state.load_per_core is not None and len(told) > bool(noisy):
        told.append(f"load {state.load_per_core:.1f} a core")
    message = f"this machine is busy: {', '.join(told)}"
    advice = "Measure when it is quiet, or let `lmbench compare --run` measure both sides in turn."
    return Guard(name, "warn", value, limit, "fraction", message, advice)


def _signs(run: RunRecord) -> list[tuple[float | None, float, str]]:
    """Shares of the window that other work took, the limit of each, and how it is told."""
    state = run.host_state
    signs = [
        (state.waited_fraction, WAITED_LIMIT_FRACTION, "this process waited {} of the time for a core"),
        (state.steal_fraction, WAITED_LIMIT_FRACTION, "the hypervisor took {} of the cores away"),
    ]
    if run.device_type == "cpu":
        # Where the device computes, what others do on cores that were free takes nothing from it.
        signs.insert(0, (state.other_cpu_fraction, OTHER_CPU_LIMIT_FRACTION, "other processes took {} of its cores"))
    return signs


def _noisy_times(run: RunRecord, steps: Sequence[StepRecord]) -> list[float]:
    """The step times of a window on a CPU that was not this run's own, else none: they spread too widely, and from each
    step to the next as well, which a drift or a few single steps do not explain."""
    step = run.phases.step or PhaseSummary()
    if run.device_type != "cpu" or (step.cv_fraction or 0.0) <= SPREAD_LIMIT_FRACTION:
        return []
    times = [step.step_s for step in select_window(steps, run.window.micro_batches).used if step.step_s is not None]
    noise = noise_fraction(times)
    return times if noise is not None and noise > NOISE_LIMIT_FRACTION else []


def hidden_syncs(run: RunRecord, steps: Sequence[StepRecord]) -> Guard:
    """Warns if a probe step found calls that make the host wait for the device."""
    name = "hidden_syncs"
    found = run.probe.hidden_syncs
    if run.device_type != "cuda":
        return not_applicable(name, "not a CUDA device")
    if found is None:
        return not_applicable(name, "no probe step looked for them")
    message = f"{len(found)} hidden synchronizes in a step"
    advice = "See their stacks under probe.hidden_syncs (.item(), .cpu(), printing a tensor, a boolean index)."
    return at_most(name, len(found), 0, "count", message, advice=advice)


def other_share(run: RunRecord, steps: Sequence[StepRecord]) -> Guard:
    """Warns if `other` is over 2 % of a device-bound step (in a host-bound one it is the host's time)."""
    name = "other_share"
    share = run.phases.other.share_fraction if run.phases.other else None
    if run.unseen_phases:
        return not_applicable(name, f"it holds phases that cannot be told apart ({', '.join(run.unseen_phases)})")
    if run.device_type != "cuda" or share is None:
        return not_applicable(name, "not a CUDA device" if share is not None else "no steps were measured")
    verdicts = dict(run.probe.verdicts.items()) if run.probe.verdicts else {}
    if not verdicts:
        return not_applicable(name, "no probe step said whether the device is the bottleneck")
    waiting = [phase for phase, found in verdicts.items() if found.verdict != "queued"]
    if waiting:
        return not_applicable(name, f"the step is not device-bound ({', '.join(waiting)})")
    message = f"`other` is {share:.1%} of the step"
    advice = "Work outside every phase reaches the device: look at callbacks, logging and hooks between the phases."
    return at_most(name, share, OTHER_LIMIT_FRACTION, "fraction", message, advice=advice)


def mfu(run: RunRecord, steps: Sequence[StepRecord]) -> Guard:
    """Fails if MFU is over 100 %, which no device can do.

    Of causal attention by itself half of the full count need not be done, and a fused kernel does not do it.
    """
    name, what = "mfu", "MFU"
    value = run.throughput.mfu_fraction
    if value is None:
        return not_applicable(name, str(run.throughput.mfu_reason or "no MFU"))
    if run.model.is_causal and run.throughput.mfu_causal_fraction is not None:
        what, value = "causal MFU", run.throughput.mfu_causal_fraction
    advice = "The FLOP count, the peak or the clock is wrong: check flops.source and flops.peak_source."
    return at_most(name, value, MFU_LIMIT_FRACTION, "fraction", f"{what} {value:.1%}", advice=advice, otherwise="fail")


# settings that slow every step, and compilation inside the window


def launch_blocking(run: RunRecord, steps: Sequence[StepRecord]) -> Guard:
    """Fails if CUDA_LAUNCH_BLOCKING makes every kernel launch wait."""
    name = "launch_blocking"
    if run.device_type != "cuda":
        return not_applicable(name, "not a CUDA device")
    variables = run.environment.variables if run.environment else None
    if variables is None:
        return not_applicable(name, "the environment was not recorded")
    value = variables.get("CUDA_LAUNCH_BLOCKING", "0")
    if value in ("", "0"):
        return Guard(name, "pass", None, None, "", "kernels are launched without waiting")
    advice = "Unset CUDA_LAUNCH_BLOCKING and measure again."
    return Guard(name, "fail", None, None, "", f"CUDA_LAUNCH_BLOCKING={value}: every launch waits", advice)


def anomaly_mode(run: RunRecord, steps: Sequence[StepRecord]) -> Guard:
    """Fails if autograd's anomaly detection is on."""
    advice = (
        "Turn off detect_anomaly (--trainer.detect_anomaly false, torch.autograd.set_detect_anomaly) and measure again."
    )
    flags = run.environment.flags if run.environment else Flags()
    return _off("anomaly_mode", (flags.anomaly_mode,), "anomaly detection", advice)


def deterministic(run: RunRecord, steps: Sequence[StepRecord]) -> Guard:
    """Fails if PyTorch or cuDNN is kept to deterministic algorithms."""
    advice = (
        "Turn off deterministic mode (--trainer.deterministic, torch.use_deterministic_algorithms) and measure again."
    )
    flags = run.environment.flags if run.environment else Flags()
    values = (flags.deterministic_algorithms, flags.cudnn_deterministic)
    return _off("deterministic", values, "deterministic mode", advice)


def recompiles(run: RunRecord, steps: Sequence[StepRecord]) -> Guard:
    """Fails if torch.compile compiled something inside the window."""
    name = "recompiles"
    count = run.compile.window_recompile_count
    is_enabled = run.compile.is_enabled
    if is_enabled is False and not count:
        return not_applicable(name, "torch.compile is off")
    if count is None:
        return not_applicable(name, "recompilations were not counted")
    advice = "Warm up for longer and keep shapes fixed (drop_last, one batch size): the window timed the compiler."
    return at_most(
        name,
        count,
        0,
        "count",
        f"{count:.0f} graphs were compiled in the window",
        advice=advice,
        otherwise="fail",
    )


def _off(name: str, values: Sequence[bool | None], what: str, advice: str) -> Guard:
    if any(values):
        return Guard(name, "fail", None, None, "", f"{what} is on", advice)
    if all(value is None for value in values):
        return not_applicable(name, "the environment was not recorded")
    return Guard(name, "pass", None, None, "", f"{what} is off")


# the device's state over the window

#: Share of the window under a cap from which it is worth a word.
CAPPED_LIMIT_FRACTION = 0.01
CLOCK_DROP_LIMIT_FRACTION = 0.05

_MIB = 2**20


def power_cap(run: RunRecord, steps: Sequence[StepRecord]) -> Guard:
    """Warns if the power limit held the clock down for over 1 % of the window."""
    limit = run.environment.gpu.power_limit_w if run.environment else None
    at = "" if limit is None else f" of {limit:.0f} W"
    advice = (
        f"This is the card's speed at its power limit{at}: compare only with windows as long and cards with "
        "the same limit, and expect shorter bursts to be faster."
    )
    return _capped("power_cap", run, run.device_state.power_capped_fraction, f"its power limit{at}", advice)


def thermal_cap(run: RunRecord, steps: Sequence[StepRecord]) -> Guard:
    """Warns if temperature held the clock down for over 1 % of the window."""
    celsius = run.device_state.close.temperature_c
    at = "" if celsius is None else f" ({celsius:.0f} °C at the end)"
    advice = "Cool the card, or let it settle with a longer warm-up; times depend on its temperature now."
    return _capped("thermal_cap", run, run.device_state.thermal_capped_fraction, f"temperature{at}", advice)


def _capped(name: str, run: RunRecord, value: float | None, what: str, advice: str) -> Guard:
    if value is None:
        return not_applicable(name, _no_counter(run))
    message = f"{what} held the clock down for {value:.1%} of the window"
    return at_most(name, value, CAPPED_LIMIT_FRACTION, "fraction", message, advice=advice)


def sm_clock_drop(run: RunRecord, steps: Sequence[StepRecord]) -> Guard:
    """Warns if the SM clock fell by over 5 % from the window's start to its end."""
    name = "sm_clock_drop"
    value = run.device_state.sm_clock_drop_fraction
    if value is None:
        return not_applicable(name, _no_counter(run))
    clocks = [run.device_state.open.sm_clock_hz, run.device_state.close.sm_clock_hz]
    message = f"the SM clock fell by {value:.1%}" if value > 0 else "the SM clock did not fall"
    if None not in clocks:
        message += f" ({' -> '.join(f'{clock / 1e6:.0f}' for clock in clocks if clock is not None)} MHz)"
    advice = "Warm up for longer, so that the clock settles before the window; its mean mixes two speeds."
    return at_most(name, value, CLOCK_DROP_LIMIT_FRACTION, "fraction", message, advice=advice)


def other_processes(run: RunRecord, steps: Sequence[StepRecord]) -> Guard:
    """Warns if other processes had the GPU open at either end of the window."""
    name = "other_processes"
    count = run.device_state.other_process_count
    if count is None:
        hidden = "the driver does not show this machine's processes"
        return not_applicable(name, hidden if run.device_type == "cuda" else _no_counter(run))
    readings = (run.device_state.open, run.device_state.close)
    pids = sorted({pid for reading in readings for pid in reading.other_process_pids or ()})
    message = f"{count:.0f} other processes on the GPU" + (f": pid {', '.join(map(str, pids))}" if pids else "")
    advice = "End them or take another GPU: they share its time, memory and power."
    return at_most(name, count, 0, "count", message, advice=advice)


def allocator_growth(run: RunRecord, steps: Sequence[StepRecord]) -> Guard:
    """Warns if the allocator took more memory from the device within the window."""
    name = "allocator_growth"
    growth = run.memory.window_reserved_growth_bytes
    if growth is None:
        return not_applicable(name, "no caching allocator was read")
    message = f"reserved memory grew by {growth / _MIB:.0f} MiB in the window"
    advice = (
        "Warm up for longer: an allocation from the device waits for it. If it never ends, memory leaks or fragments."
    )
    return at_most(name, growth, 0, "bytes", message, advice=advice)


def allocator_retries(run: RunRecord, steps: Sequence[StepRecord]) -> Guard:
    """Warns if an allocation within the window worked only after the cache was emptied."""
    name = "allocator_retries"
    count = run.memory.window_alloc_retry_count
    if count is None:
        return not_applicable(name, "no caching allocator was read")
    message = f"{count:.0f} allocations in the window needed the cache emptied"
    advice = (
        "Memory is nearly full: take a smaller batch, or PYTORCH_ALLOC_CONF=expandable_segments:True against fragments."
    )
    return at_most(name, count, 0, "count", message, advice=advice)


def _no_counter(run: RunRecord) -> str:
    return "the card does not report it" if run.device_type == "cuda" else "not a CUDA device"


#: In the order they are printed. Each takes a run's record and its steps, and returns its guard under its own name.
CHECKS: tuple[Callable[[RunRecord, Sequence[StepRecord]], Guard], ...] = (
    finite_loss,
    first_loss,
    gradients,
    trained,
    skipped_steps,
    window_complete,
    probe_steps,
    window_identity,
    mfu,
    busy_machine,
    trend,
    spread,
    other_share,
    hidden_syncs,
    launch_blocking,
    anomaly_mode,
    deterministic,
    recompiles,
    power_cap,
    thermal_cap,
    sm_clock_drop,
    other_processes,
    allocator_growth,
    allocator_retries,
)


def evaluate_guards(run: RunRecord, steps: Sequence[StepRecord]) -> list[Guard]:
    """Every guard, each once. Reads only; what a run does not have makes `n/a`, never an error or a pass."""
    return [check(run, steps) for check in CHECKS]
