"""Facts: what tells one cell from another (size, mode, precision, ...), read from a run's record or its plan."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from lmbench.masking import masked
from lmbench.precision import FP32_MATMUL, PRECISIONS, TF32_MATMUL, matmul_label
from lmbench.records.passes import PASSES
from lmbench.records.run import RunRecord
from lmbench.records.schema import leaves, value_at
from lmbench.records.vocabulary import MODES
from lmbench.sizes import SIZES
from lmbench.text import shown

#: A fact's value as it is shown and compared: text or a number, None where the record does not tell.
Value = str | int | float | None

EAGER = "eager"
CAUSAL = "causal"


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
    caption, where all rows share it. `read` is a field of a run's record by its dotted name, or a function of the
    record. `settings` are the dotted options that set it, read from the plan where the run died before it could tell,
    and `label` is how a value of either is told. `order` lists known values in the order of a table.
    """

    name: str
    heading: str
    caption: str
    read: str | Callable[[RunRecord], Any]
    settings: tuple[str, ...] = ()
    order: tuple[str, ...] = ()
    label: Callable[[Any], str | None] | None = None
    #: A difference of this kind makes another cell only among runs that belong to no sweep.
    is_environment: bool = False
    #: Follows from other facts (16-mixed takes another variant of the optimizer): a baseline need not share it.
    is_consequence: bool = False

    def of(self, run: RunRecord, plan: Planned) -> Value:
        """What the run was, or what it was to be."""
        value = value_at(run, self.read) if isinstance(self.read, str) else self.read(run)
        if value is None and self.name == "size":
            return _planned_size(plan)
        if value is None:
            value = next((value for option in self.settings if (value := plan.get(option)) is not None), None)
        return None if value is None else self.labelled(value)

    def labelled(self, value: Any) -> Value:
        """A recorded value or that of an option as this fact has it: `highest` is `highest (fp32)`."""
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


def mode_of(run: RunRecord) -> str | None:
    """The mode of a run; `lmbench validate` is inference."""
    return "inference" if run.command == "validate" else run.mode


def _compiled(run: RunRecord) -> Any:
    compiled = run.compile
    return msgspec.structs.asdict(compiled) if compiled.is_enabled else compiled.is_enabled


def _commit(run: RunRecord) -> str | None:
    code = run.environment.code.project if run.environment else None
    return f"{code.commit[:9]}{'+' if code.is_dirty else ''}" if code and code.commit else None


FACTS: tuple[Fact, ...] = (
    Fact("size", "size", "size {}", _size, ("model.size",), tuple(SIZES)),
    Fact("mode", "mode", "mode {}", mode_of, ("measure.mode", "mode"), MODES),
    Fact("batch", "batch", "batch {}", "data.batch_size", ("data.batch_size",)),
    Fact("context", "context", "context {}", "data.context_length", ("data.context_length",)),
    Fact("precision", "precision", "{}", "precision", ("trainer.precision",), tuple(PRECISIONS)),
    Fact(
        "matmul", "float32 matmul", "float32 matmul {}", "matmul_precision", ("measure.matmul_precision",),
        (FP32_MATMUL, TF32_MATMUL), matmul_label,
    ),
    Fact("compile", "compile", "compile {}", _compiled, ("trainer.compile",), (EAGER, "default"), compile_label),
    Fact("attention", "attention", "attention {}", "model.attention", ("model.attention",), ("naive",)),
    Fact("head_dim", "head_dim", "head_dim {}", "model.head_dim", ("model.head_dim", "model.init_args.head_dim")),
    Fact(
        "heads", "heads", "heads {}", lambda run: run.model.num_heads if run.model.head_dim else None,
        ("model.heads", "model.init_args.heads"),
    ),
    Fact(
        "causal", "mask", "mask {}", "model.is_causal", ("model.causal", "model.init_args.causal"), (CAUSAL, "none"),
        lambda is_causal: CAUSAL if is_causal else "none",
    ),
    Fact("checkpoint", "checkpoint", "checkpoint {}", "model.checkpoint", ("model.checkpoint",)),
    Fact("optimizer", "optimizer", "{}", "model.optimizer", is_consequence=True),
    Fact(
        "micro_batches", "micro-batches", "{} micro-batches", lambda run: run.window.micro_batches or None,
        ("trainer.accumulate_grad_batches",),
    ),
    Fact("warmup", "warm-up", "warm-up {}", "window.warmup_steps", ("measure.warmup_steps",)),
    Fact("zero_grad", "zero_grad", "zero_grad {}", "zero_grad", ("measure.zero_grad",)),
    Fact("ranks", "ranks", "{} ranks", "world_size"),
    Fact("environment", "environment", "environment {}", "sweep.environment", ("environment",)),
    Fact("torch", "torch", "torch {}", "environment.versions.torch", is_environment=True),
    Fact("commit", "commit", "commit {}", _commit, is_environment=True),
    Fact("host", "host", "host {}", "environment.host.hostname", is_environment=True),
)  # fmt: skip

FACT: Mapping[str, Fact] = {fact.name: fact for fact in FACTS}

#: The fact that each option sets.
_SETTINGS: Mapping[str, str] = {option: fact.name for fact in reversed(FACTS) for option in fact.settings}

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
    facts = {fact.name: fact.of(run, plan) for fact in FACTS}
    return {name: value for name, value in facts.items() if value is not None}


def fact_of(option: str) -> str:
    """The fact that an option sets: itself where no fact of FACTS stands for it."""
    return _SETTINGS.get(option, option)


def other_axes(axes: Mapping[str, Any]) -> dict[str, Value]:
    """The sweep's axes that no fact of FACTS stands for, by their own names."""
    return {shown(name): plain(value) for name, value in axes.items() if not _is_one_of(name, (*_SETTINGS, *_NO_ROWS))}


def other_settings(config: Mapping[str, Any]) -> dict[str, Value]:
    """The configuration's settings that no fact of FACTS stands for: what else tells two unrelated runs apart."""
    known = (*_SETTINGS, *_NO_FACTS)
    return {shown(path): plain(masked(value, path)) for path, value in leaves(config) if not _is_one_of(path, known)}


def _is_one_of(option: str, options: Iterable[str]) -> bool:
    """Whether the option, or one that it is a part of, is among these."""
    return any(option == known or option.startswith(f"{known}.") for known in options)


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
