"""Runs on a machine whose cores other processes take."""

from __future__ import annotations

import os
import subprocess
import sys

from tables import rows

#: Tells for each line of its input, a command, what it left.
PROGRAM = """
import os, sys, psutil
from lmbench.cli import main
for line in sys.stdin.read().splitlines():
    percent, own, words = line.split(maxsplit=2)
    psutil.cpu_percent = lambda interval: float(percent)
    os.environ.pop("OMP_WAIT_POLICY", None)
    if own != "none":
        os.environ["OMP_WAIT_POLICY"] = own
    code = main(words.split())
    print(code, os.environ.get("OMP_WAIT_POLICY", "none"), "torch" in sys.modules)
"""
CASES = rows("""
90 none fit nope | passive
5 none overhead --config nope | passive
90 none sweep nope | passive
90 active judge nope nope | active
5 none judge nope nope | passive
5 none compare --run nope nope | passive
90 active fit nope | active
5 none fit nope | none
90 none fit nope --print_config | none
""")
RUNS = "90 none fit smoke --measure.steps 1 --measure.min_window_s 0 --measure.probe_steps 0"


def outcome(*lines, **where):
    command = [sys.executable, "-c", PROGRAM]
    return subprocess.run(
        command, input="\n".join(lines), env={**os.environ}, capture_output=True, text=True, check=True, **where
    )


def test_threads_give_way_in_every_command_alike_and_a_wrong_name_fails_before_torch_with_its_line_alone():
    lines, policies = zip(*CASES, strict=True)
    done = outcome(*lines)
    assert done.stdout.splitlines() == [f"2 {policy} False" for policy in policies]
    assert "give their cores away" not in done.stderr


def test_a_run_on_a_busy_machine_says_that_its_threads_give_way(tmp_path):
    assert outcome(RUNS, cwd=tmp_path).stderr.count("set OMP_WAIT_POLICY=passive") == 1
