"""The part of `lmbench fit` and `validate` that runs before PyTorch is imported.

It prints the short help, reports misspelt options, and starts repeats in fresh processes.
"""

from __future__ import annotations

import re
from textwrap import fill

from lmbench.configs import shipped_configs
from lmbench.errors import ExitCode, UsageError
from lmbench.fit_options import check_options
from lmbench.report.answer import Answer
from lmbench.sizes import SIZES

_MODE = re.compile(r"(?:^| )--measure\.mode[ =](\w+)")
#: Options that have the configuration measured in fresh processes.
_REPEATING_OPTIONS = {"--repeats", "--compare", "--gate"}


def run(args: list[str]) -> int:
    """Run `lmbench fit|validate` with the given words; returns the exit code."""
    command, words = args[0], args[1:]
    if words == ["-h"]:
        print(help_text(command), end="")
        return ExitCode.OK
    check_options(words)
    if command == "validate" and (mode := _MODE.search(" ".join(words))) and mode[1] != "inference":
        raise UsageError(f"measure.mode is {mode[1]}, and validate measures inference; use `lmbench fit`")
    if _REPEATING_OPTIONS & {word.partition("=")[0] for word in words} and "--print_config" not in words:
        from lmbench.commands.parser import run_typed

        if command == "validate":
            words = [*words, "--measure.mode=inference"]
        return run_typed(command, repeated, words)
    from lmbench.fit.run import run as measure

    return measure([command, *words])


def repeated(
    configuration: str | None = None,
    *,
    repeats: int = 3,
    compare: str | None = None,
    gate: str | None = None,
    quiet: bool = False,
    settings: list[str],
) -> Answer | int:
    """Measures a configuration in fresh processes, as a sweep of one cell, and compares it with an earlier result.

    Args:
        configuration: a YAML file, or a shipped one by its name; or --config
        repeats: processes
        compare: an earlier result, such as last or baseline; exit codes are those of `lmbench compare`
        gate: changes up to this count as none (1%)
        quiet: only the result's folder on standard output
        settings: options of `lmbench fit`
    """
    from lmbench.campaign.repeats import repeats_answer
    from lmbench.commands.words import read_configuration, read_gate, refuse

    tolerance = read_gate(gate)
    if compare is None:
        refuse({"gate": gate}, "belongs to --compare")
    advice = "--repeats and --compare take a configuration, such as `lmbench fit smoke --repeats 3`"
    options = read_configuration(configuration, settings, advice)
    return repeats_answer(options, repeats, compare, tolerance, quiet=quiet)


_HELP = """\
usage: lmbench {command} CONFIG [--OPTION VALUE]...

{measures}

configuration:
  CONFIG                      a YAML file, or a shipped one's name; or --config
{shipped}

what:
  --model.size SIZE           {sizes}
  --model.attention NAME      naive, sdpa, sdpa_flash, sdpa_cudnn, flex
  --model CLASS               my_module.MyModule, or lmbench.HuggingFace
  --data CLASS                its LightningDataModule
  --data.batch_size N         sequences in a micro-batch
  --data.context_length N     tokens in a sequence

how:
  --trainer.precision NAME    32-true, bf16-mixed, 16-mixed, bf16-true,
                              fp8-tensorwise
  --trainer.compile true      torch.compile; also .mode, .regional, .fullgraph
  --trainer.accumulate_grad_batches N
                              micro-batches in a step
  --measure.mode NAME         train_step, forward_backward, forward (of fit)
  --measure.steps N           steps in the window, at least
  --measure.min_window_s S    seconds of the window, at least
  --memory.history true       what fills the peak, by `lmbench memory`; untimed
  --dtypes.record true        which dtype everything has, by `lmbench dtypes`
  --measure.strict true       exit with 4 when a guard fails

again:
  --repeats N                 fresh processes, as a sweep of one cell
  --compare RESULT            3 repeats, and a verdict against it (last, ...)

result:
  --measure.results_dir DIR   where result folders go (results)
  --measure.run_id NAME       name of the result folder (one is made up)
  --wandb.mode NAME           offline (default with a key), online, disabled
  --print_config              all settings as YAML, and nothing else
  --json                      the record on standard output
  --quiet                     only the result's folder on standard output

`lmbench {command} --help` lists all options, after `--model CLASS` that class's.
It takes seconds.
"""
_MEASURES = {
    "fit": "Measures training and leaves a result: forward, backward and optimizer times,\nmemory, throughput.",
    "validate": "Measures inference on the validation data and leaves a result.",
}


def help_text(command: str) -> str:
    """The short help of `fit` or `validate`."""
    names = f"shipped: {', '.join(shipped_configs())}"
    shipped = fill(names, 78, initial_indent="  ", subsequent_indent="    ", break_on_hyphens=False)
    return _HELP.format(command=command, measures=_MEASURES[command], shipped=shipped, sizes=", ".join(SIZES))


def daily_options() -> dict[str, tuple[str, str]]:
    """The options in the short help, each with its placeholder (`N`, `NAME`) and its meaning."""
    lines = re.findall(r"^  (--\S+) ?(\S*)\s+(\S.*(?:\n {9,}\S.*)*)$", help_text("fit"), re.MULTILINE)
    return {name: (value, meaning) for name, value, meaning in lines}
