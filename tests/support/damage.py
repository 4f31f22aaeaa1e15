"""Damaged files from a fixed seed: valid ones of every kind with a few places changed, cut off or replaced."""

from __future__ import annotations

import copy
import gzip
import json
import random
from typing import Any

#: Values that a field may have in a file of somebody else's.
ODD: tuple[Any, ...] = (
    None, "", "x", "1", "nan", "../../..", "/etc/passwd", "line\nfeed", "\x1b[31mred", "\u202eright", "<script>",
    "=1+1", "%s{0}{a.b}%n", "[bold]", "a" * 5000, True, False, 0, -1, 1, 7, 2**31, 2**53 + 1, 2**63, -(2**63), 10**30,
    0.0, -0.0, -1.5, 1e-320, 1e-9, 1e16, 1e308, -1e308, [], [[]], [None], [1, "a"], ["a", "b"], {}, {"a": None},
    {"a": {"b": [1]}}, {"": ""}, {"a.b": 1}, json.loads("[" * 60 + "]" * 60),
)  # fmt: skip

Place = tuple[Any, ...]


def places(tree: Any, prefix: Place = ()) -> list[Place]:
    """Paths of everything in a tree of mappings and lists, the root left out."""
    pairs = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    return [found for key, child in pairs for found in ((*prefix, key), *places(child, (*prefix, key)))]


def change_tree(tree: Any, chance: random.Random, odd: tuple[Any, ...] = ODD) -> Any:
    """A copy with one to three places changed, removed, moved or added."""
    tree = copy.deepcopy(tree)
    for _ in range(chance.choice((1, 1, 1, 2, 3))):
        found = places(tree)
        if not found:
            return tree
        *parents, last = chance.choice(found)
        holder = tree
        for key in parents:
            holder = holder[key]
        match chance.randrange(8):
            case 0:
                del holder[last]
            case 1 if isinstance(holder, dict):
                holder[f"{last}2"] = holder.pop(last)
            case 2 if isinstance(holder, list):
                holder.extend(copy.deepcopy(holder) * 3)
            case 3 if isinstance(holder[last], int | float) and not isinstance(holder[last], bool):
                holder[last] *= chance.choice((-1, 0, 10**6, 1e300))
            case 4 | 5:
                # Of the same kind, where a type does not tell that it is wrong.
                same = [value for value in odd if type(value) is type(holder[last])]
                holder[last] = copy.deepcopy(chance.choice(same or odd))
            case _:
                holder[last] = copy.deepcopy(chance.choice(odd))
    return tree


def change_bytes(data: bytes, chance: random.Random) -> bytes:
    """Cut off, flipped, doubled, with bytes in between that do not belong there."""
    at = chance.randrange(len(data) + 1)
    ends = (b"\0", b"\xff\xfe", b"\xef\xbb\xbf", b"NaN", b'"', b"[" * 2000, b"\n" * 50, b"1e999", b"\\ud800")
    junk, flipped = chance.choice(ends), bytes([chance.randrange(256)])
    return chance.choice(
        (b"", data[:at], data[at:], data + data, junk + data, data[:at] + junk + data[at:],
         data[:at] + flipped + data[at + 1 :])
    )  # fmt: skip


def change_json(data: bytes, chance: random.Random) -> bytes:
    """A JSON text, mostly still JSON."""
    if chance.random() < 0.15:
        return change_bytes(data, chance)
    text = json.dumps(change_tree(json.loads(data), chance))
    if chance.random() < 0.05:
        # The last of two keys of one name counts.
        text = text.replace("{", '{"outcome": "ok", "outcome": [], ', 1)
    return text.encode()


def change_lines(data: bytes, chance: random.Random) -> bytes:
    """A file of JSON lines."""
    lines = data.splitlines()
    at = chance.randrange(len(lines))
    lines[at] = change_json(lines[at], chance)
    return b"\n".join(lines) + chance.choice((b"\n", b"", b"\n\n{", b"\n" + b"x" * 100_000))


def change_packed(data: bytes, chance: random.Random) -> bytes:
    """A gzip file of JSON."""
    if chance.random() < 0.3:
        return change_bytes(data, chance)
    return gzip.compress(change_json(gzip.decompress(data), chance), 1)
