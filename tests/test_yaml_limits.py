"""A configuration that somebody sent: YAML that multiplies, or has no bottom, is refused."""

from __future__ import annotations

import pytest

from lmbench.configs import parse_yaml
from lmbench.errors import UsageError

_DOUBLED = "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{', '.join([f'*{chr(97 + i)}'] * 10)}]\n" for i in range(8)
)
_CHAIN = "k0: &k0 [1]\n" + "".join(f"k{i}: &k{i} [*k{i - 1}]\n" for i in range(1, 3000))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (_DOUBLED, "with its aliases written out it has more than 200,000 values"),
        (_DOUBLED.replace("[", "{<<: [").replace("]", "]}").replace("{<<: [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]}", "{x: 1}"),
         "with its aliases written out it has more than 200,000 values"),
        (_CHAIN, "contains itself, or is nested more than 50 levels deep"),
        ("a: &a [*a]", "contains itself"),
        ("&a {b: *a}", "contains itself"),
        ("[" * 100_000, "nested more than 50 levels deep"),
        ("a: 0x" + "f" * 6000, "is no YAML"),
        ("a: 2026-99-99", "is no YAML"),
        ("x: !!python/object/apply:os.system [ls]", "is no YAML"),
        ("--- 1\n--- 2", "is no YAML"),
    ],
)  # fmt: skip
def test_yaml_that_multiplies_or_has_no_bottom_is_refused(text: str, told: str) -> None:
    with pytest.raises(UsageError) as refused:
        parse_yaml(text, "file")
    assert told in str(refused.value)
    assert "\n" not in str(refused.value)


def test_yaml_with_ordinary_aliases_is_read() -> None:
    assert parse_yaml("a: &x {b: 1}\nc: {<<: *x, d: *x}", "file") == {"a": {"b": 1}, "c": {"b": 1, "d": {"b": 1}}}
