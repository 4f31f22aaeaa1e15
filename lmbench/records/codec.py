"""Records as JSON and back, checked against their classes.

msgspec does both: typed, strict, and the fastest. Beside pydantic 2.14 (which comes with wandb) on two busy cores of an
EPYC (`python tests/experiments/codec_costs.py RESULT`, msgspec 0.22): 1 000 run.json of 20 kB in 0.21 s and 26 MiB
against 0.59 s and 92 MiB, 10^6 step records in 1.7 s against 5.0 s, where plain `json`, which checks nothing, takes
0.40 s and 11.5 s.

JSON has no NaN or infinity, and null must keep meaning "not measured". A non-finite number is stored as null, and its
name with `nan`, `inf` or `-inf` under `nonfinite`; reading puts the numbers back.
"""

from __future__ import annotations

import math
import os
import re
import typing
from collections.abc import Iterable
from copy import copy
from functools import cache
from typing import Any, TypeVar

import msgspec
from msgspec import Struct

from lmbench.masking import masked, masked_message, masked_text, masked_words
from lmbench.records.run import SCHEMA_VERSION, RunRecord
from lmbench.records.step import StepRecord

R = TypeVar("R", RunRecord, StepRecord)

#: A path into a record, config included, has some ten names; deeper ones would end Python's recursions.
MAX_DEPTH = 50
#: Of whole numbers, to either side; larger ones become no float, and no text from 4 300 digits on.
_MOST = 2**63

_WRONG_TYPE = re.compile(r"Expected `.*`, got `(\w+)` - at `\$\.?(.*)`", re.DOTALL)
#: Mappings and lists side by side; a sweep of 100 000 cells has two or three for each.
_MOST_PARTS = 500_000
_NONFINITE = ("nan", "inf", "-inf")
_WORDS = {"str": "text", "int": "a whole number", "float": "a number", "bool": "true or false", "array": "a list",
          "object": "a mapping", "null": "null"}  # fmt: skip


class DamagedRecord(ValueError):
    """A record that does not fit its class; the message is one line that says which field."""


class OtherSchema(ValueError):
    """A record of no schema version, or of one that this lmbench does not read; `version` is it, None without one."""

    def __init__(self, version: int | None) -> None:
        super().__init__(f"schema version {version}")
        self.version = version


class _Versioned(Struct):
    schema_version: int | None = None


def decode_run(data: bytes) -> RunRecord:
    """A run's record from the content of run.json.

    Fields that this version does not know are left out: a newer lmbench may add some without another schema version.

    Raises:
        OtherSchema: it has another schema version, or none.
        DamagedRecord: it is no JSON, or a field has the wrong type.
    """
    version = decode(data, _Versioned).schema_version
    if version != SCHEMA_VERSION:
        raise OtherSchema(version)
    return checked(_with_nonfinite(decode(data, RunRecord)))


def decode_step(data: bytes) -> StepRecord:
    """A step's record from a line of steps.jsonl. Raises DamagedRecord."""
    return _with_nonfinite(decode(data, StepRecord))


S = TypeVar("S", bound=Struct)


def decode(data: bytes, kind: type[S]) -> S:
    """A record of any class from its JSON. Raises DamagedRecord."""
    try:
        return msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as error:
        raise DamagedRecord(_what_is_wrong(str(error))) from None
    except msgspec.DecodeError as error:
        raise DamagedRecord(f"it is no JSON: {error}") from None
    except UnicodeDecodeError as error:
        raise DamagedRecord(f"it is no JSON: byte {error.start} of a text is no UTF-8") from None
    except RecursionError:
        raise DamagedRecord("it is nested too deeply") from None


def checked(record: S) -> S:
    """The record, where nothing in it is nested too deeply and no whole number is too large to be worked with, be it in
    what others make up (a configuration, axes). Raises DamagedRecord."""
    level: list[tuple[str, Any]] = [("", record)]
    for _ in range(MAX_DEPTH):
        deeper: list[tuple[str, Any]] = []
        for path, holder in level:
            for key, value in _children(holder):
                if type(value) is int:
                    if not -_MOST <= value < _MOST:
                        raise DamagedRecord(f"{_join(path, key)} is a number of more than 64 bits")
                elif isinstance(value, Struct | dict | list | tuple):
                    deeper.append((_join(path, key), value))
        if len(deeper) > _MOST_PARTS:
            raise DamagedRecord(f"it has more than {_MOST_PARTS:,} parts")
        if not deeper:
            return record
        level = deeper
    raise DamagedRecord(f"it is nested too deeply, more than {MAX_DEPTH} levels")


def _children(value: Any) -> Iterable[tuple[object, Any]]:
    if isinstance(value, Struct):
        return ((name, getattr(value, name)) for name in value.__struct_fields__)
    if isinstance(value, dict):
        return value.items()
    return enumerate(value) if isinstance(value, list | tuple) else ()


