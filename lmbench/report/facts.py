"""Facts: what tells one cell from another (size, mode, precision, ...), read from a run's record."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lmbench.records.paths import leaves, lookup
from lmbench.records.vocabulary import MODES, Record
from lmbench.report.text import shown
from lmbench.sizes import SIZES

#: A fact's value as it is shown and compared: text or a number, None where the record does not tell.
Value = str | int | float | None

PRECISIONS = ("64-true", "32-true", "bf16-mixed", "16-mixed", "bf16-true", "16-true", "transformer-engine")
FP32_MATMUL, TF32_MATMUL = "highest (fp32)", "high (TF32)"
EAGER = "eager"

_MATMUL = {"highest": FP32_MATMUL, "high": TF32_MATMUL, "medium": "medium (bf16)"}


@dataclass(frozen=True)
class Fact:
    """One fact.

    `name` is what `--baseline` and CSV call it, `heading` what a table does; `caption` is how it is told in a
    caption, where all rows share it. `read` takes a run's record. `settings` are the dotted options that set it, read
    from the configuration or from the sweep's plan where the run died before it could tell. `order` lists known values
    in the order of a table.
    """

    name: str
    heading: str
    caption: str
    read: Callable[[Record], Any]
    settings: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    #: A difference of this kind makes another cell only among runs that belong to no sweep.
    is_environment: bool = False
    #: Follows from other facts (16-mixed takes another variant of the optimizer): a baseline need not share it.
    is_consequence: bool = False


def _at(path: str) -> Callable[[Record], Any]:
    return lambda run: lookup(run, path)


def _size(run: Record) -> str | None:
    model = run.get("model") or {}
    if model.get("size"):
        return str(model["size"])
    if model.get("d_model") and model.get("num_layers"):
        return f"{model['num_layers']} x {model['d_model']}"
    if model.get("name"):
        return str(model["name"]).rpartition(".")[2]
    return _planned_size(run)


def _planned_size(run: Record) -> str | None:
    """The size that a run was to have: by its name, or layers x width where the settings change a named one."""
    size, layers, width = (planned(run, f"model.{name}") for name in ("size", "num_layers", "d_model"))
    named = SIZES.get(str(size))
    if named is not None and (layers or width):
        layers, width = layers or named.num_layers, width or named.d_model
    if layers and width and (layers, width) != (named and (named.num_layers, named.d_model)):
        return f"{layers} x {width}"
    return str(size) if size else None


def planned(run: Record, option: str) -> Any:
    """What an option was set to: by the sweep's axes or the rest of its plan, else by the configuration."""
    for holder in (lookup(run, "sweep.axes"), lookup(run, "sweep.options")):
        if isinstance(holder, dict) and holder.get(option) is not None:
            return holder[option]
    return lookup(run, f"config.{option}")


def _mode(run: Record) -> Any:
    return "inference" if run.get("command") in ("validate", "test") else run.get("mode")


def _matmul(run: Record) -> str | None:
    return matmul_label(run.get("matmul_precision"))


def matmul_label(value: Any) -> str | None:
    return None if value is None else _MATMUL.get(str(value), str(value))


def _compiled(run: Record) -> str | None:
    return compile_label(run.get("compile"))


def compile_label(options: Any) -> str | None:
    """`eager`, or torch.compile's mode with what was asked for beside it."""
    if options is None:
        return None
    if isinstance(options, bool):
        return "default" if options else EAGER
    if not isinstance(options, Mapping):
        return str(options)
    if not options.get("is_enabled", True):
        return EAGER
    extras = [name for name in ("regional", "fullgraph", "dynamic") if options.get(name)]
    return " ".join([str(options.get("mode") or "default"), *extras])


def _micro_batches(run: Record) -> Any:
    return lookup(run, "window.micro_batches") or lookup(run, "config.trainer.accumulate_grad_batches")


def _commit(run: Record) -> str | None:
    commit = lookup(run, "environment.code.project.commit")
    dirty = "+" if lookup(run, "environment.code.project.is_dirty") else ""
    return f"{commit[:9]}{dirty}" if isinstance(commit, str) else None


FACTS: tuple[Fact, ...] = (
    Fact("size", "size", "size {}", _size, ("model.size",), tuple(SIZES)),
    Fact("mode", "mode", "mode {}", _mode, ("measure.mode", "mode"), MODES),
    Fact("batch", "batch", "batch {}", _at("data.batch_size"), ("data.batch_size",)),
    Fact("context", "context", "context {}", _at("data.context_length"), ("data.context_length",)),
    Fact("precision", "precision", "{}", _at("precision"), ("trainer.precision",), PRECISIONS),
    Fact(
        "matmul", "float32 matmul", "float32 matmul {}", _matmul, ("measure.matmul_precision",),
        (FP32_MATMUL, TF32_MATMUL),
    ),
    Fact("compile", "compile", "compile {}", _compiled, ("trainer.compile",), (EAGER, "default")),
    Fact("attention", "attention", "attention {}", _at("model.attention"), ("model.attention",)),
    Fact("optimizer", "optimizer", "{}", _at("model.optimizer"), is_consequence=True),
    Fact("micro_batches", "micro-batches", "{} micro-batches", _micro_batches, ("trainer.accumulate_grad_batches",)),
    Fact("warmup", "warm-up", "warm-up {}", _at("window.warmup_steps"), ("measure.warmup_steps",)),
    Fact("zero_grad", "zero_grad", "zero_grad {}", _at("zero_grad"), ("measure.zero_grad",)),
    Fact("ranks", "ranks", "{} ranks", _at("world_size")),
    Fact("environment", "environment", "environment {}", _at("sweep.environment"), ("environment",)),
    Fact("torch", "torch", "torch {}", _at("environment.versions.torch"), is_environment=True),
    Fact("commit", "commit", "commit {}", _commit, is_environment=True),
    Fact("host", "host", "host {}", _at("environment.host.hostname"), is_environment=True),
)  # fmt: skip

