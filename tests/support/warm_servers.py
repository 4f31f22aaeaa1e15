"""One warm server for the sweeps of several tests: what importing costs is paid once."""

from __future__ import annotations

from contextlib import contextmanager

from lmbench.sweep.local import LocalExecutor


class WarmServers(LocalExecutor):
    """Keeps its servers from round to round and from sweep to sweep."""

    def begin_round(self, rounds_to_come):
        """The servers stay."""

    def close(self):
        """The servers stay."""


@contextmanager
def warm_servers():
    servers = WarmServers(lambda text: None, cores=1)
    try:
        yield servers
    finally:
        LocalExecutor.close(servers)
