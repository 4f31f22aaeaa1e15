"""Facts: what tells one cell from another (size, mode, precision, ...), read from a run's record or its plan."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from lmbench.masking import masked, shown
from lmbench.precision import FP32_MATMUL, PRECISIONS, TF32_MATMUL, matmul_label, short_label
from lmbench.records.codec import as_dict
from lmbench.records.passes import PASS
from lmbench.records.run import Model, Revision, RunRecord
from lmbench.records.schema import value_at
from lmbench.records.settings import NOT_MEASURED, as_text, is_named, variables_of
from lmbench.records.vocabulary import MODES, Values, recompute_words
from lmbench.report.answer import Value, listed
from lmbench.report.strategies import strategy_of
from lmbench.sizes import SIZES

#: Facts by their names, as far as they are known.
Facts = dict[str, Value]
#: The settings of a run: the sweep's axes by dotted names, and the nested configuration.
Plan = tuple[Values, Any]

EAGER = "eager"


def planned(plan: Plan, option: str) -> Any:
    """The value of an option in a plan, from the axes or else the configuration; None if it is in neither."""
    axes, nested = plan
    return value_at(nested, option) if axes.get(option) is None else axes[option]


def first_known(*values: Any) -> Any:
    """The first value that is not None; None if all are."""
    return next((value for value in values if value is not None), None)


class Fact(NamedTuple):
    """One fact.

    Attributes:
        name: its name in `--baseline` and CSV.
        read: the dotted name of its field in a run's record, or a function of the record.
        settings: the dotted options that set it, separated by blanks; read from the plan if the run died before its
            record had the fact.
        order: known values in the order of tables.
        heading: its title in tables if that differs from the name.
        usual: the value of nearly all runs, which captions leave out.
        label: the words for a recorded value or an option's value: `highest` becomes `highest (fp32)`.
        from_settings: computes the fact from the values of its settings; by default it is the first that is known.
    """

    name: str
    read: str | Callable[[RunRecord], Any]
    settings: str = ""
    order: Sequence[str] = ()
    heading: str = ""
    usual: Value = None
    label: Callable[[Any], Any] = lambda value: value
    from_settings: Callable[..., Any] = first_known

    def of(self, run: RunRecord, plan: Plan) -> Value:
        """The fact as the run's record has it, or else as it was planned; None if neither says."""
        value = value_at(run, self.read) if isinstance(self.read, str) else self.read(run)
        if value is None:
            value = self.from_settings(*(planned(plan, option) for option in self.settings.split()))
        return None if value is None else self.labelled(value)

    def labelled(self, value: Any) -> Value:
        """A recorded value or an option's value in this fact's words."""
        return plain(self.label(value))


def _device(run: RunRecord) -> str | None:
    """The name of the GPU, or of the CPU that the run was on; None if the run ended before it looked."""
    if run.device_type == "cpu" and run.is_set_up:
        return re.sub(" +", " ", f"CPU {run.environment.host.cpu_model or ''}").rstrip()
    return run.environment.gpu.name


def _size(run: RunRecord) -> str | None:
    model = run.model
    if model.d_model and model.num_layers and not model.size:
        return f"{model.num_layers} x {model.d_model}"
    return model.size or (model.name or "").rpartition(".")[2] or None


def choices(residual_dtype: str | None, fused: bool | str | None, loss: str | None) -> str:
    """The non-default choices of lmbench's own model, in words; empty if it is computed the plain way."""
    return listed(
        residual_dtype and f"{residual_dtype} residual",
        fused and ("fused q, k, v" if fused == "qkv" else "fused projections"),
        loss == "chunked" and "chunked loss",
        separator=" + ",
    )


def choices_of(model: Model) -> str:
    """The non-default choices of a recorded model, in words."""
    return choices(model.residual_dtype, model.fused_projections, model.loss)


def _compile_label(options: Any) -> str:
    """The option `trainer.compile` in words: `eager`, or torch.compile's mode with its further options."""
    if options is True:
        return "default"
    if options is False:
        return EAGER
    if not isinstance(options, Mapping):
        return str(options)
    extras = [name for name in ("regional", "fullgraph", "dynamic") if options.get(name)]
    is_static = options.get("dynamic") is False
    return listed(options.get("mode") or "default", *extras, is_static and "static", separator=" ")


