"""Predict the memory of a configuration of `lmbench fit`, as a process of its own.

    python -m lmbench.fit.prediction REQUEST [OPTIONS OF lmbench fit]

prints the forecast or the plan as JSON, and a line on standard error for each fake step that it runs.
"""

from __future__ import annotations

import sys
import time

import msgspec

from lmbench.errors import ExitCode, find_modules_in_current_folder
from lmbench.fit.fake.training import FakeTraining
from lmbench.fit.planning import make_plan
from lmbench.fit.trainer import quiet
from lmbench.instruments.ending import is_usage_error
from lmbench.memory.forecast import Forecast, Request
from lmbench.memory.plan import PlanRequest
from lmbench.standard_output import result_alone, write_result


def forecast(words: list[str], request: Request) -> Forecast:
    """Predict the memory of a configuration, and answer the request.

    Raises:
        UsageError: the words are wrong, or the module cannot run on fake tensors.
    """
    started, gpus = time.perf_counter(), request.gpus
    training = FakeTraining(words, max((gpu.workspace_bytes for gpu in gpus), default=0))
    predictor = training.predictor()
    result = Forecast(
        *predictor.shape, training.precision, training.mode, training.zero_grad, training.is_compiled,
        predictor.phases, predictor.reserved_bytes, predictor.method, training.strategy, training.world_size,
        predictor.run_peak_bytes, training.is_sharded, assumed=list(training.assumed),
    )  # fmt: skip
    if gpus and request.finds_largest:
        result.on_gpus = predictor.fits_on(gpus, training.has_context)
    if len(result.on_gpus) == 1 and training.is_sharded:
        result.fewest_gpus = predictor.fewest_ranks(training.world_size, gpus[0])
    result.took_s = time.perf_counter() - started
    return result


def main(args: list[str]) -> int:
    """Print the forecast, or one line about the user's mistake; returns the exit code."""
    quiet()
    find_modules_in_current_folder()
    try:
        words, request = args[1:], msgspec.json.decode(args[0], type=Request | PlanRequest)
        answer = make_plan(words, request) if isinstance(request, PlanRequest) else forecast(words, request)
    except Exception as error:
        if not is_usage_error(error):
            raise
        # The command tells it: on standard error it would be progress.
        write_result(str(error))
        return ExitCode.USAGE
    write_result(msgspec.json.encode(answer).decode())
    return ExitCode.OK


if __name__ == "__main__":
    # Keep what the user's code prints out of the JSON on standard output.
    with result_alone(until_exit=True):
        raise SystemExit(main(sys.argv[1:]))
