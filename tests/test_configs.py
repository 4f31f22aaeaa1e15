"""Reading a configuration: a text that is not YAML is refused in one line."""

from __future__ import annotations

from refusals import usage_error
from tables import cases

from lmbench.configs import parse_yaml


@cases("text", "a: 2026-99-99", "x: !!python/object/apply:os.system [ls]", "--- 1\n--- 2", "[" * 3000)
def test_text_that_is_not_yaml_is_refused_in_one_line(text):
    with usage_error(r"^file is no YAML: .*") as refused:
        parse_yaml(text, "file")
    assert "\n" not in str(refused.value)


def test_yaml_with_aliases_is_read():
    assert parse_yaml("a: &x {b: 1}\nc: {<<: *x, d: *x}", "file") == {"a": {"b": 1}, "c": {"b": 1, "d": {"b": 1}}}


@cases(
    "text",
    "a: &x [*x]",
    "\n".join(["a0: &a0 1", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 10))]),
    ids=["within itself", "a thousand million"],
)
def test_aliases_without_end_are_refused_in_one_line(text):
    with usage_error(r"^file has more than 100,000 values, or an alias within its own anchor"):
        parse_yaml(text, "file")
