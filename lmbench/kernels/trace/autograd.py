"""From the autograd engine's nodes back to the forward operators that made them."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from lmbench.kernels.trace.events import NONE, HostEvents, Integers
from lmbench.kernels.trace.operators import ENGINE

Creators = dict[int, dict[int, int]]


def forward_of_nodes(host: HostEvents) -> Integers:
    """For each event of the engine (`autograd::engine::evaluate_function: ...`) the index of the forward operator that
    made its node, NONE for all other events and where it cannot be told.

    PyTorch numbers the nodes that a thread makes; an operator carries the number that the thread's next node will have,
    so that the last operator to begin with a number is the one that made the node (an operator that needs no gradient
    makes none, and the next one carries the same number). A node's event carries its number, and under `Fwd thread id`
    one for the thread, which stands nowhere else in the trace: the thread is the one that has most of these numbers.
    """
    found = np.full(len(host.names), NONE, dtype=np.int64)
    creators = _creators(host)
    nodes: dict[int, list[int]] = defaultdict(list)
    for index in np.flatnonzero((host.sequence != NONE) & (host.forward_thread > 0)):
        if host.names[index].startswith(ENGINE):
            nodes[int(host.forward_thread[index])].append(int(index))
    for indices in nodes.values():
        made = _likeliest(creators, host.sequence[indices])
        for node in indices:
            creator = made.get(int(host.sequence[node]), NONE)
            # A number of a node that was made before the trace began can come again on another thread.
            if creator != NONE and host.start_ns[creator] <= host.start_ns[node]:
                found[node] = creator
    return found


def _creators(host: HostEvents) -> Creators:
    """By thread and sequence number, the last forward operator that began with it."""
    found: Creators = defaultdict(dict)
    # Events of a thread stand in the order of their starts: later ones replace earlier ones.
    for index in np.flatnonzero((host.sequence != NONE) & (host.forward_thread <= 0)):
        found[int(host.thread[index])][int(host.sequence[index])] = int(index)
    return found


def _likeliest(creators: Creators, sequence: Integers) -> dict[int, int]:
    numbers = set(sequence.tolist())
    return max(creators.values(), key=lambda made: len(numbers & made.keys()), default={})