def commit_text(code: Revision) -> str | None:
    """The beginning of a commit, with a plus if the tree had uncommitted changes; None without a commit."""
    return code.commit[:9] + ("+" if code.is_dirty else "") if code.commit else None


def _variables(run: RunRecord) -> str | None:
    """The environment variables that may change times; `none` where none was set, None where that is unknown."""
    variables = variables_of(run)
    if variables is None:
        return None
    return " ".join(f"{name}={value}" for name, value in variables.items()) or "none"


#: Every fact, in the order of columns and of words.
FACT: Mapping[str, Fact] = {
    fact.name: fact
    for fact in (
        Fact("gpu", _device),
        Fact(
            "size", _size, "model.size model.num_layers model.d_model",
            from_settings=lambda size, *shape: "{} x {}".format(*shape) if all(shape) else size,
        ),
        Fact(
            "mode", lambda run: "inference" if run.command == "validate" else run.mode, "measure.mode mode", MODES,
        ),
        Fact("batch", "data.batch_size", "data.batch_size"),
        Fact("context", "data.context_length", "data.context_length"),
        Fact("precision", "precision", "trainer.precision", (*PRECISIONS,)),
        Fact(
            "matmul", "matmul_precision", "measure.matmul_precision", (FP32_MATMUL, TF32_MATMUL), "float32 matmul",
            label=matmul_label,
        ),
        Fact("dtype", "model.dtype", heading="parameters"),
        Fact(
            "compile", lambda run: as_dict(run.compile) if run.compile.is_enabled else run.compile.is_enabled,
            "trainer.compile", (EAGER, "default"), label=_compile_label,
        ),
        Fact("attention", "model.attention", "model.attention", ("naive",)),
        Fact("head_dim", "model.head_dim", "model.head_dim model.init_args.head_dim"),
        Fact(
            "heads", lambda run: run.model.num_heads if run.model.head_dim else None,
            "model.heads model.init_args.heads",
        ),
        Fact(
            "causal", "model.is_causal", "model.causal model.init_args.causal", ("causal", "none"), "mask",
            label=lambda is_causal: "causal" if is_causal else "none",
        ),
        Fact(
            # The record has it in words.
            "checkpoint", "model.checkpoint", "trainer.recompute", usual="none",
            label=lambda recompute: recompute_words(**recompute) if isinstance(recompute, Mapping) else recompute,
        ),
        Fact(
            "choices", lambda run: choices_of(run.model) or ("plain" if run.model.name else None),
            "model.residual_dtype model.fused_projections model.loss",
            ("plain", "bf16 residual", "fused projections", "chunked loss"), usual="plain",
            from_settings=lambda *settings: choices(*settings) or "plain",
        ),
        Fact("optimizer", "model.optimizer"),
        Fact(
            "micro_batches", lambda run: run.window.micro_batches or None, "trainer.accumulate_grad_batches",
            heading="micro-batches", usual=1,
        ),
        Fact("warmup", "window.warmup_steps", "measure.warmup_steps", heading="warm-up"),
        Fact("zero_grad", "zero_grad", "measure.zero_grad", usual="after_step"),
        Fact("ranks", "world_size", "trainer.devices", usual=1),
        Fact("strategy", strategy_of, "trainer.strategy", ("none",), usual="none"),
        Fact("environment", "sweep.environment", "environment"),
        Fact("torch", "environment.versions.torch"),
        Fact("threads", "environment.flags.thread_count"),
        Fact("variables", _variables),
        Fact("commit", lambda run: commit_text(run.environment.code.project)),
        Fact("host", "environment.host.hostname"),
    )
}  # fmt: skip
#: Further options that do not tell runs apart: they decide how long is measured, not what, or a fact covers them.
_LEFT_OUT = """
measure.steps measure.min_window_s measure.probe_steps data.vocab_size model.context_length model.optimizer
model.optimizer_variant trainer.devices trainer.callbacks ckpt_path
"""

#: Facts that separate cells only among runs outside sweeps.
ENVIRONMENT = {"torch", "threads", "variables", "commit", "host"}
#: Facts that follow from others (16-mixed takes another variant of the optimizer): a baseline need not share them.
CONSEQUENCES = {"optimizer"}
#: Axes that usually change with layers and width, and then tell nothing that the size does not.
OF_SHAPE = {"model.d_ff", "model.num_heads"}

