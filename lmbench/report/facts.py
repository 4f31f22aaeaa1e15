"""Facts: what tells one cell from another (size, mode, precision, ...), read from a run's record or its plan."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lmbench.masking import masked, shown
from lmbench.precision import FP32_MATMUL, PRECISIONS, TF32_MATMUL, matmul_label, short_label
from lmbench.records.codec import as_dict
from lmbench.records.passes import PASSES
from lmbench.records.run import Model, RunRecord
from lmbench.records.schema import leaves, value_at
from lmbench.records.vocabulary import MODES
from lmbench.report import shipped
from lmbench.sizes import SIZES

#: A fact's value as it is shown and compared: text or a number, None where the record does not tell.
Value = str | int | float | None
#: What a run's options were set to: by the sweep's axes, by dotted names, and by its configuration, which is nested.
Plan = tuple[Mapping[str, Any], Any]

EAGER = "eager"


def planned(plan: Plan, option: str) -> Any:
    """What an option was set to; None where the plan does not say."""
    axes, nested = plan
    for key in option.split("."):
        nested = nested.get(key) if isinstance(nested, Mapping) else None
    return nested if axes.get(option) is None else axes[option]


@dataclass(frozen=True)
class Fact:
    """One fact.

    `name` is what `--baseline` and CSV call it. `read` is a field of a run's record by its dotted name; without one
    _READ works it out. `settings` are the dotted options that set it, read from the plan where the run died before it
    could tell. `heading` is what a table calls it (by default its name). `order` lists known values in the order of a
    table; `usual` is what everybody has, which a caption leaves out.
    """

    name: str
    read: str = ""
    settings: Sequence[str] = ()
    order: Sequence[str] = ()
    heading: str = ""
    usual: Value = None

    def of(self, run: RunRecord, plan: Plan) -> Value:
        """What the run was, or what it was to be."""
        value = value_at(run, self.read) if self.read else _READ[self.name](run)
        settings = [planned(plan, option) for option in self.settings]
        if value is None and self.name in _PLANNED:
            value = _PLANNED[self.name](*settings)
        if value is None:
            value = next((value for value in settings if value is not None), None)
        return None if value is None else self.labelled(value)

    def labelled(self, value: Any) -> Value:
        """A recorded value or that of an option as this fact has it: `highest` is `highest (fp32)`."""
        return plain(_LABELS[self.name](value) if self.name in _LABELS else value)


def _device(run: RunRecord) -> str | None:
    """The GPU's name, or the processor's where the run was on it; None where it ended before it could look."""
    if run.environment is None:
        return None
    model = re.sub(" +", " ", run.environment.host.cpu_model or "")
    return run.environment.gpu.name or (f"CPU {model}".rstrip() if run.device_type == "cpu" else None)


def _size(run: RunRecord) -> str | None:
    model = run.model
    if model.d_model and model.num_layers and not model.size:
        return f"{model.num_layers} x {model.d_model}"
    return model.size or (model.name or "").rpartition(".")[2] or None


def choices(residual_dtype: str | None, is_fused: bool | None, loss: str | None) -> str:
    """How lmbench's own model is computed where that is not the plain way; empty where it is."""
    chosen = {
        f"{residual_dtype} residual": residual_dtype, "fused projections": is_fused, f"{loss} loss": loss == "chunked",
    }  # fmt: skip
    return " + ".join(word for word, is_chosen in chosen.items() if is_chosen)


def choices_of(model: Model) -> str:
    """The choices of a run's model."""
    return choices(model.residual_dtype, model.fused_projections, model.loss)


def _strategy(run: RunRecord) -> str | None:
    """How several ranks share the work; `none` of one."""
    name = value_at(run, "config.trainer.strategy")
    if run.world_size == 1 or not isinstance(name, Mapping):
        return "none" if run.world_size == 1 else name
    options = (f"{option}={value}" for option, value in (name.get("init_args") or {}).items() if value is not None)
    return f"{name['class_path'].rpartition('.')[2]}({', '.join(options)})"


def _compile_label(options: Any) -> str:
    """`eager`, or torch.compile's mode with what was asked for beside it, of the option `trainer.compile`."""
    if not isinstance(options, Mapping):
        return {True: "default", False: EAGER}.get(options, str(options))
    extras = [name for name in ("regional", "fullgraph", "dynamic") if options.get(name)]
    return " ".join([str(options.get("mode") or "default"), *extras])


def _commit(run: RunRecord) -> str | None:
    """The commit of the user's code, with a plus where the tree had changes."""
    code = run.environment.code.project if run.environment else None
    return f"{code.commit[:9]}{'+' if code.is_dirty else ''}" if code and code.commit else None


