"""`lmbench numerics`: the sums agree with the published ones."""

from __future__ import annotations


def test_the_sums_agree_with_the_published_ones(answered):
    for row in answered("numerics")["tables"]["sums"]:
        assert all(abs(float(text) - row["loop"]) < 5e-5 for text in row["published"].split(", "))