def _what_is_wrong(message: str) -> str:
    """msgspec's complaint in our words: `phases.step.mean_s is text`."""
    wrong = _WRONG_TYPE.fullmatch(message)
    if wrong is None:
        text = message.replace("`$.", "`").replace("`", "")
        return " ".join(text.split())
    found, path = wrong.groups()
    return f"{path or 'it'} is {_WORDS.get(found, found)}"


def encode_run(record: RunRecord) -> bytes:
    """The content of run.json, one field a line; ends in a line feed. Objects in `config` that JSON has not become
    text; no secret is in it, by the names of settings and variables and by the looks of any text."""
    plain = _plain_record(_without_secrets(record))
    return indented_json(plain).encode()


def _without_secrets(record: RunRecord) -> RunRecord:
    """A record whose settings, command line, variables and error have `***` for secrets."""
    found = copy(record)
    found.config = masked(record.config)
    found.argv = record.argv and masked_words(record.argv)
    if record.environment is not None and record.environment.variables is not None:
        found.environment = copy(record.environment)
        found.environment.variables = masked(record.environment.variables)
    if record.error is not None and record.error.message is not None:
        found.error = copy(record.error)
        found.error.message = masked_message(record.error.message)
    return found


def indented_json(value: object, indent: int = 1) -> str:
    """What msgspec takes as JSON that people can read, an item a line; ends in a line feed."""
    return msgspec.json.format(msgspec.json.encode(value), indent=indent).decode() + "\n"


def encode_step(step: StepRecord) -> bytes:
    """A line of steps.jsonl, its line feed included."""
    for name in StepRecord.__struct_fields__:
        value = getattr(step, name)
        if type(value) is float and not math.isfinite(value):
            return msgspec.json.encode(_plain_record(step)) + b"\n"
    return msgspec.json.encode(step) + b"\n"


def as_dict(record: Struct) -> dict[str, Any]:
    """A record as plain dictionaries and lists, non-finite numbers in their places."""
    plain: dict[str, Any] = msgspec.to_builtins(record, enc_hook=_plain, str_keys=True)
    return plain


def _plain_record(record: Struct) -> dict[str, Any]:
    found: dict[str, str] = {}
    plain: dict[str, Any] = _without_nonfinite(as_dict(record), "", found)
    return {**plain, "nonfinite": found}


def _without_nonfinite(value: Any, path: str, found: dict[str, str]) -> Any:
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        found[path] = str(float(value))
        return None
    if isinstance(value, str):
        return masked_text(value)
    if isinstance(value, dict):
        return {key: _without_nonfinite(item, _join(path, key), found) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nonfinite(item, _join(path, index), found) for index, item in enumerate(value)]
    return value


def _join(path: str, key: object) -> str:
    return f"{path}.{key}" if path else str(key)


def _with_nonfinite(record: R) -> R:
    for path, name in record.nonfinite.items():
        *parents, last = path.split(".")
        holder: Any = record
        for key in parents:
            holder = _child(holder, key)
        if name not in _NONFINITE or not _put(holder, last, float(name)):
            raise DamagedRecord(f"nonfinite.{path} is {name!r}, or leads to no number")
    record.nonfinite = {}
    return record


def _child(holder: Any, key: str) -> Any:
    if isinstance(holder, dict):
        return holder.get(key)
    if isinstance(holder, list):
        return holder[int(key)] if _is_place(key, holder) else None
    return getattr(holder, key, None) if isinstance(holder, Struct) else None


def _put(holder: Any, key: str, value: float) -> bool:
    """Put a number where one can be and none is; returns whether it could."""
    if _child(holder, key) is not None:
        return False
    if isinstance(holder, dict):
        holder[key] = value
    elif isinstance(holder, list) and _is_place(key, holder):
        holder[int(key)] = value
    elif isinstance(holder, Struct) and key in _float_fields(type(holder)):
        setattr(holder, key, value)
    else:
        return False
    return True


def _is_place(key: str, holder: list[Any]) -> bool:
    return key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < len(holder)


@cache
def _float_fields(kind: type[Struct]) -> frozenset[str]:
    """Names of the fields that take a number with a fraction."""
    hints = typing.get_type_hints(kind)
    return frozenset(name for name, hint in hints.items() if float in (hint, *typing.get_args(hint)))


def _plain(value: Any) -> Any:
    """What JSON has not: a 0-dimensional array's number, a path's text, a set's sorted list, else the object's text."""
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
        item = value.item()
        return item if not isinstance(item, float) or math.isfinite(item) else str(item)
    if isinstance(value, set | frozenset):
        return sorted(value, key=str)
    return str(value)
