"""Two processes that take turns: who measures when, what the records say, and what happens if one of them ends."""

from __future__ import annotations

import math
import threading
import time
from multiprocessing import Pipe
from random import Random

import pytest
from tables import cases

from lmbench.callbacks import Turns
from lmbench.instruments.turns import TurnTaking
from lmbench.instruments.window import Schedule

from conftest import measure

SEED, PART_S = "3-0", 0.03


def take_turns(sleeper, play):
    """Measures ten steps in turns with `play`, a function of the other end of the pipe."""
    here, there = Pipe()
    peer = threading.Thread(target=play, args=(there,))
    peer.start()
    result = measure(sleeper, Turns(TurnTaking(here, SEED, 0)), schedule=Schedule(2, 10))
    peer.join(10)
    assert not peer.is_alive()
    return result


def play_with_coins(other):
    """A process that warms up, takes a part of eight turns, and ends its window."""
    coins = Random(SEED)
    other.send(PART_S)
    other.recv()
    for _ in range(8):
        is_first = coins.random() >= 0.5
        if not is_first:
            other.recv()
        time.sleep(PART_S)
        other.send(PART_S)
        if is_first:
            other.recv()
    other.send("over")
    while other.recv() != "over":
        pass


def test_a_process_measures_one_part_of_each_turn_and_leaves_the_other_part_out_of_its_window(sleeper):
    window, session = take_turns(sleeper, play_with_coins)
    # After eight turns the other window is over, and the rest is measured alone.
    assert [record.turn for record in window][:8] == [0, 1, 2, 3, 4, 5, 6, 7]
    assert len(window) == 10
    excluded_s = math.fsum(record.excluded_s for record in window)
    # A coin lets the other process begin: its first part may lie before this window.
    assert excluded_s >= 7 * PART_S
    steps_s = math.fsum(record.step_s for record in window)
    assert steps_s == pytest.approx(session.raw_wall_s - excluded_s, rel=0.05)


@cases("message", None, PART_S, "over")
def test_a_process_whose_partner_ends_measures_alone(sleeper, message):
    def play(other):
        if message:
            other.send(message)
        other.close()

    window, _ = take_turns(sleeper, play)
    assert len(window) == 10
