"""CSV of rooms that do not give an `Answer` yet."""

from __future__ import annotations

from lmbench.report.render import csv_field

__all__ = ["csv_field"]
