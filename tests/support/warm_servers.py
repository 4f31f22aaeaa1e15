"""One warm server for the sweeps of several tests: what importing costs is paid once."""

from __future__ import annotations

from contextlib import contextmanager

from lmbench.sweep.local import LastingExecutor


@contextmanager
def warm_servers():
    servers = LastingExecutor()
    try:
        yield servers
    finally:
        servers.shut_down()
