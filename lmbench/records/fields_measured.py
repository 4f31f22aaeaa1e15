# ruff: noqa: E501 (tables, one row a line)
"""Fields of run.json that were measured: window, phases, rates, memory, device state, probe steps."""

from __future__ import annotations

from lmbench.records.old_field import Row, group

_WINDOW = group(
    "Window",
    "run",
    (
        ("warmup_steps", "count", "warm-up", "Steps before the window."),
        ("requested_steps", "count", "steps asked for", "Steps the window was to have at least; null until training ends."),
        ("requested_s", "s", "time asked for", "Seconds the window was to last at least."),
        ("steps", "count", "steps", "Steps in the window, skipped and short ones included."),
        ("first_step", "index", "first step", "Index of the window's first step."),
        ("micro_batches", "count", "micro-batches", "Micro-batches of a full step."),
        ("skipped_count", "count", "skipped", "Steps the fp16 scaler skipped; in no statistic.", "down"),
        ("short_count", "count", "short", "Steps with fewer micro-batches than a full one; in no statistic."),
        ("tokens", "count", "tokens", "Tokens of all steps, micro-batches and ranks."),
        ("tokens_reason", "text", "no tokens because", "Why `tokens` is not known, where it is not."),
        ("wall_s", "s", "wall", "Wall time between the two synchronizes, `excluded_s` subtracted; clocked apart from the steps."),
        ("steps_sum_s", "s", "sum of steps", "Sum of `step_s` over the window."),
        ("excluded_s", "s", "excluded", "Validation, checkpoints and record writing within the window, already subtracted."),
        ("excluded_count", "count", "exclusions", "How often that happened."),
        ("clock_drift_fraction", "fraction", "clock drift", "How much faster the device's clock ran than the host's; corrected in the lags."),
        ("identity_error_fraction", "fraction", "identity error", "Signed: (`steps_sum_s` - `wall_s`) / `wall_s`."),
    ),
    prefix="window.",
)  # fmt: skip

_STATISTICS: tuple[Row, ...] = (
    ("n", "count", "n", "Steps behind the statistics of <phase>: in the window, full, not skipped."),
    ("mean_s", "s", "mean", "Mean device span of <phase>.", "down"),
    ("std_s", "s", "std", "Sample standard deviation (n - 1).", "down"),
    ("min_s", "s", "min", "Smallest value.", "down"),
    ("p5_s", "s", "p5", "5th percentile, from 20 steps on.", "down"),
    ("p25_s", "s", "p25", "25th percentile, linear between order statistics.", "down"),
    ("median_s", "s", "median", "Median.", "down"),
    ("p75_s", "s", "p75", "75th percentile.", "down"),
    ("p95_s", "s", "p95", "95th percentile, from 20 steps on.", "down"),
    ("p99_s", "s", "p99", "99th percentile, from 100 steps on.", "down"),
    ("max_s", "s", "max", "Largest value.", "down"),
    ("cv_fraction", "fraction", "CV", "Standard deviation divided by the mean.", "down"),
    ("median_low_s", "s", "median low", "Lower end of the median's interval within this run (order statistics, 6 steps on)."),
    ("median_high_s", "s", "median high", "Upper end of that interval."),
    ("median_coverage_fraction", "fraction", "coverage", "That interval's real coverage, at least 0.95, if steps are independent."),
    ("lag1_autocorrelation", "1", "autocorrelation", "Correlation of a step with the next one."),
    ("outlier_count", "count", "outliers", "Values over 3.5 robust deviations (from the MAD) off the median.", "down"),
    ("trend_fraction", "fraction", "trend", "Drift over the window by Theil and Sen's slope, as a fraction of the median."),
    ("trend_p", "1", "trend p", "How likely such an order of values is without a trend (Kendall)."),
    ("share_fraction", "fraction", "share", "Mean of <phase> divided by the mean step."),
    ("host.mean_s", "s", "host mean", "Mean host span of <phase>.", "down"),
    ("host.min_s", "s", "host min", "Smallest host span.", "down"),
    ("host.median_s", "s", "host median", "Median host span.", "down"),
    ("host.max_s", "s", "host max", "Largest host span.", "down"),
    ("lag.min_s", "s", "lag min", "Smallest lag at the end of <phase>."),
    ("lag.median_s", "s", "lag median", "Median lag at the end of <phase>."),
    ("lag.max_s", "s", "lag max", "Largest lag at the end of <phase>."),
)  # fmt: skip

_PHASES = group("Phases", "run", _STATISTICS, prefix="phases.<phase>.")

_THROUGHPUT = group(
    "Throughput",
    "run",
    (
        ("throughput.tokens_per_s", "tokens/s", "tokens/s", "`window.tokens` / `window.wall_s`.", "up"),
        ("throughput.model_flops_per_s", "FLOP/s", "model FLOP/s", "Tokens/s times model FLOPs per token.", "up"),
        ("throughput.mfu_fraction", "fraction", "MFU", "Model FLOP/s of one device over its peak, attention counted full.", "up"),
        ("throughput.mfu_causal_fraction", "fraction", "causal MFU", "The same with attention halved.", "up"),
        ("throughput.mfu_reason", "text", "no MFU because", "Why there is no MFU, null where there is one."),
        ("throughput.joules_per_token", "J/token", "J/token", "`device_state.energy_j` / `window.tokens`.", "down"),
        ("loss.first", "nat", "first loss", "Loss of step 0, warm-up included.", "down"),
        ("loss.last", "nat", "last loss", "Loss of the window's last step.", "down"),
        ("loss.mean", "nat", "mean loss", "Mean loss over the window.", "down"),
        ("loss.perplexity", "1", "perplexity", "exp(`loss.mean`).", "down"),
    ),
)  # fmt: skip

