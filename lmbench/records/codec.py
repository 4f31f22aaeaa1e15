"""Records as JSON and back, checked against their classes.

msgspec does both: typed, strict, and the fastest. Beside pydantic 2.14 (which comes with wandb) on two busy cores of an
EPYC (msgspec 0.22): 1 000 run.json of 20 kB in 0.21 s and 26 MiB
against 0.59 s and 92 MiB, 10^6 step records in 1.7 s against 5.0 s, where plain `json`, which checks nothing, takes
0.40 s and 11.5 s.

JSON has no NaN or infinity, and null must keep meaning "not measured". A non-finite number is stored as null, and its
name with `nan`, `inf` or `-inf` under `nonfinite`; reading puts the numbers back.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from msgspec import Struct
from msgspec.structs import replace

from lmbench.files import Unreadable, read_file
from lmbench.masking import keep_environment_secret, masked, masked_words
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.step import StepRecord

S = TypeVar("S", bound=Struct)

#: A path into a record, config included, has some ten names; deeper ones would end Python's recursions.
MAX_DEPTH = 50
#: Larger whole numbers, to either side, become no float.
_MAX_WHOLE = 2**63
_MAX_UNPACKED_BYTES = 32 * 2**20
_STEP = msgspec.json.Decoder(StepRecord)


class DamagedRecord(ValueError):
    """A record that does not fit its class; the message is one line that says which field."""


class OtherSchema(ValueError):
    """A record of no schema version, or of one that this lmbench does not read; `version` is it, None without one."""

    def __init__(self, version: int | None) -> None:
        super().__init__(f"schema version {version}")
        self.version = version


class _Head(Struct):
    schema_version: int | None = None
    nonfinite: dict[str, Literal["nan", "inf", "-inf"]] = {}


def decode_run(data: bytes) -> RunRecord:
    """A run's record from the content of run.json.

    Fields that this version does not know are left out: a newer lmbench may add some without another schema version.

    Raises:
        OtherSchema: it has another schema version, or none.
        DamagedRecord: it is no JSON, or a field has the wrong type.
    """
    plain = _plain(data)
    version = _typed(plain, _Head).schema_version
    if version != SCHEMA_VERSION:
        raise OtherSchema(version)
    return _typed(_with_nonfinite(plain), RunRecord)


def decode_step(data: bytes) -> StepRecord:
    """A step's record from a line of steps.jsonl. Raises DamagedRecord."""
    record: StepRecord = _checked(_STEP.decode, data)
    if record.nonfinite:
        record = _typed(_with_nonfinite(_plain(data)), StepRecord)
    return record


def decode(data: bytes, kind: type[S]) -> S:
    """A record of any class from its JSON. Raises DamagedRecord."""
    return _typed(_plain(data), kind)


def read_packed(path: Path, kind: type[S]) -> S:
    """A record from its gzipped JSON of at most 32 MiB. Raises DamagedRecord."""
    try:
        return decode(read_file(path, _MAX_UNPACKED_BYTES, unpacks=True), kind)
    except Unreadable as error:
        raise DamagedRecord(f"{path.name} is not read: {error}") from error


def _plain(data: bytes) -> Any:
    plain = _checked(msgspec.json.decode, data)
    _check_size(plain, MAX_DEPTH)
    return plain


def _typed(plain: Any, kind: type[S]) -> S:
    record: S = _checked(partial(msgspec.convert, type=kind), plain)
    return record


def _checked(read: Callable[[Any], Any], data: Any) -> Any:
    """What msgspec reads, its complaints as DamagedRecord in one line: `Expected int, got str - at window.steps`."""
    try:
        return read(data)
    except RecursionError:
        raise DamagedRecord("it is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        complaint = " ".join(str(error).replace("`$.", "").replace("`", "").split())
        is_json = isinstance(error, msgspec.ValidationError)
        raise DamagedRecord(complaint if is_json else f"it is no JSON: {complaint}") from None


def _check_size(value: Any, depth: int) -> None:
    """Raises DamagedRecord where free-form parts (a configuration, axes) nest too deeply or hold too large a number."""
    if isinstance(value, dict | list):
        if not depth:
            raise DamagedRecord(f"it is nested too deeply, more than {MAX_DEPTH} levels")
        for item in value.values() if isinstance(value, dict) else value:
            _check_size(item, depth - 1)
    elif isinstance(value, int) and not -_MAX_WHOLE <= value < _MAX_WHOLE:
        raise DamagedRecord("it has a number of more than 64 bits")


def encode_run(record: RunRecord) -> bytes:
    """The content of run.json, one field a line; ends in a line feed. Objects in `config` that JSON has not become
    text; no secret is in it, by the names of settings and variables and by the looks of any text."""
    keep_environment_secret()
    plain = masked(as_dict(record)) | {"argv": record.argv and masked_words(record.argv)}
    return indented_json(plain | {"nonfinite": _nonfinite(plain)}).encode()


def indented_json(value: object, indent: int = 1) -> str:
    """What msgspec takes as JSON that people can read, an item a line; ends in a line feed."""
    return msgspec.json.format(msgspec.json.encode(value), indent=indent).decode() + "\n"


def encode_step(step: StepRecord) -> bytes:
    """A line of steps.jsonl, its line feed included."""
    values = {name: getattr(step, name) for name in StepRecord.__struct_fields__}
    nonfinite = {name: str(v) for name, v in values.items() if type(v) is float and not math.isfinite(v)}
    return msgspec.json.encode(replace(step, nonfinite=nonfinite) if nonfinite else step) + b"\n"


def as_dict(record: Struct) -> dict[str, Any]:
    """A record as plain dictionaries and lists, non-finite numbers in their places."""
    plain: dict[str, Any] = msgspec.to_builtins(record, enc_hook=_builtin, str_keys=True)
    return plain


def _builtin(value: Any) -> Any:
    """What JSON has not: a 0-dimensional array's number, else the object's text."""
    is_number = hasattr(value, "item") and getattr(value, "ndim", None) == 0
    return value.item() if is_number else str(value)


def _nonfinite(value: Any, path: str = "") -> dict[str, str]:
    """Names of the non-finite numbers in a record, for which JSON has null, by their dotted paths."""
    if isinstance(value, float):
        return {} if math.isfinite(value) else {path[1:]: str(float(value))}
    items = value.items() if isinstance(value, dict) else enumerate(value if isinstance(value, list | tuple) else ())
    return {inner: name for key, item in items for inner, name in _nonfinite(item, f"{path}.{key}").items()}


def _with_nonfinite(plain: Any) -> Any:
    """Put a record's non-finite numbers back where they are null. Raises DamagedRecord for a path to anything else."""
    for path, name in _typed(plain, _Head).nonfinite.items():
        holder: Any = None
        value: Any = plain
        try:
            for key in path.split("."):
                holder, place = value, int(key) if isinstance(value, list) else key
                value = holder[place]
            if value is not None:
                raise ValueError
            holder[place] = float(name)
        except (LookupError, TypeError, ValueError):
            raise DamagedRecord(f"nonfinite.{path} is {name!r}, or leads to no number") from None
    return {**plain, "nonfinite": {}}
