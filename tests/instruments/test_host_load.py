"""The load of other processes in a window, against real processes."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time

from tables import cases

from lmbench.instruments.host import host_state, read_host
from lmbench.python_process import PAIR


def spin(seconds):
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def own_seconds(pipe):
    before = read_host()
    time.sleep(0.6)
    pipe.send(read_host().own_s - before.own_s)


@cases("is_pair", True, False)
def test_the_other_side_that_takes_turns_counts_as_own(is_pair, monkeypatch):
    if is_pair:
        monkeypatch.setenv(PAIR, str(os.getpid()))
    here, there = multiprocessing.Pipe()
    fork = multiprocessing.get_context("fork").Process
    sides = [fork(target=spin, args=(1.0,)), fork(target=own_seconds, args=(there,))]
    for side in sides:
        side.start()
    assert (here.recv() > 0.03) == is_pair
    for side in sides:
        side.join()


def test_a_stranger_is_seen():
    # A grandchild whose parent has ended is no descendant of this process.
    code = "import os, time\nif os.fork() == 0:\n e = time.time() + 1.5\n while time.time() < e: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    before = read_host()
    time.sleep(0.8)
    state = host_state(before, read_host())
    assert state.other_cpu_fraction > 0.3 / read_host().cores
    assert 0.0 <= state.waited_fraction <= 1.0
