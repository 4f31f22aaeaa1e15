"""One warm server for the sweeps of several tests: what importing costs is paid once."""

from __future__ import annotations

import os
from contextlib import contextmanager
from unittest import mock

from lmbench.sweep.local import LocalExecutor


class WarmServers(LocalExecutor):
    """Servers that the end of a sweep leaves running; W&B is on in their forks, whichever test starts one."""

    def await_ready(self, environments):
        with mock.patch.dict(os.environ):
            os.environ.pop("WANDB_MODE", None)
            super().await_ready(environments)

    def close(self):
        """Keep the servers."""


@contextmanager
def warm_servers():
    servers = WarmServers(is_lasting=True)
    try:
        yield servers
    finally:
        LocalExecutor.close(servers)
