"""All guards of a run: each reads its record and steps; what these lack makes `n/a`, never an error or a pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import wraps
from typing import NamedTuple, TypeAlias

from lmbench.precision import find_precision
from lmbench.records.environment import Flags
from lmbench.records.guard import BUSY_MACHINE, Guard, Status, not_applicable
from lmbench.records.measured import PhaseSummary, TrainingFacts
from lmbench.records.run import RunRecord
from lmbench.records.statistics import mean_error_fraction, noise_fraction
from lmbench.records.step import StepRecord, select_window
from lmbench.records.vocabulary import BACKWARD_MODES

#: Distance of a fresh model's first loss from ln(vocab): logits of unit variance add half a nat.
FIRST_LOSS_LIMIT_NAT = 0.5
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
#: Share of the window under a cap from which it is worth a word.
CAPPED_LIMIT_FRACTION = 0.01


class Judged(NamedTuple):
    """A figure with what it means. `status`, `limit` and `advice` are those of the guard's table unless set here."""

    value: float | None
    message: str
    status: Status | None = None
    advice: str = ""
    limit: float | None = None


Steps: TypeAlias = Sequence[StepRecord]
#: A figure that its message explains, or why there is none.
Answer: TypeAlias = Judged | tuple[float, str] | str
Judge: TypeAlias = Callable[[RunRecord, Steps], Answer]
Check: TypeAlias = Callable[[RunRecord, Steps], Guard]

#: In the order they are printed. Each takes a run's record and its steps, and returns its guard under its own name.
CHECKS: list[Check] = []


def _guard(
    advice: str, limit: float | None = 0, unit: str = "count", otherwise: Status = "warn"
) -> Callable[[Judge], Check]:
    """Add a guard to CHECKS. The function returns its figure with a message, or as text why there is none (`n/a`).
    Above the limit the guard has the status `otherwise`, and only then the advice."""

    def table_row(judge: Judge) -> Check:
        @wraps(judge)
        def check(run: RunRecord, steps: Steps) -> Guard:
            answer = judge(run, steps)
            if isinstance(answer, str):
                return not_applicable(judge.__name__, answer)
            value, message, status, own_advice, own_limit = Judged(*answer)
            largest = limit if own_limit is None else own_limit
            status = status or (otherwise if value is not None and largest is not None and value > largest else "pass")
            needed = "" if status == "pass" else own_advice or advice
            if value is None:
                return Guard(judge.__name__, status, message=message, advice=needed)
            return Guard(judge.__name__, status, value, largest, unit, message, needed)

        CHECKS.append(check)
        return check

    return table_row


def evaluate_guards(run: RunRecord, steps: Steps) -> list[Guard]:
    """Every guard, each once. Reads only."""
    return [check(run, steps) for check in CHECKS]


def _listed(names: Sequence[str]) -> str:
    return f": {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}" if names else ""


# training itself


@_guard(
    "Lower the learning rate, clip gradients or use a wider precision; the speed of a diverged run is no result.",
    otherwise="fail",
)
def finite_loss(run: RunRecord, steps: Steps) -> Answer:
    """Fails if a step, warm-up included, or the summary has a loss that is nan or infinite."""
    losses = [(step.step, step.loss) for step in steps if step.loss is not None]
    summary = [value for value in (run.loss.first, run.loss.last, run.loss.mean) if value is not None]
    if not losses and not summary:
        return "no loss was recorded"
    bad = [number for number, loss in losses if not math.isfinite(loss)]
    count = len(bad) or sum(not math.isfinite(value) for value in summary)
    if not count:
        return 0, "every loss is finite"
    where = f", the first at step {bad[0]}" if bad else ", in the summary" if losses else ""
    return count, f"{count} losses are nan or infinite{where}"


