"""The options of `lmbench fit` by name, without the parser, which imports PyTorch; rooms name their own."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from itertools import zip_longest
from typing import Any

from lmbench.configs import find_config, placed, shipped_configs
from lmbench.errors import UsageError, suggest
from lmbench.rooms import ROOMS

_NAMES = """
config seed_everything ckpt_path weights_only verbose help print_config json quiet repeats compare gate

trainer trainer.accelerator trainer.strategy trainer.devices trainer.num_nodes trainer.precision trainer.logger
trainer.callbacks trainer.fast_dev_run trainer.max_epochs trainer.min_epochs trainer.max_steps trainer.min_steps
trainer.max_time trainer.limit_train_batches trainer.limit_val_batches trainer.limit_test_batches
trainer.limit_predict_batches trainer.overfit_batches trainer.val_check_interval trainer.check_val_every_n_epoch
trainer.num_sanity_val_steps trainer.log_every_n_steps trainer.enable_checkpointing trainer.enable_progress_bar
trainer.enable_model_summary trainer.accumulate_grad_batches trainer.gradient_clip_val trainer.gradient_clip_algorithm
trainer.deterministic trainer.benchmark trainer.inference_mode trainer.use_distributed_sampler trainer.profiler
trainer.detect_anomaly trainer.barebones trainer.plugins trainer.sync_batchnorm
trainer.reload_dataloaders_every_n_epochs trainer.default_root_dir trainer.enable_autolog_hparams
trainer.model_registry trainer.compile trainer.recompute

model model.size model.d_model model.d_ff model.num_layers model.num_heads model.vocab_size model.context_length
model.attention model.residual_dtype model.fused_projections model.loss model.optimizer
model.optimizer_variant model.learning_rate model.weight_decay model.betas

data data.source data.batch_size data.context_length data.vocab_size data.num_batches data.placement data.num_workers
data.seed data.text_files data.cache_dir

measure measure.warmup_steps measure.steps measure.min_window_s measure.probe_steps measure.collective_timeout_s
measure.mode measure.matmul_precision measure.zero_grad measure.gradient_norm measure.sigterm_broadcast
measure.blocks measure.what_if measure.loader measure.results_dir measure.run_id measure.strict
measure.price_per_hour

wandb wandb.mode wandb.project wandb.entity wandb.group wandb.tags wandb.artifact wandb.timeout_s

timer timer.clock
"""


def option_names() -> list[str]:
    """Every option by its full name (`trainer.precision`), and the groups. A test compares them with the parser's."""
    rooms = {room.name: fields(room.load("settings")) for room in ROOMS if room.settings}
    return [*_NAMES.split(), *rooms, *(f"{room}.{field.name}" for room, of_room in rooms.items() for field in of_room)]


def option_words(options: Mapping[str, Any]) -> list[str]:
    """Options by name as words of a command line. Values that are not text are JSON."""
    texts = {name: value if isinstance(value, str) else json.dumps(value) for name, value in options.items()}
    # Name and value are one word, since a value may begin with a dash.
    return [f"--{name}={text}" for name, text in texts.items()]


def check_options(words: Sequence[str], places: Mapping[str, str] = {}, problems: Sequence[str] = ()) -> None:
    """Check the words of `lmbench fit` for misspelt options and configurations, but not options of a user's class.

    `places` says where options stand in a file. `problems` are other mistakes in that file.

    Raises:
        UsageError: there are problems, a configuration that does not exist, or unknown options. Each of these is named
            with its place and the most similar option.
    """
    options = dict.fromkeys(_options(words))
    shipped = {name: path.read_text("utf-8") for name, path in shipped_configs().items()}
    known, class_groups = option_names(), {"optimizer", "lr_scheduler"}
    for name, value in options:
        if name == "config" and value:
            find_config(value)
        if name in ("model", "data") or (name == "config" and "class_path" in shipped.get(value, "class_path")):
            class_groups |= {"model", "data"}
    lines = []
    for name, _ in options:
        group, *rest = name.split(".")
        belongs_to_class = group in class_groups or rest[:1] in (["init_args"], ["help"])
        if not belongs_to_class and ".".join([group, *rest[:1]]) not in known:
            lines.append(placed(f"unknown option --{name}{suggest(name, known, '--{}')}", places))
    if lines:
        lines[-1] += " (`lmbench fit --help` lists them all)"
    if lines or problems:
        raise UsageError("; ".join([*lines, *problems]))


def _options(words: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Options with their values. A first word without an option names a configuration."""
    if words and not words[0].startswith("-"):
        yield "config", words[0]
    for word, next_word in zip_longest(words, words[1:], fillvalue=""):
        # A word such as -1 is a value.
        if match := re.match(r"-+([A-Za-z][^=]*)(=.*)?", word):
            name = "config" if match[1] == "c" else match[1].removesuffix("+")
            yield name, next_word if match[2] is None else match[2][1:]
