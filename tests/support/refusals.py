"""A mistake of the user's, as code that calls lmbench meets it."""

from __future__ import annotations

import pytest

from lmbench.errors import UsageError


def usage_error(line):
    """The block ends with a usage error whose line matches a pattern."""
    return pytest.raises(UsageError, match=line)
