"""The guards of a run: checks whether its measurement is valid.

Each guard reads the record and the steps. Where these lack a fact the guard is `n/a`; it never raises and never passes.
A guard that passes or is `n/a` has no message.
Here the guards' figures are computed; `guards.toml` has their texts and limits.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import pairwise
from pathlib import Path

import msgspec
from msgspec.structs import replace

from lmbench.precision import find_precision
from lmbench.python_process import KEPT_HEAP
from lmbench.records.endurance import leak_limit
from lmbench.records.host_time import HARNESS
from lmbench.records.measured import BUSY_MACHINE, Guard, PhaseSummary, Status, TrainingFacts
from lmbench.records.run import RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.vocabulary import BACKWARD_MODES, WAIT_POLICY, Values

#: The share of a window and the time at its ends that may be outside its steps. On a GPU the synchronizations at both
#: ends took 20 to 107 us in 496 windows of 7 ms to 15 s (H200, torch 2.11), and up to 0.47 ms in windows of less than
#: 0.5 s on a slower host, a virtual machine. Where other processes share the device they take whole time slices: 0.5 ms
#: on a GPU with four others, 13.5 ms on one with five, and on Linux 3 ms, of which one at an end of a window took
#: 2.3 ms, and 12 ms at a load of 7 a core. So the time is that for two other processes on the GPU, or for a load of 1 a
#: core, and grows with both. Each part of a window that takes turns has ends of its own: 1.2 ms in eight parts.
IDENTITY_LIMITS = {"own": (0.001, 600e-6), "shared": (0.005, 6e-3)}
#: Ranks plan the number of the window's steps from the pace of the warm-up, and a window of them may be shorter by this
#: share: 2.99 s of 3 s on two H200s whose pace still rose.
PACE_LIMIT_FRACTION = 0.1
#: A drift is a trend only if noise alone would cause it less often than this.
TREND_P = 0.05
#: Largest share of a CPU's cores that other processes may take, and largest share of the window without a core.
OTHER_CPU_LIMIT_FRACTION, WAITED_LIMIT_FRACTION = 0.10, 0.02
#: The least time of a page fault that reads nothing. The steps of `smoke` had 6,200 to 8,500 of them and took 25 to
#: 32 ms; with the heap kept they had less than 100 and took 17 ms (two cores of an EPYC, 8 and 6 processes).
PAGE_FAULT_S = 1e-6


class Rule(msgspec.Struct, frozen=True):
    """A table of guards.toml, where its keys are described."""

    message: str
    advice: str = ""
    limit: float = 0
    unit: str = ""
    beyond: Status = "warn"
    variants: dict[str, Values] = {}

    @property
    def texts(self) -> list[str]:
        """Message and advice with dots for the figures."""
        return [re.sub(r"\{.*?\}", "...", text) for text in (self.message, self.advice)]


@cache
def rules() -> dict[str, Rule]:
    return msgspec.toml.decode(Path(__file__).with_name("guards.toml").read_bytes(), type=dict[str, Rule])


def make_guard(name: str, value: float | None, limit: float | None = None, variant: str = "", **words: object) -> Guard:
    """The guard of this name with the status that its figure gives it.

    Args:
        name: name of the guard's table in guards.toml.
        value: the figure; None where it is unknown, which makes the guard `n/a`.
        limit: largest figure that passes, instead of the rule's.
        variant: name of the variant that changes the rule; empty for the rule itself.
        words: values for the braces in the rule's texts, beside the figure itself in its unit, in MiB, GiB and ms.
    """
    rule = rules()[name]
    if value is None:
        return Guard(name, "n/a")
    rule = replace(rule, **rule.variants[variant]) if variant else rule
    limit = rule.limit if limit is None else limit
    status: Status = "pass" if value <= limit else rule.beyond
    figure, bound = (value, limit) if rule.unit else (None, None)
    if status == "pass":
        return Guard(name, status, figure, bound, rule.unit)
    message = rule.message.format(value=value, mib=value / 2**20, gib=value / 2**30, ms=value * 1e3, **words)
    return Guard(name, status, figure, bound, rule.unit, message, rule.advice.format(**words))


def evaluate_guards(run: RunRecord, steps: Sequence[StepRecord]) -> list[Guard]:
    """Every guard once, in the order in which they are printed; the run is not changed."""
    return [
        *_training(run, steps),
        *_window(run),
        busy_machine(run),
        *_step_times(run),
        *_settings(run),
        *_device(run),
    ]


def _training(run: RunRecord, steps: Sequence[StepRecord]) -> Iterator[Guard]:
    """Guards of losses, gradients, moved weights, and steps that the fp16 scaler skipped."""
    loss, uniform_loss = run.loss.first, math.log(run.model.vocab_size or 1)
    losses = [(f"step {step.step}", step.loss) for step in steps if step.loss is not None]
    # Where the steps are lost, the record still has the first and the last loss.
    losses = losses or [("the end", value) for value in (loss, run.loss.last) if value is not None]
    nonfinite = [moment for moment, value in losses if not math.isfinite(value)]
    yield make_guard("finite_loss", len(nonfinite) if losses else None, first=nonfinite[:1])
    distance = None
    if run.model.is_fresh and uniform_loss and loss is not None and math.isfinite(loss):
        distance = abs(loss - uniform_loss)
    yield make_guard("first_loss", distance, loss=loss, uniform_loss=uniform_loss)

    training = run.probe.training or TrainingFacts()
    checked = training.parameters if run.mode in BACKWARD_MODES else None

    def guard_of(guard: str, names: Sequence[str] | None, variant: str = "") -> Guard:
        if names is None or checked is None:
            return make_guard(guard, None)
        listed = ", ".join([*names[:3], "..."] if len(names) > 3 else names)
        if not variant and len(names) >= checked:
            variant = "none"
        return make_guard(guard, len(names), variant=variant, checked=checked, names=listed and f": {listed}")

    if training.nonfinite_gradients and not training.is_skipped:
        yield guard_of("gradients", training.nonfinite_gradients, "nonfinite")
    else:
        yield guard_of("gradients", training.missing_gradients + training.zero_gradients)
    has_update = run.mode == "train_step" and not training.is_skipped
    yield guard_of("trained", training.unmoved_parameters if has_update else None)
    window = [step for step in steps if step.stage == "window"]
    timed = [step for step in window if not step.is_skipped]
    is_seen = timed and run.mode == "train_step" and "optimizer" not in (run.unseen_phases or ())
    missing = sum(step.optimizer_s is None for step in timed) if is_seen else None
    # Batches without an update may be there to add up their gradients.
    kept = training.kept_gradient_count if has_update and not missing else None
    yield make_guard("kept_gradients", kept, checked=checked)
    yield make_guard("updates", missing, total=len(timed))
    yield make_guard("closures", training.backward_count)

    yield make_guard("inputs", _lacks(training.has_new_batch))
    yield make_guard("outputs", _lacks(training.depends_on_batch))
    yield make_guard("tokens", None if training.embedded_fraction is None else 1 - training.embedded_fraction)
    yield make_guard("uncounted_tokens", training.uncounted_fraction)
    pairs = list(pairwise(step.loss for step in window if step.loss is not None))
    repeated = sum(before == after for before, after in pairs)
    yield make_guard("repeated_losses", repeated / len(pairs) if pairs and run.mode == "train_step" else None)

    count, precision = len(window) - len(timed), find_precision(str(run.precision))
    yield make_guard(
        "skipped_steps",
        count if count or (precision is not None and precision.has_scaler) else None,
        variant="" if timed or not window else "all",
        total=len(window),
        since=", from the first step on: nothing was trained" if all(step.is_skipped for step in steps) else "",
    )


def _lacks(flag: bool | None) -> bool | None:
    """Whether a flag is false; None where it is unknown."""
    return None if flag is None else not flag


def _window(run: RunRecord) -> Iterator[Guard]:
    """Guards of the window's and the probe steps' number, the sum of the steps, the ranks' pace, and MFU."""
    window, probe, rates = run.window, run.probe, run.throughput
    wall_s, count, total_s, has_ended = window.wall_s, window.steps, window.steps_sum_s, run.outcome == "ok"
    requested_s = window.requested_s
    if requested_s is not None and window.pace_steps is not None:
        requested_s *= 1 - PACE_LIMIT_FRACTION
    requests = ((count or 0, window.requested_steps), (window.lasted_s, requested_s))
    missing = 1 - min([1, *(amount / request for amount, request in requests if request)])
    was_agreed = window.pace_steps is not None and (count or 0) >= (window.requested_steps or 0)
    yield make_guard(
        "window_complete",
        missing if has_ended and count is not None else None,
        variant="empty" if not count else "ranks" if was_agreed else "",
        window=window,
    )
    is_incomplete, error = _lacks(probe.is_complete) if has_ended else None, probe.error
    yield make_guard("probe_steps", is_incomplete, variant="error" if error else "", phase=error and error.phase)
    if not wall_s or not count or total_s is None or run.is_profiled:
        yield make_guard("window_identity", None)
    else:
        others = _other_processes(run) or 0
        share, ends_s = IDENTITY_LIMITS["shared" if run.device_type == "cpu" or others else "own"]
        ends_s *= max(1, len(window.turn_steps_s or ())) * max(1.0, run.host_state.load_per_core or 0.0, others / 2)
        yield make_guard("window_identity", abs(total_s - wall_s) / wall_s, max(share, ends_s / wall_s), window=window)
    for guard, names in (("flags", window.changed_flags), ("clocks", window.replaced_functions)):
        yield make_guard(guard, None if names is None else len(names), names=", ".join(names or ()))
    # In an evaluation ranks do not wait for each other.
    is_joint = run.mode != "inference"
    if is_joint and (steps_s := [rank.mean_s["step"] for rank in run.per_rank or [] if "step" in rank.mean_s]):
        # A rank may start or end its window a step before another.
        yield make_guard("ranks", max(steps_s) / min(steps_s) - 1, 0.005 + 1 / (count or 1))
    # Only attention alone is known to be causal. A fused kernel then skips half of the products, so that the full count
    # could exceed 100 %.
    if run.model.is_causal:
        yield make_guard("mfu", rates.mfu_causal_fraction, variant="causal")
    else:
        yield make_guard("mfu", rates.mfu_fraction)


