"""Records as JSON and back, checked against their classes.

msgspec does both: it is typed, strict and the fastest. Measured on two busy cores of an EPYC with msgspec 0.22 and
pydantic 2.14, which comes with wandb:

- 1 000 run.json of 20 kB: msgspec 0.21 s and 26 MiB, pydantic 0.59 s and 92 MiB, plain `json`, which checks nothing,
  0.40 s.
- 10^6 step records: msgspec 1.7 s, pydantic 5.0 s, plain `json` 11.5 s.

JSON has no NaN or infinity, and null means "not measured". So a non-finite number is stored as null, and `nonfinite`
has its name with `nan`, `inf` or `-inf`. Reading puts the numbers back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec

from lmbench.files import Unreadable, read_file
from lmbench.masking import keep_environment_secret, masked, masked_words
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.step import StepRecord
from lmbench.records.vocabulary import Values

R = TypeVar("R")

#: Levels of nesting that are read. Real records, with their configuration, have some ten; far deeper ones would exceed
#: Python's recursion limit.
MAX_DEPTH = 50
#: Whole numbers outside of [-2^63, 2^63) are refused, since the largest ones cannot become floats, and so are numbers
#: that a change of their unit could make infinite.
_MAX_WHOLE, _MAX_NUMBER = 2**63, 1e200
#: Largest file that `read_packed` reads, unpacked: a sweep.json has 500 bytes per cell.
MAX_PACKED_BYTES = 64 * 2**20
_step_values = attrgetter(*(entry.name for entry in fields(StepRecord)))
_STEP = msgspec.json.Decoder(StepRecord)


class DamagedRecord(ValueError):
    """A record does not fit its class; the message is one line that names the field."""


class OtherSchema(ValueError):
    """A record has a schema version that this lmbench does not read, or none; the message follows its file's name."""


class _Head(msgspec.Struct):
    schema_version: int | None = None
    nonfinite: dict[str, Literal["nan", "inf", "-inf"]] = {}


def decode_run(data: bytes) -> RunRecord:
    """A run's record from the content of run.json.

    Unknown fields are ignored, since a newer lmbench may add fields without changing the schema version.

    Raises:
        OtherSchema: the record has another schema version, or none.
        DamagedRecord: the content is not JSON, or a field has the wrong type.
    """
    plain = _plain(data)
    version = _typed(plain, _Head).schema_version
    if version is None:
        raise OtherSchema("is no lmbench result: it has no schema_version; give a run's folder")
    if version != SCHEMA_VERSION:
        problem = f"has schema version {version}, this lmbench reads {SCHEMA_VERSION}"
        raise OtherSchema(f"{problem}; use the lmbench that wrote it")
    run = _typed(_with_nonfinite(plain), RunRecord)
    run.throughput.refuse_impossible()
    return run


def decode_step(data: bytes) -> StepRecord:
    """A step's record from a line of steps.jsonl.

    Raises:
        DamagedRecord: the line is not JSON, or a field has the wrong type.
    """
    record: StepRecord = _checked(_STEP.decode, data)
    if record.nonfinite:
        record = _typed(_with_nonfinite(_plain(data)), StepRecord)
    return record


def decode(data: bytes, kind: type[R]) -> R:
    """A record of any class from its JSON.

    Raises:
        DamagedRecord: the data is not JSON, or a field has the wrong type.
    """
    return _typed(_plain(data), kind)


def read_packed(path: Path, kind: type[R]) -> R:
    """A record from a file of JSON, gzipped or plain, of at most 64 MiB unpacked.

    Raises:
        DamagedRecord: the file cannot be read, is not JSON, or a field has the wrong type.
    """
    try:
        return decode(read_file(path, MAX_PACKED_BYTES, unpacks=True), kind)
    except Unreadable as error:
        raise DamagedRecord(f"{path.name} is not read: {error}") from error


def find_packed(path: Path, kind: type[R]) -> R | None:
    """The record that `read_packed` reads; None where the file is missing, is damaged or does not fit the class."""
    with suppress(DamagedRecord):
        return read_packed(path, kind)
    return None


def _plain(data: bytes) -> Any:
    plain = _checked(msgspec.json.decode, data)
    _check_size(plain, MAX_DEPTH)
    return plain


def _typed(plain: Any, kind: type[R]) -> R:
    record: R = _checked(partial(msgspec.convert, type=kind), plain)
    return record


