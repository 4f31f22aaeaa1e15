"""`lmbench memory --config NAME`: what a configuration will take, predicted without a GPU."""

from __future__ import annotations

from lmbench.commands.parser import CommandParser
from lmbench.errors import ExitCode, UsageError, tell
from lmbench.standard_output import write_result

#: How the command's help tells of it.
USAGE = "lmbench memory [--gpu NAME] [--json] [OPTIONS OF lmbench fit]"
DESCRIPTION = """\
Without a recorded run it predicts one: the peak of each phase by category, whether it
fits on a GPU (`--gpu H200`; by default the one here), and the largest batch and context
that do. Takes every option of `lmbench fit` and takes its step on fake tensors, which
needs no GPU and no weights:
`lmbench memory --config large_bf16 --data.batch_size 32 --gpu H200`."""


def run(words: list[str]) -> int:
    """Predict and print; returns the exit code."""
    parser = CommandParser("memory", DESCRIPTION, usage=USAGE)
    parser.add_argument("--gpu", metavar="NAME")
    parser.add_argument("--json", action="store_true")
    options, fit_words = parser.parse_known_args(words)
    if "validate" in fit_words:
        raise UsageError(
            "a prediction takes a training step, not validate's; leave the word out, and give --measure.mode forward "
            "for a forward alone (with what it keeps for a backward)"
        )
    # Help does not wait for these.
    from lmbench.memory.asking import PredictionFailed, Request, ask_forecast, gpu_for
    from lmbench.memory.forecast_table import print_forecast
    from lmbench.records.codec import indented_json
    from lmbench.report.screen import make_console

    try:
        made = ask_forecast(fit_words, Request(gpu_for(options.gpu), finds_largest=True))
    except PredictionFailed as error:
        tell(f"memory: the prediction broke: {error}")
        return ExitCode.INTERNAL
    if options.json:
        write_result(indented_json(made))
    else:
        print_forecast(made, make_console())
    return ExitCode.OK