def busy_machine(run: RunRecord) -> Guard:
    """Guard of other load on the machine.

    It warns if the training thread waited for a core, or the hypervisor took cores away, for over 2 % of the window. In
    a run on a CPU it also warns if other processes took over 10 % of the cores.
    """
    state = run.host_state
    # A run on a GPU loses nothing to processes on cores that were free.
    others = state.other_cpu_fraction if run.device_type == "cpu" else None
    shares = (
        (others, OTHER_CPU_LIMIT_FRACTION, "other processes took {:.0%} of its cores"),
        (state.waited_fraction, WAITED_LIMIT_FRACTION, "this process waited {:.0%} of the time for a core"),
        (state.steal_fraction, WAITED_LIMIT_FRACTION, "the hypervisor took {:.0%} of the cores away"),
    )
    signs = [(share, limit, text) for share, limit, text in shares if share is not None]
    above = [text.format(share) for share, limit, text in signs if share > limit]
    if above and state.load_per_core is not None:
        above.append(f"load {state.load_per_core:.1f} a core")
    value, limit, _ = max(signs, key=lambda sign: sign[0] / sign[1], default=(None, None, ""))
    environment = run.environment
    threads, variables = environment.flags.thread_count or 1, environment.variables or {}
    # The command line sets the variable on a busy machine. A notebook has to set it itself.
    is_spinning = run.device_type == "cpu" and threads > 1 and WAIT_POLICY not in variables
    return make_guard(BUSY_MACHINE, value, limit, "spinning" if is_spinning else "", signs=", ".join(above))


