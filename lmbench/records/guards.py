"""All guards of a run: each reads its record and steps; what these lack makes `n/a`, never an error or a pass."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypeAlias

from lmbench.precision import find_precision
from lmbench.records.environment import Flags
from lmbench.records.guard import BUSY_MACHINE, Guard, Status, at_most, not_applicable
from lmbench.records.measured import PhaseSummary
from lmbench.records.run import RunRecord
from lmbench.records.schema import value_at
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
#: From this error of a mean on its figure says no more than a factor.
MOST_ERROR_FRACTION = 0.5
#: A drift that noise makes this often is not called a trend.
TREND_P = 0.05
SPREAD_LIMIT_FRACTION = 0.10
#: Noise from step to step that a quiet CPU does not have: half the spread that warns.
NOISE_LIMIT_FRACTION = 0.05
#: What other processes may take of a CPU's cores, and what may be lost of a window without a core.
OTHER_CPU_LIMIT_FRACTION, WAITED_LIMIT_FRACTION = 0.10, 0.02
#: Share of the window under a cap from which it is worth a word.
CAPPED_LIMIT_FRACTION = 0.01

Steps: TypeAlias = Sequence[StepRecord]


def evaluate_guards(run: RunRecord, steps: Steps) -> list[Guard]:
    """Every guard, each once, in the order in which they are printed. Reads only."""
    return [
        *_losses(run, steps),
        *_parameters(run),
        _skipped_steps(run, steps),
        *_window(run, steps),
        busy_machine(run, steps),
        *_step_times(run, steps),
        *_waiting(run),
        *_settings(run),
        *_device(run),
    ]


def _losses(run: RunRecord, steps: Steps) -> Iterator[Guard]:
    # Fails if a step, warm-up included, or the summary has a loss that is nan or infinite.
    losses = [(step.step, step.loss) for step in steps if step.loss is not None]
    summary = [value for value in (run.loss.first, run.loss.last, run.loss.mean) if value is not None]
    bad = [number for number, loss in losses if not math.isfinite(loss)]
    count = len(bad) or sum(not math.isfinite(value) for value in summary)
    where = f", the first at step {bad[0]}" if bad else ", in the summary" if losses else ""
    yield at_most(
        "finite_loss",
        count if losses or summary else None,
        0,
        "count",
        f"{count} losses are nan or infinite{where}" if count else "every loss is finite",
        "Lower the learning rate, clip gradients or use a wider precision; the speed of a diverged run is no result.",
        "no loss was recorded",
        "fail",
    )
    # Warns if a fresh model's first loss is far from ln(vocab), the loss of an even guess.
    loss, vocab = run.loss.first, run.model.vocab_size
    is_known = loss is not None and vocab is not None and math.isfinite(loss)
    even = math.log(vocab) if vocab else math.nan
    yield at_most(
        "first_loss",
        abs(loss - even) if loss is not None and is_known and run.model.is_fresh else None,
        FIRST_LOSS_LIMIT_NAT,
        "nat",
        f"first loss {loss or 0:.2f}, ln(vocab) {even:.2f}",
        "Check the initialisation, the labels' shift and the loss's mean: an untrained model guesses evenly.",
        "the first loss or the vocabulary is not known, or not finite"
        if run.model.is_fresh
        else "the model is not known to be fresh from initialisation",
    )


def _parameters(run: RunRecord) -> Iterator[Guard]:
    training = run.probe.training
    if run.mode not in BACKWARD_MODES or training is None or training.parameters is None:
        has_gradients = run.mode in BACKWARD_MODES
        reason = "no probe step looked at the gradients" if has_gradients else f"mode {run.mode} computes no gradients"
        yield from (not_applicable(name, reason) for name in ("gradients", "trained"))
        return
    checked = training.parameters
    # Fails if no trainable tensor has a non-zero gradient, or one is not finite; warns if some have none.
    names = training.missing_gradients + training.zero_gradients
    status: Status = "warn" if names else "pass"
    message = f"{len(names)} of {checked} parameters have no or zero gradients{_listed(names)}"
    advice = "Freeze these parameters if they are meant to stay; else their work is missing from this step."
    if training.nonfinite_gradients and training.is_skipped is not True:
        names, status = training.nonfinite_gradients, "fail"
        message = f"{len(names)} of {checked} gradients are not finite{_listed(names)}"
        advice = "Lower the learning rate or the loss scale; find the operation with torch.autograd.detect_anomaly."
    elif len(names) >= checked:
        status, message = "fail", f"none of {checked} parameters has a non-zero gradient"
        advice = "Check that the loss depends on the parameters and that they require gradients; nothing was trained."
    yield Guard("gradients", status, len(names), 0, "count", message, "" if status == "pass" else advice)
    # Fails if the optimizer moved nothing; warns if it left some parameters as they were.
    unmoved = training.unmoved_parameters
    reasons = (
        (run.mode != "train_step", f"mode {run.mode} has no optimizer step"),
        (training.is_skipped is True, "the fp16 scaler skipped the checked step"),
        (unmoved is None, "the weights were not compared"),
    )
    if reason := next((reason for is_so, reason in reasons if is_so), ""):
        yield not_applicable("trained", reason)
        return
    names = unmoved or []
    status = "warn" if names else "pass"
    message = f"{len(names)} of {checked} parameters did not move{_listed(names)}"
    advice = "Check that the optimizer holds these parameters and that the update is not below their precision."
    if len(names) >= checked:
        message, status = f"the step moved none of {checked} parameters", "fail"
        advice = (
            "Check the learning rate (a warm-up from 0 moves nothing) and which parameters the optimizer was given."
        )
    yield Guard("trained", status, len(names), 0, "count", message, "" if status == "pass" else advice)


def _listed(names: Sequence[str]) -> str:
    return f": {', '.join(names[:3])}{', ...' if len(names) > 3 else ''}" if names else ""


def _skipped_steps(run: RunRecord, steps: Steps) -> Guard:
    """Warns if the fp16 scaler skipped updates in the window, which are left out of every statistic; fails if it did so
    with all."""
    precision = find_precision(str(run.precision))
    if precision is None or not precision.has_scaler:
        return not_applicable("skipped_steps", "no gradient scaler at this precision")
    window = select_window(steps)
    status: Status = "warn"
    count = window.skipped_count
    total = count + len(window.used) + window.short_count
    message = f"the scaler skipped {count} of {total} steps of the window"
    advice = "Warm up for longer, so that the loss scale settles before the window."
    if count == total > 0:
        before = [bool(step.is_skipped) for step in steps if step.stage == "warmup" and _is_own(run, step)]
        since = ", from the first step on: nothing was trained" if all(before) else ""
        message = f"fp16 gradients overflowed in all {total} steps of the window{since}, and there is no step time"
        advice = (
            "Use bf16-mixed, or a smaller loss; or warm up for longer, if the loss scale has only to settle (it was "
            f"halved {count + sum(before)} times so far)."
        )
        status = "fail"
    return at_most("skipped_steps", count, 0, "count", message, advice, otherwise=status)


def _is_own(run: RunRecord, step: StepRecord) -> bool:
    return int(step.rank or 0) == int(run.rank or 0)


def _window(run: RunRecord, steps: Steps) -> Iterator[Guard]:
    window, device = run.window, str(run.device_type)
    ended = "" if run.outcome == "ok" else f"the run's outcome is {run.outcome}"
    # Warns if the window has fewer steps, or is shorter, than was asked for; fails if it has none.
    asked, asked_s, count = window.requested_steps, window.requested_s or 0.0, window.steps
    if ended or count is None:
        yield not_applicable("window_complete", ended or "no window was recorded")
    else:
        message = f"{count:.0f} steps in the window" + ("" if asked is None else f", {asked:.0f} asked for")
        is_long = window.wall_s is not None and window.wall_s + (window.excluded_s or 0.0) >= asked_s
        has_all = asked is None or count >= asked
        status: Status = "fail" if not count else "pass" if has_all and (is_long or asked is None) else "warn"
        if status == "warn" and has_all:
            message += f"; shorter than the {asked_s:g} s asked for"
        advice = (
            "The run ended first: lift what ends training (max_steps, max_epochs, max_time, limits), or ask for less."
        )
        limit = (asked or 0) if count else 1
        yield Guard("window_complete", status, count, limit, "count", message, "" if status == "pass" else advice)
    # Warns if the steps after the window, which look inside it, ended too soon.
    error = run.probe.error
    if ended or run.probe.is_complete is None:
        yield not_applicable("probe_steps", ended or "no probe steps were taken")
    elif run.probe.is_complete:
        yield Guard("probe_steps", "pass", message="every kind of probe step was taken")
    elif error is None:
        message = "the run ended before its probe steps did: some verdicts or checks are missing"
        yield Guard("probe_steps", "warn", message=message, advice="Lift what ends training, or ask for fewer steps.")
    else:
        message = f"out of memory in the probe steps, in {error.phase}, after a complete window"
        advice = "Probes take memory of their own; --measure.probe_steps 0 leaves them out, a smaller batch makes room."
        yield Guard("probe_steps", "warn", message=message, advice=advice)
    # Fails if the window's steps do not add up to its wall time, which was clocked apart from them. The sum is taken
    # from the records where all of the window's are there, else from run.json.
    wall = window.wall_s
    spans = [step.step_s for step in steps if step.stage == "window" and _is_own(run, step) and step.step_s is not None]
    total = math.fsum(spans) if len(spans) == count else window.steps_sum_s
    if not wall or not count or total is None:
        is_closed = wall and count
        reason = "the window's steps were not all recorded" if is_closed else "no window was closed"
        yield not_applicable("window_identity", reason)
    else:
        error_fraction = abs(total - wall) / wall
        limit_fraction = IDENTITY_LIMIT_FRACTION.get(device, IDENTITY_LIMIT_FRACTION["cuda"])
        yield at_most(
            "window_identity",
            error_fraction,
            max(limit_fraction, IDENTITY_ENDS_S.get(device, 0.0) / wall),
            "fraction",
            f"steps sum to {total:.4f} s, the window took {wall:.4f} s ({error_fraction:.3%} apart)",
            "Time passed outside every step, or was counted twice: look for callbacks that work between "
            "batches; if there are none, please report it.",
            otherwise="fail",
        )
    # Fails if MFU is over 100 %, which no device can do. Of causal attention by itself half of the full count need not
    # be done, and a fused kernel does not do it.
    value, causal, title = run.throughput.mfu_fraction, run.throughput.mfu_causal_fraction, "MFU"
    if value is not None and run.model.is_causal and causal is not None:
        value, title = causal, "causal MFU"
    yield at_most(
        "mfu",
        value,
        1.0,
        "fraction",
        f"{title} {value or 0:.1%}",
        "The FLOP count, the peak or the clock is wrong: check flops.source and flops.peak_source.",
        run.throughput.mfu_reason or "no MFU",
        "fail",
    )


def busy_machine(run: RunRecord, steps: Steps) -> Guard:
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
        return not_applicable(BUSY_MACHINE, "the system does not tell of other processes")
    above = [text.format(f"{100 * share:.0f} %") for share, limit, text in signs if share > limit]
    value, limit, _ = max(signs, key=lambda sign: sign[0] / sign[1], default=(None, None, ""))
    unit = "" if value is None else "fraction"
    if not above and not noisy:
        return Guard(BUSY_MACHINE, "pass", value, limit, unit, "other processes left it its cores")
    if above and state.load_per_core is not None:
        above.append(f"load {state.load_per_core:.1f} a core")
    if noisy:
        error = float(f"{mean_error_fraction(noisy):.1g}")
        is_usable = error < MOST_ERROR_FRACTION
        good_to = f"good to about \N{PLUS-MINUS SIGN}{100 * error:g} %"
        above.insert(0, f"figures are {good_to if is_usable else f'not usable: within a factor of {1 + error:.2g}'}")
    advice = "Measure when it is quiet, or let `lmbench compare --run` measure both sides in turn."
    return Guard(BUSY_MACHINE, "warn", value, limit, unit, f"this machine is busy: {', '.join(above)}", advice)


def _noisy_times(run: RunRecord, steps: Steps) -> list[float]:
    """The step times of a window on a CPU that was not this run's own, else none: they spread too widely, and from each
    step to the next as well, which a drift or a few single steps do not explain."""
    step = run.phases.step or PhaseSummary()
    if run.device_type != "cpu" or (step.cv_fraction or 0.0) <= SPREAD_LIMIT_FRACTION:
        return []
    times = [step.step_s for step in select_window(steps, run.window.micro_batches).used if step.step_s is not None]
    return times if (noise_fraction(times) or 0.0) > NOISE_LIMIT_FRACTION else []


def _step_times(run: RunRecord, steps: Steps) -> Iterator[Guard]:
    step = run.phases.step or PhaseSummary()
    is_noisy = bool(_noisy_times(run, steps))
    # Warns if step times drift by over 1 % across the window, and noise alone would rarely order them so.
    drift, chance = step.trend_fraction, step.trend_p
    if drift is None or chance is None:
        yield not_applicable("trend", "fewer than 6 steps")
    elif is_noisy:
        yield not_applicable("trend", "this machine is busy: a drift of the step is not told from one of its load")
    else:
        message = f"step time drifts by {drift:+.1%} over the window (p = {chance:.2g})"
        status: Status = "warn"
        advice = "Steps get faster: warm up for longer."
        if drift > 0:
            advice = (
                "Steps get slower: see power, temperature and clock, or memory that grows; measure a longer window."
            )
        if abs(drift) > TREND_LIMIT_FRACTION and chance >= TREND_P:
            message, advice, status = f"{message}: not told from noise", "", "pass"
        yield at_most("trend", abs(drift), TREND_LIMIT_FRACTION, "fraction", message, advice, otherwise=status)
    # Warns if the standard deviation of step times is over 10 % of their mean.
    spread, outliers = step.cv_fraction, step.outlier_count or 0
    advice = "Steps vary throughout: keep the machine free of other work, or measure more steps."
    if outliers:
        advice = (
            "Single steps stand out: see their phases in steps.jsonl (loader, other work on the machine), and quote "
            "the median."
        )
    noun = "outlier" if outliers == 1 else "outliers"
    yield at_most(
        "spread",
        None if is_noisy else spread,
        SPREAD_LIMIT_FRACTION,
        "fraction",
        f"standard deviation is {spread or 0:.1%} of the mean step, {outliers:.0f} {noun}",
        advice,
        "fewer than 2 steps" if spread is None else "this machine is busy: its steps spread with its load",
    )


def _waiting(run: RunRecord) -> Iterator[Guard]:
    # Warns if `other` is over 2 % of a device-bound step (in a host-bound one it is the host's time).
    share = run.phases.other.share_fraction if run.phases.other else None
    verdicts = dict(run.probe.verdicts.items()) if run.probe.verdicts else {}
    waiting = [phase for phase, lag in verdicts.items() if lag.verdict != "queued"]
    unseen, is_cuda = run.unseen_phases or [], run.device_type == "cuda"
    reasons = (
        (unseen, f"it holds phases that cannot be told apart ({', '.join(unseen)})"),
        (share is None, "no steps were measured"),
        (not is_cuda, "not a CUDA device"),
        (waiting, f"the step is not device-bound ({', '.join(waiting)})"),
        (not verdicts, "no probe step said whether the device is the bottleneck"),
    )
    unknown = next((reason for is_so, reason in reasons if is_so), "")
    yield at_most(
        "other_share",
        None if unknown else share,
        0.02,
        "fraction",
        f"`other` is {share or 0:.1%} of the step",
        "Work outside every phase reaches the device: look at callbacks, logging and hooks between the phases.",
        unknown,
    )
    # Warns if a probe step found calls that make the host wait for the device.
    syncs = run.probe.hidden_syncs
    count = len(syncs) if syncs is not None and is_cuda else None
    yield at_most(
        "hidden_syncs",
        count,
        0,
        "count",
        f"hidden synchronizes in a step: {count}{f', most often at {syncs[0].location}' if syncs else ''}",
        "The host waits there: .item(), .cpu(), printing a tensor, a boolean index (stacks: probe.hidden_syncs).",
        "no probe step looked for them" if is_cuda else "not a CUDA device",
    )


def _settings(run: RunRecord) -> Iterator[Guard]:
    """Fail for what slows every step: launches that wait, anomaly detection, deterministic algorithms; and for what
    torch.compile compiled inside the window."""
    is_cuda, blocking = run.device_type == "cuda", value_at(run, "environment.variables.CUDA_LAUNCH_BLOCKING")
    flags = run.environment.flags if run.environment else Flags()
    is_listed = run.environment is not None and run.environment.variables is not None
    switches = (
        (
            "launch_blocking",
            [blocking not in (None, "", "0") if is_listed and is_cuda else None],
            "kernels are launched without waiting",
            f"CUDA_LAUNCH_BLOCKING={blocking}: every launch waits",
            "Unset CUDA_LAUNCH_BLOCKING",
        ),
        (
            "anomaly_mode",
            [flags.anomaly_mode],
            "anomaly detection is off",
            "anomaly detection is on",
            "Turn off detect_anomaly (--trainer.detect_anomaly false, torch.autograd.set_detect_anomaly)",
        ),
        (
            "deterministic",
            [flags.deterministic_algorithms, flags.cudnn_deterministic],
            "deterministic mode is off",
            "deterministic mode is on",
            "Turn off deterministic mode (--trainer.deterministic, torch.use_deterministic_algorithms)",
        ),
    )
    for name, values, off, on, advice in switches:
        if any(values):
            yield Guard(name, "fail", message=on, advice=f"{advice} and measure again.")
        elif False in values:
            yield Guard(name, "pass", message=off)
        else:
            is_launch = name == "launch_blocking" and not is_cuda
            yield not_applicable(name, "not a CUDA device" if is_launch else "the environment was not recorded")
    count, is_off = run.compile.window_recompile_count, run.compile.is_enabled is False
    yield at_most(
        "recompiles",
        count or (None if is_off else count),
        0,
        "count",
        f"{count or 0:.0f} graphs were compiled in the window",
        "Warm up for longer and keep shapes fixed (drop_last, one batch size): the window timed the compiler.",
        "torch.compile is off" if is_off else "recompilations were not counted",
        "fail",
    )


def _device(run: RunRecord) -> Iterator[Guard]:
    """Warn if a cap held the clock down for over 1 % of the window, the SM clock fell by over 5 %, other processes had
    the GPU open at either end, or the allocator took more memory from the device, or retried."""
    state, is_cuda = run.device_state, run.device_type == "cuda"
    readings = (state.open, state.close)
    no_counter = "the card does not report it" if is_cuda else "not a CUDA device"
    no_allocator = "no caching allocator was read"
    limit_w, celsius = value_at(run, "environment.gpu.power_limit_w"), state.close.temperature_c
    cap = "its power limit" if limit_w is None else f"its power limit of {limit_w:.0f} W"
    end = "" if celsius is None else f" ({celsius:.0f} °C at the end)"
    yield at_most(
        "power_cap",
        state.power_capped_fraction,
        CAPPED_LIMIT_FRACTION,
        "fraction",
        f"{cap} held the clock down for {state.power_capped_fraction or 0:.1%} of the window",
        f"This is the card's speed at {cap}: compare only with windows as long and cards with the same limit, "
        "and expect shorter bursts to be faster.",
        no_counter,
    )
    yield at_most(
        "thermal_cap",
        state.thermal_capped_fraction,
        CAPPED_LIMIT_FRACTION,
        "fraction",
        f"temperature{end} held the clock down for {state.thermal_capped_fraction or 0:.1%} of the window",
        "Cool the card, or let it settle with a longer warm-up; times depend on its temperature now.",
        no_counter,
    )
    drop = state.sm_clock_drop_fraction or 0.0
    clocks = [f"{reading.sm_clock_hz / 1e6:.0f}" for reading in readings if reading.sm_clock_hz is not None]
    message = f"the SM clock fell by {drop:.1%}" if drop > 0 else "the SM clock did not fall"
    yield at_most(
        "sm_clock_drop",
        state.sm_clock_drop_fraction,
        0.05,
        "fraction",
        message + (f" ({' -> '.join(clocks)} MHz)" if len(clocks) == 2 else ""),
        "Warm up for longer, so that the clock settles before the window; its mean mixes two speeds.",
        no_counter,
    )
    pids = sorted({pid for reading in readings for pid in reading.other_process_pids or ()})
    listed = f": pid {', '.join(map(str, pids))}" if pids else ""
    yield at_most(
        "other_processes",
        state.other_process_count,
        0,
        "count",
        f"{state.other_process_count or 0:.0f} other processes on the GPU{listed}",
        "End them or take another GPU: they share its time, memory and power.",
        "the driver does not show this machine's processes" if is_cuda else no_counter,
    )
    yield at_most(
        "allocator_growth",
        run.memory.window_reserved_growth_bytes,
        0,
        "bytes",
        f"reserved memory grew by {(run.memory.window_reserved_growth_bytes or 0) / 2**20:.0f} MiB in the window",
        "Warm up for longer: an allocation from the device waits for it. If it never ends, memory leaks or fragments.",
        no_allocator,
    )
    yield at_most(
        "allocator_retries",
        run.memory.window_alloc_retry_count,
        0,
        "count",
        f"{run.memory.window_alloc_retry_count or 0:.0f} allocations in the window needed the cache emptied",
        "Memory is nearly full: take a smaller batch, or PYTORCH_ALLOC_CONF=expandable_segments:True against "
        "fragments.",
        no_allocator,
    )