def _checked(read: Callable[[Any], Any], data: Any) -> Any:
    """The result of a msgspec reader; its errors become a DamagedRecord: `Expected int, got str - at window.steps`."""
    try:
        return read(data)
    except RecursionError:
        raise DamagedRecord("it is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        complaint = " ".join(str(error).replace("`$.", "").replace("`", "").split())
        is_json = isinstance(error, msgspec.ValidationError)
        raise DamagedRecord(complaint if is_json else f"it is no JSON: {complaint}") from None


def _check_size(value: Any, depth: int) -> None:
    """Raises DamagedRecord where a free-form part (a configuration, axes) nests too deeply or has too large numbers."""
    if isinstance(value, dict | list):
        if not depth:
            raise DamagedRecord(f"it is nested too deeply, more than {MAX_DEPTH} levels")
        for item in value.values() if isinstance(value, dict) else value:
            _check_size(item, depth - 1)
    elif isinstance(value, int) and not -_MAX_WHOLE <= value < _MAX_WHOLE:
        raise DamagedRecord("it has a number of more than 64 bits")
    elif isinstance(value, float) and abs(value) > _MAX_NUMBER:
        raise DamagedRecord(f"it has a number beyond {_MAX_NUMBER:g}")


def encode_run(record: RunRecord) -> bytes:
    """The content of run.json, one field per line, with a line feed at its end.

    Objects in `config` that JSON cannot hold become text, and numbers that are too large to be read back become text or
    infinite. Secrets are masked: values of settings and variables with a
    secret's name, and text that looks like a key.
    """
    keep_environment_secret()
    plain = _changed(masked(as_dict(record)), _readable) | {"argv": record.argv and masked_words(record.argv)}
    return indented_json(plain | {"nonfinite": _nonfinite(plain)}).encode()


def _changed(tree: Any, change: Callable[[Any], Any]) -> Any:
    """A tree with its keys and leaves changed."""
    if isinstance(tree, dict):
        return {change(key): _changed(value, change) for key, value in tree.items()}
    return [_changed(value, change) for value in tree] if isinstance(tree, list) else change(tree)


def _readable(value: Any) -> Any:
    """A value that `_check_size` takes."""
    if isinstance(value, float) and abs(value) > _MAX_NUMBER:
        return math.copysign(math.inf, value)
    return hex(value) if isinstance(value, int) and not -_MAX_WHOLE <= value < _MAX_WHOLE else value


def indented_json(value: object) -> str:
    """A value that msgspec can encode, as readable JSON with one item per line and a line feed at its end."""
    try:
        data = msgspec.json.encode(value, enc_hook=_builtin)
    except UnicodeEncodeError:
        data = msgspec.json.encode(_changed(as_dict(value), _escaped))
    return msgspec.json.format(data, indent=1).decode() + "\n"


def _escaped(value: Any) -> Any:
    r"""A text with what is not UTF-8, such as in the name of a folder, escaped as in Python: `\udce9`."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value


def encode_step(step: StepRecord) -> bytes:
    """A line of steps.jsonl, including its line feed."""
    numbers = [value for value in (*_step_values(step), *step.scalars.values()) if type(value) is float]
    # Hardly any step has a number that JSON cannot hold, or that is too large to be read back: then this sum is none.
    if not sum(map(abs, numbers)) <= _MAX_NUMBER:
        plain = _changed(as_dict(step), _readable)
        return msgspec.json.encode(plain | {"nonfinite": _nonfinite(plain)}) + b"\n"
    return msgspec.json.encode(step) + b"\n"


def as_dict(record: object) -> Values:
    """A record as plain dictionaries and lists, with non-finite numbers left in place."""
    plain: Values = msgspec.to_builtins(record, enc_hook=_builtin, str_keys=True)
    return plain


def _builtin(value: Any) -> Any:
    """A plain value for an object unknown to JSON: the number in a 0-dimensional array, the text of anything else."""
    is_number = hasattr(value, "item") and getattr(value, "ndim", None) == 0
    return value.item() if is_number else str(value)


def _leaves(tree: Any, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Dotted path of each leaf of nested dictionaries and lists, with its container and the key in that."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, dict | list | tuple):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", tree, key


def _nonfinite(tree: Any) -> dict[str, str]:
    """`nan`, `inf` or `-inf` for each non-finite number in a record, by its dotted path."""
    numbers = ((path, container[key]) for path, container, key in _leaves(tree))
    return {path: str(float(n)) for path, n in numbers if isinstance(n, float) and not math.isfinite(n)}


def _with_nonfinite(plain: Any) -> Any:
    """Put a record's non-finite numbers back in the place of their nulls.

    Raises:
        DamagedRecord: a path leads to something other than null.
    """
    nonfinite = _typed(plain, _Head).nonfinite
    if not nonfinite:
        return plain
    nulls = {path: (container, key) for path, container, key in _leaves(plain) if container[key] is None}
    for path, name in nonfinite.items():
        if path not in nulls:
            raise DamagedRecord(f"nonfinite.{path} is {name!r}, or leads to no number")
        container, key = nulls[path]
        container[key] = float(name)
    return {**plain, "nonfinite": {}}