@_guard(
    "Check the initialisation, the labels' shift and the loss's mean: an untrained model guesses evenly.",
    FIRST_LOSS_LIMIT_NAT,
    "nat",
)
def first_loss(run: RunRecord, steps: Steps) -> Answer:
    """Warns if a fresh model's first loss is far from ln(vocab), the loss of an even guess."""
    loss, vocab = run.loss.first, run.model.vocab_size
    if run.model.is_fresh is not True:
        return "the model is not known to be fresh from initialisation"
    if loss is None or vocab is None or not math.isfinite(loss):
        return "the first loss or the vocabulary is not known, or not finite"
    return abs(loss - math.log(vocab)), f"first loss {loss:.2f}, ln(vocab) {math.log(vocab):.2f}"


@_guard("Freeze these parameters if they are meant to stay; else their work is missing from this step.")
def gradients(run: RunRecord, steps: Steps) -> Answer:
    """Fails if no trainable tensor has a non-zero gradient, or one is not finite; warns if some have none."""
    training = _checked(run)
    if isinstance(training, str):
        return training
    checked, bad = training.parameters or 0, training.nonfinite_gradients
    if bad and training.is_skipped is not True:
        advice = "Lower the learning rate or the loss scale; find the operation with torch.autograd.detect_anomaly."
        return Judged(len(bad), f"{len(bad)} of {checked} gradients are not finite{_listed(bad)}", "fail", advice)
    without = training.missing_gradients + training.zero_gradients
    if len(without) >= checked:
        advice = "Check that the loss depends on the parameters and that they require gradients; nothing was trained."
        return Judged(len(without), f"none of {checked} parameters has a non-zero gradient", "fail", advice)
    return Judged(len(without), f"{len(without)} of {checked} parameters have no or zero gradients{_listed(without)}")


@_guard("Check that the optimizer holds these parameters and that the update is not below their precision.")
def trained(run: RunRecord, steps: Steps) -> Answer:
    """Fails if the optimizer moved nothing; warns if it left some parameters as they were."""
    training = _checked(run)
    if isinstance(training, str):
        return training
    if run.mode != "train_step":
        return f"mode {run.mode} has no optimizer step"
    if training.is_skipped is True:
        return "the fp16 scaler skipped the checked step"
    if training.unmoved_parameters is None:
        return "the weights were not compared"
    checked, unmoved = training.parameters or 0, training.unmoved_parameters
    if len(unmoved) >= checked:
        advice = (
            "Check the learning rate (a warm-up from 0 moves nothing) and which parameters the optimizer was given."
        )
        return Judged(len(unmoved), f"the step moved none of {checked} parameters", "fail", advice)
    return Judged(len(unmoved), f"{len(unmoved)} of {checked} parameters did not move{_listed(unmoved)}")


def _checked(run: RunRecord) -> TrainingFacts | str:
    """What a probe step saw of the parameters, or why none were checked."""
    if run.mode not in BACKWARD_MODES:
        return f"mode {run.mode} computes no gradients"
    training = run.probe.training
    if training is None or training.parameters is None:
        return "no probe step looked at the gradients"
    return training


@_guard("Warm up for longer, so that the loss scale settles before the window.")
def skipped_steps(run: RunRecord, steps: Steps) -> Answer:
    """Warns if the fp16 scaler skipped updates in the window, which are left out of every statistic; fails if it did so
    with all."""
    precision = find_precision(str(run.precision))
    if precision is None or not precision.has_scaler:
        return "no gradient scaler at this precision"
    window = select_window(steps)
    count = window.skipped_count
    total = count + len(window.used) + window.short_count
    if count < total or not count:
        return Judged(count, f"the scaler skipped {count} of {total} steps of the window")
    before = [bool(step.is_skipped) for step in steps if step.stage == "warmup" and _is_own(run, step)]
    since = ", from the first step on: nothing was trained" if all(before) else ""
    message = f"fp16 gradients overflowed in all {total} steps of the window{since}, and there is no step time"
    advice = "Use bf16-mixed, or a smaller loss; or warm up for longer, if the loss scale has only to settle"
    return Judged(count, message, "fail", f"{advice} (it was halved {count + sum(before)} times so far).")


# the window


