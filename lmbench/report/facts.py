"""Facts: what tells one cell from another (size, mode, precision, ...), read from a run's record or its plan."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lmbench.masking import masked
from lmbench.precision import FP32_MATMUL, PRECISIONS, TF32_MATMUL, matmul_label
from lmbench.records.passes import PASSES
from lmbench.records.run import RunRecord
from lmbench.records.schema import leaves
from lmbench.records.vocabulary import MODES
from lmbench.sizes import SIZES
from lmbench.text import shown

#: A fact's value as it is shown and compared: text or a number, None where the record does not tell.
Value = str | int | float | None

EAGER = "eager"
CAUSAL = "causal"


def mask_label(is_causal: Any) -> str | None:
    """`causal`, or `none` where every position sees every other one; None where nobody knows."""
    return None if is_causal is None else CAUSAL if is_causal else "none"


def compile_label(options: Any) -> str:
    """`eager`, or torch.compile's mode with what was asked for beside it, of the option `trainer.compile`."""
    if isinstance(options, bool):
        return "default" if options else EAGER
    if not isinstance(options, Mapping):
        return str(options)
    extras = [name for name in ("regional", "fullgraph", "dynamic") if options.get(name)]
    return " ".join([str(options.get("mode") or "default"), *extras])


@dataclass(frozen=True)
class Planned:
    """What a run's options were set to, by their dotted names: by the sweep's axes, the rest of its plan, or the
    configuration."""

    axes: Mapping[str, Any]
    options: Mapping[str, Any]
    config: Mapping[str, Any]

    def get(self, option: str) -> Any:
        for holder in (self.axes, self.options):
            if holder.get(option) is not None:
                return holder[option]
        value: Any = self.config
        for key in option.split("."):
            value = value.get(key) if isinstance(value, Mapping) else None
        return value


@dataclass(frozen=True)
class Fact:
    """One fact.

    `name` is what `--baseline` and CSV call it, `heading` what a table does; `caption` is how it is told in a
    caption, where all rows share it. `read` takes a run's record. `settings` are the dotted options that set it, read
    from the plan where the run died before it could tell, and `label` is how their value is told. `order` lists known
    values in the order of a table.
    """

    name: str
    heading: str
    caption: str
    read: Callable[[RunRecord], Any]
    settings: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    label: Callable[[Any], str | None] | None = None
    #: A difference of this kind makes another cell only among runs that belong to no sweep.
    is_environment: bool = False
    #: Follows from other facts (16-mixed takes another variant of the optimizer): a baseline need not share it.
    is_consequence: bool = False

    def planned(self, plan: Planned) -> Any:
        """What it was to be."""
        if self.name == "size":
            return _planned_size(plan)
        value = next((value for option in self.settings if (value := plan.get(option)) is not None), None)
        return value if value is None else self.told(value)

    def told(self, value: Any) -> Value:
        """The value of an option as this fact has it: `highest` is `highest (fp32)`."""
        return plain(self.label(value) if self.label is not None else value)


def _size(run: RunRecord) -> str | None:
    model = run.model
    if model.size:
        return model.size
    if model.d_model and model.num_layers:
        return f"{model.num_layers} x {model.d_model}"
    return model.name.rpartition(".")[2] if model.name else None


def _planned_size(plan: Planned) -> str | None:
    """The size that a run was to have: by its name, or layers x width where the settings change a named one."""
    size, layers, width = (plan.get(f"model.{name}") for name in ("size", "num_layers", "d_model"))
    named = SIZES.get(str(size))
    if named is not None and (layers or width):
        layers, width = layers or named.num_layers, width or named.d_model
    if layers and width and (layers, width) != (named and (named.num_layers, named.d_model)):
        return f"{layers} x {width}"
    return str(size) if size else None


def _compiled(run: RunRecord) -> str | None:
    found = run.compile
    if not found.is_enabled:
        return None if found.is_enabled is None else EAGER
    asked = {"regional": found.regional, "fullgraph": found.fullgraph, "dynamic": found.dynamic}
    return compile_label({"mode": found.mode, **asked})


def _commit(run: RunRecord) -> str | None:
    code = run.environment.code.project if run.environment else None
    return f"{code.commit[:9]}{'+' if code.is_dirty else ''}" if code and code.commit else None


