"""`lmbench memory`: what the peak of the device's memory consists of, in a recorded run or of one to come."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from lmbench.configs import shipped_configs
from lmbench.errors import UsageError
from lmbench.report.answer import Answer


def memory(
    source: str | None = None,
    /,
    *,
    device: int | None = None,
    gpu: str | None = None,
    settings: list[str],
) -> Answer:
    """Shows what the device's memory is made of at its peak, recorded or, without a GPU, predicted.

    From a history of PyTorch's allocator: bytes by category and by part of the model, the largest allocations with
    where they come from, what is saved for the backward, and what is reserved in vain; as a page or picture
    (`--output peak.html`, `peak.svg`) with a timeline. Needs no GPU and no PyTorch. Of a run that ended out of memory
    it says what was held, and what would fit.

    Without a recorded run it predicts one: `lmbench memory [--gpu NAME] [OPTIONS OF lmbench fit]` shows the peak of
    each phase by category, whether it fits on a GPU (`--gpu H200`; by default the one here), and the largest batch and
    context that do. It takes the step on fake tensors, which needs no GPU and no weights:
    `lmbench memory --config large_bf16 --data.batch_size 32 --gpu H200`. Of several GPUs (`--trainer.devices 8
    --trainer.strategy fsdp2`) it is what rank 0 takes, and how many of them are enough.

    Args:
        source: the folder of a run recorded with `lmbench fit ... --memory.history true`, or any snapshot that
            torch.cuda.memory._dump_snapshot wrote; it is read as a pickle of plain values, from which nothing is run.
            A configuration's name is predicted, as with --config
        device: whose history, where a snapshot has several devices'
        gpu: name of the GPU to predict for, such as H200; by default the one here
        settings: options of `lmbench fit`, to predict
    """
    if source in shipped_configs() and not Path(source).exists():
        source, settings = None, [f"--config={source}", *settings]
    if source is None and settings:
        # Help and a wrong option do not wait for these.
        from lmbench.memory.answer import forecast_answer
        from lmbench.memory.forecast import Request, ask_forecast, gpu_for

        return forecast_answer(ask_forecast(settings, Request(gpu_for(gpu), finds_largest=True)))
    if source is None or settings:
        raise UsageError("memory takes a recorded run or snapshot, or options of `lmbench fit`")
    from lmbench.memory.answer import history_answer, shortage_answer
    from lmbench.memory.blocks import SNAPSHOT_FILE
    from lmbench.memory.findings import examine
    from lmbench.memory.shortage import explain
    from lmbench.records.load import is_run_folder, load_run

    loaded = load_run(Path(source), with_steps=False) if is_run_folder(Path(source)) else None
    if loaded is None or loaded.outcome != "oom":
        return history_answer(examine(source, device))
    shortage = shortage_answer(explain(loaded.record, loaded.path))
    if not (loaded.path / SNAPSHOT_FILE).is_file():
        return shortage
    return replace(shortage, sections=[replace(history_answer(examine(source, device)), title="The history")])