@_guard("The run ended first: lift what ends training (max_steps, max_epochs, max_time, limits), or ask for less.")
def window_complete(run: RunRecord, steps: Steps) -> Answer:
    """Warns if the window has fewer steps, or is shorter, than was asked for; fails if it has none."""
    window = run.window
    asked, asked_s, count = window.requested_steps, window.requested_s or 0.0, window.steps
    if run.outcome not in (None, "ok"):
        return f"the run's outcome is {run.outcome}"
    if count is None:
        return "no window was recorded"
    message = f"{count:.0f} steps in the window" + ("" if asked is None else f", {asked:.0f} asked for")
    if not count:
        return Judged(count, message, "fail", limit=1)
    is_long = window.wall_s is not None and window.wall_s + (window.excluded_s or 0.0) >= asked_s
    is_complete = asked is None or (is_long and count >= asked)
    if asked is not None and count >= asked and not is_complete:
        message += f"; shorter than the {asked_s:g} s asked for"
    return Judged(count, message, "pass" if is_complete else "warn", limit=asked)


@_guard("Lift what ends training, or ask for fewer steps.")
def probe_steps(run: RunRecord, steps: Steps) -> Answer:
    """Warns if the steps after the window, which look inside it, ended too soon."""
    is_complete, error = run.probe.is_complete, run.probe.error
    if run.outcome not in (None, "ok"):
        return f"the run's outcome is {run.outcome}"
    if is_complete is None:
        return "no probe steps were taken"
    if is_complete:
        return Judged(None, "every kind of probe step was taken")
    if error is None:
        return Judged(None, "the run ended before its probe steps did: some verdicts or checks are missing", "warn")
    advice = "Probes take memory of their own; --measure.probe_steps 0 leaves them out, a smaller batch makes room."
    message = f"out of memory in the probe steps, in {error.phase}, after a complete window"
    return Judged(None, message, "warn", advice)


@_guard(
    "Time passed outside every step, or was counted twice: look for callbacks that work between batches; if there are "
    "none, please report it.",
    unit="fraction",
    otherwise="fail",
)
def window_identity(run: RunRecord, steps: Steps) -> Answer:
    """Fails if the window's steps do not add up to its wall time, which was clocked apart from them.

    The sum is taken from the records where all of the window's are there, else from run.json.
    """
    wall, device = run.window.wall_s, str(run.device_type)
    if not wall or not run.window.steps:
        return "no window was closed"
    spans = [step.step_s for step in steps if step.stage == "window" and _is_own(run, step) and step.step_s is not None]
    total = math.fsum(spans) if len(spans) == run.window.steps else run.window.steps_sum_s
    if total is None:
        return "the window's steps were not all recorded"
    error = abs(total - wall) / wall
    limit = IDENTITY_LIMIT_FRACTION.get(device, IDENTITY_LIMIT_FRACTION["cuda"])
    message = f"steps sum to {total:.4f} s, the window took {wall:.4f} s ({error:.3%} apart)"
    return Judged(error, message, limit=max(limit, IDENTITY_ENDS_S.get(device, 0.0) / wall))


def _is_own(run: RunRecord, step: StepRecord) -> bool:
    return int(step.rank or 0) == int(run.rank or 0)


@_guard(
    "The FLOP count, the peak or the clock is wrong: check flops.source and flops.peak_source.",
    1.0,
    "fraction",
    otherwise="fail",
)
def mfu(run: RunRecord, steps: Steps) -> Answer:
    """Fails if MFU is over 100 %, which no device can do.

    Of causal attention by itself half of the full count need not be done, and a fused kernel does not do it.
    """
    value, causal = run.throughput.mfu_fraction, run.throughput.mfu_causal_fraction
    if value is None:
        return str(run.throughput.mfu_reason or "no MFU")
    if run.model.is_causal and causal is not None:
        return causal, f"causal MFU {causal:.1%}"
    return value, f"MFU {value:.1%}"


