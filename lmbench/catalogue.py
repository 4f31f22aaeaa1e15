"""The columns and charts of reports, from the report itself and from every room."""

from __future__ import annotations

from lmbench.attention import ATTENTION
from lmbench.convergence.in_report import CONVERGENCE
from lmbench.kernels.in_report import KERNELS
from lmbench.memory.timeline import MEMORY
from lmbench.report.charts import CORE
from lmbench.report.over import OVER
from lmbench.report.published import reference_feature
from lmbench.report.view import Catalogue


def make_catalogue(reference: str | None = None) -> Catalogue:
    """The Catalogue of the report and of all rooms, with the figures of a `reference`."""
    references = [reference_feature(reference)] if reference else []
    return Catalogue(CORE, ATTENTION, CONVERGENCE, KERNELS, MEMORY, OVER, *references)
