"""`lmbench selfcheck`: planted truths are found, and a failed check is an exit code."""

from __future__ import annotations

import re

import torch
import warm_server
from tables import cases, flat

from lmbench import selfcheck as checks
from lmbench.cli import main
from lmbench.records.measured import HostState

CPU = torch.device("cpu")


@cases("check", checks.training, checks.losses)
def test_planted_truths_are_found_on_a_cpu(check):
    truths = list(check(CPU))
    assert truths
    assert [truth.name for truth in truths if not truth.is_right] == []


def test_two_ranks_tell_which_is_late_and_what_a_slow_collective_costs(monkeypatch):
    monkeypatch.setattr(checks, "run_python", lambda *words: warm_server.run(*words[2:]))
    late, collective = checks.ranks(CPU)
    assert re.fullmatch(r"rank 1, \d+\.\d ms in forward", late.measured)
    # A sleep may last longer than asked for, but not shorter.
    assert float(collective.measured.split()[0]) > 0.9e3 * checks.COLLECTIVE_S


def test_steps_sum_to_the_window_and_durations_are_judged(monkeypatch):
    monkeypatch.setattr(checks, "LENGTHS_S", dict.fromkeys(checks.LENGTHS_S, 0.002))
    *durations, identity = checks.known_durations(CPU)
    assert [truth.name for truth in durations] == [
        f"known duration in {phase}" for phase in ("forward", "backward", "optimizer")
    ]
    assert identity.is_right


@cases("""
- [is_right, waited, code, counts]
- [true, 0.3, 0, 1 passed]
- [false, 0.01, 1, "0 passed, 1 failed"]
# On a busy machine.
- [false, 0.3, 11, "0 passed, 1 undecided"]
""")
def test_the_table_has_every_truth_and_the_code_tells_a_failure(monkeypatch, capsys, is_right, waited, code, counts):
    planted = checks.Check(lambda device: [checks.Truth("planted truth", is_right, "one", "two")])
    monkeypatch.setattr(checks, "CHECKS", {"planted": planted, "other": checks.Check(None, gpus=1)})
    monkeypatch.setattr(checks, "host_state", lambda *_: HostState(waited_fraction=waited))
    assert main(["selfcheck", "cpu"]) == code
    text = flat(capsys.readouterr().out)
    assert ("planted truth one two" in text, f"{counts}; 1 checks need a GPU" in text) == (True, True)
    assert ("undecided this machine is busy: this process waited 30%" in text) == (code == 11)