FACTS: tuple[Fact, ...] = (
    Fact("size", "size", "size {}", _size, ("model.size",), tuple(SIZES)),
    Fact(
        "mode", "mode", "mode {}", lambda run: "inference" if run.command == "validate" else run.mode,
        ("measure.mode", "mode"), MODES,
    ),
    Fact("batch", "batch", "batch {}", lambda run: run.data.batch_size, ("data.batch_size",)),
    Fact("context", "context", "context {}", lambda run: run.data.context_length, ("data.context_length",)),
    Fact("precision", "precision", "{}", lambda run: run.precision, ("trainer.precision",), tuple(PRECISIONS)),
    Fact(
        "matmul", "float32 matmul", "float32 matmul {}",
        lambda run: matmul_label(run.matmul_precision),
        ("measure.matmul_precision",), (FP32_MATMUL, TF32_MATMUL), lambda value: str(matmul_label(str(value))),
    ),
    Fact("compile", "compile", "compile {}", _compiled, ("trainer.compile",), (EAGER, "default"), compile_label),
    Fact("attention", "attention", "attention {}", lambda run: run.model.attention, ("model.attention",), ("naive",)),
    Fact(
        "head_dim", "head_dim", "head_dim {}", lambda run: run.model.head_dim,
        ("model.head_dim", "model.init_args.head_dim"),
    ),
    Fact(
        "heads", "heads", "heads {}", lambda run: run.model.num_heads if run.model.head_dim else None,
        ("model.heads", "model.init_args.heads"),
    ),
    Fact(
        "causal", "mask", "mask {}", lambda run: mask_label(run.model.is_causal),
        ("model.causal", "model.init_args.causal"), (CAUSAL, "none"), mask_label,
    ),
    Fact("checkpoint", "checkpoint", "checkpoint {}", lambda run: run.model.checkpoint, ("model.checkpoint",)),
    Fact("optimizer", "optimizer", "{}", lambda run: run.model.optimizer, is_consequence=True),
    Fact(
        "micro_batches", "micro-batches", "{} micro-batches", lambda run: run.window.micro_batches or None,
        ("trainer.accumulate_grad_batches",),
    ),
    Fact("warmup", "warm-up", "warm-up {}", lambda run: run.window.warmup_steps, ("measure.warmup_steps",)),
    Fact("zero_grad", "zero_grad", "zero_grad {}", lambda run: run.zero_grad, ("measure.zero_grad",)),
    Fact("ranks", "ranks", "{} ranks", lambda run: run.world_size),
    Fact(
        "environment", "environment", "environment {}", lambda run: run.sweep and run.sweep.environment,
        ("environment",),
    ),
    Fact(
        "torch", "torch", "torch {}", lambda run: run.environment and run.environment.versions.torch,
        is_environment=True,
    ),
    Fact("commit", "commit", "commit {}", _commit, is_environment=True),
    Fact(
        "host", "host", "host {}", lambda run: run.environment and run.environment.host.hostname, is_environment=True
    ),
)  # fmt: skip

FACT: Mapping[str, Fact] = {fact.name: fact for fact in FACTS}

#: Axes that say how a cell is looked at, not what it is: the passes of one cell are joined.
PASS_AXES = ("pass", *(option for look in PASSES for option in look.options))

#: Axes that repeat a cell from another beginning: of its weights, of its data.
SEEDS = ("seed_everything", "data.seed")

#: Axes without rows of their own: passes, seeds, and what the size of a shape tells.
_NO_ROWS = (*PASS_AXES, *SEEDS, "model.d_model", "model.num_layers")

#: Options that say for how long is measured: no facts where the other ones tell cells apart.
HOW_LONG = ("measure.steps", "measure.min_window_s", "measure.probe_steps")

#: Options that decide how long or where is measured, not what, and those that a fact of FACTS tells better.
_NO_FACTS = (
    *PASS_AXES, *SEEDS, *HOW_LONG,
    "measure.results_dir", "measure.run_id", "measure.strict", "data.vocab_size",
    "model.context_length", "model.d_model", "model.num_layers", "model.optimizer", "model.optimizer_variant",
    "trainer.devices",
    "data.cache_dir", "wandb", "trainer.logger", "trainer.callbacks", "trainer.default_root_dir",
    "trainer.enable_progress_bar", "ckpt_path",
)  # fmt: skip


def read_facts(run: RunRecord, plan: Planned) -> dict[str, Value]:
    """Every fact of FACTS that the record or its plan tells."""
    found: dict[str, Value] = {}
    for fact in FACTS:
        value = fact.read(run)
        value = fact.planned(plan) if value is None else value
        if value is not None:
            found[fact.name] = plain(value)
    return found


def fact_of(option: str) -> str:
    """The fact that an option sets: itself where no fact of FACTS stands for it."""
    return next((fact.name for fact in FACTS for known in fact.settings if option == known), option)


def other_axes(axes: Mapping[str, Any]) -> dict[str, Value]:
    """The sweep's axes that no fact of FACTS stands for, by their own names."""
    return {shown(name): plain(value) for name, value in axes.items() if not _is_known(name) and name not in _NO_ROWS}


def other_settings(config: Mapping[str, Any]) -> dict[str, Value]:
    """The configuration's settings that no fact of FACTS stands for: what else tells two unrelated runs apart."""
    return {
        shown(path): plain(masked(value, path))
        for path, value in leaves(config)
        if not _is_known(path) and not _is_ignored(path)
    }


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