@_guard("Measure when it is quiet, or let `lmbench compare --run` measure both sides in turn.", unit="fraction")
def busy_machine(run: RunRecord, steps: Steps) -> Answer:
    """Warns if other work took turns on this machine: on a CPU if it took over 10 % of the cores, anywhere if the
    training thread waited for a core, or the hypervisor took them away, for over 2 % of the window.

    On a CPU whose steps spread from each to the next it says what that makes of the figures: the 95 % interval of the
    mean step within this window. What the load is in another one, no window can tell.
    """
    state = run.host_state
    # Where the device computes, what others do on cores that were free takes nothing from it.
    others = state.other_cpu_fraction if run.device_type == "cpu" else None
    shares = [
        (others, OTHER_CPU_LIMIT_FRACTION, "other processes took {} of its cores"),
        (state.waited_fraction, WAITED_LIMIT_FRACTION, "this process waited {} of the time for a core"),
        (state.steal_fraction, WAITED_LIMIT_FRACTION, "the hypervisor took {} of the cores away"),
    ]
    signs = [(share, limit, text) for share, limit, text in shares if share is not None]
    noisy = _noisy_times(run, steps)
    if not signs and not noisy:
        return "the system does not tell of other processes"
    above = [text.format(f"{100 * share:.0f} %") for share, limit, text in signs if share > limit]
    value, limit, _ = max(signs, key=lambda sign: sign[0] / sign[1], default=(None, None, ""))
    if not above and not noisy:
        return Judged(value, "other processes left it its cores", "pass", limit=limit)
    if above and state.load_per_core is not None:
        above.append(f"load {state.load_per_core:.1f} a core")
    if noisy:
        error = float(f"{mean_error_fraction(noisy):.1g}")
        above.insert(0, f"figures are good to about \N{PLUS-MINUS SIGN}{100 * error:g} %")
    return Judged(value, f"this machine is busy: {', '.join(above)}", "warn", limit=limit)


assert busy_machine.__name__ == BUSY_MACHINE


def _noisy_times(run: RunRecord, steps: Steps) -> list[float]:
    """The step times of a window on a CPU that was not this run's own, else none: they spread too widely, and from each
    step to the next as well, which a drift or a few single steps do not explain."""
    step = run.phases.step or PhaseSummary()
    if run.device_type != "cpu" or (step.cv_fraction or 0.0) <= SPREAD_LIMIT_FRACTION:
        return []
    times = [step.step_s for step in select_window(steps, run.window.micro_batches).used if step.step_s is not None]
    return times if (noise_fraction(times) or 0.0) > NOISE_LIMIT_FRACTION else []


@_guard("Steps get faster: warm up for longer.", TREND_LIMIT_FRACTION, "fraction")
def trend(run: RunRecord, steps: Steps) -> Answer:
    """Warns if step times drift by over 1 % across the window, and noise alone would rarely order them so."""
    step = run.phases.step or PhaseSummary()
    drift, chance = step.trend_fraction, step.trend_p
    if drift is None or chance is None:
        return "fewer than 6 steps"
    if _noisy_times(run, steps):
        return "this machine is busy: a drift of the step is not told from one of its load"
    message = f"step time drifts by {drift:+.1%} over the window (p = {chance:.2g})"
    if abs(drift) > TREND_LIMIT_FRACTION and chance >= TREND_P:
        return Judged(abs(drift), f"{message}: not told from noise", "pass")
    slower = "Steps get slower: see power, temperature and clock, or memory that grows; measure a longer window."
    return Judged(abs(drift), message, advice=slower if drift > 0 else "")


@_guard(
    "Steps vary throughout: keep the machine free of other work, or measure more steps.",
    SPREAD_LIMIT_FRACTION,
    "fraction",
)
def spread(run: RunRecord, steps: Steps) -> Answer:
    """Warns if the standard deviation of step times is over 10 % of their mean."""
    step = run.phases.step or PhaseSummary()
    value, outliers = step.cv_fraction, step.outlier_count or 0
    if value is None:
        return "fewer than 2 steps"
    if _noisy_times(run, steps):
        return "this machine is busy: its steps spread with its load"
    message = (
        f"standard deviation is {value:.1%} of the mean step, {outliers:.0f} outlier{'' if outliers == 1 else 's'}"
    )
    single = (
        "Single steps stand out: see their phases in steps.jsonl (loader, other work on the machine), and quote the "
    )
    return Judged(value, message, advice=f"{single}median." if outliers else "")


