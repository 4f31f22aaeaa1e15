"""A trace, read and attributed: what the tables and guards are computed from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from lmbench.kernels.trace.events import Events, HostEvents, read_events
from lmbench.kernels.trace.graphs import read_graphs
from lmbench.kernels.trace.kernels import KernelTable, attribute
from lmbench.kernels.trace.phases import PhaseTimeline, find_phases
from lmbench.kernels.trace.scopes import PartFinder, Scopes, find_scopes, nested_only
from lmbench.kernels.trace.source import Source, read_source


@dataclass(frozen=True)
class Trace:
    """All that is known of a trace. `host` are the events that nest (operators, modules); `scopes` belongs to them."""

    source: Source
    events: Events
    host: HostEvents
    scopes: Scopes
    finder: PartFinder
    timeline: PhaseTimeline
    kernels: KernelTable

    @property
    def mode(self) -> str:
        """The run's mode, empty for a trace of something else."""
        return str(self.source.run.run.get("mode") or "") if self.source.run else ""


def load_trace(path: str | Path) -> Trace:
    """Read a run's folder or a trace file and find phase, kind and part of every kernel.

    Raises UsageError, in one line, for whatever is no such trace.
    """
    source = read_source(path)
    events = read_events(source)
    timeline = find_phases(events, source.metadata.get("steps"))
    host = nested_only(events.host)
    scopes = find_scopes(host)
    stored = source.metadata.get("module_classes")
    classes = {str(name): str(kind) for name, kind in stored.items()} if isinstance(stored, dict) else {}
    finder = PartFinder(host, scopes, classes)
    graphs = read_graphs(source.metadata.get("compiled_graphs"), classes)
    kernels = attribute(events, host, timeline, scopes, finder, graphs)
    return Trace(source, events, host, scopes, finder, timeline, kernels)
