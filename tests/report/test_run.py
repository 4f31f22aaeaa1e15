"""A run as people see it: readable at 80 columns, without colour and in a log file; commands stay whole."""

from __future__ import annotations

import shlex
from pathlib import Path

from fit_process import QUICK
from paths import RUNS
from runs import make_run
from tables import cases, flat, texts_of

from lmbench.records.codec import decode_run, encode_run
from lmbench.records.input_pipeline import InputPipeline
from lmbench.records.measured import Guard
from lmbench.records.summary import complete_run
from lmbench.report.render import render
from lmbench.report.run import run_answer

DATA = (RUNS / "h200_run.json").read_bytes()
H200 = decode_run(DATA)
DEEP = Path("/a/folder/of/results/whose/path/is/longer/than/a/terminal/is/wide") / str(H200.run_id)
TO_COPY = ("result ", "repeat ", "upload ")


def shown(run):
    return render(run_answer(run, DEEP), "terminal")


def test_the_answer_comes_before_the_table_and_only_paths_and_commands_are_longer_than_a_line():
    run = decode_run(DATA)
    run.guards = [*run.guards, Guard("spread", "warn", message="steps vary", advice="look at [steps]")]
    text = shown(run)
    answer, _, rest = text.partition("\n\ndevice span in ms")
    assert answer.endswith("\nWARN         steps vary\n             look at [steps]")
    assert "guards       3 pass, 1 warn" in rest
    lines = text.splitlines()
    assert [line for line in lines if len(line) > 80 and not line.startswith(TO_COPY)] == []
    assert [line for line in lines if line != line.rstrip()] == []
    assert f"result       {DEEP}" in lines
    assert f"repeat       {H200.replay_command}" in lines
    assert "\x1b" not in text


def test_the_host_limits_a_step_by_the_share_of_phases_that_wait_for_it():
    run = decode_run(DATA)
    run.probe.verdicts.forward.verdict = "host-bound"
    part = "the device, but in forward (33.9 % of the step), where it waits for the host"
    assert part in flat(shown(run))
    run.probe.verdicts.backward.verdict = "host-bound"
    most = "limited by the host: the device waits for it in 97.9 % of the step (forward, backward)"
    assert most in flat(shown(run))


def test_adapters_are_shown_as_the_trained_part_of_the_parameters_and_a_number_stays_with_its_unit():
    run = decode_run(DATA)
    assert "trained" not in shown(run)
    run.model.trainable_parameter_count = 24_576
    assert f"{run.model.parameter_count / 1e6:.4g} M parameters, 24.58 k of them trained," in flat(shown(run))
    for length in range(1, 80):
        run.guards = [Guard("spread", "warn", message=f"{'x' * length} 25.5 % of it")]
        assert "25.5 %" in shown(run)


@cases("""
- [synchronized_s, words]
- [0.052, the difference is communication]
- [0.048, no difference above]
""")
def test_a_difference_below_its_noise_or_negative_is_not_called_communication(synchronized_s, words):
    """The steps vary by 0.12 ms."""
    run = decode_run(DATA)
    run.probe.synchronized_step_s, run.probe.unsynchronized_step_s = synchronized_s, 0.05
    assert words in flat(shown(run))


@cases("""
- [resident_s, words]
- [0.04, input-bound by 19.8 %]
- [0.06, input-bound by 0.0 %]
""")
def test_no_step_is_input_bound_by_less_than_nothing(resident_s, words):
    run = decode_run(DATA)
    run.input_pipeline = InputPipeline(resident_step_s=resident_s, waited_s=0.01, fix={"num_workers": 2})
    assert words in flat(shown(run))


@cases("""
- [fraction, causal_fraction, source, words]
- [1.342, 1.2, a datasheet, "MFU none: it would be 134.2% of the peak, which no device reaches: the peak is an"]
- [-0.5, 0.455, a datasheet, "MFU none: it would be -50.0% of the peak, which no device reaches"]
- [0.473, 0.455, a datasheet; elsewhere 2382 or 2500, "MFU 47.3 % of 67 TFLOP/s, elsewhere 2382 or 2500 (45.5"]
""")
def test_an_mfu_that_cannot_be_is_refused_and_a_disputed_peak_stands_beside_it(
    fraction, causal_fraction, source, words
):
    run = decode_run(DATA)
    run.throughput.mfu_fraction, run.throughput.mfu_causal_fraction = fraction, causal_fraction
    run.flops.peak_source = source
    text = flat(shown(decode_run(encode_run(run))))
    assert words in text
    assert "134.2 %" not in text


def test_of_many_logged_scalars_the_first_stand_in_the_answer():
    run = decode_run(DATA)
    run.scalars = {f"metric_{index}": float(index) for index in range(10)}
    (line,) = texts_of(run_answer(run, DEEP).notes, "scalars")
    assert line.endswith(", metric_6 6, metric_7 7, and 2 more in run.json")


def test_a_price_of_the_device_gives_the_price_and_the_time_of_tokens():
    run = decode_run(DATA)
    run.config["measure"]["price_per_hour"] = 3.0
    run.world_size = 2
    complete_run(run, [], run.window.wall_s)
    # 40,482 tokens/s by two devices.
    assert "cost         41.17 for 10^9 tokens, 6 h 52 min on 2 device(s)" in shown(run)


def test_show_prints_what_fit_printed_and_the_printed_command_repeats_it(here, monkeypatch, printed):
    monkeypatch.setenv("COLUMNS", "80")
    text = printed("fit", "smoke", "--model.num_layers=1", *QUICK)
    assert printed("show", "results") == text
    (command,) = (line for line in text.splitlines() if line.startswith("repeat "))
    printed(*shlex.split(command)[2:])
    assert len(list((here / "results").iterdir())) == 2


def test_a_path_below_a_folder_with_a_blank_is_quoted_only_if_it_has_one_itself(tmp_path, monkeypatch, printed):
    here = tmp_path / "my work"
    folder, command = here / "results" / "a", f"lmbench fit --config '{here}/results/a/config.yaml'"
    make_run(folder, {}, {"replay_command": command, "run_id": "a"})
    (folder / "config.yaml").touch()
    monkeypatch.chdir(here)
    assert printed("show", "results/a").splitlines()[-1] == "repeat       lmbench fit --config results/a/config.yaml"