@_guard(
    "Work outside every phase reaches the device: look at callbacks, logging and hooks between the phases.",
    0.02,
    "fraction",
)
def other_share(run: RunRecord, steps: Steps) -> Answer:
    """Warns if `other` is over 2 % of a device-bound step (in a host-bound one it is the host's time)."""
    share = run.phases.other.share_fraction if run.phases.other else None
    if run.unseen_phases:
        return f"it holds phases that cannot be told apart ({', '.join(run.unseen_phases)})"
    if share is None:
        return "no steps were measured"
    if run.device_type != "cuda":
        return "not a CUDA device"
    verdicts = dict(run.probe.verdicts.items()) if run.probe.verdicts else {}
    waiting = [phase for phase, lag in verdicts.items() if lag.verdict != "queued"]
    if waiting or not verdicts:
        reason = f"the step is not device-bound ({', '.join(waiting)})"
        return reason if waiting else "no probe step said whether the device is the bottleneck"
    return share, f"`other` is {share:.1%} of the step"


@_guard("See their stacks under probe.hidden_syncs (.item(), .cpu(), printing a tensor, a boolean index).")
def hidden_syncs(run: RunRecord, steps: Steps) -> Answer:
    """Warns if a probe step found calls that make the host wait for the device."""
    syncs = run.probe.hidden_syncs
    if run.device_type != "cuda":
        return "not a CUDA device"
    return (
        "no probe step looked for them"
        if syncs is None
        else (len(syncs), f"{len(syncs)} hidden synchronizes in a step")
    )


# settings that slow every step, and compilation inside the window


@_guard("Unset CUDA_LAUNCH_BLOCKING and measure again.")
def launch_blocking(run: RunRecord, steps: Steps) -> Answer:
    """Fails if CUDA_LAUNCH_BLOCKING makes every kernel launch wait."""
    variables = run.environment.variables if run.environment else None
    if run.device_type != "cuda":
        return "not a CUDA device"
    if variables is None:
        return "the environment was not recorded"
    value = variables.get("CUDA_LAUNCH_BLOCKING", "0")
    if value in ("", "0"):
        return Judged(None, "kernels are launched without waiting")
    return Judged(None, f"CUDA_LAUNCH_BLOCKING={value}: every launch waits", "fail")


@_guard(
    "Turn off detect_anomaly (--trainer.detect_anomaly false, torch.autograd.set_detect_anomaly) and measure again.",
)
def anomaly_mode(run: RunRecord, steps: Steps) -> Answer:
    """Fails if autograd's anomaly detection is on."""
    flags = run.environment.flags if run.environment else Flags()
    return _switch("anomaly detection", flags.anomaly_mode)


@_guard(
    "Turn off deterministic mode (--trainer.deterministic, torch.use_deterministic_algorithms) and measure again.",
)
def deterministic(run: RunRecord, steps: Steps) -> Answer:
    """Fails if PyTorch or cuDNN is kept to deterministic algorithms."""
    flags = run.environment.flags if run.environment else Flags()
    return _switch("deterministic mode", flags.deterministic_algorithms, flags.cudnn_deterministic)


def _switch(title: str, *flags: bool | None) -> Judged | str:
    if any(flags):
        return Judged(None, f"{title} is on", "fail")
    return (
        "the environment was not recorded" if all(flag is None for flag in flags) else Judged(None, f"{title} is off")
    )


@_guard(
    "Warm up for longer and keep shapes fixed (drop_last, one batch size): the window timed the compiler.",
    otherwise="fail",
)
def recompiles(run: RunRecord, steps: Steps) -> Answer:
    """Fails if torch.compile compiled something inside the window."""
    count = run.compile.window_recompile_count
    if run.compile.is_enabled is False and not count:
        return "torch.compile is off"
    if count is None:
        return "recompilations were not counted"
    return count, f"{count:.0f} graphs were compiled in the window"


