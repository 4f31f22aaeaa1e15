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
    "again": (
        ("--repeats", "N", "fresh processes, as a sweep of one cell"),
        ("--compare", "RESULT", "3 repeats, and a verdict against it (last, baseline)"),
    ),
    "result": (
        ("--measure.results_dir", "DIR", "where result folders go (results)"),
        ("--measure.run_id", "NAME", "name of the result folder (one is made up)"),
        ("--wandb.mode", "NAME", "offline (the default of who has a key), online, disabled"),
        ("--print_config", "", "all settings as YAML, and nothing else"),
        ("--json", "", "the record on standard output"),
        ("--quiet", "", "only the result's folder on standard output"),
    ),
}

_WIDTH = 78
_COLUMN = 30


def run(args: list[str]) -> int:
    """Print the short help of `lmbench COMMAND -h`; returns the exit code."""
    command = args[0]
    print(f"usage: lmbench {command} CONFIG [--OPTION VALUE]...\n\n{_MEASURES[command]}\n\nconfiguration:")
    print("  CONFIG                       a YAML file, or a shipped one by its name; or --config")
    names = f"shipped: {', '.join(shipped_configs())}"
    print(fill(names, _WIDTH, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False))
    for heading, options in OPTIONS.items():
        print(f"\n{heading}:")
        for name, value, meaning in options:
            words = f"  {name} {value}".rstrip()
            # What is too long for its column has a line of its own.
            words += f"\n{'':<{_COLUMN}}" if len(words) > _COLUMN else ""
            print(f"{words:<{_COLUMN}} {meaning}")
    print(f"\n`lmbench {command} --help` lists all options, after `--model CLASS` that class's.\nIt takes seconds.")
    return ExitCode.OK