#: What is worked out of a record, where facts.toml names no field of it.
_READ: Mapping[str, Callable[[RunRecord], Any]] = {
    "gpu": _device,
    "size": _size,
    # `lmbench validate` is inference.
    "mode": lambda run: "inference" if run.command == "validate" else run.mode,
    "compile": lambda run: as_dict(run.compile) if run.compile.is_enabled else run.compile.is_enabled,
    "choices": lambda run: choices_of(run.model) or ("plain" if run.model.name else None),
    "heads": lambda run: run.model.num_heads if run.model.head_dim else None,
    "micro_batches": lambda run: run.window.micro_batches or None,
    "strategy": _strategy,
    "commit": _commit,
}
#: What the settings of a run tell together that died before its record could.
_PLANNED: Mapping[str, Callable[..., str | None]] = {
    "size": lambda _, *dimensions: "{} x {}".format(*dimensions) if all(dimensions) else None,
    "choices": lambda *settings: choices(*settings) or "plain",
}
_LABELS: Mapping[str, Callable[[Any], Any]] = {
    "matmul": matmul_label, "compile": _compile_label, "causal": lambda is_causal: "causal" if is_causal else "none",
}  # fmt: skip
_ORDERS = {"mode": MODES, "precision": (*PRECISIONS,), "matmul": (FP32_MATMUL, TF32_MATMUL)}

_TABLES = tomllib.loads(shipped("facts.toml"))
FACT: Mapping[str, Fact] = {
    name: Fact(name, **{"order": _ORDERS.get(name, ()), **fact}) for name, fact in _TABLES["facts"].items()
}

#: Facts that make another cell only among runs that belong to no sweep.
ENVIRONMENT = {"torch", "commit", "host"}
#: Facts that follow from others (16-mixed takes another variant of the optimizer): a baseline need not share them.
CONSEQUENCES = {"optimizer"}

#: The fact that each option sets.
_SETTINGS: Mapping[str, str] = {option: fact.name for fact in reversed([*FACT.values()]) for option in fact.settings}

#: Axes that repeat a cell from another beginning: of its weights, of its data.
SEEDS = ("seed_everything", "data.seed")

#: Axes without rows of their own: seeds, and those that say how a cell is looked at: its passes are joined.
NO_ROWS = (*SEEDS, "pass", *(option for look in PASSES for option in look.options))


def read_facts(run: RunRecord, plan: Plan | None = None) -> dict[str, Value]:
    """Every fact of FACT that the record or its plan tells, which is by default what the record has of it."""
    plan = plan or (value_at(run, "sweep.axes") or {}, run.config)
    facts = {fact.name: fact.of(run, plan) for fact in FACT.values()}
    return {name: value for name, value in facts.items() if value is not None}


def fact_of(option: str) -> str:
    """The fact that an option sets: itself where no fact of FACT stands for it."""
    return _SETTINGS.get(option, option)


def other_axes(axes: Mapping[str, Any]) -> dict[str, Value]:
    """The sweep's axes that no fact of FACT stands for, by their own names."""
    return _others(axes, NO_ROWS)


def other_settings(config: Mapping[str, Any]) -> dict[str, Value]:
    """The configuration's settings that no fact of FACT stands for: what else tells two unrelated runs apart."""
    return _others(dict(leaves(config)), (*NO_ROWS, *_TABLES["left_out"]))


def _others(settings: Mapping[str, Any], left_out: tuple[str, ...]) -> dict[str, Value]:
    known = (*_SETTINGS, *left_out)
    return {
        shown(name): plain(masked(value, name))
        for name, value in settings.items()
        if not any(name == option or name.startswith(f"{option}.") for option in known)
    }


def plain(value: Any) -> Value:
    """A value that can be compared, sorted and shown."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or isinstance(value, int | float):
        return value
    return shown(value) if isinstance(value, str) else json.dumps(value, sort_keys=True, default=str)


def is_said(name: str, value: Value) -> bool:
    """Whether a caption says the value of a fact: not what everybody has."""
    return name in FACT and name not in ENVIRONMENT and value != FACT[name].usual


def heading(name: str) -> str:
    """A fact's heading; an option without a fact of its own goes by the last part of its name."""
    return (FACT[name].heading or name) if name in FACT else name.rpartition(".")[2]


def in_words(facts: Mapping[str, Value], names: Sequence[str]) -> str:
    """These facts as people say them, as far as they are known: `small, TF32, compiled, batch 4`.

    Text speaks for itself, a number needs its name. Precision and float32 matmul are one word.
    """
    words = list[str]()
    for name in names:
        value = facts.get(name)
        if value is None or (name == "matmul" and "precision" in names):
            continue
        if name == "compile" and value != EAGER:
            words.append("compiled" if value == "default" else f"compiled {value}")
        elif name == "precision":
            words.append(short_label(str(value), str(facts.get("matmul"))))
        else:
            is_word = isinstance(value, str) and name in FACT and name != "checkpoint" and value != "none"
            words.append(str(value) if is_word else f"{heading(name)} {value}")
    return ", ".join(words)


def sort_key(name: str, value: Value) -> tuple[int, float, str]:
    """Known values in their known order, sizes by their parameters, then numbers, then text; unknown ones come last."""
    order = FACT[name].order if name in FACT else ()
    if value is None:
        return (3, 0.0, "")
    if isinstance(value, int | float):
        return (1, float(value), "")
    if value in order:
        return (0, float(order.index(value)), "")
    # 4 x 512 is smaller than `small`: the blocks of a Transformer have 12 L D^2 parameters.
    size = SIZES.get(value)
    shape = re.fullmatch(r"(\d+) x (\d+)", f"{size.num_layers} x {size.d_model}" if size else value)
    return (0, float(int(shape[1]) * int(shape[2]) ** 2), value) if shape and name == "size" else (2, 0.0, value)
