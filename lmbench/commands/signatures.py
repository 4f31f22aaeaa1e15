"""Names of options, read off the source of what takes them: to import it would take PyTorch, and seconds."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from lmbench.configs import shipped_configs
from lmbench.errors import UsageError, suggest

#: The groups of `lmbench fit`'s options, with the classes whose arguments they are.
GROUPS = {
    "trainer": (("lightning.pytorch.trainer.trainer", "Trainer"), ("lmbench.fit.trainer", "BenchTrainer")),
    "model": (("lmbench.model.language_model", "LanguageModel"),),
    "data": (("lmbench.data.datamodule", "TokenData"),),
    "measure": (("lmbench.fit.settings", "MeasureSettings"),),
    "memory": (("lmbench.fit.settings", "MemorySettings"),),
    "dtypes": (("lmbench.fit.settings", "DtypeSettings"),),
    "wandb": (("lmbench.wandb.publish", "WandbSettings"),),
    "timer": (("lmbench.callbacks.phase_timer", "PhaseTimer"),),
}
#: Options of `lmbench fit` that are in no group.
_ALONE = (
    "config", "seed_everything", "ckpt_path", "weights_only", "verbose", "help", "print_config", "json", "quiet",
    "repeats", "compare", "gate",
)  # fmt: skip
#: Options of classes that are named before them.
_OF_CLASSES = ("optimizer", "lr_scheduler")


@cache
def arguments(module: str, name: str) -> tuple[str, ...]:
    """The arguments of a class's constructor, or the options of a command's function; none where there is no source."""
    package, _, rest = module.partition(".")
    spec = find_spec(package)
    folders = (spec and spec.submodule_search_locations) or []
    paths = (Path(folder, f"{rest.replace('.', '/')}.py") for folder in folders)
    source = next((path.read_text(encoding="utf-8") for path in paths if path.is_file()), "")
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef) and node.name == name:
            is_answer = node.returns is not None and "Answer" in ast.unparse(node.returns)
            output = arguments("lmbench.report.render", "Output") if is_answer else ()
            return (*(argument.arg for argument in node.args.kwonlyargs), *output)
        if isinstance(node, ast.ClassDef) and node.name == name:
            methods = {part.name: part.args for part in node.body if isinstance(part, ast.FunctionDef)}
            if (init := methods.get("__init__")) is not None:
                return tuple(argument.arg for argument in (*init.args[1:], *init.kwonlyargs))
            fields = (part.target for part in node.body if isinstance(part, ast.AnnAssign))
            return tuple(field.id for field in fields if isinstance(field, ast.Name))
    return ()


def group_options(group: str) -> list[str]:
    """All options of a group by their full names: `trainer.precision`."""
    return [f"{group}.{name}" for source in GROUPS[group] for name in arguments(*source)]


def check_options(words: Sequence[str]) -> None:
    """Look for misspelt options of `lmbench fit` among its words; of a class of the user's they are left alone.

    Raises:
        UsageError: an option that there is not, with the nearest that there is.
    """
    options = list(_options(words))
    shipped = {name: path.read_text(encoding="utf-8") for name, path in shipped_configs().items()}
    is_own = all("class_path" not in shipped.get(value, "class_path") for name, value in options if name == "config")
    has_classes = not is_own or any(name in ("model", "data") for name, _ in options)
    unknown_here = (*_OF_CLASSES, *(("model", "data") if has_classes else ()))
    known = [*_ALONE, *GROUPS, *(option for group in GROUPS for option in group_options(group))]
    for name, _ in options:
        group, *rest = name.split(".")
        # Without its source a group is left to the parser, as are classes of the user's.
        if (
            group in unknown_here
            or rest[:1] == ["init_args"]
            or (rest and group in GROUPS and not group_options(group))
        ):
            continue
        if ".".join([group, *rest[:1]]) not in known:
            hint = suggest(name, known, "--{}")
            raise UsageError(f"unknown option --{name}{hint} (`lmbench fit --help` lists them all)")


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options with their values; a first word without one names a configuration."""
    if words and not words[0].startswith("-"):
        yield "config", words[0]
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        # A negative number is a value.
        if word.startswith("-") and name.strip("-")[:1].isalpha():
            value = value if equals else "".join(words[place + 1 : place + 2])
            yield "config" if name == "-c" else name.lstrip("-").removesuffix("+"), value