# the device's state over the window


def _no_counter(run: RunRecord) -> str:
    return "the card does not report it" if run.device_type == "cuda" else "not a CUDA device"


@_guard("", CAPPED_LIMIT_FRACTION, "fraction")
def power_cap(run: RunRecord, steps: Steps) -> Answer:
    """Warns if the power limit held the clock down for over 1 % of the window."""
    limit, value = (
        run.environment.gpu.power_limit_w if run.environment else None,
        run.device_state.power_capped_fraction,
    )
    if value is None:
        return _no_counter(run)
    cap = "its power limit" if limit is None else f"its power limit of {limit:.0f} W"
    advice = (
        f"This is the card's speed at {cap}: compare only with windows as long and cards with the same limit, and "
        "expect shorter bursts to be faster."
    )
    return Judged(value, f"{cap} held the clock down for {value:.1%} of the window", advice=advice)


@_guard(
    "Cool the card, or let it settle with a longer warm-up; times depend on its temperature now.",
    CAPPED_LIMIT_FRACTION,
    "fraction",
)
def thermal_cap(run: RunRecord, steps: Steps) -> Answer:
    """Warns if temperature held the clock down for over 1 % of the window."""
    celsius, value = run.device_state.close.temperature_c, run.device_state.thermal_capped_fraction
    if value is None:
        return _no_counter(run)
    end = "" if celsius is None else f" ({celsius:.0f} °C at the end)"
    return value, f"temperature{end} held the clock down for {value:.1%} of the window"


@_guard("Warm up for longer, so that the clock settles before the window; its mean mixes two speeds.", 0.05, "fraction")
def sm_clock_drop(run: RunRecord, steps: Steps) -> Answer:
    """Warns if the SM clock fell by over 5 % from the window's start to its end."""
    value, clocks = run.device_state.sm_clock_drop_fraction, (run.device_state.open, run.device_state.close)
    if value is None:
        return _no_counter(run)
    known = [f"{reading.sm_clock_hz / 1e6:.0f}" for reading in clocks if reading.sm_clock_hz is not None]
    message = f"the SM clock fell by {value:.1%}" if value > 0 else "the SM clock did not fall"
    return value, message + (f" ({' -> '.join(known)} MHz)" if len(known) == 2 else "")


@_guard("End them or take another GPU: they share its time, memory and power.")
def other_processes(run: RunRecord, steps: Steps) -> Answer:
    """Warns if other processes had the GPU open at either end of the window."""
    count, readings = run.device_state.other_process_count, (run.device_state.open, run.device_state.close)
    if count is None:
        is_hidden = run.device_type == "cuda"
        return "the driver does not show this machine's processes" if is_hidden else _no_counter(run)
    pids = sorted({pid for reading in readings for pid in reading.other_process_pids or ()})
    return count, f"{count:.0f} other processes on the GPU" + (f": pid {', '.join(map(str, pids))}" if pids else "")


@_guard(
    "Warm up for longer: an allocation from the device waits for it. If it never ends, memory leaks or fragments.",
    unit="bytes",
)
def allocator_growth(run: RunRecord, steps: Steps) -> Answer:
    """Warns if the allocator took more memory from the device within the window."""
    growth = run.memory.window_reserved_growth_bytes
    if growth is None:
        return "no caching allocator was read"
    return growth, f"reserved memory grew by {growth / 2**20:.0f} MiB in the window"


@_guard(
    "Memory is nearly full: take a smaller batch, or PYTORCH_ALLOC_CONF=expandable_segments:True against fragments."
)
def allocator_retries(run: RunRecord, steps: Steps) -> Answer:
    """Warns if an allocation within the window worked only after the cache was emptied."""
    count = run.memory.window_alloc_retry_count
    if count is None:
        return "no caching allocator was read"
    return count, f"{count:.0f} allocations in the window needed the cache emptied"
