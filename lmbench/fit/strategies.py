"""lmbench's own strategies by the names of `--trainer.strategy`, registered with Lightning when this is imported."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

from lightning.pytorch.strategies import StrategyRegistry

from lmbench.fit.data_parallel import DataParallel, ShardedOptimizer
from lmbench.fit.model_parallel import ModelParallel
from lmbench.records.vocabulary import Values

#: Strategies by name: the class, and the arguments that the name stands for.
STRATEGIES: dict[str, partial[Any]] = {
    "ddp": partial(DataParallel),
    "ddp_find_unused_parameters_true": partial(DataParallel, find_unused_parameters=True),
    "ddp_zero1": partial(ShardedOptimizer),
    "fsdp2": partial(ModelParallel),
    # Like ZeRO stage 2: parameters stay gathered until the end of the backward.
    "fsdp2_zero2": partial(ModelParallel, reshard_after_forward=False),
    "tensor_parallel": partial(ModelParallel, tensor_parallel_size="auto"),
}
for _name, _strategy in STRATEGIES.items():
    # Lightning has registered its own DDPStrategy as `ddp`. It stays reachable by its class.
    StrategyRegistry.register(_name, _strategy.func, override=True, **_strategy.keywords)


_OPTION = "--trainer.strategy"


def name_classes(words: Iterable[str], configured: str | None) -> Iterator[str]:
    """Write the strategy so that the parser takes it for a class: of two kinds of words the parser sees only a name.

    These are the path of a class without options, and one of lmbench's names with options of its class.

    Args:
        words: words of a command line, such as `--trainer.strategy.bucket_cap_mb 50`; a strategy is one word with its
            option, `--trainer.strategy=ddp`.
        configured: the strategy that a configuration names.
    """
    words = list(words)
    has_options = any(word.startswith(f"{_OPTION}.") for word in words)
    is_named = any(word.startswith(f"{_OPTION}=") for word in words)
    if configured is not None and not is_named and has_options:
        words = [f"{_OPTION}={configured}", *words]
    for word in words:
        option, _, name = word.partition("=")
        if option == _OPTION and has_options and name in STRATEGIES:
            strategy = STRATEGIES[name]
            yield _class_word(f"lmbench.{strategy.func.__name__}", strategy.keywords)
        elif option == _OPTION and "." in name and not name.startswith("{"):
            yield _class_word(name, {})
        else:
            yield word


def _class_word(path: str, arguments: Values) -> str:
    return f"{_OPTION}={json.dumps({'class_path': path, 'init_args': arguments})}"
