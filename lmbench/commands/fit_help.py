"""`lmbench fit -h`: the options of daily use on one screen, without importing PyTorch."""

from __future__ import annotations

from textwrap import fill

from lmbench.configs import shipped_configs
from lmbench.errors import ExitCode
from lmbench.sizes import SIZES

_MEASURES = {
    "fit": "Measures training and leaves a result: forward, backward and optimizer times,\nmemory, throughput.",
    "validate": "Measures inference on the validation data and leaves a result.",
}

#: By heading: option, its value, what it does.
OPTIONS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "what": (
        ("--model.size", "SIZE", ", ".join(SIZES)),
        ("--model.attention", "NAME", "naive, sdpa, sdpa_flash, sdpa_efficient, ..."),
        ("--model", "CLASS", "my_module.MyModule, lmbench.HuggingFace, .AttentionLayer"),
        ("--data", "CLASS", "its LightningDataModule"),
        ("--data.batch_size", "N", "sequences in a micro-batch"),
        ("--data.context_length", "N", "tokens in a sequence"),
    ),
    "how": (
        ("--trainer.precision", "NAME", "32-true, bf16-mixed, 16-mixed, bf16-true"),
        ("--trainer.compile", "true", "torch.compile; also .mode, .regional, .fullgraph"),
        ("--trainer.accumulate_grad_batches", "N", "micro-batches in a step"),
        ("--measure.mode", "NAME", "train_step, forward_backward, forward (of fit)"),
        ("--measure.steps", "N", "steps in the window, at least"),
        ("--measure.min_window_s", "S", "seconds of the window, at least"),
        ("--memory.history", "true", "what the peak consists of, by `lmbench memory`; no timing"),
        ("--dtypes.record", "true", "which dtype everything has, by `lmbench dtypes`"),
        ("--measure.strict", "true", "exit with 4 when a guard fails"),
    ),
    "result": (
        ("--measure.results_dir", "DIR", "where result folders go (results)"),
        ("--wandb.mode", "NAME", "offline (a W&B run beside the result), online, disabled"),
        ("--print_config", "", "all settings as YAML, and nothing else"),
        ("--json", "", "the record on standard output"),
        ("--quiet", "", "only the result's folder on standard output"),
    ),
}

_WIDTH = 78
_COLUMN = 30


def run(args: list[str]) -> int:
    """Print the short help of `lmbench COMMAND -h`; returns the exit code."""
    print(text(args[0]))
    return ExitCode.OK


def text(command: str) -> str:
    """The short help of `fit` or `validate`."""
    names = f"shipped: {', '.join(shipped_configs())}"
    lines = [
        f"usage: lmbench {command} CONFIG [--OPTION VALUE]...",
        f"\n{_MEASURES[command]}",
        "\nconfiguration:",
        _line("CONFIG", "", "a YAML file, or a shipped one by its name; or --config"),
        fill(names, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False),
    ]
    for heading, options in OPTIONS.items():
        lines += [f"\n{heading}:", *(_line(*option) for option in options)]
    lines += [
        f"\n`lmbench {command} --help` lists all options, after `--model CLASS` that class's.",
        "It takes seconds.",
    ]
    return "\n".join(lines)


def _line(name: str, value: str, what: str) -> str:
    given = f"  {name} {value}".rstrip()
    return f"{given:<{_COLUMN}} {what}" if len(given) <= _COLUMN else f"{given}\n{'':<{_COLUMN}} {what}"