def _step_times(run: RunRecord) -> Iterator[Guard]:
    """Guards of the step times' trend and spread, of time outside all phases, and of hidden synchronizes."""
    # A profiler slows the steps, by more or less each time, and takes memory for its events: no table has their times.
    step = PhaseSummary() if run.is_profiled else run.step
    drift, chance = step.trend_fraction or 0.0, step.trend_p
    variant = ""
    if chance is not None and chance < TREND_P:
        variant = "slower" if drift > 0 else "faster"
    yield make_guard("trend", None if chance is None else abs(drift), variant=variant, drift=drift, chance=chance)
    outliers = step.outlier_count
    yield make_guard("spread", step.cv_fraction, variant="outliers" if outliers else "", outliers=outliers)

    syncs = run.probe.hidden_syncs
    verdicts = {lag.verdict for lag in run.probe.lags.values()}
    is_device_bound = run.is_on_gpu and verdicts == {"queued"} and not run.unseen_phases
    other = run.phases.other or PhaseSummary()
    hooks = [owned for owned in run.host_time.owners_within("other", other.mean_s or 0.0) if owned.owner != HARNESS]
    other_share = other.share_fraction if is_device_bound else None
    if not is_device_bound and step.mean_s and run.host_time.steps:
        # Where the step waits for the host, Lightning's own work is no fault of the user's.
        other_share = sum(owned.host_s for owned in hooks) / step.mean_s
    yield make_guard("other_share", other_share, where=f", most of it in {hooks[0]}" if hooks else "")
    # Where the loader was timed, its verdict tells more.
    was_timed = run.input_pipeline is not None and not run.input_pipeline.reason
    yield make_guard("data_share", run.phases.data.share_fraction if run.phases.data and not was_timed else None)
    count = len(syncs) if syncs is not None and run.is_on_gpu else None
    yield make_guard("hidden_syncs", count, where=syncs[0].location if syncs else "")

    faults = run.host_state.page_fault_count
    per_step = faults / run.window.steps if faults is not None and run.window.steps else None
    share = per_step * PAGE_FAULT_S / step.mean_s if per_step is not None and step.mean_s else None
    variables = " ".join(f"{name}={value}" for name, value in KEPT_HEAP.items())
    yield make_guard("page_faults", share, per_step=per_step, variables=variables)

    communication = run.communication
    yield make_guard("sigterm_check", communication.sigterm_check_s, location=communication.sigterm_check_location)
    yield make_guard("bucket_copies", communication.bucket_copy_bytes)
    yield make_guard("bucket_splits", communication.bucket_split_count)