#: The fact that each option sets.
_FACT_OF = {option: fact.name for fact in FACT.values() for option in fact.settings.split()}

#: Axes that repeat a cell with other weights or other data.
SEEDS = ("seed_everything", "data.seed")

#: Axes that make no rows: seeds, and the options of passes, since the passes of a cell are joined.
NO_ROWS = (*SEEDS, "pass", *(option for run_pass in PASS.values() for option in run_pass.options))
#: Settings of a configuration that do not tell runs outside sweeps apart.
NO_FACTS = (*NO_ROWS, *NOT_MEASURED, *_LEFT_OUT.split())


def read_facts(run: RunRecord, plan: Plan | None = None) -> Facts:
    """Every fact of FACT that the record or the plan has; without a plan, the record's own axes and configuration."""
    plan = plan or (run.axes, run.config)
    facts = {fact.name: fact.of(run, plan) for fact in FACT.values()}
    return {name: value for name, value in facts.items() if value is not None}


def fact_of(option: str) -> str:
    """The fact of FACT that an option sets, or else the option itself."""
    return _FACT_OF.get(option, option)


def other_facts(settings: Values, left_out: tuple[str, ...] = NO_ROWS) -> Facts:
    """The settings, by default axes of a sweep, that set no fact of FACT, by their own names: they also tell runs
    apart."""
    return {
        shown(name): plain(masked(value, name))
        for name, value in settings.items()
        if not is_named(name, (*_FACT_OF, *left_out))
    }


def plain(value: Any) -> Value:
    """A value as text or a number, which can be compared, sorted and shown."""
    if isinstance(value, bool):
        return str(value).lower()
    if value is None or isinstance(value, int | float):
        return value
    return shown(as_text(value))


def environment_of(runs: Iterable[Facts]) -> dict[str, list[str]]:
    """The values that some runs have of each fact of their environment."""
    runs = [*runs]
    return {name: sorted({str(facts[name]) for facts in runs if name in facts}) for name in sorted(ENVIRONMENT)}


def is_notable(name: str, value: Value) -> bool:
    """Whether a caption states the fact: its value is not the usual one."""
    return name in FACT and name not in ENVIRONMENT and value != FACT[name].usual


def heading(name: str) -> str:
    """A fact's title in tables; for another option the last part of its name."""
    return (FACT[name].heading or name) if name in FACT else name.rpartition(".")[2]


def describe(facts: Facts, names: Sequence[str], has_matmul: bool = True) -> str:
    """The named facts, as far as they are known, as people say them: `small, TF32, compiled, batch 4`.

    Texts stand alone and numbers follow their names. Precision and float32 matmul are one word (`TF32`), unless
    `has_matmul` is false: then the precision is called as in tables.
    """
    words = []
    for name in names:
        value = facts.get(name)
        if value is None or (name == "matmul" and "precision" in names):
            continue
        if name == "compile" and value != EAGER:
            words.append("compiled" if value == "default" else f"compiled {value}")
        elif name == "precision" and has_matmul:
            words.append(short_label(str(value), str(facts.get("matmul"))))
        else:
            stands_alone = isinstance(value, str) and name in FACT and name != "checkpoint" and value != "none"
            words.append(str(value) if stands_alone else f"{heading(name)} {value}")
    return ", ".join(words)


def sort_key(name: str, value: Value) -> tuple[int, float, str]:
    """A key that sorts known values by the fact's order, sizes by their parameters, then numbers, texts, and None."""
    order = FACT[name].order if name in FACT else ()
    if value is None:
        return (3, 0.0, "")
    if isinstance(value, int | float):
        return (1, float(value), "")
    if value in order:
        return (0, float(order.index(value)), "")
    # The blocks of a Transformer have 12 L D^2 parameters, so that 4 x 512 is smaller than `small`.
    size = SIZES.get(value)
    shape = re.fullmatch(r"(\d+) x (\d+)", f"{size.num_layers} x {size.d_model}" if size else value)
    return (0, float(int(shape[1]) * int(shape[2]) ** 2), value) if shape and name == "size" else (2, 0.0, value)
