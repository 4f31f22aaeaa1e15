"""A run's recorded dtypes, read, and what was published of the same model."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from lmbench.dtypes.reasons import words
from lmbench.dtypes.recorded import DtypeNotes, NotedModule, read_notes
from lmbench.errors import UsageError
from lmbench.records.instruments import DtypeRecord
from lmbench.records.load import is_run_folder, load_run
from lmbench.records.run import RunRecord
from lmbench.reference.published import load_dtypes

#: The published model, and whose output a published tensor is.
_PUBLISHED_MODEL = "lmbench.model.toy.Toy"
_PUBLISHED_OUTPUTS = {"fc1_output": "fc1", "relu_output": "relu", "layernorm_output": "ln", "fc2_output": "fc2"}
_INDEX = re.compile(r"(?<=\.)\d+(?=\.|$)")


@dataclass(frozen=True)
class Findings:
    """One run's dtypes; `path` is its folder."""

    path: Path
    run: RunRecord
    record: DtypeRecord
    notes: DtypeNotes

    @property
    def title(self) -> str:
        """What tells this run from others: precision and device."""
        return f"{self.run.precision} on {_device(self.notes.device_type)}"


@dataclass(frozen=True)
class ModuleRow:
    """Modules that are alike in all but their number in a list: `blocks.*.norm`."""

    path: str
    count: int
    module: NotedModule


@dataclass(frozen=True)
class TensorRow:
    """A kind of tensor, or a module's output, with its dtypes in words; `published` is empty where nobody tells."""

    name: str
    dtypes: str
    reason: str
    published: str = ""


def examine(source: str) -> Findings:
    """The dtypes recorded in a result folder.

    Raises:
        UsageError: it is no result, has no dtypes, or they cannot be read.
    """
    path = Path(source)
    if not is_run_folder(path):
        raise UsageError(f"{source!r} is no result; give the folder of a run recorded with --dtypes.record true")
    run = load_run(path, with_steps=False).record
    record = run.dtypes
    if record is None:
        raise UsageError(f"{source} has no dtypes; record them with `lmbench fit ... --dtypes.record true`")
    if record.notes_file is None:
        raise UsageError(f"{source} has no dtypes: {record.reason or 'they were not written'}")
    return Findings(path, run, record, read_notes(path))


def module_rows(modules: Sequence[NotedModule]) -> list[ModuleRow]:
    """Modules in the order of the model, those that are alike in one row."""
    groups: dict[bytes, list[NotedModule]] = {}
    for module in modules:
        key = msgspec.json.encode(replace(module, path=_INDEX.sub("*", module.path)))
        groups.setdefault(key, []).append(module)
    rows = []
    for alike in groups.values():
        path = alike[0].path if len(alike) == 1 else _INDEX.sub("*", alike[0].path)
        rows.append(ModuleRow(path, len(alike), alike[0]))
    return rows


def tensor_rows(found: Findings) -> list[TensorRow]:
    """The tensors that every training has; of the published model its modules' outputs too."""
    published = _published(found)
    rows = [
        TensorRow(each.name.replace("_", " "), tally(each.dtypes), each.reason, published.get(each.name, ""))
        for each in found.record.tensors
    ]
    if not published:
        return rows
    outputs = [_output(found, name, path, published) for name, path in _PUBLISHED_OUTPUTS.items()]
    at = next((place for place, row in enumerate(rows) if row.name == "logits"), len(rows))
    return rows[:at] + outputs + rows[at:]


def tally(dtypes: dict[str, int]) -> str:
    """Dtypes with how many tensors have each; one alone needs no number."""
    if len(dtypes) == 1:
        return next(iter(dtypes))
    return ", ".join(f"{dtype} ({count})" for dtype, count in dtypes.items()) or "none"


def as_record(found: Findings) -> dict[str, Any]:
    """Everything, for JSON."""
    told: dict[str, Any] = {
        "run_id": found.run.run_id,
        "model": found.run.model.name,
        "precision": found.run.precision,
        "device_type": found.notes.device_type,
        "torch": found.notes.torch,
        **msgspec.to_builtins(found.record),
        "modules": msgspec.to_builtins(found.notes.modules),
    }
    if published := _published(found):
        told["published"] = published
    return told


def _output(found: Findings, name: str, path: str, published: dict[str, str]) -> TensorRow:
    module = next((each for each in found.notes.modules if each.path == path), None)
    dtypes = [dtype for call in (module.calls if module else []) for dtype in call.outputs]
    return TensorRow(name.replace("_", " "), words(dtypes), module.reason if module else "", published.get(name, ""))


def _published(found: Findings) -> dict[str, str]:
    """Of the published model, the dtypes that were published of it under the same autocast; sources that differ are
    told apart."""
    if found.run.model.name != _PUBLISHED_MODEL:
        return {}
    told: dict[str, dict[str, list[str]]] = {}
    for row in load_dtypes():
        if row.autocast_dtype == found.record.autocast_dtype:
            told.setdefault(row.tensor, {}).setdefault(row.dtype, []).append(row.source)
    return {
        tensor: ", ".join(f"{dtype} ({', '.join(sources)})" if len(by) > 1 else dtype for dtype, sources in by.items())
        for tensor, by in told.items()
    }


def _device(device_type: str) -> str:
    return {"cuda": "CUDA", "cpu": "a CPU"}.get(device_type, device_type)
