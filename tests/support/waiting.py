"""Waiting for what another process does."""

from __future__ import annotations

import time


def wait_for(state, timeout_s=60):
    """What `state` returns, once that is true."""
    deadline_s = time.monotonic() + timeout_s
    while not (value := state()):
        assert time.monotonic() < deadline_s, f"not so after {timeout_s} s"
        time.sleep(0.02)
    return value