_MEMORY = group(
    "Memory",
    "run",
    (
        ("run_peak_allocated_bytes", "bytes", "run peak", "Peak allocated on the device over the whole run (decides what fits).", "down"),
        ("run_peak_reserved_bytes", "bytes", "run peak reserved", "Peak reserved by the allocator over the whole run.", "down"),
        ("steady_peak_allocated_bytes", "bytes", "steady peak", "Peak allocated within the window.", "down"),
        ("steady_peak_reserved_bytes", "bytes", "steady peak reserved", "Peak reserved within the window.", "down"),
        ("phase_peak_allocated_bytes.<phase>", "bytes", "peak in <phase>", "Peak allocated in <phase>, from the probe steps.", "down"),
        ("device_total_bytes", "bytes", "device total", "Memory of the device."),
        ("run_alloc_retry_count", "count", "retries", "Allocations that worked only after the cache was emptied.", "down"),
        ("window_alloc_retry_count", "count", "retries in window", "The same within the window.", "down"),
        ("window_reserved_growth_bytes", "bytes", "growth", "What the allocator reserved more at the window's end than at its start.", "down"),
        ("host_peak_rss_bytes", "bytes", "host peak", "Peak resident memory of the process.", "down"),
    ),
    prefix="memory.",
)  # fmt: skip

_READING: tuple[Row, ...] = (
    ("read_at_s", "s", "read at", "Monotonic clock at the reading."),
    ("sm_clock_hz", "Hz", "SM clock", "SM clock at the window's <end>."),
    ("memory_clock_hz", "Hz", "memory clock", "Memory clock."),
    ("temperature_c", "°C", "temperature", "Temperature of the GPU."),
    ("power_w", "W", "power", "Power draw."),
    ("energy_j", "J", "energy counter", "Energy since the driver was loaded."),
    ("power_capped_s", "s", "power-capped", "Counter of the time that the power cap held the clock down."),
    ("thermal_capped_s", "s", "thermal-capped", "The same for temperature."),
    ("throttle_reasons", "tree", "throttle reasons", "What holds the clock at this moment."),
    ("memory_used_bytes", "bytes", "used", "Memory used on the device by all processes."),
    ("other_process_pids", "tree", "other pids", "Other processes on the GPU, where the driver shows them."),
    ("other_process_count", "count", "other processes", "How many; null where the driver hides processes."),
)

_DEVICE_STATE = group("Device state", "run", _READING, prefix="device_state.<end>.") + group(
    "Device state",
    "run",
    (
        ("mean_power_w", "W", "power", "Mean power between the two readings, from the energy counter.", "down"),
        ("mean_temperature_c", "°C", "mean temperature", "Mean of the temperatures at the window's two ends: reading it in between would cost time in the window.", "down"),
        ("energy_j", "J", "energy", "Mean power times `window.wall_s`.", "down"),
        ("power_capped_fraction", "fraction", "power-capped", "Share of the time that the power cap held the clock down.", "down"),
        ("thermal_capped_fraction", "fraction", "thermal-capped", "The same for temperature.", "down"),
        ("sm_clock_drop_fraction", "fraction", "clock drop", "SM clock lost from the window's start to its end.", "down"),
        ("other_process_count", "count", "other processes", "The larger of both readings.", "down"),
    ),
    prefix="device_state.",
)  # fmt: skip

_WARMUP = group(
    "Window",
    "run",
    (
        ("gradient_norm", "1", "warm-up gradient norm", "2-norm of all gradients at the last warm-up step, before clipping: the same step whatever the window."),
    ),
    prefix="warmup.",
)  # fmt: skip

_PROBE = group(
    "Probe steps",
    "run",
    (
        ("requested_steps", "count", "probe steps asked for", "Steps that were to look at the lag."),
        ("is_complete", "flag", "probed", "Every kind of probe step was taken."),
        ("error", "tree", "probe error", "What ended the probe steps too soon, after a complete window: like `error`."),
        ("steps", "count", "probe steps", "Steps after the window that were probed; in no statistic."),
        ("marked_modules", "count", "marked modules", "Modules whose ends were marked in the probe steps."),
        ("verdicts.<phase>.verdict", "text", "<phase> verdict", "`host-bound`, `queued` or `mixed`, by the smallest lag within <phase>."),
        ("verdicts.<phase>.min_lag_s", "s", "<phase> min lag", "Median over probe steps of the smallest lag within <phase>."),
        ("verdicts.<phase>.agree_fraction", "fraction", "<phase> agreement", "Share of probe steps that gave this verdict."),
        ("verdicts.<phase>.marks", "count", "<phase> marks", "Marks within <phase> in one step."),
        ("hidden_syncs", "tree", "hidden syncs", "Synchronizes found in a probe step: location, stack, count; null if not looked for."),
        ("training.parameters", "count", "checked", "Trainable tensors that were checked; null if none were."),
        ("training.missing_gradients", "tree", "no gradient", "Names of those without a gradient."),
        ("training.zero_gradients", "tree", "zero gradient", "Names of those whose gradient is all zero."),
        ("training.nonfinite_gradients", "tree", "non-finite gradient", "Names of those whose gradient is not finite."),
        ("training.unmoved_parameters", "tree", "unmoved", "Names of those that the optimizer left as they were; null without one."),
        ("training.gradient_norm", "1", "gradient norm", "2-norm of all gradients, before clipping."),
        ("training.is_skipped", "flag", "check skipped", "The fp16 scaler skipped the checked step."),
    ),
    prefix="probe.",
)  # fmt: skip

MEASURED_FIELDS = (*_WINDOW, *_WARMUP, *_PHASES, *_THROUGHPUT, *_MEMORY, *_DEVICE_STATE, *_PROBE)
