"""Runs on a machine whose cores other processes take."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tables import rows

PROGRAM = """
import os, sys, psutil
psutil.cpu_percent = lambda interval: float(sys.argv[1])
from lmbench.cli import main
code = main(sys.argv[2:])
print(code, os.environ.get("OMP_WAIT_POLICY"), "torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("percent", "own", "words", "printed"),
    rows("""
    90 |        | fit nope        | passive
    90 |        | overhead --config nope | passive
    90 |        | sweep nope      | passive
    90 | active | judge nope nope | active
    5  |        | judge nope nope | passive
    5  |        | compare --run nope nope | passive
    90 | active | fit nope        | active
    5  |        | fit nope        | None
    90 |        | fit nope --print_config | None
    """),
)
def test_threads_give_way_in_every_command_alike_and_a_wrong_name_fails_before_torch(percent, own, words, printed):
    env = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    env |= {"OMP_WAIT_POLICY": own} if own else {}
    command = [sys.executable, "-c", PROGRAM, str(percent), *words.split()]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["2", printed, "False"]
    assert done.stderr.splitlines()[-1].startswith("lmbench: ")
    assert ("give theirs away" in done.stderr) == (printed == "passive" and percent == "90")