def _settings(run: RunRecord) -> Iterator[Guard]:
    """Guards of settings that slow every step, and of graphs that torch.compile compiled inside the window."""
    environment, count = run.environment, run.compile.window_recompile_count
    flags, variables = environment.flags, environment.variables
    blocking = None if variables is None else variables.get("CUDA_LAUNCH_BLOCKING", "")
    is_known = blocking is not None and run.device_type == "cuda"
    yield make_guard("launch_blocking", blocking not in ("", "0") if is_known else None, blocking=blocking)
    yield make_guard("anomaly_mode", flags.anomaly_mode)
    modes = [mode for mode in (flags.deterministic_algorithms, flags.cudnn_deterministic) if mode is not None]
    yield make_guard("deterministic", max(modes, default=None))
    yield make_guard("recompiles", count if count or run.compile.is_enabled is not False else None)
    collector, wall_s = run.collector, run.window.wall_s
    share = collector.total_s / wall_s if collector.total_s is not None and wall_s else None
    variant, full_s = "", (collector.full_s or 0.0) * (collector.count or 0)
    if collector.location and wall_s:
        share, variant = full_s / (wall_s + full_s), "called"
    yield make_guard(
        "garbage_collection", share, variant=variant, collector=collector, full_ms=(collector.full_s or 0) * 1e3
    )


def _other_processes(run: RunRecord) -> int | None:
    """The number of other processes on the GPU, without the other side of a comparison, which waits meanwhile."""
    others = run.device_state.other_process_count
    return others - 1 if others and run.window.turn_steps_s else others


def _device(run: RunRecord) -> Iterator[Guard]:
    """Guards of the GPU's clock, of other processes on the GPU, and of the allocator."""
    state, memory = run.device_state, run.memory
    limit_w = run.environment.gpu.power_limit_w
    cap = f"its power limit of {limit_w:.0f} W" if limit_w else "its power limit"
    yield make_guard("power_cap", state.power_capped_fraction, cap=cap)
    yield make_guard("thermal_cap", state.thermal_capped_fraction, celsius=state.close.temperature_c or 0.0)
    clocks = " -> ".join(f"{(reading.sm_clock_hz or 0.0) / 1e6:.0f}" for reading in (state.open, state.close))
    yield make_guard("sm_clock_drop", state.sm_clock_drop_fraction, clocks=clocks)
    pids = sorted({*(state.open.other_process_pids or ()), *(state.close.other_process_pids or ())})
    yield make_guard("other_processes", _other_processes(run), pids=", ".join(map(str, pids)) or "unknown")
    growths = (("host", memory.host_growth), ("reserved device", memory.reserved_growth))
    name, slope = max(growths, key=lambda item: item[1].low_bytes_per_step or -math.inf)
    yield make_guard(
        "memory_growth",
        slope.low_bytes_per_step,
        leak_limit(run.window.steps or 1),
        memory=name,
        slope_mib=(slope.bytes_per_step or 0.0) / 2**20,
        keeper=memory.keeper or "what keeps it is unknown",
    )
    yield make_guard("allocator_growth", memory.window_reserved_growth_bytes)
    yield make_guard("allocator_retries", memory.window_alloc_retry_count)
