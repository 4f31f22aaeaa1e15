"""Ctrl-C and SIGTERM at any moment of a real process: what was measured is kept, and nobody sees a traceback."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest
from fit_process import SMOKE, plant, sound_result, start_fit
from tables import cases
from waiting import wait_for

from lmbench.interruption import Terminated, held, listening, received

CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 143}
WORDS = ("--measure.steps=20", "--measure.probe_steps=3")


def check_interrupted(fit, code):
    """The process was interrupted with this code; returns its result, None if it was too early for one."""
    # A loader's process that was just handing over a batch has a thread of Python's own that complains.
    if "multiprocessing/resource_sharer.py" not in fit.err:
        assert "Traceback" not in fit.err
        assert fit.err.count("\n") <= 1
    run = sound_result(fit)
    if run is not None and run.outcome != "ok":
        assert (run.outcome, run.record.exit_code) == ("interrupted", code)
        assert run.record.ended_at is not None
    return run


@cases("signals", (signal.SIGINT,) * 3, (signal.SIGTERM,) * 2, ids=["three ctrl-c", "two terms"])
def test_a_signal_at_any_of_5_instants_leaves_a_readable_result_and_no_traceback(signals, tmp_path):
    outcomes = []
    # Seconds after the start, or after the end of a step.
    early, within, late = [(0, 0.0), (0, 0.3)], [(step, 0.0) for step in (8, 24)], [(43, 0.1)]
    for index, (step, after_s) in enumerate([*early, *within, *late]):
        fit = start_fit(tmp_path / str(index), "--measure.steps=40", "--measure.probe_steps=0", ticks=True)
        fit.wait_for_step(step)
        fit.signal_after(after_s + 0.02 * random.random(), *signals)
        code = fit.wait()
        run = check_interrupted(fit, code)
        assert code in (0, CODES[signals[0]])
        # Also the steps that no flush had written yet.
        assert run is None or len(fit.ticks) - len(run.steps) <= 1
        outcomes.append(run.outcome if run else None)
    assert "interrupted" in outcomes


@cases("""
moment | deed | steps
# hook and calls before | deed | steps kept
setup 0 | sigint | 0
on_before_zero_grad 1 | sigint | 1
on_before_backward 9 | sigint | 9
# Among the probe steps, and at the end.
on_train_batch_end 24 | sigint | 23
on_train_end 0 | sigint | 23
# From the handler on, signals differ in their exit code: one moment shows that.
on_before_zero_grad 1 | sigterm | 1
on_before_zero_grad 1 | sighup | 1
# What somebody swallows is raised again after the step.
on_train_batch_end 9 | swallowed_sigint | 10
""")
def test_a_signal_is_obeyed_at_once_and_what_was_measured_is_kept(moment, deed, steps, tmp_path):
    hook, calls = moment.split()
    signum = signal.Signals[deed.removeprefix("swallowed_").upper()]
    fit = start_fit(tmp_path, *WORDS, *plant(hook, deed, calls))
    assert fit.wait() == CODES[signum]
    run = check_interrupted(fit, CODES[signum])
    assert (len(run.steps), run.record.error.kind, fit.err) == (int(steps), signum.name, "")
    assert "outcome      interrupted" in fit.out


@cases("signum", signal.SIGINT, signal.SIGTERM)
def test_a_signal_to_all_processes_of_a_terminal_ends_the_loader_too(signum, tmp_path):
    words = ("--data.placement=pinned", "--data.num_workers=2", "--measure.steps=100000")
    fit = start_fit(tmp_path, *words, ticks=True)
    fit.wait_for_step(20)
    os.killpg(fit.pid, signum)
    assert fit.wait() == CODES[signum]
    assert check_interrupted(fit, CODES[signum]).outcome == "interrupted"
    with pytest.raises(ProcessLookupError):
        wait_for(lambda: os.killpg(fit.pid, 0))


def test_a_signal_during_the_imports_gets_one_line(tmp_path):
    command = [sys.executable, "-m", "lmbench", "fit", f"--config={SMOKE}", f"--measure.results_dir={tmp_path}"]
    for signum, code in CODES.items():
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
            maps = Path(f"/proc/{process.pid}/maps")
            while process.poll() is None and "libtorch" not in maps.read_text():
                time.sleep(0.005)
            process.send_signal(signum)
            err = process.communicate()[1]
        assert (process.returncode, err) == (code, f"lmbench: stopped by {signum.name}\n")
    assert list(tmp_path.iterdir()) == []


class Interrupting:
    """In place of a finalizer that a fork puts aside, which is what it does first: three Ctrl-C."""

    def __setattr__(self, *_):
        for _ in range(3):
            signal.raise_signal(signal.SIGINT)


def interrupt_first_deed():
    weakref.finalize._registry[Interrupting()] = None


def test_three_ctrl_c_before_a_fork_handles_signals_print_nothing(tmp_path):
    fit = start_fit(tmp_path, *WORDS, before=interrupt_first_deed)
    assert (fit.wait(), fit.out, fit.err) == (130, "", "")


def test_a_signal_waits_for_the_end_of_a_held_block_and_only_the_first_raises():
    reached = []
    with listening():
        with pytest.raises(KeyboardInterrupt), held():  # noqa: PT012
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGTERM)
            reached.append("the end")
        signal.raise_signal(signal.SIGTERM)
        assert received() == signal.SIGINT
    assert reached == ["the end"]
    with listening(), pytest.raises(Terminated):
        signal.raise_signal(signal.SIGTERM)
    # Also in a program that does not listen.
    with pytest.raises(KeyboardInterrupt), held():
        signal.raise_signal(signal.SIGINT)


def test_a_handler_that_is_no_default_stays():
    own = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    with listening():
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    signal.signal(signal.SIGTERM, own)
