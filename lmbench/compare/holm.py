"""Holm's correction for many tests at once."""

from __future__ import annotations

from collections.abc import Sequence


def holm(p_values: Sequence[float]) -> list[float]:
    """Adjusted p-values, in the order given: below 0.05 with at most 5 % for any false one among them.

    Sequential rejection (Holm, Scandinavian Journal of Statistics 6, 1979): the k-th smallest of m is multiplied by
    m - k + 1, and no adjusted value is below that of a smaller p.
    """
    adjusted = [0.0] * len(p_values)
    highest = 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        highest = max(highest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = highest
    return adjusted
