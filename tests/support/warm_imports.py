"""What the server of `warm_server` imports once: all that lmbench and the tests' own modules need."""

from __future__ import annotations

import planted_faults  # noqa: F401
import pytest  # noqa: F401 (test modules are imported for their functions)

from lmbench.sweep.fork_server import import_everything

import_everything()
