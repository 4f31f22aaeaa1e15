"""The columns and charts of reports, from the report itself and from every room."""

from __future__ import annotations

from lmbench.report.charts import CORE
from lmbench.report.over import OVER
from lmbench.report.published import reference_feature
from lmbench.report.view import Catalogue
from lmbench.rooms import ROOMS


def make_catalogue(reference: str | None = None) -> Catalogue:
    """The Catalogue of the report and of all rooms, with the figures of a `reference`."""
    references = [reference_feature(reference)] if reference else []
    features = [room.load("columns") for room in ROOMS if room.columns]
    return Catalogue(CORE, *features, OVER, *references)
