"""`lmbench memory`: what the peak of the device's memory consists of, in a recorded run or of one to come."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lmbench.commands.parser import run_typed
from lmbench.configs import shipped_configs
from lmbench.errors import ExitCode, UsageError, tell
from lmbench.report.answer import Answer

#: Options that only what was recorded has.
_OF_RECORDED = (
    "--top", "--device", "--format", "--output", "--table", "--all", "--json", "-h", "--help",
)  # fmt: skip


def run(args: list[str]) -> int:
    """Explain what was recorded, or predict: a configuration is options and nothing else. Returns the exit code."""
    words = args[1:]
    first = next((word for word in words if word != "--json"), "")
    is_config = first in shipped_configs() and not Path(first).exists()
    if is_config:
        words[words.index(first)] = f"--config={first}"
    is_option = first.startswith("-") and first.partition("=")[0] not in _OF_RECORDED
    if not Path(first).exists() and "validate" in words:
        tell("memory predicts a training step, not validate's; leave `validate` out")
        return ExitCode.USAGE
    is_to_come = is_config or is_option
    return run_typed("memory", predicted_memory if is_to_come else memory, words)


def memory(source: str, *, top: int = 15, device: int | None = None) -> Answer:
    """Shows what the device's memory is made of at its peak, recorded or, without a GPU, predicted.

    From a history of PyTorch's allocator: bytes by category and by part of the model, the largest allocations with
    where they come from, what is saved for the backward, and what is reserved in vain; as a page or picture
    (`--output peak.html`, `peak.svg`) with a timeline. Needs no GPU and no PyTorch. Of a run that ended out of memory
    it says what was held, and what would fit.

    Without a recorded run it predicts one: `lmbench memory [--gpu NAME] [OPTIONS OF lmbench fit]` shows the peak of
    each phase by category, whether it fits on a GPU (`--gpu H200`; by default the one here), and the largest batch and
    context that do. It takes the step on fake tensors, which needs no GPU and no weights:
    `lmbench memory --config large_bf16 --data.batch_size 32 --gpu H200`.

    Args:
        source: the folder of a run recorded with `lmbench fit ... --memory.history true`, or any snapshot that
            torch.cuda.memory._dump_snapshot wrote; it is read as a pickle of plain values, from which nothing is run
        top: allocations shown
        device: whose history, where a snapshot has several devices'
    """
    # Help does not wait for these.
    from lmbench.memory.answers import history_answer, shortage_answer
    from lmbench.memory.findings import examine
    from lmbench.memory.recorded import SNAPSHOT_FILE
    from lmbench.memory.shortage import explain
    from lmbench.records.load import is_run_folder, load_run

    if top < 1:
        raise UsageError(f"--top {top} is no number of allocations; give 1 or more")
    loaded = load_run(Path(source), with_steps=False) if is_run_folder(Path(source)) else None
    if loaded is None or loaded.outcome != "oom":
        return history_answer(examine(source, device), top)
    tell("predicting what would fit; about a minute")
    shortage = shortage_answer(explain(loaded.record, loaded.path))
    if not (loaded.path / SNAPSHOT_FILE).is_file():
        return shortage
    return replace(shortage, sections=[replace(history_answer(examine(source, device), top), title="The history")])


def predicted_memory(*, gpu: str | None = None, settings: list[str]) -> Answer | int:
    """Predicts the peak of each phase by category, whether it fits on a GPU, and the largest batch and context that do.

    Args:
        gpu: name of the GPU, such as H200; by default the one here
        settings: options of `lmbench fit`
    """
    from lmbench.memory.answers import forecast_answer
    from lmbench.memory.forecast import PredictionFailed, Request, ask_forecast, gpu_for

    try:
        return forecast_answer(ask_forecast(settings, Request(gpu_for(gpu), finds_largest=True)))
    except PredictionFailed as error:
        tell(f"memory: the prediction broke: {error}")
        return ExitCode.INTERNAL
