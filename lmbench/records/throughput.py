"""Rates from a window's totals: tokens, FLOPs, MFU, energy per token."""

from __future__ import annotations

from typing import Any


def throughput(
    tokens: int | None,
    wall_s: float | None,
    per_token_flops: int | None,
    causal_per_token_flops: int | None,
    peak_flops_per_s: float | None,
    energy_j: float | None,
    reason: str | None = None,
) -> dict[str, Any]:
    """The `throughput` part of a run's record.

    Args:
        tokens: all micro-batches of the window, on all ranks; None when the module does not tell.
        wall_s: the window's own wall time, pauses subtracted; never a multiple of a median.
        per_token_flops, causal_per_token_flops: model FLOPs per token including the mode's multiplier (x3 when
            training), attention counted full and halved.
        peak_flops_per_s: the device's dense datasheet peak for the precision in use; None when unknown, and then
            there is no MFU, never a guess.
        energy_j: joules the device used in the window.
        reason: why there is no MFU, when there is none.
    """
    if tokens is None or not wall_s:
        return {
            "tokens_per_s": None,
            "mfu_fraction": None,
            "mfu_reason": reason or "tokens per batch unknown",
        }
    rate = tokens / wall_s
    result: dict[str, Any] = {
        "tokens_per_s": rate,
        "model_flops_per_s": None if per_token_flops is None else rate * per_token_flops,
        "mfu_fraction": None,
        "mfu_causal_fraction": None,
        "mfu_reason": reason,
        "joules_per_token": None if energy_j is None else energy_j / tokens,
    }
    if peak_flops_per_s is not None:
        if per_token_flops is not None:
            result["mfu_fraction"] = rate * per_token_flops / peak_flops_per_s
        if causal_per_token_flops is not None:
            result["mfu_causal_fraction"] = rate * causal_per_token_flops / peak_flops_per_s
    return result
