"""One warm server for the sweeps of several tests: what importing costs is paid once."""

from __future__ import annotations

from contextlib import contextmanager

from lmbench.sweep.local import LocalExecutor


class WarmServers(LocalExecutor):
    """Servers that the end of a sweep leaves running."""

    def close(self):
        """Keep the servers."""


@contextmanager
def warm_servers():
    servers = WarmServers(is_lasting=True)
    try:
        yield servers
    finally:
        LocalExecutor.close(servers)
