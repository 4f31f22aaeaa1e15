"""What reading records costs with msgspec, pydantic and plain json: `python tests/experiments/codec_costs.py RESULT`.

RESULT is a run's folder. The models of pydantic are made from the same classes, strict as ours are.
"""

from __future__ import annotations

import json
import sys
import time
import types
import typing
from pathlib import Path
from typing import Any

import msgspec
import pydantic

from lmbench.records.codec import decode_run, decode_step
from lmbench.records.field import PerPhase
from lmbench.records.run import RunRecord
from lmbench.records.step import StepRecord

_models: dict[Any, Any] = {}


def model(cls: Any) -> Any:
    """pydantic's counterpart of a record's class."""
    if cls not in _models:
        hints = typing.get_type_hints(cls)
        required = [field.name for field in msgspec.structs.fields(cls) if field.required]
        fields: dict[str, Any] = {
            name: (_converted(hint), ...) if name in required else (_converted(hint) | None, None)
            for name, hint in hints.items()
        }
        config = pydantic.ConfigDict(strict=True, protected_namespaces=())
        _models[cls] = pydantic.create_model(cls.__name__, __config__=config, **fields)
    return _models[cls]


def _converted(hint: Any) -> Any:
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return model(hint)
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is PerPhase:
        inner = _converted(arguments[0])
        spans = dict.fromkeys(PerPhase.__struct_fields__, (inner | None, None))
        return _models.setdefault(hint, pydantic.create_model(f"PerPhase{len(_models)}", **spans))
    if origin in (typing.Union, types.UnionType):
        return typing.Union[tuple(_converted(one) for one in arguments)]  # noqa: UP007
    return list[_converted(arguments[0])] if origin is list else hint


def _resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20


def main(folder: Path) -> None:
    run = (folder / "run.json").read_bytes()
    step = (folder / "steps.jsonl").read_bytes().splitlines()[0]
    print(f"run.json {len(run):,} bytes, a step {len(step):,} bytes")
    readers = {
        "json": (json.loads, json.loads),
        "msgspec": (decode_run, decode_step),
        "pydantic": (model(RunRecord).model_validate_json, model(StepRecord).model_validate_json),
    }
    for name, (read_run, read_step) in readers.items():
        before_mib, start = _resident_mib(), time.perf_counter()
        kept = [read_run(run) for _ in range(1000)]
        runs_s, kept_mib = time.perf_counter() - start, _resident_mib() - before_mib
        del kept
        start = time.perf_counter()
        for _ in range(1_000_000):
            read_step(step)
        steps_s = time.perf_counter() - start
        print(f"{name:<9} 1 000 runs {runs_s:.2f} s, {kept_mib:.0f} MiB kept; 10^6 steps {steps_s:.1f} s")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
