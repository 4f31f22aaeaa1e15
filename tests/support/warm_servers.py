"""One warm server for the sweeps of several tests: what importing costs is paid once."""

from __future__ import annotations

from contextlib import contextmanager

from lmbench.sweep.local import HeldExecutor


@contextmanager
def warm_servers():
    servers = HeldExecutor(is_lasting=True)
    try:
        yield servers
    finally:
        servers.shut_down()
