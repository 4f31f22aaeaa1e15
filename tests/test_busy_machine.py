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


def test_threads_give_way_in_every_command_alike_and_a_wrong_name_fails_before_torch():
    lines, policies = zip(*CASES, strict=True)
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        command, input="\n".join(lines), env={**os.environ}, capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [f"2 {policy} False" for policy in policies]
    # A comparison does so without a word.
    assert done.stderr.count("give theirs away") == 2