FACT: Mapping[str, Fact] = {fact.name: fact for fact in FACTS}

#: Axes that say how a cell is looked at, not what it is: the passes of one cell are joined.
PASSES = ("timer.clock", "trainer.profiler", "pass")

#: Axes without rows of their own: passes, and what the size of a shape tells.
_NO_ROWS = (*PASSES, "model.d_model", "model.num_layers")

#: Options that decide how long or where is measured, not what, and those that a fact of FACTS tells better.
_NO_FACTS = (
    *PASSES,
    "measure.results_dir", "measure.run_id", "measure.steps", "measure.min_window_s", "measure.probe_steps",
    "measure.strict", "seed_everything", "data.seed", "data.vocab_size",
    "model.context_length", "model.d_model", "model.num_layers", "model.optimizer", "model.optimizer_variant",
    "trainer.devices",
    "data.cache_dir", "wandb", "trainer.logger", "trainer.callbacks", "trainer.default_root_dir",
    "trainer.enable_progress_bar", "ckpt_path",
)  # fmt: skip


def read_facts(run: Record) -> dict[str, Value]:
    """Every fact of FACTS that the record, its configuration or its place in a sweep tells."""
    found: dict[str, Value] = {}
    for fact in FACTS:
        value = fact.read(run)
        if value is None:
            value = _from_settings(fact, run)
        if value is not None:
            found[fact.name] = plain(value)
    return found


#: Facts that are not told as the option's own value.
_LABELS: Mapping[str, Callable[[Any], str | None]] = {"matmul": matmul_label, "compile": compile_label}


def _from_settings(fact: Fact, run: Record) -> Any:
    for option in fact.settings:
        value = planned(run, option)
        if value is not None:
            return _LABELS[fact.name](value) if fact.name in _LABELS else value
    return None


def fact_of(option: str) -> str:
    """The fact that an option sets: itself where no fact of FACTS stands for it."""
    return next((fact.name for fact in FACTS for known in fact.settings if option == known), option)


def other_axes(run: Record) -> dict[str, Value]:
    """The sweep's axes that no fact of FACTS stands for, by their own names."""
    axes = lookup(run, "sweep.axes") or {}
    return {name: plain(value) for name, value in axes.items() if not _is_known(name) and name not in _NO_ROWS}


def other_settings(run: Record) -> dict[str, Value]:
    """The configuration's settings that no fact of FACTS stands for: what else tells two unrelated runs apart."""
    config = run.get("config")
    if not isinstance(config, dict):
        return {}
    return {path: plain(value) for path, value in leaves(config) if not _is_known(path) and not _is_ignored(path)}


def _is_known(option: str) -> bool:
    return any(option == known or option.startswith(f"{known}.") for fact in FACTS for known in fact.settings)


def _is_ignored(option: str) -> bool:
    return any(option == name or option.startswith(f"{name}.") for name in _NO_FACTS)


def plain(value: Any) -> Value:
    """A value that can be compared, sorted and shown."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return shown(value)
    if value is None or isinstance(value, int | float):
        return value
    return json.dumps(value, sort_keys=True, default=str)


def heading(name: str) -> str:
    """A fact's heading; an option without a fact of its own goes by the last part of its name."""
    return FACT[name].heading if name in FACT else name.rpartition(".")[2]


def captioned(name: str, value: Value) -> str:
    """A fact as a caption tells it: `context 512`, `bf16-mixed`, `eager`."""
    if value == EAGER:
        return EAGER
    return FACT[name].caption.format(value) if name in FACT else f"{heading(name)} {value}"


def is_consequence(name: str) -> bool:
    return name in FACT and FACT[name].is_consequence


def in_words(name: str, value: Value) -> str:
    """A fact among others in a line: text speaks for itself, a number needs its name."""
    return captioned(name, value) if isinstance(value, int | float) or name not in FACT else str(value)


def sort_key(name: str, value: Value) -> tuple[int, float, str]:
    """Known values in their known order, then numbers, then text; what is unknown comes last."""
    order = FACT[name].order if name in FACT else ()
    if value is None:
        return (3, 0.0, "")
    if value in order:
        return (0, float(order.index(str(value))), "")
    if isinstance(value, int | float):
        return (1, float(value), "")
    # Numbers within text by their value: 4 x 512 before 4 x 1024.
    return (2, 0.0, re.sub(r"\d+", lambda digits: digits[0].zfill(12), value))
