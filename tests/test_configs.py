"""Reading a configuration: a text that is not YAML is refused in one line."""

from __future__ import annotations

import pytest

from lmbench.configs import parse_yaml
from lmbench.errors import UsageError


@pytest.mark.parametrize(
    "text", ["a: 2026-99-99", "x: !!python/object/apply:os.system [ls]", "--- 1\n--- 2", "[" * 3000]
)
def test_text_that_is_not_yaml_is_refused_in_one_line(text):
    with pytest.raises(UsageError, match=r"^file is no YAML: .*") as refused:
        parse_yaml(text, "file")
    assert "\n" not in str(refused.value)


def test_yaml_with_aliases_is_read():
    assert parse_yaml("a: &x {b: 1}\nc: {<<: *x, d: *x}", "file") == {"a": {"b": 1}, "c": {"b": 1, "d": {"b": 1}}}
